// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
	"github.com/stormguard-mq/stormguard/internal/brokers"
	"github.com/stormguard-mq/stormguard/limiter"
)

// record is a handler that keeps what it was given.
type record struct {
	mu   sync.Mutex
	got  []int
	when []time.Time
	seen map[int]int
	down atomic.Bool
	hits atomic.Int64 // calls while down
}

func (r *record) handle(_ context.Context, d amqp091.Delivery) error {
	if r.down.Load() {
		r.hits.Add(1)
		return errDown
	}
	n, err := strconv.Atoi(string(d.Body))
	if err != nil {
		return guard.Permanent(err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.seen == nil {
		r.seen = make(map[int]int)
	}
	r.got, r.when = append(r.got, n), append(r.when, time.Now())
	r.seen[n]++
	return nil
}

func (r *record) distinct() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.seen)
}

func (r *record) all() []int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.got)
}

// order reports the first that comes after a later one.
func (r *record) order() error {
	got := r.all()
	for i := 1; i < len(got); i++ {
		if got[i] < got[i-1] {
			return fmt.Errorf("out of order at %d: %d", i, got[max(0, i-8):min(len(got), i+24)])
		}
	}
	return nil
}

func (r *record) twice() int { return len(r.all()) - r.distinct() }

// Everything is handled in order, and acked in far fewer frames than messages.
func TestConsumeHandlesEverythingInOrderAndStops(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		r := newRig(t, s, Quorum, nil)
		var l lines
		var rec record
		const n = 5000
		r.publish(0, n)
		c := r.consumeBy(l.dialer(r.url()), adaptertest.Guard(t, guard.Config{}), rec.handle)
		adaptertest.Eventually(t, "all handled", func() bool { return rec.distinct() == n })
		if err := c.Stop(t); err != nil {
			t.Fatal(err)
		}
		if !slices.IsSorted(rec.all()) || rec.twice() > 0 {
			t.Error("out of order, or twice")
		}
		b := l.books()
		if b.acked != n || b.ackFrames > n/2 || !slices.Equal(b.prefetch, []int{defaultPrefetch}) {
			t.Errorf("%+v", b)
		}
		if err := l.check(); err != nil {
			t.Error(err)
		}
		t.Logf("%d messages in %d ack frames", n, b.ackFrames)
		if k, err := r.ready(); k != 0 || err != nil {
			t.Errorf("%d left, %v", k, err)
		}
	})
}

// While a breaker is forced open nothing at all goes over the wire.
func TestForcedOpenCostsTheBrokerNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t, shared(t, brokers.RabbitMQ), Quorum, nil)
	g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Ramp: guard.Ramp{Off: true}}})
	var l lines
	var rec record
	c := r.consumeBy(l.dialer(r.url()), g, rec.handle, WithPrefetch(100))
	src := adaptertest.Source(t, g, r.queue)
	if err := src.ForceOpen(0); err != nil {
		t.Fatal(err)
	}
	r.publish(0, 300)
	adaptertest.Eventually(t, "the window is full", func() bool { return src.State().Room == 0 })
	before := l.books()
	time.Sleep(time.Second)
	if after := l.books(); after.delivered != 100 || after.acked+after.rejects+after.nacks+after.flows != 0 || len(after.prefetch) != len(before.prefetch) {
		t.Errorf("%+v", after)
	}
	if err := src.ForceClosed(); err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "all handled", func() bool { return rec.distinct() == 300 })
	if !slices.IsSorted(rec.all()) || l.books().delivered != 300 {
		t.Errorf("in order: %t; %+v", slices.IsSorted(rec.all()), l.books())
	}
	if err := errors.Join(c.Stop(t), l.check()); err != nil {
		t.Fatal(err)
	}
}

