// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// A hold that is shorter than the wait of a call is waited out, although the pull
// has ended with what it brought.
func TestWrappedNextWaitsOutAHold(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{AckWait: 20 * time.Second})
	retry := guard.Retry{Base: time.Minute, Max: time.Minute}
	g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Order: guard.OrderNone, Workers: 12, Breaker: breaker.Config{Base: 300 * time.Millisecond}, Retry: retry}})
	w := wrap(t, g, r.consumer)
	r.publish(t, subject, 0, 12)
	for i := range 12 {
		start := time.Now()
		m, err := w.Next(jetstream.FetchMaxWait(20 * time.Second))
		if err != nil {
			t.Fatalf("message %d after %s: %v", i, time.Since(start), err)
		}
		settle := m.Ack
		if i < 5 { // a run opens the breaker
			settle = m.Nak
		}
		if err := settle(); err != nil {
			t.Fatal(err)
		}
		if b := w.src.State().Breaker; i == 4 && b.State == breaker.Closed { // half-open soon
			t.Fatalf("%+v", b)
		}
	}
}

// A call whose pull brought all that there was room for is over once that is handed
// out, also when that is less than it was asked for.
func TestWrappedFetchWithLessRoom(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{AckWait: 20 * time.Second, MaxAckPending: 10})
	retry := guard.Retry{Base: time.Hour, Max: time.Hour}
	g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Order: guard.OrderNone, Workers: 10, Retry: retry}})
	w := wrap(t, g, r.consumer)
	r.publish(t, subject, 0, 100)
	const wait = 20 * time.Second
	for call, most := range []int{10, 9, 9} {
		start := time.Now()
		b, err := w.Fetch(10, jetstream.FetchMaxWait(wait))
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for m := range b.Messages() {
			settle := m.Ack
			if call == 0 && n == 0 {
				settle = m.Nak // takes a place until its retry
			}
			n++
			if err := settle(); err != nil {
				t.Fatal(err)
			}
		}
		// Fewer, where the server sees the pull before the last acks: it queues those.
		if took := time.Since(start); n < most/2 || n > most || took > wait/2 || b.Error() != nil {
			t.Fatalf("call %d: %d messages in %s: %v", call, n, took, b.Error())
		}
	}
}

// A call whose pull brings more bytes than the source has room for hands out what
// there is, whether the program acks as it goes or when it has all.
func TestWrappedFetchOfMoreBytesThanFit(t *testing.T) {
	t.Parallel()
	const n, fit = 40, 5
	for name, atOnce := range map[string]bool{"acked one by one": true, "acked at the end of a batch": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, jetstream.ConsumerConfig{AckWait: 20 * time.Second})
			body := make([]byte, 1000)
			g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Order: guard.OrderNone, Workers: n, WindowBytes: int64(fit * len(body))}})
			w := wrap(t, g, r.consumer)
			for range n {
				if _, err := r.js.Publish(adaptertest.Context(t), "s.x", body); err != nil {
					t.Fatal(err)
				}
			}
			late := time.After(30 * time.Second)
			for acked := 0; acked < n; {
				b, err := w.Fetch(n, jetstream.FetchMaxWait(5*time.Second))
				if err != nil {
					t.Fatal(err)
				}
				var got []jetstream.Msg
				for open := true; open; {
					select {
					case m, more := <-b.Messages():
						if open = more; more {
							got = append(got, m)
						}
					case <-late:
						t.Fatalf("a fetch does not end: %d acked, %d in hand, %+v", acked, len(got), w.src.Account())
					}
					for ; len(got) > 0 && (atOnce || !open); got = got[1:] {
						if err := got[0].Ack(); err != nil {
							t.Fatal(err)
						}
						acked++
					}
				}
				if err := b.Error(); err != nil {
					t.Fatal(err)
				}
			}
			adaptertest.Eventually(t, "all acked", func() bool { return r.info(t).AckFloor.Stream == n })
			if i := r.info(t); i.Delivered.Consumer != n {
				t.Errorf("%d deliveries", i.Delivered.Consumer)
			}
		})
	}
}

// A batch of none is the client's error, also while an earlier pull is open.
func TestWrappedFetchOfNone(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	w := wrap(t, adaptertest.Guard(t, guard.Config{}), r.consumer)
	for range 2 {
		for _, most := range []int{0, -1} {
			if _, err := w.Fetch(most); !errors.Is(err, nats.ErrInvalidArg) {
				t.Errorf("Fetch(%d): %v", most, err)
			}
			if _, err := w.FetchNoWait(most); !errors.Is(err, nats.ErrInvalidArg) {
				t.Errorf("FetchNoWait(%d): %v", most, err)
			}
		}
		if _, err := w.Fetch(5, jetstream.FetchMaxWait(time.Second)); err != nil {
			t.Fatal(err)
		}
	}
}

