// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// Poison is at the head when the dependency comes back, and the channel has been
// closed meanwhile: the messages behind it are there as witnesses, so that it is
// dead-lettered and everything else handled.
func TestAParkedChannelHasWitnesses(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		for _, kind := range []Kind{Quorum, Classic} {
			t.Run(kind, func(t *testing.T) {
				t.Parallel()
				r := newRig(t, s, kind, nil)
				letters := r.deadLetters(Quorum)
				g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{
					Timeout: 500 * time.Millisecond, Ramp: guard.Ramp{Off: true},
					Retry:   guard.Retry{Attempts: 2, Base: time.Millisecond, Max: 10 * time.Millisecond},
					Breaker: breaker.Config{Base: 100 * time.Millisecond, Cap: 500 * time.Millisecond},
				}})
				var l lines
				var rec record
				rec.down.Store(true)
				const n, poison, timeout = 300, 2, 8 * time.Second
				r.publish(0, n)
				bad := func(d amqp091.Delivery) bool { return len(d.Body) == 1 && d.Body[0] < '0'+poison }
				c := r.consumeBy(l.dialer(r.url()), g, func(ctx context.Context, d amqp091.Delivery) error {
					if bad(d) {
						return errDown
					}
					return rec.handle(ctx, d)
				}, WithPrefetch(200), WithConsumerTimeout(timeout), WithDeadLetters(letters), WithDeliveryLimit(100))
				adaptertest.Eventually(t, "opened to probe", func() bool { return len(l.books().prefetch) > 1 && l.unacked() == witnesses })
				rec.down.Store(false)
				up := time.Now()
				adaptertest.Eventually(t, "all healthy messages are handled", func() bool { return rec.distinct() == n-poison })
				var dead []amqp091.Delivery
				adaptertest.Eventually(t, "all poison is dead-lettered", func() (ok bool) {
					var err error
					dead, err = r.get(r.queue + ".dlq")
					return err == nil && len(dead) >= poison
				})
				t.Logf("done after %s", time.Since(up).Round(10*time.Millisecond))
				if err := errors.Join(c.Stop(t), l.check()); err != nil {
					t.Fatal(err)
				}
				if slices.ContainsFunc(dead, func(d amqp091.Delivery) bool { return !bad(d) }) {
					t.Errorf("%d dead letters, healthy ones among them", len(dead))
				}
			})
		}
	})
}

// A prefetch that was halved for slow handlers grows back once they are fast, in one
// step and without a message out of order, twice or requeued from then on.
func TestALoweredPrefetchGrowsBack(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		r := newRig(t, s, Quorum, nil)
		var l lines
		var rec record
		var fast atomic.Bool
		// A delivery may wait for 4 s. The last of 32 slow ones waits for 4.8 s, of 16 for
		// 2.4 s; a busy machine has the rest.
		const n, prefetch, timeout, slow = 4000, 32, 8 * time.Second, 150 * time.Millisecond
		r.publish(0, n)
		c := r.consumeBy(l.dialer(r.url()), adaptertest.Guard(t, guard.Config{}), func(ctx context.Context, d amqp091.Delivery) error {
			if fast.Load() {
				time.Sleep(time.Millisecond)
			} else {
				time.Sleep(slow)
			}
			return rec.handle(ctx, d)
		}, WithPrefetch(prefetch), WithConsumerTimeout(timeout), WithPolicy(guard.Policy{Timeout: timeout / 4}))
		adaptertest.Eventually(t, "it is halved", func() bool { return l.prefetch() > 0 && l.prefetch() <= prefetch/2 })
		low := len(l.books().prefetch)
		time.Sleep(timeout / 2) // it is looked at each quarter
		if p := l.books().prefetch; slices.Max(p[low-1:]) > prefetch/2 {
			t.Errorf("it grows although the handlers are slow: %d", p)
		}
		before := len(rec.all()) + prefetch // what goes back a second time goes behind
		fast.Store(true)
		adaptertest.Eventually(t, "all handled", func() bool { return rec.distinct() == n })
		if err := errors.Join(c.Stop(t), l.check()); err != nil {
			t.Fatal(err)
		}
		if got := rec.all(); !slices.IsSorted(got[before:]) {
			t.Errorf("prefetches %d, and from message %d on out of order: %d", l.books().prefetch, before, got[before:])
		}
		if l.prefetch() != prefetch || rec.twice() > 0 {
			t.Errorf("prefetches %d, %d twice", l.books().prefetch, rec.twice())
		}
	})
}