// In a hold longer than half of the consumer timeout the channel is closed in
// order, opened again only to probe, with a prefetch that has room for witnesses, and
// what was held drains in order at the ramp. The broker never closes it.
func TestHoldLongerThanTheConsumerTimeout(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		r := newRig(t, s, Quorum, nil)
		ramp := guard.Ramp{Start: 50, Double: 500 * time.Millisecond, For: 3 * time.Second}
		g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{
			Timeout: 500 * time.Millisecond, Ramp: ramp,
			Breaker: breaker.Config{Base: 200 * time.Millisecond, Cap: time.Second},
		}})
		var l lines
		var rec record
		rec.down.Store(true)
		const n, prefetch, timeout = 600, 150, 8 * time.Second
		r.publish(0, n)
		c := r.consumeBy(l.dialer(r.url()), g, rec.handle, WithPrefetch(prefetch), WithConsumerTimeout(timeout))
		src := adaptertest.Source(t, g, r.queue)
		adaptertest.Eventually(t, "held", func() bool { return src.State().Room == 0 })
		oldest := time.Now()
		// How soon is TestAges's to say. The next one, to probe, may be open before anybody has looked.
		adaptertest.Eventually(t, "the channel is closed", func() bool { return l.unacked() == 0 || len(l.books().prefetch) > 1 })
		adaptertest.Eventually(t, "it is opened again to probe", func() bool { return len(l.books().prefetch) > 1 })
		adaptertest.Eventually(t, "it probes", func() bool { return l.unacked() == witnesses })
		rec.down.Store(false)
		up := time.Now()
		adaptertest.Eventually(t, "drained", func() bool { return rec.distinct() == n })
		took := time.Since(up)
		wide := func(n int) bool { return n != witnesses }
		// A consumer is replaced while all of its prefetch is out, and not at an idle queue.
		all := n
		for !slices.ContainsFunc(l.books().prefetch[1:], wide) && all < 100*n {
			r.publish(all, all+n)
			all += n
			adaptertest.Eventually(t, "more is handled", func() bool { return rec.distinct() == all })
		}
		if err := errors.Join(c.Stop(t), l.check()); err != nil {
			t.Fatal(err)
		}
		if err := rec.order(); err != nil || rec.twice() > 0 {
			t.Errorf("%v, or %d twice", err, rec.twice())
		}
		b := l.books()
		if i := slices.IndexFunc(b.prefetch[1:], wide); i < 0 || b.prefetch[0] != prefetch || b.prefetch[i+1] <= witnesses { // as the messages come
			t.Errorf("prefetches %d", b.prefetch)
		}
		// The ramp allows Start·Double/ln 2·(2^(t/Double) - 1) messages in its first t. A
		// machine that stands still bunches what was due, and allows no more in all.
		for i, at := range rec.when {
			least := float64(ramp.Double) * math.Log2(1+float64(i)*math.Ln2/(ramp.Start*ramp.Double.Seconds()))
			if i >= 50 && float64(at.Sub(rec.when[0])) < 0.7*least {
				t.Errorf("%d drained in %s, against the ramp", i, at.Sub(rec.when[0]))
				break
			}
		}
		t.Logf("held for %s, prefetches %d, drained %d in %s", up.Sub(oldest).Round(time.Millisecond), b.prefetch, n, took.Round(time.Millisecond))
	})
}

// In a much longer hold the channel is opened and closed again and again. Where the
// broker counts deliveries it is with one message at a time after half of them, and few
// calls reach the dependency. Messages that were out go behind those that came back before.
func TestHoldMuchLongerThanTheConsumerTimeout(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		r := newRig(t, s, Quorum, nil)
		g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{
			Timeout: 500 * time.Millisecond, Ramp: guard.Ramp{Off: true}, Breaker: breaker.Config{Base: 200 * time.Millisecond, Cap: time.Second},
		}})
		var l lines
		var rec record
		var most atomic.Int64
		rec.down.Store(true)
		const n, timeout = 100, 2 * time.Second
		r.publish(0, n)
		c := r.consumeBy(l.dialer(r.url()), g, func(ctx context.Context, d amqp091.Delivery) error {
			most.Store(max(most.Load(), int64(deliveries(d.Headers))))
			return rec.handle(ctx, d)
		}, WithPrefetch(50), WithConsumerTimeout(timeout), WithDeliveryLimit(8))
		adaptertest.Eventually(t, "parked", func() bool { return len(l.books().prefetch) > 1 })
		calls := rec.hits.Load()
		time.Sleep(3 * timeout)
		adaptertest.Eventually(t, "one at a time", func() bool { return l.prefetch() == 1 && l.unacked() <= 1 })
		if b := l.books(); !slices.Equal(b.prefetch[:6], []int{50, 50, 50, 50, 50, 1}) { // delivered 5 times, more than half of 9
			t.Errorf("prefetches %d", b.prefetch)
		}
		if more := rec.hits.Load() - calls; more > 60 { // probes at a tenth of the time open, and their looks
			t.Errorf("%d calls of a dependency that is down, in %s", more, 3*timeout)
		}
		rec.down.Store(false)
		adaptertest.Eventually(t, "drained", func() bool { return rec.distinct() == n })
		if err := errors.Join(c.Stop(t), l.check()); err != nil {
			t.Fatal(err)
		}
		if rec.twice() > 0 || most.Load() > int64(len(l.books().prefetch)) {
			t.Errorf("%d twice, %d deliveries of one message", rec.twice(), most.Load())
		}
		t.Logf("prefetches %d, at most %d deliveries of one message", l.books().prefetch, most.Load())
	})
}

