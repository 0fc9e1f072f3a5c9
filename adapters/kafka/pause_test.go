// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// A program that pauses its group while the guard has paused the claim, too, stays paused
// when the guard has room again; and what the guard has paused by itself goes on.
func TestPauseOfTheProgramStays(t *testing.T) {
	t.Parallel()
	for name, first := range map[string]bool{"before the guard's": true, "during the guard's": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, 1)
			g := adaptertest.Guard(t, guard.Config{})
			var calls atomic.Int64
			m := r.join(testConfig(), Wrap(g, func(context.Context, *sarama.ConsumerMessage) error { calls.Add(1); return nil },
				WithPolicy(guard.Policy{Window: 20, Ramp: guard.Ramp{Off: true}})))
			src := adaptertest.Source(t, g, sourceName("", r.topic, 0))
			full := func(from, to int) {
				t.Helper()
				if err := src.ForceOpen(0); err != nil {
					t.Fatal(err)
				}
				r.publish(from, to, nil, nil)
				adaptertest.Eventually(t, "the window is full", func() bool { return src.State().Room == 0 })
			}
			full(0, 30)
			if first {
				time.Sleep(500 * time.Millisecond) // a fetch that is under way arrives
			}
			m.group.PauseAll()
			time.Sleep(500 * time.Millisecond)
			if err := src.ForceClosed(); err != nil {
				t.Fatal(err)
			}
			// Of the 30 the last 10 may be in the pause, too. A fetch that is under way
			// may bring the next message.
			adaptertest.Eventually(t, "what was fetched is handled", func() bool { return calls.Load() >= 20 })
			r.publish(30, 31, nil, nil)
			time.Sleep(2 * time.Second)
			r.publish(31, 60, nil, nil)
			time.Sleep(time.Second)
			if n := calls.Load(); n > 31 {
				t.Fatalf("%d messages came through the program's pause", n-30)
			}
			m.group.ResumeAll()
			adaptertest.Eventually(t, "it goes on", func() bool { return calls.Load() == 60 })

			full(60, 500)
			if err := src.ForceClosed(); err != nil {
				t.Fatal(err)
			}
			adaptertest.Eventually(t, "the guard's own pause ends", func() bool { return calls.Load() == 500 })
			m.stop()
		})
	}
}

// A program's pause outlives its session, as sarama says.
func TestPauseOfTheProgramOutlivesItsSession(t *testing.T) {
	t.Parallel()
	for _, cfg := range []*sarama.Config{testConfig(), cooperativeConfig()} {
		r := newRig(t, 2)
		var a, b atomic.Int64
		count := func(n *atomic.Int64) sarama.ConsumerGroupHandler {
			return Wrap(adaptertest.Guard(t, guard.Config{}), func(context.Context, *sarama.ConsumerMessage) error { n.Add(1); return nil })
		}
		both := func(i int) int32 { return int32(i % 2) }
		first := r.join(cfg, count(&a))
		r.publish(0, 10, both, nil)
		adaptertest.Eventually(t, "the first has both", func() bool { return a.Load() == 10 })
		first.group.PauseAll()
		time.Sleep(500 * time.Millisecond) // a fetch that is under way arrives
		second := r.join(cfg, count(&b))
		r.publish(10, 30, both, nil)
		adaptertest.Eventually(t, "the second has one", func() bool { return b.Load() == 10 })
		time.Sleep(time.Second)
		if n := a.Load(); n != 10 {
			t.Errorf("%d messages came through the program's pause", n-10)
		}
		first.group.ResumeAll()
		adaptertest.Eventually(t, "it goes on", func() bool { return a.Load() == 20 })
		first.stop()
		second.stop()
	}
}
