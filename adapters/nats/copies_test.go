// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// What the server delivers again while its earlier copy is held is handled once and
// acked once, with room in the window and without.
func TestRedeliveredWhileHeld(t *testing.T) {
	t.Parallel()
	const ackWait = 600 * time.Millisecond
	for name, c := range map[string]struct {
		n, window int
		passive   bool
	}{
		"room":         {n: 50, window: 1000},
		"full":         {n: 400, window: 100},
		"passive room": {n: 50, window: 1000, passive: true},
		"passive full": {n: 400, window: 100, passive: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, jetstream.ConsumerConfig{AckWait: ackWait})
			var away atomic.Bool // no extension arrives
			consumer := r.lossy(t, func(f frame) bool { return away.Load() && f.progress() }).consumer(t)
			var mu sync.Mutex
			calls, late := map[uint64]int{}, 0
			var last uint64
			handle := func(_ context.Context, m jetstream.Msg) error {
				md, err := m.Metadata()
				if err != nil {
					return err
				}
				mu.Lock()
				defer mu.Unlock()
				calls[md.Sequence.Stream]++
				if md.Sequence.Stream < last {
					late++
				}
				last = md.Sequence.Stream
				return nil
			}
			g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Ramp: guard.Ramp{Off: true}}})
			var running *adaptertest.Running
			if c.passive {
				w := wrap(t, g, consumer, WithWindow(c.window))
				running = adaptertest.Run(t, func(ctx context.Context) error {
					cc, err := w.Consume(func(m jetstream.Msg) { _ = errors.Join(handle(ctx, m), m.Ack()) }, jetstream.PullMaxMessages(50))
					if err != nil {
						return err
					}
					<-ctx.Done()
					cc.Stop()
					<-cc.Closed()
					return nil
				})
			} else {
				running = consume(t, g, consumer, handle, WithWindow(c.window))
			}
			src := adaptertest.Source(t, g, "S/C")
			if err := src.ForceOpen(0); err != nil {
				t.Fatal(err)
			}
			r.publish(t, subject, 0, c.n)
			adaptertest.Eventually(t, "held", func() bool { return src.Account().Held >= min(c.n, c.window/2) })
			away.Store(true)
			if c.window > c.n {
				adaptertest.Eventually(t, "all delivered again", func() bool { return r.info(t).NumRedelivered == c.n })
			} else {
				time.Sleep(2 * ackWait) // no pull is open: the server gives them to the next one
			}
			away.Store(false)
			if err := src.ForceClosed(); err != nil {
				t.Fatal(err)
			}
			adaptertest.Eventually(t, "all acked", func() bool {
				i := r.info(t)
				return i.AckFloor.Stream == uint64(c.n) && i.NumAckPending == 0
			})
			adaptertest.Eventually(t, "all accounted for", func() bool { return src.Account().Acked >= uint64(c.n) })
			if a := src.Account(); a.Received != uint64(c.n) || a.Acked != uint64(c.n) || a.Check() != nil {
				t.Errorf("%+v", a)
			}
			if err := running.Stop(t); err != nil {
				t.Fatal(err)
			}
			mu.Lock()
			defer mu.Unlock()
			for seq, n := range calls {
				if n != 1 {
					t.Errorf("message %d was handled %d times", seq, n)
				}
			}
			if len(calls) != c.n || late > 0 {
				t.Errorf("%d handled, %d out of order", len(calls), late)
			}
		})
	}
}

// message is one as the server delivers it.
type message struct {
	jetstream.Msg
	reply string
	acks  int
}

func (m *message) Reply() string { return m.reply }
func (m *message) Ack() error    { m.acks++; return nil }

func TestCopies(t *testing.T) {
	at := func(deliveries, seq, time string) *message {
		return &message{reply: "$JS.ACK.S.C." + deliveries + "." + seq + ".9." + time + ".0"}
	}
	c := newCopies(1)
	first := at("1", "7", "100")
	if !c.take(first) || c.of(first) != first {
		t.Fatal("a new message")
	}
	again := at("2", "7", "100")
	if c.take(again) || c.of(first) != again {
		t.Fatal("a copy of a held one")
	}
	if anew := at("1", "7", "100"); c.take(anew) || c.of(first) != anew {
		t.Fatal("a held one from a consumer that was made anew")
	}
	c.settled(first, true)
	if c.latestCount.Load() != 0 || c.of(first) != first {
		t.Fatal("the copy stays")
	}
	if late := at("3", "7", "100"); c.take(late) || late.acks != 1 {
		t.Fatal("a copy of an acked one is acked")
	}
	if !c.take(at("2", "7", "200")) {
		t.Fatal("a message of another stream of that name")
	}
	port := &msgPort{copies: c}
	if err := port.Ack(first); !errors.Is(err, errEarlierStream) || first.acks > 0 {
		t.Fatal("the server would take the ack of the old stream's for that of the new one's")
	}
	c.settled(first, true)
	if of := at("3", "7", "200"); c.take(of) || of.acks > 0 {
		t.Fatal("the ack of the old stream's is that of the new one's")
	}
	c.settled(at("2", "7", "200"), true)
	if !c.take(at("1", "7", "200")) {
		t.Fatal("a first delivery of an acked one")
	}
	c.settled(at("1", "7", "200"), false)
	if !c.take(at("2", "7", "200")) {
		t.Fatal("one whose ack failed")
	}
}

