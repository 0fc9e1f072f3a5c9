// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// extensions loses all but each nth extension of each message, from the first,
// and lets the others come late.
type extensions struct {
	each int // 0 loses all
	late time.Duration

	mu   sync.Mutex
	sent map[string]int // of a delivery
	lost map[string]int
	slow string // the delivery whose extensions wait, and so those behind them
}

func (e *extensions) loses(f frame) bool {
	if !f.progress() {
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.slow == "" {
		e.slow = f.subject
	}
	if e.sent[f.subject]++; e.each > 0 && e.sent[f.subject]%e.each == 0 {
		if f.subject == e.slow {
			time.Sleep(e.late)
		}
		return false
	}
	e.lost[f.subject]++
	return true
}

// least is how many extensions each of n deliveries has lost.
func (e *extensions) least(n int) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.lost) < n {
		return 0
	}
	least := math.MaxInt
	for _, k := range e.lost {
		least = min(least, k)
	}
	return least
}

// Extensions go out at a third of the AckWait. So one that is lost does no harm,
// even if the next, at two thirds, is late. Behind two it would come at the
// deadline itself.
func TestEachSecondExtensionMayBeLost(t *testing.T) {
	t.Parallel()
	const n, losses = 5, 2
	for name, c := range map[string]struct {
		each    int
		ackWait time.Duration
		again   bool
	}{
		"each second": {each: 2, ackWait: 9 * time.Second},          // a busy machine extends late, and still in time
		"all":         {each: 0, ackWait: time.Second, again: true}, // so a redelivery would be seen
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, jetstream.ConsumerConfig{AckWait: c.ackWait})
			e := &extensions{each: c.each, late: 200 * time.Millisecond, sent: map[string]int{}, lost: map[string]int{}}
			var mu sync.Mutex
			var order []uint64
			g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Ramp: guard.Ramp{Off: true}}})
			running := consume(t, g, r.lossy(t, e.loses).consumer(t), func(_ context.Context, m jetstream.Msg) error {
				md, err := m.Metadata()
				mu.Lock()
				defer mu.Unlock()
				order = append(order, md.Sequence.Stream)
				return err
			})
			src := adaptertest.Source(t, g, "S/C")
			if err := src.ForceOpen(0); err != nil {
				t.Fatal(err)
			}
			r.publish(t, subject, 0, n)
			// There is room, so a pull is open all the time, and a message whose
			// AckWait has ended would come again at once.
			if c.again {
				adaptertest.Eventually(t, "redelivered", func() bool { return r.info(t).NumRedelivered == n })
				return
			}
			adaptertest.Eventually(t, "several extensions of each message are lost", func() bool { return e.least(n) >= losses })
			if i := r.info(t); i.Delivered.Consumer != n || i.NumAckPending != n || i.NumRedelivered != 0 {
				t.Errorf("%d deliveries, %d pending, %d redelivered", i.Delivered.Consumer, i.NumAckPending, i.NumRedelivered)
			}
			if err := src.ForceClosed(); err != nil {
				t.Fatal(err)
			}
			adaptertest.Eventually(t, "all handled", func() bool { return r.info(t).AckFloor.Stream == n })
			if err := running.Stop(t); err != nil {
				t.Fatal(err)
			}
			for i, seq := range order {
				if seq != uint64(i+1) {
					t.Errorf("message %d in place %d", seq, i+1)
				}
			}
			if len(order) != n {
				t.Errorf("%d calls for %d messages", len(order), n)
			}
		})
	}
}

// While the connection is down extensions leave room for acks in the client's
// reconnect buffer.
func TestExtensionsLeaveRoomForAcks(t *testing.T) {
	t.Parallel()
	const n, buffer, rounds = 50, 64 << 10, 100 // more than fits
	ways := map[string]func(w *wrapped, ms []jetstream.Msg){
		"taken":  func(w *wrapped, ms []jetstream.Msg) { w.port.msgPort.Extend(ms) },
		"parked": func(w *wrapped, _ []jetstream.Msg) { w.port.Extend(nil) },
	}
	for name, extend := range ways {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, jetstream.ConsumerConfig{})
			nc, err := nats.Connect(r.url(), nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond), nats.Timeout(connectTimeout), nats.ReconnectBufSize(buffer))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(nc.Close)
			js, err := jetstream.New(nc)
			if err != nil {
				t.Fatal(err)
			}
			c, err := js.Consumer(adaptertest.Context(t), "S", "C")
			if err != nil {
				t.Fatal(err)
			}
			w := wrap(t, adaptertest.Guard(t, guard.Config{}), c)
			r.publish(t, subject, 0, n)
			b, err := c.Fetch(n)
			if err != nil {
				t.Fatal(err)
			}
			var ms []jetstream.Msg
			for m := range b.Messages() {
				ms = append(ms, m)
				w.port.parked[&taken{Msg: m}] = struct{}{}
			}
			r.stop()
			adaptertest.Eventually(t, "disconnected", nc.IsReconnecting)
			for range rounds {
				extend(w, ms)
			}
			if k, err := nc.Buffered(); err != nil || k < buffer/2 {
				t.Errorf("%d bytes of extensions wait, %v", k, err)
			}
			for _, m := range ms {
				if err := m.Ack(); err != nil {
					t.Fatal(err)
				}
			}
			clear(w.port.parked)
			r.start()
			adaptertest.Eventually(t, "all acked", func() bool { return r.info(t).AckFloor.Stream == n })
		})
	}
}
