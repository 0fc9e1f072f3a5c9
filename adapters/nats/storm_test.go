// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// wire counts what passes between the client and JetStream.
type wire struct {
	progress, acks, naks, pulls, looks, other atomic.Int64 // looks: for the lag

	subs []*nats.Subscription
}

// stop ends the count.
func (w *wire) stop() {
	for _, s := range w.subs {
		_ = s.Unsubscribe()
	}
}

func (r *rig) wire(t testing.TB) *wire {
	t.Helper()
	w := new(wire)
	for _, s := range []string{"$JS.ACK.>", "$JS.API.>"} {
		sub, err := r.nc.Subscribe(s, func(m *nats.Msg) {
			switch body := string(m.Data); {
			case strings.HasPrefix(m.Subject, "$JS.API.CONSUMER.MSG.NEXT."):
				w.pulls.Add(1)
			case strings.HasPrefix(m.Subject, "$JS.API.CONSUMER.INFO."):
				w.looks.Add(1)
			case strings.HasPrefix(m.Subject, "$JS.API."):
				w.other.Add(1)
			case body == "+WPI":
				w.progress.Add(1)
			case strings.HasPrefix(body, "-NAK"):
				w.naks.Add(1)
			default:
				w.acks.Add(1)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		w.subs = append(w.subs, sub)
	}
	t.Cleanup(w.stop)
	if err := r.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	return w
}

// sync waits until everything that was sent has been counted.
func (r *rig) sync(t testing.TB) {
	t.Helper()
	if err := r.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(50 * time.Millisecond) // the callbacks' own queue
}

// While a breaker is forced open over a full window nothing goes over the wire
// but keep-alives and a look for the lag each 10 s, and no message's delivery count moves.
func TestForcedOpenCostsTheBrokerNothing(t *testing.T) {
	ackWait, period := 3*time.Second, 4*time.Second // a busy machine extends late, and still in time
	if adaptertest.Full() {
		ackWait, period = 15*time.Second, 60*time.Second
	}
	const window, n = 200, 400
	r := newRig(t, jetstream.ConsumerConfig{AckWait: ackWait, MaxAckPending: window})
	g := adaptertest.Guard(t, guard.Config{})
	var mu sync.Mutex
	deliveries := map[uint64]uint64{}
	c := consume(t, g, r.consumer, func(_ context.Context, m jetstream.Msg) error {
		md, err := m.Metadata()
		mu.Lock()
		deliveries[md.Sequence.Stream] = md.NumDelivered
		mu.Unlock()
		return err
	})
	src := adaptertest.Source(t, g, "S/C")
	if err := src.ForceOpen(0); err != nil {
		t.Fatal(err)
	}
	r.publish(t, subject, 0, n)
	var held int
	adaptertest.Eventually(t, "the window is full, the pull closed, and what it brought taken in", func() bool {
		i, st := r.info(t), src.State()
		was := held // what is between the feed and nats.go is in no account
		held = i.NumAckPending
		return st.Room == 0 && i.NumWaiting == 0 && was == held
	})
	var w *wire
	var watched time.Duration // longer than the period on a busy machine
	redelivered := 0          // of those held, before the period
	// The answer to the last pull may still be on its way: then the next period is judged.
	for was, try := -1, 0; was != held; try++ {
		if try == 3 {
			t.Fatalf("%d held, and still not at rest", held)
		}
		begin := time.Now()
		redelivered = r.info(t).NumRedelivered
		w = r.wire(t)
		time.Sleep(period)
		r.sync(t)
		w.stop()
		watched = time.Since(begin)
		was, held = held, r.info(t).NumAckPending
		t.Logf("%d held when the period began, %d when it ended", was, held)
	}
	most := int64(float64(held) * math.Ceil(watched.Seconds()/(ackWait/3).Seconds()))
	looks := int64(watched/lagEvery) + 1
	t.Logf("%d held, open for %s: %d keep-alives (at most %d), %d looks for the lag (at most %d), %d acks, %d naks, %d pulls, %d other calls",
		held, watched, w.progress.Load(), most, w.looks.Load(), looks, w.acks.Load(), w.naks.Load(), w.pulls.Load(), w.other.Load())
	if w.acks.Load() != 0 || w.naks.Load() != 0 || w.pulls.Load() != 0 || w.looks.Load() > looks || w.other.Load() != 0 {
		t.Error("something else than keep-alives and looks for the lag went over the wire")
	}
	if n := w.progress.Load(); n > most || n < int64(held) {
		t.Errorf("%d keep-alives", n)
	}
	if i := r.info(t); i.NumRedelivered != redelivered || i.NumAckPending != held {
		t.Errorf("%d redelivered, %d before the period; %d pending", i.NumRedelivered, redelivered, i.NumAckPending)
	}
	if err := src.ForceClosed(); err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "everything drained", func() bool { return r.info(t).AckFloor.Stream == n })
	mu.Lock()
	defer mu.Unlock()
	// On a busy machine the end of a pull may overtake a message that the server sends: it comes
	// again at once. So the messages of the drain are not judged.
	for seq, n := range deliveries {
		if seq <= uint64(held) && n != 1 && redelivered == 0 {
			t.Errorf("message %d: %d deliveries", seq, n)
		}
	}
	if err := c.Stop(t); err != nil {
		t.Fatal(err)
	}
}

// What waits in nats.go's buffer behind a slow handler is taken out of it and
// kept alive, so nothing is delivered twice.
func TestNothingWaitsUnextendedBehindASlowHandler(t *testing.T) {
	r := newRig(t, jetstream.ConsumerConfig{AckWait: 3 * time.Second}) // a busy machine extends late, and still in time
	const n = 45
	r.publish(t, subject, 0, n)
	var calls atomic.Int64
	c := consume(t, adaptertest.Guard(t, guard.Config{}), r.consumer, func(context.Context, jetstream.Msg) error {
		calls.Add(1)
		time.Sleep(200 * time.Millisecond)
		return nil
	}, WithWindow(16)) // 16 + 8 in the feed + 8 pulled: less than there is, and twice the AckWait
	adaptertest.Eventually(t, "all handled", func() bool { return r.info(t).AckFloor.Stream == n })
	if i := r.info(t); calls.Load() != n || i.Delivered.Consumer != n {
		t.Errorf("%d calls, %d deliveries of %d messages", calls.Load(), i.Delivered.Consumer, n)
	}
	if err := c.Stop(t); err != nil {
		t.Fatal(err)
	}
}

func key(m jetstream.Msg) string { return m.Subject() }

// One percent of poison over 1,000 keys in steady traffic: each is dead-lettered
// once with its history, the breaker stays closed, the other keys go on in order.
func TestPoisonAmongThousandKeys(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	d, err := NewDLQ(adaptertest.Context(t), r.js, DLQConfig{Stream: "D"})
	if err != nil {
		t.Fatal(err)
	}
	const n, keys = 10_000, 1000
	poison := func(i int) bool { return i%100 == 37 }
	g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{
		Order: guard.OrderKey, Workers: 8,
		Retry: guard.Retry{Attempts: 3, Base: 5 * time.Millisecond, Max: 20 * time.Millisecond},
	}})
	var mu sync.Mutex
	last := map[string]int{}
	done := map[int]time.Time{}
	var disorder, repeats int
	var row, longest int // calls that failed with no success between
	c := consume(t, g, r.consumer, func(_ context.Context, m jetstream.Msg) error {
		i, err := strconv.Atoi(string(m.Data()))
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		if poison(i) {
			row++
			longest = max(longest, row)
			return fmt.Errorf("cannot parse order %d", i)
		}
		row = 0
		if was, ok := last[key(m)]; ok && was > i {
			disorder++
		}
		if _, ok := done[i]; ok {
			repeats++
		}
		last[key(m)], done[i] = i, time.Now()
		return nil
	}, WithDeadLetters(d))
	src := adaptertest.Source(t, g, "S/C")
	defer func() {
		if t.Failed() { // where it stands still
			t.Logf("source: %+v\nconsumer: %+v", src.State(), r.info(t))
		}
	}()
	start := time.Now()
	var opened atomic.Bool
	byRate := false
	bySubject := func(i int) string { return "s." + strconv.Itoa(i%keys) }
	published := 0
	sent := map[int]time.Time{}
	adaptertest.Eventually(t, "all poison is dead-lettered", func() bool {
		mu.Lock()
		for i := published; i < published+20; i++ {
			sent[i] = time.Now()
		}
		mu.Unlock()
		r.publish(t, bySubject, published, published+20)
		published += 20
		st := src.State()
		if st.Breaker.State != breaker.Closed {
			opened.Store(true)
			byRate = byRate || st.Breaker.Cause == breaker.CauseRate
		}
		return published >= n && (opened.Load() || st.Tally.DeadLettered >= uint64(published/100))
	})
	adaptertest.Eventually(t, "all settled", func() bool { return r.info(t).AckFloor.Stream == uint64(published) })
	tally := src.State().Tally
	if err := c.Stop(t); err != nil {
		t.Fatal(err)
	}
	letters := r.letters(t, "D")
	seen := map[string]int{}
	for _, m := range letters {
		rec, err := ReadDeadLetter(m)
		if err != nil {
			t.Fatal(err)
		}
		i, _ := strconv.Atoi(string(rec.Body))
		if seen[string(rec.Body)]++; !poison(i) || len(rec.History) < 3 || rec.FirstFailed.IsZero() || rec.Error.Message == "" || rec.Cause.ID == "" {
			t.Errorf("letter %s: %+v", rec.Body, rec)
		}
	}
	bad := (published + 62) / 100 // 37, 137, ...
	if len(letters) != bad || len(seen) != bad {
		t.Errorf("%d letters of %d messages, want %d", len(letters), len(seen), bad)
	}
	// While a busy machine does not publish, the retries of two poison messages are alone,
	// and five of them in a row open the breaker, as they should. Nothing else may.
	if run := (breaker.Config{}).WithDefaults().Run; byRate || opened.Load() && longest < run {
		t.Errorf("the breaker opened; by rate: %v; at most %d calls in a row failed, %d may open it", byRate, longest, run)
	}
	var waits []time.Duration // of keys without poison
	for i, at := range done {
		if !poison(i % 100) {
			waits = append(waits, at.Sub(sent[i]))
		}
	}
	slices.Sort(waits)
	if disorder > 0 || repeats > 0 || len(done) != published-bad {
		t.Errorf("%d handled, %d out of order, %d twice", len(done), disorder, repeats)
	}
	t.Logf("%d messages, %d dead letters, %d retries in %s; other keys waited %s (median), %s (99 %%), %s (most) from publishing to handled",
		published, len(letters), tally.Retries, time.Since(start).Round(time.Millisecond),
		waits[len(waits)/2], waits[len(waits)*99/100], waits[len(waits)-1])
}