// An outage that outlasts the broker's delivery limit loses nothing: what the broker would
// drop is dead-lettered, also at a stop, whether its handler ran, asked for time or hung. The
// rest is handled.
func TestHoldBeyondTheDeliveryLimit(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		for _, limit := range []int{1, 4} {
			t.Run(strconv.Itoa(limit), func(t *testing.T) {
				t.Parallel()
				r := newRig(t, s, Quorum, amqp091.Table{"x-delivery-limit": int64(limit)})
				letters := r.deadLetters(Classic)
				g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{
					Timeout: 500 * time.Millisecond, Ramp: guard.Ramp{Off: true}, Breaker: breaker.Config{Base: 200 * time.Millisecond, Cap: time.Second},
				}})
				var rec record
				rec.down.Store(true)
				const n = 6
				r.publish(0, n)
				handle := func(ctx context.Context, d amqp091.Delivery) error {
					err := rec.handle(ctx, d)
					switch {
					case err == nil:
						return nil
					case string(d.Body) == "1":
						return guard.Backoff(err, time.Now().Add(300*time.Millisecond))
					case string(d.Body) == "2":
						<-ctx.Done()
					}
					return guard.Unavailable(err)
				}
				// A channel that closes has an eighth of the consumer timeout to write letters.
				opts := []Option{WithPrefetch(100), WithConsumerTimeout(5 * time.Second), WithDeliveryLimit(limit), WithDeadLetters(letters)}
				c := r.consume(g, handle, opts...)
				died := func() int {
					ds, err := r.get(letters.cfg.Queue)
					if err != nil {
						t.Error(err)
					}
					for _, d := range ds {
						if rec, err := ReadDeadLetter(d); err != nil || rec.Reason != dlq.ReasonLastDelivery {
							t.Errorf("%v: %+v", err, rec)
						}
					}
					return len(ds)
				}
				adaptertest.Eventually(t, "three have died", func() bool { return died() >= 3 })
				if err := c.Stop(t); err != nil { // a deploy in the outage
					t.Fatal(err)
				}
				c = r.consume(g, handle, opts...)
				rec.down.Store(false)
				adaptertest.Eventually(t, "nothing is left", func() bool { return rec.distinct()+died() >= n })
				if err := c.Stop(t); err != nil {
					t.Fatal(err)
				}
				if rec.distinct()+died() != n || rec.twice() > 0 {
					t.Errorf("%d handled, %d dead letters of %d; %d twice", rec.distinct(), died(), n, rec.twice())
				}
				t.Logf("%d of %d died", died(), n)
			})
		}
	})
}

// A connection that breaks in a long hold does not bring the whole prefetch back: most messages
// would be at their last delivery then.
func TestABrokenConnectionInALongHold(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		for _, limit := range []int{1, 4} {
			t.Run(strconv.Itoa(limit), func(t *testing.T) {
				t.Parallel()
				r := newRig(t, s, Quorum, amqp091.Table{"x-delivery-limit": int64(limit)})
				letters := r.deadLetters(Classic)
				g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{
					Timeout: 500 * time.Millisecond, Ramp: guard.Ramp{Off: true}, Breaker: breaker.Config{Base: 200 * time.Millisecond, Cap: time.Second},
				}})
				const n = 20
				var l lines
				var rec record
				var times atomic.Int64 // the most deliveries of a message that was handled
				rec.down.Store(true)
				r.publish(0, n)
				c := r.consumeBy(l.dialer(r.url()), g, func(ctx context.Context, d amqp091.Delivery) error {
					times.Store(max(times.Load(), int64(deliveries(d.Headers)))) // one call at a time
					if err := rec.handle(ctx, d); err != nil {
						return guard.Unavailable(err)
					}
					return nil
				}, WithPrefetch(100), WithConsumerTimeout(5*time.Second), WithDeliveryLimit(limit), WithDeadLetters(letters))
				died := func() int {
					ds, err := r.get(letters.cfg.Queue)
					if err != nil {
						t.Error(err)
					}
					return len(ds)
				}
				// With limit 1 the second channel takes one message, since that is its last delivery. With
				// limit 4 the third takes all: only then are half of the deliveries used.
				few := int64(limit+1) / 2
				adaptertest.Eventually(t, "a message has used more than half of its deliveries", func() bool { return times.Load() > few })
				before := len(l.books().prefetch)
				l.cut()
				adaptertest.Eventually(t, "the channel is opened again", func() bool { return len(l.books().prefetch) > before })
				dropped := 0
				if limit == 1 {
					dropped = 1 // the message that was out at the cut
					adaptertest.Eventually(t, "two more channels had a last delivery", func() bool { return died() >= 2 })
				}
				dead, p := died(), l.books().prefetch
				if slices.Max(p[before:]) != 1 || dead >= len(p) { // one of each channel but the first
					t.Errorf("%d dead letters, prefetches %d, the connection broke after %d", dead, p, before)
				}
				rec.down.Store(false)
				adaptertest.Eventually(t, "nothing is left", func() bool { return rec.distinct()+died() >= n-dropped })
				if err := errors.Join(c.Stop(t), l.check()); err != nil {
					t.Fatal(err)
				}
				if dead := died(); dead >= len(l.books().prefetch) || rec.twice() > 0 {
					t.Errorf("%d handled, %d dead letters of %d; %d twice", rec.distinct(), dead, n, rec.twice())
				}
				t.Logf("%d of %d handled, %d dead letters, prefetches %d", rec.distinct(), n, died(), l.books().prefetch)
			})
		}
	})
}

