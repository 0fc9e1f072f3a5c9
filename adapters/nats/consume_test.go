// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

func TestConsumeHandlesEverythingInOrderAndStops(t *testing.T) {
	r := newRig(t, jetstream.ConsumerConfig{})
	g := adaptertest.Guard(t, guard.Config{})
	var last atomic.Uint64
	const n = 5000
	c := consume(t, g, r.consumer, func(_ context.Context, m jetstream.Msg) error {
		md, err := m.Metadata()
		if err != nil {
			return err
		}
		if was := last.Swap(md.Sequence.Stream); was+1 != md.Sequence.Stream {
			t.Errorf("%d after %d", md.Sequence.Stream, was)
		}
		return nil
	})
	r.publish(t, subject, 0, n)
	adaptertest.Eventually(t, "all handled", func() bool { return last.Load() == n })
	if err := c.Stop(t); err != nil {
		t.Fatal(err)
	}
	if i := r.info(t); i.NumWaiting != 0 {
		t.Fatalf("a pull is open: %+v", i)
	}
	// The server has the acks, and takes them in beside its answers.
	adaptertest.Eventually(t, "all acked", func() bool { i := r.info(t); return i.NumAckPending == 0 && i.AckFloor.Stream == n })
	if i := r.info(t); i.NumRedelivered != 0 {
		t.Fatalf("%+v", i)
	}
}

// A pull that the server refuses ends Consume, which gives back what it holds.
func TestRefusedPullGivesBack(t *testing.T) {
	t.Parallel()
	const first, then = 3, 4 // of a pull of 10, so that the next one follows
	r := newRig(t, jetstream.ConsumerConfig{})
	g := adaptertest.Guard(t, guard.Config{})
	c := consume(t, g, r.consumer, func(context.Context, jetstream.Msg) error { return nil }, WithWindow(20))
	src := adaptertest.Source(t, g, "S/C")
	if err := src.ForceOpen(0); err != nil {
		t.Fatal(err)
	}
	r.publish(t, subject, 0, first)
	adaptertest.Eventually(t, "held", func() bool { return src.Account().Held == first })
	cfg := r.info(t).Config
	cfg.PriorityPolicy, cfg.PriorityGroups = jetstream.PriorityPolicyOverflow, []string{"g"}
	grouped, err := r.stream.UpdateConsumer(adaptertest.Context(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	r.publish(t, subject, first, first+then)
	if err := c.Wait(t); !errors.Is(err, jetstream.ErrBadRequest) {
		t.Fatal(err)
	}
	b, err := grouped.Fetch(first+then, jetstream.FetchPriorityGroup("g"), jetstream.FetchMaxWait(10*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for m := range b.Messages() {
		n++
		if md, err := m.Metadata(); err != nil || md.Sequence.Stream != uint64(n) {
			t.Errorf("message %d in place %d, %v", md.Sequence.Stream, n, err)
		}
	}
	if n != first+then || b.Error() != nil {
		t.Errorf("%d of %d messages come again within a third of the AckWait, %v", n, first+then, b.Error())
	}
}

// A stop at the last delivery of a message, which nobody is given again, says so and what helps.
func TestAStopAtTheLastDelivery(t *testing.T) {
	t.Parallel()
	const n = 3
	for max, warned := range map[int]int{1: 1, 2: 0} {
		r := newRig(t, jetstream.ConsumerConfig{MaxDeliver: max})
		g, log := logging(t, guard.Config{})
		c := consume(t, g, r.consumer, none, WithLogger(g.Logger()))
		src := adaptertest.Source(t, g, "S/C")
		if err := src.ForceOpen(0); err != nil {
			t.Fatal(err)
		}
		r.publish(t, subject, 0, n)
		adaptertest.Eventually(t, "held", func() bool { return src.Account().Held == n })
		if err := c.Stop(t); err != nil {
			t.Error(err)
		}
		if got := log.lines("level=WARN", "source=S/C", "messages=3", "nats consumer edit S C --max-deliver=-1", "NewMover"); got != warned {
			t.Errorf("MaxDeliver %d: warned %d times\n%s", max, got, log)
		}
	}
}

// What must not be nil is named, with all else that is wrong.
func TestNilGuard(t *testing.T) {
	handle := func(context.Context, jetstream.Msg) error { return nil }
	consumed := Consume(t.Context(), nil, nil, handle, WithStopTimeout(0))
	_, wrapped := WrapConsumer(nil, nil, WithStopTimeout(0))
	for name, err := range map[string]error{"Consume": consumed, "WrapConsumer": wrapped} {
		for _, want := range []string{"nats: the Guard must not be nil", "WithStopTimeout"} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v does not say %q", name, err, want)
			}
		}
	}
}