// After an outage what was held drains in order and within the ramp.
func TestDrainsInOrderWithinTheRamp(t *testing.T) {
	const wait = 2 * time.Second
	r := newRig(t, jetstream.ConsumerConfig{AckWait: wait})
	ramp := guard.Ramp{Start: 100, Double: 500 * time.Millisecond, For: 3 * time.Second}
	g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Ramp: ramp}})
	var mu sync.Mutex
	var order []uint64
	var at []time.Time
	c := consume(t, g, r.consumer, func(_ context.Context, m jetstream.Msg) error {
		md, err := m.Metadata()
		mu.Lock()
		defer mu.Unlock()
		order, at = append(order, md.Sequence.Stream), append(at, time.Now())
		return err
	})
	src := adaptertest.Source(t, g, "S/C")
	if err := src.ForceOpen(0); err != nil {
		t.Fatal(err)
	}
	const n = 450
	r.publish(t, subject, 0, n)
	adaptertest.Eventually(t, "held", func() bool { return src.State().Account.Held == n })
	time.Sleep(wait) // they are kept alive
	closed := time.Now()
	if err := src.ForceClosed(); err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "drained", func() bool { return r.info(t).AckFloor.Stream == n })
	if err := c.Stop(t); err != nil {
		t.Fatal(err)
	}
	if !slices.IsSorted(order) || len(order) != n {
		t.Errorf("%d handled, in order: %v", len(order), slices.IsSorted(order))
	}
	tau := ramp.Double.Seconds() / math.Ln2
	for i, when := range at {
		passed := when.Sub(closed)
		if passed >= ramp.For {
			break
		}
		if most := ramp.Start*tau*(math.Exp(passed.Seconds()/tau)-1) + 1; float64(i) > most {
			t.Fatalf("message %d after %s: at most %.0f", i, passed, most)
		}
	}
	t.Logf("%d drained in %s", n, at[n-1].Sub(closed).Round(time.Millisecond))
}