// A consumer that is replaced after a hold hands over to the next one of a queue with a
// single active consumer: between them they keep the order, and one handler runs at a time.
func TestASingleActiveConsumerHandsOver(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		r := newRig(t, s, Quorum, amqp091.Table{"x-single-active-consumer": true, "x-delivery-limit": int64(1000)})
		policy := guard.Policy{
			Timeout: 500 * time.Millisecond, Ramp: guard.Ramp{Off: true},
			Breaker: breaker.Config{Base: 100 * time.Millisecond, Cap: 500 * time.Millisecond},
		}
		var lines [2]lines
		var rec record
		var down atomic.Bool
		var running, overlaps, second atomic.Int32
		down.Store(true)
		const n = 600
		r.publish(0, n)
		start := func(i int) *adaptertest.Running {
			return r.consumeBy(lines[i].dialer(r.url()), adaptertest.Guard(t, guard.Config{Policy: policy}), func(ctx context.Context, d amqp091.Delivery) error {
				if i == 0 && down.Load() {
					return errDown
				}
				second.Add(int32(i))
				if running.Add(1) > 1 {
					overlaps.Add(1)
				}
				defer running.Add(-1)
				time.Sleep(time.Millisecond)
				return rec.handle(ctx, d)
			}, WithPrefetch(200), WithConsumerTimeout(40*time.Second), WithDeliveryLimit(1000))
		}
		first := start(0)
		adaptertest.Eventually(t, "opened to probe", func() bool { return len(lines[0].books().prefetch) > 1 && lines[0].unacked() == witnesses })
		next := start(1)
		adaptertest.Eventually(t, "the next one waits", func() bool { return lines[1].prefetch() > 0 })
		down.Store(false)
		adaptertest.Eventually(t, "all handled", func() bool { return rec.distinct() == n })
		if err := errors.Join(first.Stop(t), next.Stop(t), lines[0].check(), lines[1].check(), rec.order()); err != nil {
			t.Error(err)
		}
		if overlaps.Load() > 0 || rec.twice() > 0 {
			t.Errorf("%d calls beside another, %d messages twice", overlaps.Load(), rec.twice())
		}
		t.Logf("prefetches %d, %d of %d by the second", lines[0].books().prefetch, second.Load(), n)
	})
}

// Large messages that are held take no more than twice WindowBytes for long, and the
// prefetch is the whole again when small ones follow.
func TestHeldBytesAreBounded(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		r := newRig(t, s, Quorum, nil)
		const n, size, prefetch, window = 60, 512 << 10, 60, 4 << 20
		body := func(i int) []byte { return append(bytes.Repeat([]byte("0"), size), strconv.Itoa(i)...) }
		for i := range n {
			if err := r.send(t.Context(), amqp091.Publishing{Body: body(i), DeliveryMode: amqp091.Persistent}); err != nil {
				t.Fatal(err)
			}
		}
		g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{WindowBytes: window, Ramp: guard.Ramp{Off: true}}})
		var l lines
		var rec record
		rec.down.Store(true)
		c := r.consumeBy(l.dialer(r.url()), g, func(ctx context.Context, d amqp091.Delivery) error {
			time.Sleep(time.Millisecond) // so that there is a backlog
			return rec.handle(ctx, d)
		}, WithPrefetch(prefetch))
		adaptertest.Eventually(t, "the channel is opened again", func() bool { return len(l.books().prefetch) > 1 })
		if low := l.prefetch(); low > window/size || low < window/size/2 {
			t.Errorf("prefetches %d", l.books().prefetch)
		}
		adaptertest.Eventually(t, "held", func() bool { return l.unacked() == l.prefetch() })
		time.Sleep(200 * time.Millisecond)
		if out := l.unacked(); out*size > 2*window {
			t.Errorf("%d messages of %d bytes are held, the window is %d", out, size, window)
		}
		rec.down.Store(false)
		adaptertest.Eventually(t, "the large ones are handled", func() bool { return rec.distinct() == n })
		if p := l.books().prefetch; slices.Max(p[1:]) > window/size {
			t.Errorf("prefetches %d", p)
		}
		for i := n; l.prefetch() < prefetch; i += 3000 {
			if i > 60_000 {
				t.Fatalf("it does not grow back: %d", l.books().prefetch)
			}
			r.publish(i, i+3000)
			adaptertest.Eventually(t, "half of them are handled", func() bool { return l.prefetch() >= prefetch || rec.distinct() >= i+1500 })
		}
		if err := errors.Join(c.Stop(t), l.check(), rec.order()); err != nil {
			t.Fatal(err)
		}
		if rec.twice() > 0 {
			t.Errorf("%d twice", rec.twice())
		}
	})
}