// What waits behind a retry of its lane keeps no call open: neither beyond its wait,
// nor when all else that it pulled is handed out.
func TestWrappedFetchBehindARetry(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{AckWait: 20 * time.Second, MaxAckPending: 4})
	retry := guard.Retry{Base: time.Hour, Max: time.Hour}
	g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Order: guard.OrderKey, Retry: retry}})
	w := wrap(t, g, r.consumer)
	r.publish(t, func(i int) string { return "s." + strconv.Itoa(i/3) }, 0, 4)
	for i, call := range []struct {
		most, want int
		wait       time.Duration
	}{{1, 1, 20 * time.Second}, {10, 1, 20 * time.Second}, {10, 0, time.Second}} {
		start := time.Now()
		b, err := w.Fetch(call.most, jetstream.FetchMaxWait(call.wait))
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		late := time.After(10 * time.Second)
		for open := true; open; {
			select {
			case m, more := <-b.Messages():
				if open = more; more {
					n++
					if err := m.Nak(); err != nil {
						t.Fatal(err)
					}
				}
			case <-late:
				t.Fatalf("call %d is open after %s, %+v", i, time.Since(start), w.src.Account())
			}
		}
		if n != call.want || b.Error() != nil || n == 0 && time.Since(start) < call.wait {
			t.Fatalf("call %d: %d messages in %s, %v, %+v", i, n, time.Since(start), b.Error(), w.src.Account())
		}
	}
}

// With an order one pull is open at a time, for the server deals messages out to all that
// are. A call that comes while another's is open hands out what that brings, and pulls the
// rest as soon as it has ended.
func TestWrappedFetchesPullInTurn(t *testing.T) {
	t.Parallel()
	for _, order := range []guard.Order{guard.OrderSource, guard.OrderKey} {
		t.Run(order.String(), func(t *testing.T) {
			t.Parallel()
			const held, more, wait = 10, 30, 20 * time.Second
			r := newRig(t, jetstream.ConsumerConfig{AckWait: time.Minute})
			w := wrap(t, adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Order: order, Ramp: guard.Ramp{Off: true}}}), r.consumer)
			next := 0
			fetch := func(most int, wait time.Duration) jetstream.MessageBatch {
				b, err := w.Fetch(most, jetstream.FetchMaxWait(wait))
				if err != nil {
					t.Fatal(err)
				}
				return b
			}
			inOrder := func(b jetstream.MessageBatch) (n int) {
				for m := range b.Messages() {
					if is, _ := strconv.Atoi(string(m.Data())); is != next {
						t.Fatalf("message %d came in place of %d", is, next)
					}
					next, n = next+1, n+1
					if err := m.Ack(); err != nil {
						t.Fatal(err)
					}
				}
				if err := b.Error(); err != nil {
					t.Error(err)
				}
				return n
			}
			if err := w.src.ForceOpen(time.Hour); err != nil {
				t.Fatal(err)
			}
			r.publish(t, subject, 0, held)
			if n := inOrder(fetch(held, time.Second)); n != 0 {
				t.Fatalf("%d came through", n)
			}
			if err := w.src.ForceClosed(); err != nil {
				t.Fatal(err)
			}
			if n := inOrder(fetch(held, wait)); n != held { // and its pull stays open
				t.Fatalf("%d messages, %+v", n, w.src.Account())
			}
			start := time.Now()
			b := fetch(more, wait)
			for time.Since(start) < 100*time.Millisecond { // a pull of its own would be there soon
				if i := r.info(t); i.NumWaiting > 1 {
					t.Errorf("%d pulls are open", i.NumWaiting)
					break
				}
			}
			r.publish(t, subject, held, held+more)
			if n := inOrder(b); n != more || time.Since(start) > wait/2 {
				t.Errorf("%d messages after %s", n, time.Since(start))
			}
			if i := r.info(t); i.NumRedelivered != 0 {
				t.Errorf("%+v", i)
			}
		})
	}
}

// A call that found no room, or whose pull brought a message that another call got, pulls
// again as soon as there is room: it does not wait for the end of its time.
func TestWrappedNextPullsAgain(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{AckWait: time.Minute, MaxAckPending: 1})
	w := wrap(t, adaptertest.Guard(t, guard.Config{}), r.consumer)
	const n, wait = 4, 30 * time.Second
	r.publish(t, subject, 0, n)
	start := time.Now()
	for i := range n {
		m, err := w.Next(jetstream.FetchMaxWait(wait))
		if err != nil {
			t.Fatalf("message %d after %s: %v", i, time.Since(start), err)
		}
		time.AfterFunc(100*time.Millisecond, func() { // while the next call finds no room
			if err := m.Ack(); err != nil {
				t.Error(err)
			}
		})
	}
	if took := time.Since(start); took > wait/2 {
		t.Errorf("%s", took)
	}
}

