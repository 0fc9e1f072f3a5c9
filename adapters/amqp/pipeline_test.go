// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"
	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

// back is how many messages are in the queue once it has taken in all that the
// last consumer's channel sent, or has given up what that did not.
func (r *rig) back() (n int) {
	r.t.Helper()
	adaptertest.Eventually(r.t, "the queue has no consumer", func() bool {
		var q amqp091.Queue
		err := r.do(func(ch *amqp091.Channel) (err error) {
			q, err = ch.QueueDeclarePassive(r.queue, true, false, false, false, nil)
			return err
		})
		n = q.Messages
		return err == nil && q.Consumers == 0 // a cancelled one counts until nothing of it is out
	})
	return n
}

// inFlight is how many settlements a quorum queue's client has in flight.
const inFlight = 33

// What the broker does by itself. A quorum queue has 33 settlements in flight
// and keeps what comes after in the channel's process, where it is dropped when
// the channel closes. The answer to the consumer's cancel comes after all of it
// was sent on: 4.0 sends it before it cancels, 3.10 when it sees what it had in
// flight applied, which is before it sees another method.
func TestCancelIsABarrier(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		const rounds, n = 5, 400
		lost := map[bool]int{}
		for range rounds {
			for _, cancel := range []bool{false, true} {
				r := newRig(t, s, Quorum, nil)
				r.publish(0, n)
				_, ch, in := r.openedAs("c", amqp091.Config{}, n)
				var all []amqp091.Delivery
				for range n {
					all = append(all, take(t, in))
				}
				for _, d := range all {
					if err := d.Ack(false); err != nil {
						t.Fatal(err)
					}
				}
				if cancel {
					if err := ch.Cancel("c", false); err != nil {
						t.Fatal(err)
					}
				}
				if err := ch.Close(); err != nil {
					t.Fatal(err)
				}
				lost[cancel] += r.back()
			}
		}
		t.Logf("of %d acks %d were lost by a close alone, %d by a close after a cancel", rounds*n, lost[false], lost[true])
		if lost[true] > 0 {
			t.Error("a cancel is no barrier")
		}
	})
}

// Acks of everything that was delivered survive the close that follows: their
// consumer is cancelled before.
func TestAcksSurviveTheClose(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		for range 5 {
			r := newRig(t, s, Quorum, nil)
			const n = 200
			r.publish(0, n)
			var l lines
			conn, ch, in := r.opened(l.dialer(s.url()).Config, 100)
			ctx, cancel := context.WithCancel(t.Context())
			out, err := Deliveries(ctx, adaptertest.Guard(t, guard.Config{}), ch, in, atATime(100))
			if err != nil {
				t.Fatal(err)
			}
			for range n / 100 {
				var all []amqp091.Delivery
				for range 100 { // the whole prefetch at once, so that each ack is a frame
					all = append(all, take(t, out))
				}
				for _, d := range all {
					if err := d.Ack(false); err != nil {
						t.Fatal(err)
					}
				}
			}
			cancel()
			drained(t, out)
			if err := errors.Join(ch.Close(), conn.Close()); err != nil {
				t.Fatal(err)
			}
			if lost, cancels := r.back(), l.books().cancels; lost > 0 || cancels != 1 {
				t.Errorf("%d of %d acks were lost after %d cancels", lost, n, cancels)
			}
		}
	})
}