// everyThree is a limiter that admits one message in three seconds.
type everyThree struct{ next time.Duration }

func (l *everyThree) Admit(now time.Duration) time.Duration {
	if now < l.next {
		return l.next - now
	}
	l.next = now + 3*settleMost
	return 0
}

// downDLQ takes no letter.
type downDLQ struct{}

func (downDLQ) Write(context.Context, *dlq.Record) error { return errDown }

// Where there is an order to keep, a consumer is replaced when all it has is handled, however
// long a call takes within its timeout, or a limiter or a retry delays it. A message that only
// others can help is not waited for, nor are letters that cannot be written. The consumer is not
// replaced when a delivery has been out for too long, or the source is held.
func TestAConsumerIsReplacedWhenAllIsHandled(t *testing.T) {
	const timeout, out = 30 * time.Second, 4
	for name, c := range map[string]struct {
		order guard.Order
		each  time.Duration // how long a call takes; 0: until the end of the test
		fails bool
		retry guard.Retry   // not zero: the first call of each message fails
		dlq   dlq.Writer    // not nil: all fail for good
		age   time.Duration // that a delivery may have; 0: more than enough
		takes time.Duration
		not   bool // replaced
		limit guard.Limiter
		first func(*guard.Source[amqp091.Delivery], guard.Policy) error // before there is a message; may be nil
	}{
		"in order":        {order: guard.OrderSource, each: settleMost / 2, takes: out * settleMost / 2},
		"by key":          {order: guard.OrderKey, each: settleMost / 2, takes: out * settleMost / 2},
		"slow calls":      {order: guard.OrderSource, each: 3 * settleMost, takes: 3 * out * settleMost},
		"no order":        {order: guard.OrderNone, each: settleMost / 2},
		"all fail":        {order: guard.OrderSource, each: time.Millisecond, fails: true, takes: settleMost + 400*time.Millisecond},
		"a retry":         {order: guard.OrderSource, each: time.Millisecond, retry: guard.Retry{Base: 10 * settleMost, Max: 10 * settleMost}},
		"letters wait":    {order: guard.OrderSource, each: time.Millisecond, dlq: downDLQ{}, takes: timeout + settleMost},
		"a call hangs":    {order: guard.OrderSource, takes: timeout + settleMost},
		"almost too long": {order: guard.OrderSource, each: 5 * settleMost, age: 16 * settleMost, takes: 15 * settleMost, not: true},
		"paced":           {order: guard.OrderSource, each: time.Millisecond, takes: 3 * (out - 1) * settleMost, limit: new(everyThree)},
		"paused": {
			order: guard.OrderSource, each: time.Millisecond, takes: settleMost, not: true,
			first: func(s *guard.Source[amqp091.Delivery], _ guard.Policy) error { s.Pause(0); return nil },
		},
		"forced open": {
			order: guard.OrderSource, each: time.Millisecond, takes: settleMost, not: true,
			first: func(s *guard.Source[amqp091.Delivery], _ guard.Policy) error { return s.ForceOpen(0) },
		},
		"a longer timeout": {
			order: guard.OrderSource, each: timeout + 2*settleMost, takes: out * (timeout + 2*settleMost),
			first: func(s *guard.Source[amqp091.Delivery], p guard.Policy) error {
				p.Timeout *= 2
				return s.Update(p)
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				policy := guard.Policy{Order: c.order, Timeout: timeout, NoBreaker: c.fails || c.dlq != nil || c.retry.Max > 0, Retry: c.retry}
				e := &epoch{
					c:    &consumer{full: 100, o: &options{}, policy: policy},
					port: newPort("q", &options{}), size: out, budget: 50 * 1000, age: newAges(cmp.Or(c.age, time.Hour)),
				}
				defer e.port.end()
				e.port.life.Store(&channelEpoch{ch: new(amqp091.Channel)})
				e.port.hold() // as widen does
				in, release := make(chan amqp091.Delivery, out), make(chan struct{})
				var err error
				var calls atomic.Int32
				e.src, err = guard.Open(adaptertest.Guard(t, guard.Config{}), guard.SourceConfig{Name: "q", Policy: &policy, Limiter: c.limit, DeadLetters: c.dlq}, guard.Limits{}, e.port,
					func(context.Context, amqp091.Delivery) error {
						var done <-chan time.Time
						if c.each > 0 {
							done = time.After(c.each)
						}
						select {
						case <-done:
						case <-release:
						}
						switch {
						case c.dlq != nil:
							return guard.Permanent(errDown)
						case c.fails, c.retry.Max > 0 && calls.Add(1)%2 == 1:
							return errDown
						}
						return nil
					})
				if err != nil {
					t.Fatal(err)
				}
				if c.first != nil {
					if err := c.first(e.src, policy); err != nil {
						t.Fatal(err)
					}
				}
				var running sync.WaitGroup
				running.Go(func() { _ = e.src.Run(context.Background(), in) })
				for n := range uint64(out) {
					e.port.tags.add(n+1, 1000)
					in <- amqp091.Delivery{DeliveryTag: n + 1}
				}
				synctest.Wait()
				start := time.Now()
				if to, ok := e.replaceable(t.Context(), 100); ok == c.not || ok && to != 50 {
					t.Errorf("%d, %t", to, ok)
				}
				left := e.port.tags.unsettled()
				if want := map[bool]int{true: out}[c.fails || c.dlq != nil]; (c.retry.Max > 0 || want > 0) && left != want {
					t.Errorf("%d of %d are not settled, want %d", left, out, want)
				}
				if took := time.Since(start); took < c.takes || took > c.takes+out*c.retry.Max+settleTime {
					t.Errorf("it took %v, want %v", took, c.takes)
				}
				if c.not && c.first != nil && !t.Failed() {
					e.narrow, e.pace = true, new(pace)
					if err := e.widen(t.Context(), 100); err != nil || !e.narrow {
						t.Errorf("%v, narrow: %t", err, e.narrow)
					}
					e.port.hold()
				}
				close(release)
				end, cancel := context.WithTimeout(context.Background(), time.Hour)
				defer cancel()
				e.src.End(end, guard.ReasonShutdown)
				running.Wait()
			})
		})
	}
}

