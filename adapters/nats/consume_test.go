// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package nats

import (
	"context"
	"sync/atomic"
	"testing"

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
	if i := r.info(t); i.NumAckPending != 0 || i.AckFloor.Stream != n || i.NumRedelivered != 0 {
		t.Fatalf("%+v", i)
	}
	if i := r.info(t); i.NumWaiting != 0 {
		t.Fatalf("a pull is open: %+v", i)
	}
}