// A message at its last delivery whose letter the source could not write is rescued by the
// stop; if that cannot write it either, nobody is told that it comes again.
func TestStopAtTheLastDelivery(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		for _, up := range []bool{true, false} {
			r := newRig(t, s, Quorum, amqp091.Table{"x-delivery-limit": int64(1)})
			var log logbook
			var calls, letters atomic.Int32
			w := dlq.WriterFunc(func(_ context.Context, rec *dlq.Record) error {
				if rec.Reason != dlq.ReasonLastDelivery || !up {
					return errDown
				}
				letters.Add(1)
				return nil
			})
			consume := func() error {
				g := adaptertest.Guard(t, guard.Config{}, guard.WithLogger(log.logger()))
				before := calls.Load()
				c := r.consume(g, func(context.Context, amqp091.Delivery) error {
					calls.Add(1)
					return guard.Permanent(errDown)
				}, WithDeliveryLimit(1), WithDeadLetters(w), WithStopTimeout(time.Second))
				adaptertest.Eventually(t, "it is delivered, and has failed", func() bool {
					all := g.Sources()
					return calls.Load() > before && len(all) == 1 && all[0].Account().Settling == 1
				})
				return c.Stop(t)
			}
			r.publish(0, 1)
			if err := consume(); err == nil || !strings.Contains(err.Error(), "delivered again") {
				t.Errorf("the first delivery: %v", err)
			}
			err := consume()
			warned, failed := log.with("level=WARN", "messages at their last delivery were dead-lettered"), log.with("level=ERROR", "the broker may drop messages")
			if up && (letters.Load() != 1 || len(warned) != 1 || len(failed) != 0 || err != nil) {
				t.Errorf("%d letters, %v, %v, %v", letters.Load(), warned, failed, err)
			}
			if !up && (len(failed) != 1 || err == nil || !strings.Contains(err.Error(), "1 messages are not delivered again")) {
				t.Errorf("%v, %v", failed, err)
			}
		}
	})
}

// What holds a source without its breaker is sat out all the same: what the broker
// counts is a delivery of the prefetch for each half of the consumer timeout.
func TestHoldsWithoutTheBreaker(t *testing.T) {
	t.Parallel()
	const n, timeout = 20, 2 * time.Second
	for _, c := range []struct {
		name   string
		handle func(since time.Duration) error // until it returns nil
		most   int                             // deliveries of each beside the first
		opts   []Option
	}{
		{
			name: "a handler asks for time, twice", most: 2,
			handle: func(since time.Duration) error {
				if since < 4*time.Second {
					return guard.Backoff(errDown, time.Now().Add(2*time.Second))
				}
				return nil
			},
		},
		{
			name: "no dead letters", most: 6,
			handle: func(since time.Duration) error {
				if since < 4*time.Second {
					return guard.Permanent(errDown)
				}
				return nil
			},
		},
		{
			name: "the writer is down", most: 6,
			handle: func(since time.Duration) error {
				if since < 4*time.Second {
					return guard.Permanent(errDown)
				}
				return nil
			},
			opts: []Option{WithDeadLetters(dlq.WriterFunc(func(context.Context, *dlq.Record) error { return errDown }))},
		},
		{
			name: "a limiter lets nothing through", most: 6,
			handle: func(time.Duration) error { return nil },
			opts:   []Option{WithLimiter(&shut{wait: 4 * time.Second})},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, shared(t, brokers.RabbitMQ4), Quorum, nil)
			g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Timeout: 200 * time.Millisecond, Ramp: guard.Ramp{Off: true}}})
			var l lines
			var rec record
			r.publish(0, n)
			var begun time.Time
			handle := func(ctx context.Context, d amqp091.Delivery) error {
				if begun.IsZero() {
					begun = time.Now()
				}
				if err := c.handle(time.Since(begun)); err != nil {
					return err
				}
				return rec.handle(ctx, d)
			}
			co := r.consumeBy(l.dialer(r.url()), g, handle, append(c.opts, WithPrefetch(n), WithConsumerTimeout(timeout))...)
			adaptertest.Eventually(t, "all handled", func() bool { return rec.distinct() == n })
			if err := errors.Join(co.Stop(t), l.check()); err != nil {
				t.Fatal(err)
			}
			b := l.books()
			if again := b.delivered - n; again > c.most*n || again < n {
				t.Errorf("%d delivered again: prefetches %d", again, b.prefetch)
			}
			t.Logf("prefetches %d, %d delivered again", b.prefetch, b.delivered-n)
		})
	}
}

// shut is a limiter that lets nothing through for a while after it was first asked.
type shut struct {
	wait  time.Duration
	once  sync.Once
	until time.Time
}

func (s *shut) Admit(time.Duration) time.Duration {
	s.once.Do(func() { s.until = time.Now().Add(s.wait) })
	return max(0, time.Until(s.until))
}

// A rate that is too low for the prefetch shrinks it, as slow handlers do.
func TestALowRateShrinksThePrefetch(t *testing.T) {
	t.Parallel()
	r := newRig(t, shared(t, brokers.RabbitMQ4), Quorum, nil)
	var l lines
	var rec record
	const n = 40
	r.publish(0, n)
	rate, err := limiter.Local(limiter.Limit{Rate: 10, Burst: 1})
	if err != nil {
		t.Fatal(err)
	}
	c := r.consumeBy(l.dialer(r.url()), adaptertest.Guard(t, guard.Config{}), rec.handle,
		WithPrefetch(32), WithConsumerTimeout(2*time.Second), WithLimiter(rate), WithPolicy(guard.Policy{Timeout: 500 * time.Millisecond}))
	adaptertest.Eventually(t, "all handled", func() bool { return rec.distinct() == n })
	if err := errors.Join(c.Stop(t), l.check()); err != nil {
		t.Fatal(err)
	}
	if p := l.books().prefetch; len(p) < 2 || len(p) > 4 || p[len(p)-1] > 16 || rec.twice() > 0 {
		t.Errorf("prefetches %d, %d twice", p, rec.twice())
	}
}