func TestServerRestartIsWaitedOut(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{AckWait: 3 * time.Second})
	var mu sync.Mutex
	seen := map[string]int{}
	g, log := logging(t, guard.Config{})
	c := consume(t, g, r.consumer, func(_ context.Context, m jetstream.Msg) error {
		mu.Lock()
		seen[string(m.Data())]++
		mu.Unlock()
		time.Sleep(time.Millisecond)
		return nil
	})
	r.publish(t, subject, 0, 500)
	count := func() int { mu.Lock(); defer mu.Unlock(); return len(seen) }
	adaptertest.Eventually(t, "some handled", func() bool { return count() > 50 })
	r.stop()
	adaptertest.Eventually(t, "it says that it waits", func() bool { return log.lines("level=WARN", "the server is away", "source=S/C") == 1 })
	r.start()
	adaptertest.Eventually(t, "it says that it goes on", func() bool { return log.lines("level=INFO", "the server is there", "source=S/C") == 1 })
	adaptertest.Eventually(t, "the publisher is back", func() bool { return r.nc.IsConnected() })
	adaptertest.Eventually(t, "JetStream is back", func() bool {
		_, err := r.js.Publish(adaptertest.Context(t), "s.x", []byte("500"))
		return err == nil
	})
	adaptertest.Eventually(t, "all handled", func() bool { return count() == 501 })
	if err := c.Stop(t); err != nil {
		t.Fatal(err)
	}
	twice := 0
	for _, n := range seen {
		twice += n - 1
	}
	t.Logf("%d handled twice", twice)
}