// A call that waits takes no more of a shared consumer than it can hand out.
func TestWrappedNextTakesOne(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{AckWait: time.Minute, MaxAckPending: 100})
	w := wrap(t, adaptertest.Guard(t, guard.Config{}), r.consumer)
	r.publish(t, subject, 0, 100)
	m, err := w.Next()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Next(jetstream.FetchMaxWait(2 * time.Second)); !errors.Is(err, nats.ErrTimeout) {
		t.Errorf("a second one is out: %v", err)
	}
	if n := r.info(t).NumAckPending; n > 2 {
		t.Errorf("%d are taken", n)
	}
	if err := m.Ack(); err != nil {
		t.Error(err)
	}
}

// Many calls that wait on an idle stream all get a message when so many come, with and
// without an order.
func TestWrappedNextOfManyGoroutines(t *testing.T) {
	t.Parallel()
	for name, policy := range map[string]guard.Policy{
		"none": {Order: guard.OrderNone, Workers: 8},
		"key":  {Order: guard.OrderKey, Workers: 8},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const n, wait = 8, 30 * time.Second
			r := newRig(t, jetstream.ConsumerConfig{AckWait: time.Minute})
			w := wrap(t, adaptertest.Guard(t, guard.Config{Policy: policy}), r.consumer)
			release := make(chan struct{})
			got := make(chan error, n)
			for range n {
				go func() {
					m, err := w.Next(jetstream.FetchMaxWait(wait))
					if err == nil {
						<-release // all are out at once
						err = m.Ack()
					}
					got <- err
				}()
			}
			open := 1
			if policy.Order == guard.OrderNone { // nobody waits for another's
				open = n
			}
			adaptertest.Eventually(t, "the pulls are open", func() bool { return r.info(t).NumWaiting == open })
			start := time.Now()
			r.publish(t, func(i int) string { return "s." + strconv.Itoa(i) }, 0, n)
			adaptertest.Eventually(t, "all are out", func() bool { return w.src.Account().Processing == n })
			close(release)
			for range n {
				if err := <-got; err != nil {
					t.Error(err)
				}
			}
			if took := time.Since(start); took > wait/2 {
				t.Errorf("%s", took)
			}
		})
	}
}

