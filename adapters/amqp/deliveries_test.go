// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

// opened is a channel that a program consumes from.
func (r *rig) opened(cfg amqp091.Config, prefetch int) (*amqp091.Connection, *amqp091.Channel, <-chan amqp091.Delivery) {
	r.t.Helper()
	return r.openedAs("", cfg, prefetch)
}

func (r *rig) openedAs(tag string, cfg amqp091.Config, prefetch int) (*amqp091.Connection, *amqp091.Channel, <-chan amqp091.Delivery) {
	r.t.Helper()
	conn, err := amqp091.DialConfig(r.url(), cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = conn.Close() })
	ch, err := conn.Channel()
	if err != nil {
		r.t.Fatal(err)
	}
	if prefetch > 0 {
		if err := ch.Qos(prefetch, 0, false); err != nil {
			r.t.Fatal(err)
		}
	}
	in, err := ch.Consume(r.queue, tag, false, false, false, false, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	return conn, ch, in
}

// atATime lets n deliveries be out.
func atATime(n int) Option {
	return WithPolicy(guard.Policy{Workers: n, Order: guard.OrderNone})
}

func take(t testing.TB, in <-chan amqp091.Delivery) amqp091.Delivery {
	t.Helper()
	select {
	case d, ok := <-in:
		if !ok {
			t.Fatal("the deliveries have ended")
		}
		return d
	case <-time.After(time.Minute):
		t.Fatal("no delivery comes")
	}
	return amqp091.Delivery{}
}

func drained(t testing.TB, in <-chan amqp091.Delivery) (left int) {
	t.Helper()
	limit := time.After(time.Minute)
	for {
		select {
		case _, ok := <-in:
			if !ok {
				return left
			}
			left++
		case <-limit:
			t.Fatal("the deliveries do not end")
		}
	}
}

// The client's own recovery begins the tags at 1 again on the same channel: an
// ack of an old delivery then acks another message, which is lost.
func TestRecoveryTrap(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		recovery := func(l *lines) amqp091.Config {
			cfg := l.dialer(s.url()).Config
			cfg.Recovery = &amqp091.Recovery{ReconnectionConfig: &amqp091.ReconnectionConfig{MaxRetryCount: 10, RetryInterval: time.Millisecond}}
			return cfg
		}
		t.Run("is refused", func(t *testing.T) {
			r := newRig(t, s, Quorum, nil)
			var l lines
			_, ch, in := r.opened(recovery(&l), 10)
			if _, err := Deliveries(t.Context(), adaptertest.Guard(t, guard.Config{}), ch, in); !errors.Is(err, ErrUnsuitable) || !strings.Contains(err.Error(), "Recovery") {
				t.Errorf("%v", err)
			}
		})
		// What the client does by itself, so that this test is about something.
		t.Run("loses messages without a guard", func(t *testing.T) {
			r := newRig(t, s, Quorum, nil)
			var l lines
			_, ch, in := r.opened(recovery(&l), 3)
			r.publish(0, 10)
			take(t, in)
			old := take(t, in)
			back := make(chan *amqp091.StateChanged, 16)
			ch.NotifyStateChange(back)
			l.cut()
			for to := range back {
				if to.To == amqp091.StateOpen {
					break
				}
			}
			adaptertest.Eventually(t, "the broker delivered again", func() bool { return l.unacked() == 3 })
			if err := old.Ack(true); err != nil || l.books().acked != 2 {
				t.Errorf("the trap is not there any more: %v, %d acked", err, l.books().acked)
			}
		})
		// Where it is not seen, what the program still holds is never acked.
		t.Run("is harmless", func(t *testing.T) {
			r := newRig(t, s, Quorum, nil)
			var l lines
			_, ch, in := r.opened(recovery(&l), 3)
			r.publish(0, 10)
			out, err := guarded(t.Context(), adaptertest.Guard(t, guard.Config{}), ch, in, []Option{atATime(2)})
			if err != nil {
				t.Fatal(err)
			}
			first, second := take(t, out), take(t, out)
			back := make(chan *amqp091.StateChanged, 16)
			ch.NotifyStateChange(back)
			l.cut()
			for to := range back {
				if to.To == amqp091.StateOpen {
					break
				}
			}
			adaptertest.Eventually(t, "the broker delivered again", func() bool { return l.unacked() == 3 })
			// Tags 1 and 2 mean other deliveries now.
			for _, d := range []amqp091.Delivery{first, second} {
				if err := d.Ack(true); !errors.Is(err, errChannelGone) {
					t.Errorf("an old delivery was acked: %v", err)
				}
			}
			drained(t, out)
			if b := l.books(); b.acked != 0 {
				t.Errorf("%d messages were acked", b.acked)
			}
		})
	})
}

