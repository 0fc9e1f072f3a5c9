// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// stall loses pull requests, so that nats.go waits on a pull that the server
// knows nothing of. A request that nats.go forgets to send comes to the same:
// nothing is delivered, and only a missing heartbeat tells.
type stall struct {
	lose  atomic.Int64 // how many requests are still to be lost
	lost  atomic.Int64
	asked atomic.Int64 // requests that have reached the server
}

func (s *stall) loses(f frame) bool {
	if !f.pull() {
		return false
	}
	if s.lose.Load() > 0 {
		s.lose.Add(-1)
		s.lost.Add(1)
		return true
	}
	s.asked.Add(1)
	return false
}

const (
	stallWindow = 10
	stallBatch  = stallWindow / 2 // what a pull asks for
	// stallMost is four times what our heartbeats promise. With nats.go's a stall
	// lasts 10s under our expiry, and 30 under its own.
	stallMost = 8 * time.Second
)

// A pull request that never arrives delays messages by two heartbeats, and costs
// neither their order nor a second delivery.
func TestStalledPullGoesOn(t *testing.T) {
	t.Parallel()
	for name, before := range map[string]int{
		"the first pull": 0,
		"a later pull":   stallBatch, // they fill the first one
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const after = 4 * stallBatch
			r := newRig(t, jetstream.ConsumerConfig{})
			var s stall
			p := r.lossy(t, s.loses)
			if before == 0 {
				s.lose.Store(1)
			}
			type call struct {
				seq   uint64
				asked int64 // how many pulls had reached the server by then
			}
			var mu sync.Mutex
			var calls []call
			count := func() int { mu.Lock(); defer mu.Unlock(); return len(calls) }
			c := consume(t, adaptertest.Guard(t, guard.Config{}), p.consumer(t), func(_ context.Context, m jetstream.Msg) error {
				md, err := m.Metadata()
				if err != nil {
					return err
				}
				mu.Lock()
				defer mu.Unlock()
				calls = append(calls, call{md.Sequence.Stream, s.asked.Load()})
				return nil
			}, WithWindow(stallWindow))
			if before > 0 {
				adaptertest.Eventually(t, "a pull is open", func() bool { return r.info(t).NumWaiting == 1 })
				s.lose.Store(1)
				r.publish(t, subject, 0, before)
			}
			adaptertest.Eventually(t, "the pull is lost", func() bool { return s.lost.Load() == 1 && count() == before })
			start := time.Now()
			r.publish(t, subject, before, before+after)
			adaptertest.Eventually(t, "all handled", func() bool { return count() == before+after })
			took := time.Since(start)
			if err := c.Stop(t); err != nil {
				t.Fatal(err)
			}
			t.Logf("%s from the first message behind the stall to the last", took.Round(time.Millisecond))
			if took > stallMost {
				t.Errorf("%s, want at most %s", took, stallMost)
			}
			stalled := int64(min(1, before)) // pulls before the lost one
			for i, is := range calls {
				if is.seq != uint64(i+1) {
					t.Errorf("message %d in place %d", is.seq, i+1)
				}
				if i >= before && is.asked <= stalled {
					t.Errorf("message %d came without another pull: nothing was stalled", is.seq)
				}
			}
			if i := r.info(t); i.Delivered.Consumer != uint64(before+after) || i.AckFloor.Stream != uint64(before+after) {
				t.Errorf("%d deliveries, acked up to %d", i.Delivered.Consumer, i.AckFloor.Stream)
			}
		})
	}
}

// A consumer that is deleted while no pull of it is open tells nobody. Only the
// look that follows a missing heartbeat finds out: here no pull arrives any more,
// so that no answer to one can tell.
func TestConsumerDeletedDuringAStall(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	var s stall
	var n atomic.Int64
	c := consume(t, adaptertest.Guard(t, guard.Config{}), r.lossy(t, s.loses).consumer(t),
		func(context.Context, jetstream.Msg) error { n.Add(1); return nil }, WithWindow(stallWindow))
	adaptertest.Eventually(t, "a pull is open", func() bool { return r.info(t).NumWaiting == 1 })
	s.lose.Store(1 << 30)
	r.publish(t, subject, 0, stallBatch)
	adaptertest.Eventually(t, "the next pull is lost", func() bool { return s.lost.Load() > 0 && n.Load() == stallBatch })
	if i := r.info(t); i.NumWaiting != 0 {
		t.Fatalf("%d pulls are open", i.NumWaiting)
	}
	if err := r.stream.DeleteConsumer(adaptertest.Context(t), "C"); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(t); !errors.Is(err, ErrConsumerGone) {
		t.Fatal(err)
	}
}