// A call that waits for its turn ends with its context and its time, and so does the pull
// that it opened late: what comes afterwards is free for other processes.
func TestWrappedFetchInTurnEnds(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{AckWait: time.Minute})
	w := wrap(t, adaptertest.Guard(t, guard.Config{}), r.consumer)
	first, err := w.Fetch(10, jetstream.FetchMaxWait(8*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	late, err := w.Fetch(10, jetstream.FetchMaxWait(12*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(100*time.Millisecond, cancel)
	if _, err := w.Next(jetstream.FetchContext(ctx)); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	over, cancel := context.WithTimeout(t.Context(), time.Nanosecond)
	defer cancel()
	<-over.Done()
	if _, err := w.Next(jetstream.FetchContext(over)); !errors.Is(err, jetstream.ErrInvalidOption) {
		t.Errorf("%v", err)
	}
	if _, err := w.Next(jetstream.FetchMaxWait(-1)); !errors.Is(err, jetstream.ErrInvalidOption) {
		t.Errorf("%v", err)
	}
	if b, err := w.FetchNoWait(10); err != nil || len(b.Messages()) != 0 || b.Error() != nil {
		t.Errorf("%v", err)
	} else {
		for range b.Messages() {
			t.Error("a message")
		}
	}
	if took := time.Since(start); took > 7*time.Second {
		t.Errorf("these took %s", took)
	}
	for _, b := range []jetstream.MessageBatch{first, late} {
		for range b.Messages() {
			t.Error("a message")
		}
		if err := b.Error(); err != nil {
			t.Error(err)
		}
	}
	if took := time.Since(start); took < 11*time.Second {
		t.Errorf("it ended after %s", took)
	}
	adaptertest.Eventually(t, "no pull is open", func() bool { return r.info(t).NumWaiting == 0 })
	if took := time.Since(start); took > 18*time.Second { // its pull alone would take until 20s
		t.Errorf("a pull was open for %s", took)
	}
}

// A fetch of bytes that hands out what another call's pull brings ends when it has its bytes.
func TestWrappedFetchOfBytesInTurn(t *testing.T) {
	t.Parallel()
	const size, wait = 1000, 20 * time.Second
	r := newRig(t, jetstream.ConsumerConfig{AckWait: time.Minute})
	w := wrap(t, adaptertest.Guard(t, guard.Config{}), r.consumer)
	go func() { // a pull of many, which nobody waits for
		if b, err := w.Fetch(50, jetstream.FetchMaxWait(wait)); err == nil {
			for m := range b.Messages() {
				_ = m.Ack()
			}
		}
	}()
	adaptertest.Eventually(t, "its pull is open", func() bool { return r.info(t).NumWaiting == 1 })
	start := time.Now()
	b, err := w.FetchBytes(3*size, jetstream.FetchMaxWait(wait))
	if err != nil {
		t.Fatal(err)
	}
	for range 60 {
		if _, err := r.js.Publish(adaptertest.Context(t), "s.x", make([]byte, size)); err != nil {
			t.Fatal(err)
		}
	}
	n := 0
	for m := range b.Messages() {
		n++
		if err := m.Ack(); err != nil {
			t.Fatal(err)
		}
	}
	if took := time.Since(start); n < 1 || n > 3 || took > wait/2 || b.Error() != nil {
		t.Errorf("%d messages after %s, %v", n, took, b.Error())
	}
}

// With an order, a second reader beside the first is told of once.
func TestWrappedReadersAreTold(t *testing.T) {
	t.Parallel()
	for order, want := range map[guard.Order]int{guard.OrderSource: 1, guard.OrderKey: 1, guard.OrderNone: 0} {
		r := newRig(t, jetstream.ConsumerConfig{})
		g, log := logging(t, guard.Config{Policy: guard.Policy{Order: order}})
		w := wrap(t, g, r.consumer)
		said := func() int { return log.lines("level=WARN", "several pulls of a wrapped consumer") }
		for range 2 { // one after the other are none too many
			cc, err := w.Consume(func(jetstream.Msg) {})
			if err != nil {
				t.Fatal(err)
			}
			cc.Stop()
			<-cc.Closed()
			it, err := w.Messages()
			if err != nil {
				t.Fatal(err)
			}
			it.Stop()
		}
		if n := said(); n != 0 {
			t.Errorf("%v: told %d times of one reader", order, n)
		}
		cc, err := w.Consume(func(jetstream.Msg) {})
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if _, err := w.FetchNoWait(1); err != nil {
				t.Fatal(err)
			}
		}
		if n := said(); n != want {
			t.Errorf("%v: told %d times", order, n)
		}
		cc.Stop()
		<-cc.Closed()
	}
}

// A batch goes on while the rest of it is held, here for slow probes one by one.
func TestWrappedFetchOfProbes(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{AckWait: 20 * time.Second})
	g := adaptertest.Guard(t, guard.Config{})
	w := wrap(t, g, r.consumer)
	r.publish(t, subject, 0, 5)
	if err := w.src.ForceOpen(200 * time.Millisecond); err != nil {
		t.Fatal(err)
	}
	b, err := w.Fetch(5, jetstream.FetchMaxWait(20*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for m := range b.Messages() {
		n++
		time.Sleep(5 * settleDown)
		if err := m.Ack(); err != nil {
			t.Fatal(err)
		}
	}
	if n != 5 || b.Error() != nil {
		t.Errorf("%d messages, %v, %+v", n, b.Error(), w.src.Account())
	}
}

// A source that ends while the program consumes from it stops the pull at once,
// though a handler is still running, and costs no message more than the delivery
// that it had.
func TestWrappedSourceEndsDuringAPull(t *testing.T) {
	t.Parallel()
	const before, after = 1, 200
	// Each hands one message over, and goes on until it is told that the source has
	// ended.
	ways := map[string]func(t *testing.T, c jetstream.Consumer, handle func(jetstream.Msg)){
		"consume": func(t *testing.T, c jetstream.Consumer, handle func(jetstream.Msg)) {
			cc, err := c.Consume(handle, jetstream.PullExpiry(5*time.Minute))
			if err != nil {
				t.Error(err)
				return
			}
			<-cc.Closed()
		},
		"messages": func(t *testing.T, c jetstream.Consumer, handle func(jetstream.Msg)) {
			it, err := c.Messages(jetstream.PullExpiry(5 * time.Minute))
			if err != nil {
				t.Error(err)
				return
			}
			defer it.Stop()
			m, err := it.Next()
			if err != nil {
				t.Error(err)
				return
			}
			var handling sync.WaitGroup
			defer handling.Wait()
			handling.Go(func() { handle(m) })
			for err == nil {
				_, err = it.Next()
			}
			if !errors.Is(err, guard.ErrClosed) {
				t.Error(err)
			}
		},
		"fetch": func(t *testing.T, c jetstream.Consumer, handle func(jetstream.Msg)) {
			b, err := c.Fetch(before+after, jetstream.FetchMaxWait(20*time.Second))
			if err != nil {
				t.Error(err)
				return
			}
			var handling sync.WaitGroup
			defer handling.Wait()
			m := <-b.Messages()
			handling.Go(func() { handle(m) })
			for range b.Messages() {
			}
			if err := b.Error(); !errors.Is(err, guard.ErrClosed) {
				t.Error(err)
			}
		},
	}
	for name, way := range ways {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, jetstream.ConsumerConfig{})
			g := adaptertest.Guard(t, guard.Config{})
			w := wrap(t, g, r.consumer)
			r.publish(t, subject, 0, before)
			handling, release := make(chan struct{}), make(chan struct{})
			var running sync.WaitGroup
			defer running.Wait()
			defer close(release)
			var once sync.Once
			running.Go(func() {
				way(t, w, func(m jetstream.Msg) {
					once.Do(func() { close(handling) })
					<-release
					_ = m.Ack()
				})
			})
			<-handling
			running.Go(func() { _, _ = g.Close(context.Background()) })
			adaptertest.Eventually(t, "the source has ended", func() bool { return w.src.State().Ended })
			r.publish(t, subject, before, before+after)
			adaptertest.Eventually(t, "no pull is open", func() bool { return r.info(t).NumWaiting == 0 })
			if i := r.info(t); i.NumRedelivered != 0 || i.Delivered.Consumer > before+after {
				t.Errorf("%d redelivered, %d deliveries", i.NumRedelivered, i.Delivered.Consumer)
			}
		})
	}
}