func TestDeletedConsumerIsGone(t *testing.T) {
	for name, remove := range map[string]func(r *rig) error{
		"consumer": func(r *rig) error { return r.stream.DeleteConsumer(context.Background(), "C") },
		"stream":   func(r *rig) error { return r.js.DeleteStream(context.Background(), "S") },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, jetstream.ConsumerConfig{})
			var n atomic.Int64
			c := consume(t, adaptertest.Guard(t, guard.Config{}), r.consumer, func(context.Context, jetstream.Msg) error { n.Add(1); return nil })
			r.publish(t, subject, 0, 10)
			adaptertest.Eventually(t, "handled", func() bool { return n.Load() == 10 })
			if err := remove(r); err != nil {
				t.Fatal(err)
			}
			if err := c.Wait(t); !errors.Is(err, ErrConsumerGone) {
				t.Fatal(err)
			}
		})
	}
}

// holds are the ways in which a hold goes on after the consumer or its connection is gone, and
// whether it ends: then the next pull fails. If it lasts, that is noticed with the default settings.
var holds = map[string]bool{"the hold ends": true, "the hold lasts": false}

// A consumer that is deleted while it is held is noticed when it is pulled again, and also if
// the hold does not end: an operator's force has no end.
func TestConsumerDeletedDuringAHold(t *testing.T) {
	t.Parallel()
	for name, ends := range holds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, jetstream.ConsumerConfig{AckWait: 600 * time.Millisecond, MaxAckPending: 10})
			g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Ramp: guard.Ramp{Off: true}}})
			c := consume(t, g, r.consumer, func(context.Context, jetstream.Msg) error { return nil })
			src := adaptertest.Source(t, g, "S/C")
			if err := src.ForceOpen(0); err != nil {
				t.Fatal(err)
			}
			r.publish(t, subject, 0, 20)
			adaptertest.Eventually(t, "the pull is closed", func() bool { return src.State().Room == 0 && r.info(t).NumWaiting == 0 })
			if err := r.stream.DeleteConsumer(adaptertest.Context(t), "C"); err != nil {
				t.Fatal(err)
			}
			if ends {
				if err := src.ForceClosed(); err != nil {
					t.Fatal(err)
				}
			}
			if err := c.Wait(t); !errors.Is(err, ErrConsumerGone) {
				t.Fatal(err)
			}
		})
	}
}