// A consumer is replaced only while all of its own prefetch is out, so that nothing is
// on its way to it, and by one whose deliveries fit at their mean size.
func TestAConsumerIsReplacedWhenItsPrefetchIsOut(t *testing.T) {
	t.Parallel()
	e := &epoch{
		c:    &consumer{full: 100, o: &options{}, policy: guard.Policy{Order: guard.OrderNone}},
		port: newPort("q", &options{}), size: 4, after: 2, budget: 50 * 1000,
	}
	defer e.port.end()
	for n := uint64(1); n <= 5; n++ {
		e.port.tags.add(n, 1000)
	}
	if _, ok := e.replaceable(t.Context(), 100); ok {
		t.Error("replaced with an earlier consumer's deliveries out")
	}
	e.port.tags.settle(1, tagSettled)
	e.port.tags.settle(2, tagSettled)
	e.port.tags.take(nil)
	if _, ok := e.replaceable(t.Context(), 100); ok {
		t.Error("replaced with 3 of 4 out")
	}
	e.port.tags.add(6, 1000)
	if to, ok := e.replaceable(t.Context(), 100); !ok || to != 50 {
		t.Errorf("%d, %t", to, ok)
	}
	e.budget = 7 * 1000
	if _, ok := e.replaceable(t.Context(), 100); ok {
		t.Error("replaced for less than twice as many")
	}
}