func TestDeliveriesRefuses(t *testing.T) {
	t.Parallel()
	r := newRig(t, shared(t, brokers.RabbitMQ), Classic, nil)
	g := adaptertest.Guard(t, guard.Config{})
	ctx := t.Context()
	conn, ch, in := r.opened(amqp091.Config{}, 10)
	if _, err := Deliveries(ctx, g, nil, nil); err == nil || !strings.Contains(err.Error(), "nil") {
		t.Errorf("%v", err)
	}
	if _, err := Deliveries(ctx, g, ch, in, WithDeadLetterExchange("x")); err == nil {
		t.Error("native dead letters")
	}
	if _, err := Deliveries(ctx, g, ch, in, WithPolicy(guard.Policy{Timeout: time.Hour})); err == nil || !strings.Contains(err.Error(), "HoldMax") {
		t.Errorf("%v", err)
	}
	if _, err := Deliveries(ctx, g, ch, in, WithPolicy(guard.Policy{Retry: guard.Retry{Max: time.Hour}})); err == nil || !strings.Contains(err.Error(), "Retry.Max") {
		t.Errorf("%v", err)
	}
	other, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	auto, err := other.Consume(r.queue, "", true, false, false, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Deliveries(ctx, g, other, auto); !errors.Is(err, ErrUnsuitable) || !strings.Contains(err.Error(), "autoAck") {
		t.Errorf("%v", err)
	}
	// Two consumers on one channel: it does not tell whose deliveries these are.
	more, err := ch.Consume(r.queue, "", false, false, false, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Deliveries(ctx, g, ch, more); err == nil || !strings.Contains(err.Error(), "WithQueue") {
		t.Errorf("%v", err)
	}
	stopped, cancel := context.WithCancel(ctx)
	out, err := Deliveries(stopped, g, ch, more, WithQueue(r.queue))
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	drained(t, out)
}

// What the loop does is the outcome: multiple acks, nacks that are retried,
// rejects that are dead-lettered by the guard and never at the broker.
func TestOutcomesOfALoop(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		r := newRig(t, s, Quorum, nil)
		letters := r.deadLetters(Classic)
		g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{
			Workers: 10, Order: guard.OrderNone, Retry: guard.Retry{Attempts: 3, Base: time.Millisecond, Max: time.Millisecond},
		}})
		var l lines
		_, ch, in := r.opened(l.dialer(s.url()).Config, 20)
		out, err := Deliveries(t.Context(), g, ch, in, WithDeadLetters(letters))
		if err != nil {
			t.Fatal(err)
		}
		r.publish(0, 10)
		var batch []amqp091.Delivery
		for range 10 {
			batch = append(batch, take(t, out))
		}
		if err := errors.Join(batch[3].Nack(false, true), batch[5].Reject(false)); err != nil {
			t.Fatal(err)
		}
		if err := batch[7].Ack(true); err != nil { // 0 to 7, but 3 and 5
			t.Fatal(err)
		}
		if b := l.books(); b.acked != 6 || b.ackFrames != 4 { // up to 2, and one each
			t.Errorf("%+v", b)
		}
		for _, d := range []amqp091.Delivery{batch[0], batch[3], batch[5]} {
			if err := d.Ack(false); !errors.Is(err, errSettled) {
				t.Errorf("settled twice: %v", err)
			}
		}
		src := adaptertest.Source(t, g, r.queue)
		adaptertest.Eventually(t, "six are acked", func() bool { return src.Account().Acked == 6 })
		if err := errors.Join(Fail(batch[8], guard.Permanent(errDown)), Fail(batch[9], nil)); err != nil {
			t.Fatal(err)
		}
		for tries := 1; tries < 3; {
			d := take(t, out)
			switch d.DeliveryTag {
			case batch[3].DeliveryTag:
				if err := d.Ack(false); err != nil {
					t.Fatal(err)
				}
			case batch[5].DeliveryTag:
				tries++
				if err := d.Nack(false, false); err != nil {
					t.Fatal(err)
				}
			default:
				t.Fatalf("%s again", d.Body)
			}
		}
		adaptertest.Eventually(t, "all settled", func() bool {
			r.publish(100, 101) // traffic: poison alone looks like an outage
			d := take(t, out)
			settle := func() error { return d.Ack(false) }
			if string(d.Body) == "5" {
				settle = func() error { return d.Reject(false) }
			}
			if err := settle(); err != nil {
				t.Fatal(err)
			}
			return src.Account().DeadLettered == 2
		})
		if err := Fail(amqp091.Delivery{}, nil); !errors.Is(err, errNotGuarded) {
			t.Errorf("%v", err)
		}
		if err := l.check(); err != nil {
			t.Error(err)
		}
		if b := l.books(); b.rejects+b.nacks != 0 {
			t.Errorf("%+v", b)
		}
		dead, err := r.get(r.queue + ".dlq")
		if err != nil || len(dead) != 2 {
			t.Fatalf("%d letters, %v", len(dead), err)
		}
		for _, d := range dead {
			rec, err := ReadDeadLetter(d)
			want := map[string]string{"5": errReject.Error(), "8": errDown.Error()}[string(d.Body)]
			if err != nil || rec.Error.Message != want || rec.Origin.Source != r.queue {
				t.Errorf("%+v, %v", rec, err)
			}
		}
	})
}