// A pause by an operator outlives the channel, and so does the budget.
func TestAPauseOutlivesTheChannel(t *testing.T) {
	t.Parallel()
	r := newRig(t, shared(t, brokers.RabbitMQ4), Quorum, nil)
	g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Timeout: 200 * time.Millisecond, Ramp: guard.Ramp{Off: true}}})
	var l lines
	var rec record
	c := r.consumeBy(l.dialer(r.url()), g, rec.handle, WithConsumerTimeout(2*time.Second))
	adaptertest.Source(t, g, r.queue).Pause(0)
	r.publish(0, 20)
	adaptertest.Eventually(t, "delivered", func() bool { return l.books().delivered == 20 }) // and out for a second
	adaptertest.Eventually(t, "closed", func() bool { return l.unacked() == 0 })
	adaptertest.Eventually(t, "another source", func() bool { s := g.Source(r.queue); return s != nil && !s.State().Ended })
	time.Sleep(500 * time.Millisecond)
	src := adaptertest.Source(t, g, r.queue)
	if b := l.books(); b.delivered != 20 || rec.distinct() != 0 {
		t.Errorf("consumed while paused: %+v, %d handled", b, rec.distinct())
	}
	src.Resume()
	adaptertest.Eventually(t, "all handled", func() bool { return rec.distinct() == 20 })
	if err := errors.Join(c.Stop(t), l.check()); err != nil {
		t.Fatal(err)
	}
}

// Handlers too slow for the prefetch: the channel is closed before the broker
// does it, and the prefetch shrinks until it fits.
func TestSlowHandlersShrinkThePrefetch(t *testing.T) {
	t.Parallel()
	r := newRig(t, shared(t, brokers.RabbitMQ4), Quorum, nil)
	g := adaptertest.Guard(t, guard.Config{})
	var l lines
	var rec record
	const n = 40
	r.publish(0, n)
	c := r.consumeBy(l.dialer(r.url()), g, func(ctx context.Context, d amqp091.Delivery) error {
		time.Sleep(100 * time.Millisecond)
		return rec.handle(ctx, d)
	}, WithPrefetch(32), WithConsumerTimeout(2*time.Second), WithPolicy(guard.Policy{Timeout: 500 * time.Millisecond}))
	adaptertest.Eventually(t, "all handled", func() bool { return rec.distinct() == n })
	if err := errors.Join(c.Stop(t), l.check()); err != nil {
		t.Fatal(err)
	}
	if p := l.books().prefetch; len(p) < 2 || p[len(p)-1] > 16 || rec.twice() > 0 {
		t.Errorf("prefetches %d, %d twice", p, rec.twice())
	}
}

// Connections that break under traffic, again and again, lose nothing, and no
// tag is settled on another channel than its own.
func TestBrokenConnections(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		r := newRig(t, s, Quorum, amqp091.Table{"x-delivery-limit": int64(1000)})
		var l lines
		var rec record
		c := r.consumeBy(l.dialer("amqp://guest:guest@127.0.0.1:1/", r.url()), adaptertest.Guard(t, guard.Config{}), func(ctx context.Context, d amqp091.Delivery) error {
			time.Sleep(100 * time.Microsecond)
			return rec.handle(ctx, d)
		}, WithPrefetch(100))
		const n, cuts = 4000, 8
		for i := range cuts {
			r.publish(i*n/cuts, (i+1)*n/cuts)
			adaptertest.Eventually(t, "traffic", func() bool { return rec.distinct() > i*n/cuts })
			l.cut()
		}
		adaptertest.Eventually(t, "all handled", func() bool { return rec.distinct() == n })
		adaptertest.Eventually(t, "all acked", func() bool { k, err := r.ready(); return err == nil && k+l.unacked() == 0 })
		if err := errors.Join(c.Stop(t), l.check()); err != nil {
			t.Fatal(err)
		}
		t.Logf("%d cuts, %d handled twice", cuts, rec.twice())
		if most := cuts * perKill; rec.twice() > most {
			t.Errorf("%d handled twice, at most %d", rec.twice(), most)
		}
	})
}

