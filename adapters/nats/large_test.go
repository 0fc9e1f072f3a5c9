// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// publishLarge publishes n messages of size bytes.
func (r *rig) publishLarge(t testing.TB, n, size int) {
	t.Helper()
	body := make([]byte, size)
	for range n {
		if _, err := r.js.Publish(adaptertest.Context(t), "s.x", body); err != nil {
			t.Fatal(err)
		}
	}
}

// While the handler of the first message is slow, the server sends what the pulls
// ask for. nats.go must not get more of it than it keeps.
func TestLargeMessagesAreNotDropped(t *testing.T) { // alone: what it publishes keeps both processors busy
	const (
		window = 128
		small  = 1 + window/4 // the first goes to the handler, a quarter of the window to the feed
		large  = window / 2   // a pull: 80 MiB of them
		all    = small + large
	)
	// The intake is patient for a sixth of the AckWait, and until then keeps nothing of
	// what waits in nats.go.
	r := newRig(t, jetstream.ConsumerConfig{AckWait: 5 * time.Minute})
	var mu sync.Mutex
	var order []uint64
	count := func() int { mu.Lock(); defer mu.Unlock(); return len(order) }
	var begun atomic.Bool
	release := make(chan struct{})
	c := consume(t, adaptertest.Guard(t, guard.Config{}), r.consumer, func(_ context.Context, m jetstream.Msg) error {
		begun.Store(true)
		<-release
		md, err := m.Metadata()
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		order = append(order, md.Sequence.Stream)
		return nil
	}, WithWindow(window))
	let := sync.OnceFunc(func() { close(release) })
	defer let()
	r.publish(t, subject, 0, 1)
	adaptertest.Eventually(t, "the first is handled", begun.Load)
	r.publish(t, subject, 1, small)
	r.publishLarge(t, large, 5<<18)
	var sent uint64
	since := time.Now()
	adaptertest.Eventually(t, "the server has sent what was asked for", func() bool {
		if n := r.info(t).Delivered.Consumer; n != sent {
			sent, since = n, time.Now()
		}
		return time.Since(since) > 500*time.Millisecond
	})
	let()
	adaptertest.Eventually(t, "all handled", func() bool { return count() >= all })
	if err := c.Stop(t); err != nil {
		t.Fatal(err)
	}
	for i, seq := range order {
		if seq != uint64(i+1) {
			t.Errorf("message %d in place %d", seq, i+1)
		}
	}
	if i := r.info(t); i.Delivered.Consumer != all {
		t.Errorf("%d deliveries of %d messages", i.Delivered.Consumer, all)
	}
}

// The largest message that the server takes is above what a pull may bring
// elsewhere, and comes.
func TestTheLargestMessageComes(t *testing.T) { // alone, too
	r := newRig(t, jetstream.ConsumerConfig{})
	r.stop()
	r.payload = pullBytes + 1<<20
	r.start()
	adaptertest.Eventually(t, "connected again", func() bool { return r.nc.MaxPayload() == int64(r.payload) })
	r.publishLarge(t, 2, int(r.payload))
	var n atomic.Int64
	c := consume(t, adaptertest.Guard(t, guard.Config{}), r.consumer, func(context.Context, jetstream.Msg) error {
		n.Add(1)
		return nil
	})
	adaptertest.Eventually(t, "both handled", func() bool { return n.Load() == 2 })
	if err := c.Stop(t); err != nil {
		t.Fatal(err)
	}
}

func TestPullBytes(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	if connOf(r.consumer) != r.nc {
		t.Fatal("the connection of a consumer is not found")
	}
	if connOf(struct{ jetstream.Consumer }{r.consumer}) != nil || connOf(nil) != nil {
		t.Error("a connection that is not known")
	}
	largest := int(r.payload) + frameBytes
	for most, want := range map[int]int{0: pullBytes, 2 * pullBytes: pullBytes, largest: largest, largest - 1: 0} {
		if got := (&intake{conn: r.nc, most: most}).bytes(); got != want {
			t.Errorf("MaxRequestMaxBytes %d: %d, want %d", most, got, want)
		}
	}
	if got := new(intake).bytes(); got != 0 {
		t.Errorf("%d without a connection", got)
	}
}