func TestClosedConnectionAndClosedGuardEndConsume(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	nc := r.connect()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	own, err := js.Consumer(adaptertest.Context(t), "S", "C")
	if err != nil {
		t.Fatal(err)
	}
	handle := func(context.Context, jetstream.Msg) error { return nil }
	g := adaptertest.Guard(t, guard.Config{})
	c := consume(t, g, own, handle)
	adaptertest.Source(t, g, "S/C")
	adaptertest.Eventually(t, "a pull is open", func() bool { return r.info(t).NumWaiting > 0 })
	nc.Close()
	if err := c.Wait(t); !errors.Is(err, ErrConnectionClosed) {
		t.Fatal(err)
	}
	c = consume(t, g, r.consumer, handle)
	adaptertest.Source(t, g, "S/C")
	if _, err := g.Close(adaptertest.Context(t)); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(t); !errors.Is(err, guard.ErrClosed) {
		t.Fatal(err)
	}
}

// A connection that ends for good while no pull is open, or drains, ends Consume, too.
func TestConnectionClosedDuringAHold(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(nc *nats.Conn){
		"closed":  func(nc *nats.Conn) { nc.Close() },
		"drained": func(nc *nats.Conn) { _ = nc.Drain() },
	} {
		for which, ends := range holds {
			t.Run(name+", "+which, func(t *testing.T) {
				t.Parallel()
				r := newRig(t, jetstream.ConsumerConfig{AckWait: 600 * time.Millisecond, MaxAckPending: 10})
				nc := r.connect()
				js, err := jetstream.New(nc)
				if err != nil {
					t.Fatal(err)
				}
				own, err := js.Consumer(adaptertest.Context(t), "S", "C")
				if err != nil {
					t.Fatal(err)
				}
				g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Ramp: guard.Ramp{Off: true}}})
				c := consume(t, g, own, func(context.Context, jetstream.Msg) error { return nil })
				src := adaptertest.Source(t, g, "S/C")
				if err := src.ForceOpen(0); err != nil {
					t.Fatal(err)
				}
				r.publish(t, subject, 0, 20)
				adaptertest.Eventually(t, "the pull is closed", func() bool { return src.State().Room == 0 && r.info(t).NumWaiting == 0 })
				end(nc)
				if ends {
					if err := src.ForceClosed(); err != nil {
						t.Fatal(err)
					}
				}
				if err := c.Wait(t); !errors.Is(err, ErrConnectionClosed) {
					t.Fatal(err)
				}
			})
		}
	}
}

// After an outage everything goes on at once, however long it was: nothing is given to a pull
// that is gone.
func TestOutagesOfAllLengths(t *testing.T) {
	t.Parallel()
	for _, outage := range []time.Duration{time.Second, 4 * time.Second, 8 * time.Second, 12 * time.Second} {
		t.Run(outage.String(), func(t *testing.T) {
			t.Parallel()
			const n = 400
			r := newRig(t, jetstream.ConsumerConfig{AckWait: time.Minute})
			var handled atomic.Int64
			c := consume(t, adaptertest.Guard(t, guard.Config{}), r.consumer, func(context.Context, jetstream.Msg) error {
				time.Sleep(10 * time.Millisecond)
				handled.Add(1)
				return nil
			}, WithWindow(50))
			r.publish(t, subject, 0, n)
			adaptertest.Eventually(t, "some are handled", func() bool { return handled.Load() >= 20 })
			r.stop()
			time.Sleep(outage)
			r.start()
			back := time.Now()
			adaptertest.Eventually(t, "all are handled", func() bool { return handled.Load() >= n })
			if took := time.Since(back); took > 40*time.Second { // none waits for its AckWait
				t.Errorf("%s", took)
			}
			if err := c.Stop(t); err != nil {
				t.Error(err)
			}
		})
	}
}