// Where deliveries go back, the consumer cannot be cancelled. With a backlog the
// full prefetch proves that the acks are taken in. Without one nothing does: then
// the broker is given time, the log says so, and what may be lost are the acks
// beyond those in flight.
func TestAcksBesideWhatGoesBack(t *testing.T) {
	t.Parallel()
	const prefetch, acked = 400, 200
	kinds(t, func(t *testing.T, s *server) {
		for _, backlog := range []int{0, prefetch} {
			t.Run(fmt.Sprintf("backlog of %d", backlog), func(t *testing.T) {
				t.Parallel()
				r := newRig(t, s, Quorum, nil)
				r.publish(0, prefetch+backlog)
				conn, ch, in := r.openedAs("c", amqp091.Config{}, prefetch)
				ctx, cancel := context.WithCancel(t.Context())
				var log bytes.Buffer
				out, err := Deliveries(ctx, adaptertest.Guard(t, guard.Config{}), ch, in, WithPrefetch(prefetch), atATime(prefetch),
					WithStopTimeout(time.Millisecond), WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
				if err != nil {
					t.Fatal(err)
				}
				var all []amqp091.Delivery
				for range prefetch {
					all = append(all, take(t, out))
				}
				for i := 1; i < prefetch; i += prefetch / acked { // never contiguous: a frame each
					if err := all[i].Ack(false); err != nil {
						t.Fatal(err)
					}
				}
				acks := time.Now()
				cancel()
				drained(t, out)
				slow := time.Since(acks) >= settleMost // too long ago to be in doubt
				if err := errors.Join(ch.Close(), conn.Close()); err != nil {
					t.Fatal(err)
				}
				lost := r.back() - (prefetch + backlog - acked)
				known := !strings.Contains(log.String(), notTakenIn)
				t.Logf("%d of %d acks were lost; known to be taken in: %t", lost, acked, known)
				if most := acked - inFlight; known && lost != 0 || lost < 0 || lost > most {
					t.Errorf("%d of %d acks were lost", lost, acked)
				}
				if backlog == 0 && known && !slow {
					t.Error("that they are taken in is told, and was not known")
				}
			})
		}
	})
}

// A consumer that the program has cancelled is not cancelled again: the program
// may have given its tag to another.
func TestACancelledTagIsTheProgramsAgain(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		r := newRig(t, s, Quorum, nil)
		const n = 100
		r.publish(0, n)
		_, ch, in := r.openedAs("c", amqp091.Config{}, n)
		out, err := Deliveries(t.Context(), adaptertest.Guard(t, guard.Config{}), ch, in, atATime(n))
		if err != nil {
			t.Fatal(err)
		}
		var all []amqp091.Delivery
		for range n {
			all = append(all, take(t, out))
		}
		if err := ch.Cancel("c", false); err != nil {
			t.Fatal(err)
		}
		next, err := ch.Consume(r.queue, "c", false, false, false, false, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range all {
			if err := d.Ack(false); err != nil {
				t.Fatal(err)
			}
		}
		drained(t, out)
		r.publish(n, n+1)
		if d := take(t, next); string(d.Body) != "100" {
			t.Errorf("%s", d.Body)
		}
	})
}

// What fills the prefetch is seen although the program gets nothing any more.
func TestTheEndStillReads(t *testing.T) {
	t.Parallel()
	const n, acked = 100, 20
	var l lines
	var log bytes.Buffer
	p := newRig(t, shared(t, brokers.RabbitMQ4), Quorum, nil).acking(&l, n, time.Hour)
	p.tags.fill(n)
	p.hands.Store(n)
	in := make(chan amqp091.Delivery, acked)
	for i := range uint64(acked) {
		if err := p.ack(2 * (i + 1)); err != nil {
			t.Fatal(err)
		}
		in <- amqp091.Delivery{DeliveryTag: n + i + 1}
	}
	if got := p.tags.unsure(); got != acked {
		t.Errorf("unsure of %d", got)
	}
	d := &passiveSession{o: &options{log: slog.New(slog.NewTextHandler(&log, nil))}, port: p, in: in}
	d.leave(stopGrace)
	if p.tags.unsure() != 0 || log.Len() > 0 {
		t.Errorf("unsure of %d: %s", p.tags.unsure(), log.String())
	}
}

// The function shape sees its last acks through too.
func TestConsumeSeesItsAcksThrough(t *testing.T) {
	t.Parallel()
	const n = 300
	kinds(t, func(t *testing.T, s *server) {
		r := newRig(t, s, Quorum, nil)
		r.publish(0, n)
		g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Order: guard.OrderNone, Workers: 2}})
		var l lines
		var log bytes.Buffer
		release := make(chan struct{})
		c := r.consumeBy(l.dialer(s.url()), g, func(_ context.Context, d amqp091.Delivery) error {
			if string(d.Body) == "0" {
				<-release // so that each other has an ack of its own
				return errDown
			}
			return nil
		}, WithPrefetch(n), WithStopTimeout(time.Millisecond), WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
		adaptertest.Eventually(t, "all but one are acked", func() bool { return l.books().acked == n-1 })
		acks := time.Now()
		err := c.Stop(t)
		slow := time.Since(acks) >= settleMost/2
		close(release)
		if err == nil {
			t.Error("nothing was left")
		}
		lost, known := r.back()-1, !strings.Contains(log.String(), notTakenIn)
		t.Logf("%d of %d acks were lost; known to be taken in: %t", lost, n-1, known)
		if known && !slow || lost < 0 || lost > n-1-inFlight || known && lost > 0 {
			t.Errorf("%d acks were lost, known to be taken in: %t", lost, known)
		}
	})
}