// A retry comes again with its old tag, between others. Multiple means what was handed out
// until then: not the retry that came later, and all that came before it.
func TestMultipleGoesByTheOrderOfHandingOut(t *testing.T) {
	t.Parallel()
	r := newRig(t, shared(t, brokers.RabbitMQ4), Quorum, nil)
	g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{
		Workers: 8, Order: guard.OrderNone, Retry: guard.Retry{Base: time.Millisecond, Max: time.Millisecond},
	}})
	_, ch, in := r.opened(amqp091.Config{}, 20)
	out, err := Deliveries(t.Context(), g, ch, in)
	if err != nil {
		t.Fatal(err)
	}
	src := adaptertest.Source(t, g, r.queue)
	acked := func(want uint64) {
		t.Helper()
		adaptertest.Eventually(t, "they are acked", func() bool { return src.Account().Acked >= want })
		if a := src.Account(); a.Acked != want {
			t.Fatalf("%d are acked, want %d: %+v", a.Acked, want, a)
		}
	}
	// again fails the delivery n of a batch, and takes its retry.
	again := func(batch []amqp091.Delivery, n int) amqp091.Delivery {
		t.Helper()
		if err := Fail(batch[n], errDown); err != nil {
			t.Fatal(err)
		}
		d := take(t, out)
		if d.DeliveryTag != batch[n].DeliveryTag {
			t.Fatalf("%s came in place of a retry", d.Body)
		}
		return d
	}
	batch := func(from, n int) (all []amqp091.Delivery) {
		t.Helper()
		r.publish(from, from+n)
		for range n {
			all = append(all, take(t, out))
		}
		return all
	}

	first := batch(0, 7)
	retry := again(first, 3)
	if err := first[6].Ack(true); err != nil {
		t.Fatal(err)
	}
	acked(6)
	if err := retry.Ack(false); err != nil {
		t.Errorf("the retry was settled by a call before it: %v", err)
	}
	acked(7)

	second := batch(7, 4)
	retry = again(second, 0)
	if err := second[1].Acknowledger.Ack(retry.DeliveryTag, true); err != nil { // as Channel.Ack is called
		t.Fatal(err)
	}
	acked(11)

	third := batch(11, 4)
	retry = again(third, 1)
	if err := retry.Nack(true, true); err != nil { // all four fail
		t.Fatal(err)
	}
	seen := map[uint64]bool{}
	for range 4 {
		d := take(t, out)
		seen[d.DeliveryTag] = true
		if err := d.Ack(false); err != nil {
			t.Fatal(err)
		}
	}
	if len(seen) != 4 {
		t.Errorf("%d came again", len(seen))
	}
	acked(15)
}