// The pull of an iterator ends when Next has said that the source has ended, though no message
// comes and the program does not call Stop.
func TestWrappedIteratorEndsItsPull(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	g := adaptertest.Guard(t, guard.Config{})
	w := wrap(t, g, r.consumer)
	r.publish(t, subject, 0, 1)
	it, err := w.Messages(jetstream.PullExpiry(5 * time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	defer it.Stop()
	m, err := it.Next()
	if err != nil {
		t.Fatal(err)
	}
	var closing sync.WaitGroup
	defer closing.Wait()
	defer func() { _ = m.Ack() }() // Close waits for it
	closing.Go(func() { _, _ = g.Close(context.Background()) })
	if _, err := it.Next(); !errors.Is(err, guard.ErrClosed) {
		t.Fatal(err)
	}
	adaptertest.Eventually(t, "no pull is open", func() bool { return r.info(t).NumWaiting == 0 })
}

// A call that waits for a message ends as soon as the source does, and not when the
// program has settled the messages that it has.
func TestWrappedWaitsEndWithTheSource(t *testing.T) {
	t.Parallel()
	for name, wait := range map[string]func(c jetstream.Consumer) error{
		"fetch": func(c jetstream.Consumer) error {
			b, err := c.Fetch(1, jetstream.FetchMaxWait(time.Minute))
			if err != nil {
				return err
			}
			for range b.Messages() {
			}
			return b.Error()
		},
		"messages": func(c jetstream.Consumer) error {
			it, err := c.Messages()
			if err != nil {
				return err
			}
			defer it.Stop()
			_, err = it.Next()
			return err
		},
		"consume": func(c jetstream.Consumer) error {
			cc, err := c.Consume(func(jetstream.Msg) {})
			if err != nil {
				return err
			}
			<-cc.Closed()
			return guard.ErrClosed
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, jetstream.ConsumerConfig{})
			g := adaptertest.Guard(t, guard.Config{})
			w := wrap(t, g, r.consumer)
			r.publish(t, subject, 0, 1)
			m, err := w.Next()
			if err != nil {
				t.Fatal(err)
			}
			ended := make(chan error, 1)
			go func() { ended <- wait(w) }()
			adaptertest.Eventually(t, "the call waits", func() bool { return r.info(t).NumWaiting > 0 })
			closed := make(chan struct{})
			go func() {
				defer close(closed)
				_, _ = g.Close(context.Background())
			}()
			if err := <-ended; !errors.Is(err, guard.ErrClosed) {
				t.Error(err)
			}
			select {
			case <-closed:
				t.Error("the source has not waited for the message")
			default:
			}
			if err := m.Ack(); err != nil {
				t.Error(err)
			}
			<-closed
		})
	}
}