// A consumer that was reset counts its deliveries anew, and what this process had acked before is
// handled again, though another process had its first delivery.
func TestCopiesOfAResetConsumer(t *testing.T) {
	at := func(deliveries, seq, number int) *message {
		return &message{reply: fmt.Sprintf("$JS.ACK.S.C.%d.%d.%d.100.0", deliveries, seq, number)}
	}
	c := newCopies(1)
	for seq := range 5 {
		c.take(at(1, seq+1, 900+seq))
		c.settled(at(1, seq+1, 900+seq), true)
	}
	held := at(1, 6, 905)
	c.take(held)
	if late := at(2, 3, 906); c.take(late) || late.acks != 1 {
		t.Error("a copy of an acked one is handled")
	}
	if again := at(2, 4, 12); !c.take(again) || again.acks != 0 {
		t.Error("the replay of an acked one is not handled")
	}
	if !c.take(at(2, 5, 13)) {
		t.Error("nor the next")
	}
	if again := at(2, 6, 14); c.take(again) || c.of(held) != again {
		t.Error("one that the source has is handled twice")
	}
}

// More messages than the table has places for are known as long as they are unsettled,
// and as many as it has are known to be acked.
func TestCopiesBeyondTheTable(t *testing.T) {
	const n, stride = 1000, 64
	at := func(deliveries, i int) *message {
		return &message{reply: fmt.Sprintf("$JS.ACK.S.C.%d.%d.9.%d.0", deliveries, i*stride, 1e6+i)}
	}
	c := newCopies(4)
	for i := range n {
		if !c.take(at(1, i)) {
			t.Fatalf("message %d is new", i)
		}
	}
	for i := range n {
		if again := at(2, i); c.take(again) || c.of(at(1, i)) != again {
			t.Fatalf("message %d is held", i)
		}
	}
	for i := range n {
		c.settled(at(1, i), i%2 == 0)
	}
	if len(c.overflow) > 0 || len(c.latest) > 0 || c.latestCount.Load() != 0 {
		t.Fatalf("%d and %d are left", len(c.overflow), len(c.latest))
	}
	again := 0
	for i := n - 1; i >= 0; i-- { // a new one may take the place of one that was acked
		switch isNew := c.take(at(3, i)); {
		case !isNew && i%2 == 1:
			t.Fatalf("the ack of message %d failed", i)
		case !isNew:
			again++
		}
	}
	if again == 0 {
		t.Error("no ack is remembered")
	}
}

func TestAckSubjects(t *testing.T) {
	for reply, want := range map[string]delivery{
		"$JS.ACK.S.C.1.22.333.4444.5":            {22, 333, 4444, true},
		"$JS.ACK.S.C.11.22.333.4444.5":           {22, 333, 4444, false},
		"$JS.ACK.D.A.S.C.2.22.333.4444.5":        {22, 333, 4444, false},
		"$JS.ACK._.A.S.C.1.22.333.4444.5.random": {22, 333, 4444, true},
	} {
		m := nats.Msg{Reply: reply, Sub: &nats.Subscription{}}
		if d, ok := new(copies).read(reply); !ok || d != want {
			t.Errorf("%s: %+v", reply, d)
		}
		md, err := m.Metadata()
		if err != nil || md.Sequence.Stream != want.seq || md.Sequence.Consumer != want.number || uint64(md.Timestamp.UnixNano()) != want.time {
			t.Errorf("the client reads %s as %+v, %v", reply, md, err)
		}
	}
	c := new(copies) // one that has read another
	if _, ok := c.read("$JS.ACK.S.C.1.22.333.4444.5"); !ok {
		t.Fatal("not read")
	}
	if d, ok := c.read("$JS.ACK.S.LONGER.2.23.334.4445.5"); !ok || d != (delivery{23, 334, 4445, false}) {
		t.Errorf("%+v", d)
	}
	for _, reply := range []string{"", "s.x", "$JS.ACK.S.C.1.22.333.4444", "$JS.ACK.A.S.C.1.22.333.4444.5", "$JS.ACK.S.C.1.x.333.4444.5", "$JS.ACK.S.C.1.1.333.x.5"} {
		if _, ok := new(copies).read(reply); ok {
			t.Errorf("%q is read", reply)
		}
	}
}

// With slack, as without an order, a first delivery of what was acked tells that the consumer
// counts anew: what comes again after it is a replay, too.
func TestCopiesOfAReplayWithSlack(t *testing.T) {
	at := func(deliveries, seq, number int) *message {
		return &message{reply: fmt.Sprintf("$JS.ACK.S.C.%d.%d.%d.100.0", deliveries, seq, number)}
	}
	c := newCopies(1000)
	c.slack = 1000
	for seq := 1; seq <= 500; seq++ {
		c.take(at(1, seq, seq))
		c.settled(at(1, seq, seq), true)
	}
	for seq := 1; seq <= 10; seq++ {
		if !c.take(at(1, seq, seq)) {
			t.Errorf("the replay of %d is not handled", seq)
		}
	}
	if again := at(2, 50, 11); !c.take(again) || again.acks != 0 {
		t.Error("nor one that was lost on its way before")
	}
}