// A broker that comes back upgraded has a delivery limit, and the source that
// consumes from it knows.
func TestUpgradedBroker(t *testing.T) {
	t.Parallel()
	before, after := shared(t, brokers.RabbitMQ), newRig(t, shared(t, brokers.RabbitMQ4), Quorum, nil)
	old := &rig{server: before, t: t, queue: after.queue, kind: Quorum}
	old.on(func(ch *amqp091.Channel) error {
		_, err := ch.QueueDeclare(old.queue, true, false, false, false, amqp091.Table{"x-queue-type": Quorum})
		return err
	})
	var l lines
	var at atomic.Pointer[server]
	at.Store(before)
	d := l.dialer(after.url())
	d.Config.Dial = func(network, _ string) (net.Conn, error) {
		uri, err := amqp091.ParseURI(at.Load().url())
		if err != nil {
			return nil, err
		}
		return l.dial(network, net.JoinHostPort(uri.Host, strconv.Itoa(uri.Port)))
	}
	var letters atomic.Int64
	c := after.consumeBy(d, adaptertest.Guard(t, guard.Config{}), func(context.Context, amqp091.Delivery) error { return errDown },
		WithDeadLetters(dlq.WriterFunc(func(context.Context, *dlq.Record) error { letters.Add(1); return nil })),
		WithPolicy(guard.Policy{Retry: guard.Retry{Attempts: 100, Base: 5 * time.Minute, Max: 5 * time.Minute, Patience: 10 * time.Millisecond}}))
	adaptertest.Eventually(t, "consuming before", func() bool { return len(l.books().prefetch) > 0 })

	after.publish(0, 1)
	after.on(func(ch *amqp091.Channel) error { // up to the last delivery
		late := time.Now().Add(30 * time.Second)
		for n := 0; n < defaultDeliveryLimit; time.Sleep(time.Millisecond) { // what goes back is there again soon
			if time.Now().After(late) {
				return fmt.Errorf("delivered %d times only", n)
			}
			m, ok, err := ch.Get(after.queue, false)
			if err == nil && ok {
				n, err = n+1, m.Nack(false, true)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	at.Store(after.server)
	l.cut()
	adaptertest.Eventually(t, "a failure at the last delivery is dead-lettered", func() bool { return letters.Load() == 1 })
	if err := errors.Join(c.Stop(t), l.check()); err != nil {
		t.Fatal(err)
	}
	old.on(func(ch *amqp091.Channel) error { _, err := ch.QueueDelete(old.queue, false, false, false); return err })
	if err := old.conn.Close(); err != nil {
		t.Error(err)
	}
}

// What a broker refuses ends a consumer that has never consumed, and is waited out
// by one that has. A queue that is gone ends both, but not one whose node is down: any other
// answer begins its count anew.
func TestRefusals(t *testing.T) {
	t.Parallel()
	refused := func(code int, text string) error {
		return fmt.Errorf("wrapped: %w", &amqp091.Error{Code: code, Reason: text})
	}
	for _, c := range []struct {
		err          error
		first, later bool // whether it ends
		gone         bool
	}{
		{err: refused(amqp091.AccessRefused, "ACCESS_REFUSED - read access to queue 'q' refused"), first: true},
		{err: refused(amqp091.AccessRefused, "ACCESS_REFUSED - queue 'q' in exclusive use")},
		{err: refused(amqp091.PreconditionFailed, "PRECONDITION_FAILED - unknown"), first: true},
		{err: refused(amqp091.NotAllowed, "NOT_ALLOWED - vhost is stopping"), first: true},
		{err: refused(amqp091.NotImplemented, "NOT_IMPLEMENTED - not yet"), first: true},
		{err: unsuitable("no exchange"), first: true},
		{err: amqp091.ErrClosed},
		{err: refused(amqp091.NotFound, "NOT_FOUND - home node 'a@b' of durable queue 'q' in vhost '/' is down or inaccessible")},
		{err: refused(amqp091.NotFound, "NOT_FOUND - no queue 'q' in vhost '/'"), first: true, later: true, gone: true},
	} {
		for consumed, ends := range map[bool]bool{false: c.first, true: c.later} {
			t.Run(fmt.Sprintf("%v, consumed %t", c.err, consumed), func(t *testing.T) {
				t.Parallel()
				con := &consumer{o: &options{queue: "q", name: "q", log: adaptertest.Log()}, consumed: consumed, missing: queueTries - 1}
				how, err := (&epoch{c: con}).notConsuming(t.Context(), c.err)
				if (how == epochStopped) != ends || (err != nil) != ends || errors.Is(err, ErrQueueGone) != c.gone || ends && !errors.Is(err, c.err) {
					t.Errorf("outcome %d, %v", how, err)
				}
				if want := map[bool]int{true: queueTries}[c.gone]; con.missing != want {
					t.Errorf("missing %d times in a row, want %d", con.missing, want)
				}
			})
		}
	}
}

// A broker that starts may not know the queue: its answers do not add up with those that were
// given before the connection was lost.
func TestANewConnectionCountsMissesAnew(t *testing.T) {
	t.Parallel()
	r := newRig(t, shared(t, brokers.RabbitMQ4), Quorum, nil)
	c := &consumer{o: &options{queue: "q", name: "q", log: adaptertest.Log()}, dialer: Dial(r.url()), missing: queueTries - 1}
	defer c.hangUp()
	first := c.connected(t.Context())
	if c.missing != 0 {
		t.Errorf("missing %d times on a new connection", c.missing)
	}
	c.missing = 1
	if again := c.connected(t.Context()); again != first || c.missing != 1 {
		t.Errorf("missing %d times on the same connection", c.missing)
	}
}

// The dead-letter exchange is gone for a while after a reconnect: it is waited for.
func TestAnExchangeThatComesBack(t *testing.T) {
	t.Parallel()
	r := newRig(t, shared(t, brokers.RabbitMQ4), Quorum, nil)
	exchange := func(declare bool) {
		r.on(func(ch *amqp091.Channel) error {
			if declare {
				return ch.ExchangeDeclare(r.queue, "fanout", true, false, false, false, nil)
			}
			return ch.ExchangeDelete(r.queue, false, false)
		})
	}
	exchange(true)
	defer exchange(false)
	var l lines
	var rec record
	var refused atomic.Int64
	log := slog.New(slog.NewTextHandler(writes(func(line string) {
		if strings.Contains(line, "not consuming") && strings.Contains(line, "WithDeadLetterExchange") {
			refused.Add(1)
		}
	}), nil))
	c := r.consumeBy(l.dialer(r.url()), adaptertest.Guard(t, guard.Config{}), rec.handle, WithDeadLetterExchange(r.queue), WithLogger(log))
	r.publish(0, 10)
	adaptertest.Eventually(t, "handled", func() bool { return rec.distinct() == 10 })
	exchange(false)
	l.cut()
	r.publish(10, 20)
	adaptertest.Eventually(t, "it is missing, and that is logged", func() bool { return refused.Load() >= 2 })
	exchange(true)
	adaptertest.Eventually(t, "all handled", func() bool { return rec.distinct() == 20 })
	if err := errors.Join(c.Stop(t), l.check()); err != nil {
		t.Fatal(err)
	}
}

// writes is a writer of lines.
type writes func(string)

func (w writes) Write(p []byte) (int, error) {
	w(string(p))
	return len(p), nil
}

func TestDeletedQueueIsGone(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		r := newRig(t, s, Quorum, nil)
		var rec record
		c := r.consume(adaptertest.Guard(t, guard.Config{}), rec.handle)
		r.publish(0, 10)
		adaptertest.Eventually(t, "handled", func() bool { return rec.distinct() == 10 })
		r.on(func(ch *amqp091.Channel) error { _, err := ch.QueueDelete(r.queue, false, false, false); return err })
		if err := c.Wait(t); !errors.Is(err, ErrQueueGone) {
			t.Fatal(err)
		}
	})
}

// A queue is gone, also if its dead-letter exchange is gone with it.
func TestDeletedQueueAndExchangeAreGone(t *testing.T) {
	t.Parallel()
	r := newRig(t, shared(t, brokers.RabbitMQ4), Quorum, nil)
	r.on(func(ch *amqp091.Channel) error {
		return ch.ExchangeDeclare(r.queue, "fanout", true, false, false, false, nil)
	})
	var rec record
	c := r.consume(adaptertest.Guard(t, guard.Config{}), rec.handle, WithDeadLetterExchange(r.queue))
	r.publish(0, 10)
	adaptertest.Eventually(t, "handled", func() bool { return rec.distinct() == 10 })
	r.on(func(ch *amqp091.Channel) error {
		_, err := ch.QueueDelete(r.queue, false, false, false)
		return errors.Join(err, ch.ExchangeDelete(r.queue, false, false))
	})
	if err := c.Wait(t); !errors.Is(err, ErrQueueGone) {
		t.Fatal(err)
	}
}

func TestClosedGuardEndsConsume(t *testing.T) {
	t.Parallel()
	r := newRig(t, shared(t, brokers.RabbitMQ), Classic, nil)
	g := adaptertest.Guard(t, guard.Config{})
	var rec record
	c := r.consume(g, rec.handle)
	r.publish(0, 10)
	adaptertest.Eventually(t, "handled", func() bool { return rec.distinct() == 10 })
	if _, err := g.Close(adaptertest.Context(t)); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(t); !errors.Is(err, guard.ErrClosed) {
		t.Fatal(err)
	}
}

// A handler cannot settle by itself.
func TestHandlersDoNotSettle(t *testing.T) {
	t.Parallel()
	r := newRig(t, shared(t, brokers.RabbitMQ), Classic, nil)
	var l lines
	var rec record
	c := r.consumeBy(l.dialer(r.url()), adaptertest.Guard(t, guard.Config{}), func(ctx context.Context, d amqp091.Delivery) error {
		for _, err := range []error{d.Ack(true), d.Nack(true, false), d.Reject(false)} {
			if !errors.Is(err, errSettled) {
				t.Errorf("a handler settled: %v", err)
			}
		}
		return rec.handle(ctx, d)
	})
	r.publish(0, 20)
	adaptertest.Eventually(t, "handled", func() bool { return rec.distinct() == 20 })
	if err := errors.Join(c.Stop(t), l.check()); err != nil {
		t.Fatal(err)
	}
	if b := l.books(); b.acked != 20 || b.delivered != 20 {
		t.Errorf("%+v", b)
	}
}

// A handler that outlives the grace is named, and its message stays unsettled.
func TestStopNamesWhatItLeaves(t *testing.T) {
	t.Parallel()
	r := newRig(t, shared(t, brokers.RabbitMQ4), Quorum, nil)
	release := make(chan struct{})
	var begun atomic.Bool
	c := r.consume(adaptertest.Guard(t, guard.Config{}), func(context.Context, amqp091.Delivery) error {
		begun.Store(true)
		<-release
		return nil
	}, WithStopTimeout(50*time.Millisecond))
	r.publish(0, 3)
	adaptertest.Eventually(t, "the handler runs", begun.Load)
	err := c.Stop(t)
	close(release)
	if err == nil || !strings.Contains(err.Error(), "1 messages left after 50ms") {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "all are back", func() bool { n, err := r.ready(); return err == nil && n == 3 })
}

func TestConsumeRefuses(t *testing.T) {
	t.Parallel()
	g := adaptertest.Guard(t, guard.Config{})
	handle := func(context.Context, amqp091.Delivery) error { return nil }
	ctx := adaptertest.Context(t)
	err := Consume(ctx, nil, Dialer{URLs: []string{"http://user:secret@x"}, Timeout: 1, MaxPause: 1, Config: amqp091.Config{Recovery: &amqp091.Recovery{}}}, "", nil,
		WithPrefetch(70000), WithStopTimeout(-1), WithLogger(nil), WithConsumerTimeout(1), WithDeliveryLimit(-1),
		WithDeadLetters(&DLQ{}), WithDeadLetterExchange("x"), WithConsumeArgs(amqp091.Table{"x": struct{}{}}))
	for _, word := range []string{
		"Guard", "URLs[0]", "Dialer.Timeout", "MaxPause", "Recovery", "handler", "queue's name", "WithPrefetch", "WithStopTimeout", "WithLogger",
		"WithConsumerTimeout", "WithDeliveryLimit", "WithDeadLetterExchange", "WithConsumeArgs",
	} {
		if err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("nothing about %s: %v", word, err)
		}
	}
	if strings.Contains(fmt.Sprint(err), "secret") {
		t.Error("the password is in the error")
	}
	if err := Consume(ctx, g, Dial(), "q", handle); err == nil || !strings.Contains(err.Error(), "URLs") {
		t.Errorf("%v", err)
	}
	for name, p := range map[string]guard.Policy{
		"Retry.Max": {Retry: guard.Retry{Max: time.Hour}},
		"Window":    {Window: 70000},
	} {
		if err := Consume(ctx, g, Dial("amqp://127.0.0.1:1/"), "q", handle, WithPolicy(p)); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	kinds(t, func(t *testing.T, s *server) {
		ctx := adaptertest.Context(t) // parallel tests come between, and the other one may be over
		r := newRig(t, s, Quorum, nil)
		g := adaptertest.Guard(t, guard.Config{})
		wrong := strings.Replace(r.url(), "guest:guest", "guest:wrong", 1)
		if err := Consume(ctx, g, Dial(wrong), r.queue, handle); !errors.Is(err, amqp091.ErrCredentials) || strings.Contains(err.Error(), "wrong") {
			t.Errorf("%v", err)
		}
		nowhere := strings.TrimSuffix(r.url(), "/") + "/no-such"
		if err := Consume(ctx, g, Dial(nowhere), r.queue, handle); err == nil || !strings.Contains(err.Error(), "no-such") {
			t.Errorf("%v", err)
		}
		if err := Consume(ctx, g, Dial(r.url()), "no-such-"+r.queue, handle); !errors.Is(err, ErrQueueGone) {
			t.Errorf("%v", err)
		}
		if err := Consume(ctx, g, Dial(r.url()), r.queue, handle, WithPolicy(guard.Policy{Timeout: time.Hour})); err == nil || !strings.Contains(err.Error(), "HoldMax") {
			t.Errorf("%v", err)
		}
		if err := Consume(ctx, g, Dial(r.url()), r.queue, handle, WithDeadLetterExchange("no-such")); !errors.Is(err, ErrUnsuitable) || !strings.Contains(err.Error(), "rabbitmqadmin") {
			t.Errorf("%v", err)
		}
		ended, cancel := context.WithCancel(ctx)
		cancel()
		if err := Consume(ended, g, Dial("amqp://127.0.0.1:1/"), r.queue, handle); err != nil {
			t.Errorf("%v", err)
		}
	})
}

// Dead letters that come back to their own queue would go round for ever.
func TestOwnLettersAreRefused(t *testing.T) {
	g := adaptertest.Guard(t, guard.Config{})
	at := Dial("amqp://127.0.0.1:1/prod")
	letters := &DLQ{cfg: DLQConfig{Queue: "orders"}, dialer: at}
	err := Consume(t.Context(), g, at, "orders", func(context.Context, amqp091.Delivery) error { return nil }, WithDeadLetters(letters))
	if err == nil || !strings.Contains(err.Error(), `dead letters of "orders" would go to "orders" itself`) {
		t.Error(err)
	}
	for _, o := range []options{{queue: "payments"}, {queue: "orders"}} {
		o.letters = letters
		if err := o.ownLetters(Dial("amqp://127.0.0.1:1/test")); err != nil {
			t.Error(err)
		}
	}
}