// A cancelled consumer's loop gets everything that was delivered, held messages
// too, and then ends; the channel is still the program's.
func TestCancelDrains(t *testing.T) {
	t.Parallel()
	r := newRig(t, shared(t, brokers.RabbitMQ4), Quorum, nil)
	g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Ramp: guard.Ramp{Off: true}}})
	_, ch, in := r.openedAs("c", amqp091.Config{}, 50)
	out, err := Deliveries(t.Context(), g, ch, in)
	if err != nil {
		t.Fatal(err)
	}
	src := adaptertest.Source(t, g, r.queue)
	if err := src.ForceOpen(0); err != nil {
		t.Fatal(err)
	}
	r.publish(0, 80)
	adaptertest.Eventually(t, "held", func() bool { return src.Account().Held == 50 })
	if err := ch.Cancel("c", false); err != nil {
		t.Fatal(err)
	}
	if err := src.ForceClosed(); err != nil {
		t.Fatal(err)
	}
	var got []string
	for d := range out {
		got = append(got, string(d.Body))
		if err := d.Ack(false); err != nil {
			t.Fatal(err)
		}
	}
	if len(got) != 50 || got[0] != "0" || got[49] != "49" || ch.IsClosed() {
		t.Errorf("%d: %v; channel closed: %t", len(got), got, ch.IsClosed())
	}
	adaptertest.Eventually(t, "the rest is in the queue", func() bool { n, err := r.ready(); return err == nil && n == 30 })
}

// acking is a port of the passive shape over a real channel that has n deliveries,
// the first of which has tag 1.
func (r *rig) acking(l *lines, n int, delay time.Duration) *passivePort {
	r.t.Helper()
	r.publish(0, n)
	_, ch, in := r.opened(l.dialer(r.url()).Config, n)
	p := newPassivePort(&options{})
	p.delay = delay
	r.t.Cleanup(p.end)
	life, _ := newChannelEpoch(ch)
	p.life.Store(life)
	for range n {
		p.tags.add(take(r.t, in).DeliveryTag, 1)
	}
	return p
}

// The passive shape's acks go out together while there is something left for
// the program to do, at once when there is not, and after a moment in any case.
func TestPassiveAcks(t *testing.T) {
	t.Parallel()
	const n, never = 100, time.Hour
	s := shared(t, brokers.RabbitMQ4)
	ack := func(t *testing.T, p *passivePort, tags ...uint64) {
		for _, tag := range tags {
			if err := p.ack(tag); err != nil {
				t.Fatal(err)
			}
			if err := p.ack(tag); !errors.Is(err, errSettled) {
				t.Fatalf("acked twice: %v", err)
			}
		}
	}
	upTo := func(n uint64) (all []uint64) {
		for tag := uint64(1); tag <= n; tag++ {
			all = append(all, tag)
		}
		return all
	}
	want := func(t *testing.T, l *lines, frames, acked int) {
		t.Helper()
		if b := l.books(); b.ackFrames != frames || b.acked != acked {
			t.Errorf("%d acks in %d frames, not %d in %d", b.acked, b.ackFrames, acked, frames)
		}
		if err := l.check(); err != nil {
			t.Error(err)
		}
	}
	t.Run("in order", func(t *testing.T) {
		t.Parallel()
		var l lines
		p := newRig(t, s, Quorum, nil).acking(&l, n, never)
		ack(t, p, upTo(49)...)
		want(t, &l, 0, 0)
		ack(t, p, 50)
		want(t, &l, 1, 50) // as many are left
		ack(t, p, upTo(n)[50:]...)
		want(t, &l, 7, n) // 25, 13, 6, 3, 2 and 1
	})
	t.Run("out of order", func(t *testing.T) {
		t.Parallel()
		var l lines
		p := newRig(t, s, Quorum, nil).acking(&l, n, never)
		ack(t, p, 10, 3, 2, 1)
		if err := p.flush(); err != nil {
			t.Fatal(err)
		}
		want(t, &l, 2, 4) // up to 3, and 10
	})
	t.Run("the rest in hand", func(t *testing.T) {
		t.Parallel()
		var l lines
		p := newRig(t, s, Quorum, nil).acking(&l, n, never)
		p.hands.Store(n - 1)
		ack(t, p, 7)
		want(t, &l, 1, 1)
	})
	t.Run("late", func(t *testing.T) {
		t.Parallel()
		var l lines
		p := newRig(t, s, Quorum, nil).acking(&l, n, passiveDelay)
		ack(t, p, 1, 2)
		adaptertest.Eventually(t, "they are acked", func() bool { return l.books().acked == 2 })
	})
}