// After a clean stop the next consumer gets nothing that was handled, with a backlog or without.
func TestACleanStopRepeatsNothing(t *testing.T) {
	t.Parallel()
	const n = 1000
	kinds(t, func(t *testing.T, s *server) {
		for _, kind := range []Kind{Quorum, Classic} {
			for _, backlog := range []int{0, n} {
				r := newRig(t, s, kind, nil)
				r.publish(0, n+backlog)
				var rec record
				handled := make(chan struct{})
				var calls atomic.Int32
				c := r.consume(adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Order: guard.OrderNone, Workers: 4}}), func(ctx context.Context, d amqp091.Delivery) error {
					if calls.Add(1) == n {
						close(handled)
					}
					return rec.handle(ctx, d)
				})
				<-handled
				if err := c.Stop(t); err != nil {
					t.Error(err)
				}
				next := r.consume(adaptertest.Guard(t, guard.Config{}), rec.handle)
				adaptertest.Eventually(t, "the rest is handled", func() bool { return rec.distinct() == n+backlog })
				adaptertest.Eventually(t, "the queue is empty", func() bool { k, err := r.ready(); return err == nil && k == 0 })
				if err := next.Stop(t); err != nil {
					t.Error(err)
				}
				if twice, back := rec.twice(), r.back(); twice > 0 || back > 0 {
					t.Errorf("%s, backlog of %d: %d were handled twice, %d are left", kind, backlog, twice, back)
				}
			}
		}
	})
}

// However late a broker applies acks, no more of their frames wait there than
// tags is unsure of.
func TestTagsKnowWhatIsTakenIn(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		prefetch := rapid.IntRange(1, 20).Draw(t, "prefetch")
		var tg tags
		tg.fill(prefetch)
		var high, came uint64    // sent by the broker, arrived here
		out := map[uint64]bool{} // at the broker, with what is not applied
		var open []uint64        // not settled
		var waiting []ack        // not applied
		t.Repeat(map[string]func(*rapid.T){
			"send": func(t *rapid.T) {
				for range rapid.IntRange(1, prefetch).Draw(t, "n") {
					if len(out) < prefetch {
						high++
						out[high] = true
					}
				}
			},
			"arrive": func(t *rapid.T) {
				for range rapid.IntRange(1, prefetch).Draw(t, "n") {
					if came < high {
						came++
						tg.add(came, 1)
						open = append(open, came)
					}
				}
			},
			"settle": func(t *rapid.T) {
				for range rapid.IntRange(1, prefetch).Draw(t, "n") {
					if len(open) > 0 {
						i := rapid.IntRange(0, len(open)-1).Draw(t, "which")
						tg.settle(open[i], tagSettled)
						open = append(open[:i], open[i+1:]...)
					}
				}
			},
			"reject": func(*rapid.T) {
				if len(open) > 0 {
					tg.settle(open[0], tagRejected)
					waiting = tg.take(waiting)
					open = open[1:]
				}
			},
			"ack": func(*rapid.T) { waiting = tg.take(waiting) },
			"apply": func(*rapid.T) {
				if len(waiting) > 0 {
					for n := range out {
						if n == waiting[0].tag || waiting[0].multiple && n < waiting[0].tag {
							delete(out, n)
						}
					}
					waiting = waiting[1:]
				}
			},
			"": func(t *rapid.T) {
				if n := tg.unsure(); n < len(waiting) {
					t.Fatalf("unsure of %d frames, %d wait", n, len(waiting))
				}
			},
		})
	})
}

// A full prefetch ends the doubt.
func TestTagsAreSureOfAFullPrefetch(t *testing.T) {
	t.Parallel()
	var tg tags
	tg.fill(2)
	for _, step := range []struct {
		add, settle uint64
		unsure      int
	}{{1, 0, 0}, {2, 1, 1}, {3, 0, 0}, {0, 3, 1}, {4, 0, 0}} {
		if step.add > 0 {
			tg.add(step.add, 1)
		}
		if step.settle > 0 {
			tg.settle(step.settle, tagSettled)
			tg.take(nil)
		}
		if n := tg.unsure(); n != step.unsure {
			t.Errorf("%+v: unsure of %d", step, n)
		}
	}
}