// While the server is away no requests pile up that it would answer all at once.
func TestNoPullsPileUpInAnOutage(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{AckWait: time.Minute})
	var handled atomic.Int64
	c := consume(t, adaptertest.Guard(t, guard.Config{}), r.consumer, func(context.Context, jetstream.Msg) error {
		time.Sleep(200 * time.Millisecond)
		handled.Add(1)
		return nil
	}, WithWindow(10))
	r.publish(t, subject, 0, 20)
	adaptertest.Eventually(t, "some are handled", func() bool { return handled.Load() >= 3 })
	r.stop()
	time.Sleep(20 * time.Second) // the window runs empty, and there is room
	r.start()
	adaptertest.Eventually(t, "all are handled", func() bool { return handled.Load() >= 20 })
	if n := r.info(t).NumWaiting; n > 2 {
		t.Errorf("%d requests are open", n)
	}
	if err := c.Stop(t); err != nil {
		t.Error(err)
	}
}

// While the stream of dead letters is gone nothing is acked in vain, and the
// letters follow when it is back.
func TestDLQUnavailable(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{AckWait: 5 * time.Second})
	ctx := adaptertest.Context(t)
	d, err := NewDLQ(ctx, r.js, DLQConfig{Stream: "D"})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.js.DeleteStream(ctx, "D"); err != nil {
		t.Fatal(err)
	}
	var good atomic.Int64
	g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Order: guard.OrderNone}})
	c := consume(t, g, r.consumer, func(_ context.Context, m jetstream.Msg) error {
		if i, _ := strconv.Atoi(string(m.Data())); i%10 == 0 {
			return guard.Permanent(errDown)
		}
		good.Add(1)
		return nil
	}, WithDeadLetters(d))
	r.publish(t, subject, 0, 50)
	adaptertest.Eventually(t, "the good ones are handled", func() bool { return good.Load() == 45 })
	adaptertest.Eventually(t, "the Guard says why", func() bool { return g.Ready() != nil })
	if err := g.Ready(); !errors.Is(err, errNoStream) {
		t.Errorf("%v", err)
	}
	adaptertest.Eventually(t, "the good ones are acked", func() bool { return r.info(t).NumAckPending == 5 })
	if _, err := NewDLQ(ctx, r.js, DLQConfig{Stream: "D"}); err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "all settled", func() bool { return r.info(t).AckFloor.Stream == 50 })
	if n := len(r.letters(t, "D")); n != 5 {
		t.Errorf("%d letters", n)
	}
	if i := r.info(t); i.Delivered.Consumer != 50 {
		t.Errorf("%d deliveries", i.Delivered.Consumer)
	}
	if err := c.Stop(t); err != nil {
		t.Fatal(err)
	}
}

// Several instances share a durable; one that holds returns what it has when it
// stops, and the others finish it.
func TestSeveralInstancesOnOneDurable(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	var mu sync.Mutex
	seen := map[string]int{}
	count := func() int { mu.Lock(); defer mu.Unlock(); return len(seen) }
	handle := func(_ context.Context, m jetstream.Msg) error {
		mu.Lock()
		seen[string(m.Data())]++
		mu.Unlock()
		time.Sleep(200 * time.Microsecond)
		return nil
	}
	held := adaptertest.Guard(t, guard.Config{})
	var cs []*adaptertest.Running
	for i := range 3 {
		g := held
		if i > 0 {
			g = adaptertest.Guard(t, guard.Config{})
		}
		cs = append(cs, consume(t, g, r.consumer, handle, WithWindow(100)))
		if i == 0 {
			if err := adaptertest.Source(t, g, "S/C").ForceOpen(0); err != nil {
				t.Fatal(err)
			}
		}
	}
	const n = 3000
	r.publish(t, subject, 0, n)
	adaptertest.Eventually(t, "the other two finish theirs", func() bool {
		i := r.info(t)
		return i.NumPending == 0 && i.NumAckPending <= 200 && count()+i.NumAckPending == n
	})
	kept := n - count()
	if err := cs[0].Stop(t); err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "all handled", func() bool { return count() == n })
	for _, c := range cs[1:] {
		if err := c.Stop(t); err != nil {
			t.Fatal(err)
		}
	}
	if most := slices.Max(slices.Collect(maps.Values(seen))); most != 1 || kept > 200 {
		t.Errorf("%d handled at most, %d were held", most, kept)
	}
	t.Logf("%d were held by one of three", kept)
}

func TestUnsuitableConsumersAreRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	ctx := adaptertest.Context(t)
	g := adaptertest.Guard(t, guard.Config{})
	handle := func(context.Context, jetstream.Msg) error { return nil }
	for _, p := range []jetstream.AckPolicy{jetstream.AckNonePolicy, jetstream.AckAllPolicy} {
		c := r.durable(t, jetstream.ConsumerConfig{Durable: p.String(), AckPolicy: p})
		if err := Consume(ctx, g, c, handle); !errors.Is(err, ErrUnsuitable) {
			t.Errorf("%s: %v", p, err)
		}
		if _, err := WrapConsumer(g, c); !errors.Is(err, ErrUnsuitable) {
			t.Errorf("%s: %v", p, err)
		}
	}
	ordered, err := r.stream.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	if err := Consume(ctx, g, ordered, handle); !errors.Is(err, ErrUnsuitable) {
		t.Errorf("ordered: %v", err)
	}
	if err := Consume(ctx, g, r.consumer, handle, WithWindow(5000)); err == nil || !strings.Contains(err.Error(), "WithWindow") {
		t.Errorf("%v", err)
	}
	if err := Consume(ctx, g, r.consumer, handle, WithWindow(-1), WithStopTimeout(-1), WithLogger(nil)); err == nil ||
		!strings.Contains(err.Error(), "WithWindow") || !strings.Contains(err.Error(), "WithStopTimeout") || !strings.Contains(err.Error(), "WithLogger") {
		t.Errorf("%v", err)
	}
	short := r.durable(t, jetstream.ConsumerConfig{Durable: "backoff", MaxDeliver: 4, BackOff: []time.Duration{time.Minute, 100 * time.Millisecond, time.Second}})
	if err := Consume(ctx, g, short, handle); err == nil || !strings.Contains(err.Error(), "AckWait") {
		t.Errorf("a BackOff of 100ms: %v", err)
	}
}

// A handler that outlives the grace is named, and its message stays unsettled.
func TestStopNamesWhatItLeaves(t *testing.T) {
	r := newRig(t, jetstream.ConsumerConfig{})
	release := make(chan struct{})
	var begun atomic.Bool
	c := consume(t, adaptertest.Guard(t, guard.Config{}), r.consumer, func(context.Context, jetstream.Msg) error {
		begun.Store(true)
		<-release
		return nil
	}, WithStopTimeout(50*time.Millisecond))
	r.publish(t, subject, 0, 3)
	adaptertest.Eventually(t, "the handler runs, and the server has sent the others", func() bool {
		return begun.Load() && r.info(t).NumAckPending == 3
	})
	err := c.Stop(t)
	close(release)
	if err == nil || !strings.Contains(err.Error(), "1 messages left after 50ms") {
		t.Fatal(err)
	}
	if i := r.info(t); i.AckFloor.Stream != 0 || i.NumAckPending != 3 {
		t.Errorf("%+v", i)
	}
}

func TestDoubleAckAndLag(t *testing.T) {
	r := newRig(t, jetstream.ConsumerConfig{})
	r.publish(t, subject, 0, 20)
	seen := make(chan int, 20)
	c := consume(t, adaptertest.Guard(t, guard.Config{}), r.consumer, func(_ context.Context, m jetstream.Msg) error {
		// Not acked yet, but all before it are.
		seen <- int(r.info(t).AckFloor.Stream)
		return nil
	}, WithDoubleAck())
	adaptertest.Eventually(t, "all handled", func() bool { return len(seen) == 20 })
	for i := range 20 {
		if floor := <-seen; floor != i {
			t.Fatalf("floor %d in message %d", floor, i+1)
		}
	}
	if err := c.Stop(t); err != nil {
		t.Fatal(err)
	}
	p := &msgPort{}
	if p.Lag() != -1 {
		t.Error("a lag before any delivery")
	}
	r.publish(t, subject, 20, 30)
	m, err := r.consumer.Next()
	if err != nil {
		t.Fatal(err)
	}
	md, err := m.Metadata()
	if p.last = m; err != nil || p.Lag() != int64(md.NumPending) {
		t.Errorf("lag %d, %v", p.Lag(), err)
	}
}