// Another consumer of the channel, and what the program gets by itself, is not
// acked along.
func TestDeliveriesOnASharedChannel(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		r, other := newRig(t, s, Quorum, nil), newRig(t, s, Classic, nil)
		r.publish(0, 50)
		other.publish(0, 3)
		var l lines
		_, ch, in := r.opened(l.dialer(s.url()).Config, 20)
		out, err := Deliveries(t.Context(), adaptertest.Guard(t, guard.Config{}), ch, in)
		if err != nil {
			t.Fatal(err)
		}
		ack := func(n int) {
			for range n {
				if err := take(t, out).Ack(false); err != nil {
					t.Fatal(err)
				}
			}
		}
		ack(10)
		if _, ok, err := ch.Get(other.queue, false); err != nil || !ok {
			t.Fatal(ok, err)
		}
		ack(20)
		others, err := ch.Consume(other.queue, "other", false, false, false, false, nil)
		if err != nil {
			t.Fatal(err)
		}
		take(t, others)
		take(t, others)
		r.publish(50, 100)
		ack(70)
		adaptertest.Eventually(t, "all are acked", func() bool { return l.books().acked >= 100 })
		if n := l.unacked(); n != 3 {
			t.Errorf("%d of the others' 3 deliveries are out", n)
		}
		if err := l.check(); err != nil {
			t.Error(err)
		}
	})
}

// Without Qos the broker sends everything: that is refused by name.
func TestDeliveriesWithoutQos(t *testing.T) {
	t.Parallel()
	r := newRig(t, shared(t, brokers.RabbitMQ), Classic, nil)
	r.publish(0, 100)
	var log bytes.Buffer
	g := adaptertest.Guard(t, guard.Config{})
	_, ch, in := r.opened(amqp091.Config{}, 0)
	out, err := Deliveries(t.Context(), g, ch, in, WithPrefetch(50), WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
	if err != nil {
		t.Fatal(err)
	}
	drained(t, out)
	if !strings.Contains(log.String(), "Channel.Qos") {
		t.Errorf("%s", log.String())
	}
}

func TestPeekKnowsTheClient(t *testing.T) {
	t.Parallel()
	r := newRig(t, shared(t, brokers.RabbitMQ), Classic, nil)
	_, ch, _ := r.openedAs("me", amqp091.Config{}, 1)
	if queue, tag, auto, ok := consumerOf(ch); !ok || auto || queue != r.queue || tag != "me" {
		t.Errorf("%q, %q, %t, %t: this version of the client keeps its consumers elsewhere", queue, tag, auto, ok)
	}
	if v := versionOf(ch); v[0] < 3 {
		t.Errorf("%d: this version of the client keeps the broker's properties elsewhere", v)
	}
	if v := versionOf(nil); v != [2]int{} {
		t.Errorf("%d of nothing", v)
	}
	if recovers(ch) {
		t.Error("a recovery that is not there")
	}
	if recovers(nil) || slices.Contains([]bool{recovers(&amqp091.Channel{})}, true) {
		t.Error("of nothing")
	}
	if _, _, _, ok := consumerOf(nil); ok {
		t.Error("of nothing")
	}
}

// The order of a queue stays as it is in a loop that fails now and then, as it does in
// an unguarded one that tries again itself.
func TestDeliveriesKeepTheOrder(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		r := newRig(t, s, Quorum, nil)
		const n = 100
		r.publish(0, n)
		var log logbook
		g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Retry: guard.Retry{Base: time.Millisecond, Max: 10 * time.Millisecond}}}, guard.WithLogger(log.logger()))
		_, ch, in := r.opened(amqp091.Config{}, 50)
		out, err := Deliveries(t.Context(), g, ch, in)
		if err != nil {
			t.Fatal(err)
		}
		var got []int
		tries := map[int]int{}
		for len(got) < n {
			d := take(t, out)
			i, err := strconv.Atoi(string(d.Body))
			if err != nil {
				t.Fatal(err)
			}
			settle := func() error { got = append(got, i); return d.Ack(false) }
			if tries[i]++; i%7 == 0 && tries[i] == 1 {
				settle = func() error { return d.Nack(false, true) }
				if i%2 == 1 {
					settle = func() error { return d.Reject(false) }
				}
			}
			if err := settle(); err != nil {
				t.Fatal(err)
			}
		}
		if !slices.IsSorted(got) {
			t.Errorf("out of order: %d", got)
		}
		if lines := log.with("level=WARN", "the program nacks without an error", "guardamqp.Fail"); len(lines) != 1 {
			t.Errorf("told %d times: %s", len(lines), lines) // once, whatever fails
		}
	})
}

// A loop that collects several deliveries gets them if it asks for them. If not, it is
// told why nothing comes, by the guard.
func TestALoopThatCollects(t *testing.T) {
	t.Parallel()
	s := shared(t, brokers.RabbitMQ4)
	for _, workers := range []int{0, 10} {
		r := newRig(t, s, Quorum, nil)
		r.publish(0, 20)
		_, ch, in := r.opened(amqp091.Config{}, 20)
		var log logbook
		policy := guard.Policy{Timeout: 100 * time.Millisecond, Workers: workers, Order: guard.OrderNone}
		out, err := Deliveries(t.Context(), adaptertest.Guard(t, guard.Config{}, guard.WithLogger(log.logger())), ch, in, WithPolicy(policy))
		if err != nil {
			t.Fatal(err)
		}
		last := take(t, out)
		if workers > 0 {
			for range workers - 1 {
				last = take(t, out)
			}
			if err := last.Ack(true); err != nil {
				t.Error(err)
			}
			take(t, out)
			if lines := log.with("Policy.Workers"); len(lines) > 0 {
				t.Error(lines)
			}
			continue
		}
		adaptertest.Eventually(t, "told", func() bool { return len(log.with("level=WARN", "Policy.Workers")) > 0 })
		select {
		case d := <-out:
			t.Errorf("%s is out beside %s", d.Body, last.Body)
		default:
		}
	}
}

// A prefetch that lets large deliveries take too much is told.
func TestDeliveriesTellOfLargeOnes(t *testing.T) {
	t.Parallel()
	r := newRig(t, shared(t, brokers.RabbitMQ4), Quorum, nil)
	for range 5 {
		if err := r.send(t.Context(), amqp091.Publishing{Body: make([]byte, 1<<20)}); err != nil {
			t.Fatal(err)
		}
	}
	_, ch, in := r.opened(amqp091.Config{}, 20)
	var log logbook
	_, err := Deliveries(t.Context(), adaptertest.Guard(t, guard.Config{}), ch, in, WithPolicy(guard.Policy{WindowBytes: 2 << 20}), WithLogger(log.logger()))
	if err != nil {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "told", func() bool { return len(log.with("level=WARN", "WindowBytes", "prefetch=1")) > 0 })
}
