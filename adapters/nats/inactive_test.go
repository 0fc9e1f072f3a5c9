// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// A hold that is longer than the consumer's InactiveThreshold does not let the
// server delete the consumer, whatever the hold has in hand.
func TestHoldKeepsTheConsumer(t *testing.T) {
	t.Parallel()
	adaptertest.NotShort(t, "holds for 9s")
	const (
		window, n = 5, 20
		// The server adds up to a second to the threshold. Without any sign of
		// life it deletes a consumer at most 8s after its last delivery with an
		// AckWait of 3s: it waits for that of a delivery and of the next, too. With
		// less a busy machine extends too late.
		threshold = time.Second
		hold      = 9 * time.Second
	)
	for name, c := range map[string]struct {
		consumer jetstream.ConsumerConfig
		wrapped  bool
		empty    bool // paused with nothing in hand; else forced open over a full window
	}{
		"full":          {consumer: jetstream.ConsumerConfig{AckWait: 3 * time.Second}},
		"full, wrapped": {consumer: jetstream.ConsumerConfig{AckWait: 3 * time.Second}, wrapped: true},
		// No extension is due in all that time.
		"full, long AckWait": {consumer: jetstream.ConsumerConfig{AckWait: 30 * time.Second}},
		// Pull requests end and are followed by others.
		"empty":          {consumer: jetstream.ConsumerConfig{MaxRequestExpires: time.Second}, empty: true},
		"empty, wrapped": {wrapped: true, empty: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.consumer.InactiveThreshold, c.consumer.MaxAckPending = threshold, window
			r := newRig(t, c.consumer)
			created := r.info(t).Created
			g := adaptertest.Guard(t, guard.Config{Policy: guard.Policy{Window: window, Ramp: guard.Ramp{Off: true}}})
			type call struct{ seq, delivery uint64 }
			var mu sync.Mutex
			var calls []call
			handle := func(_ context.Context, m jetstream.Msg) error {
				md, err := m.Metadata()
				if err != nil {
					return err
				}
				mu.Lock()
				defer mu.Unlock()
				calls = append(calls, call{md.Sequence.Stream, md.NumDelivered})
				return nil
			}
			count := func() int { mu.Lock(); defer mu.Unlock(); return len(calls) }
			held := make(chan struct{}) // the source is on hold: a program may fetch
			var running *adaptertest.Running
			if c.wrapped {
				w, err := WrapConsumer(g, r.consumer)
				if err != nil {
					t.Fatal(err)
				}
				running = adaptertest.Run(t, func(ctx context.Context) error { <-held; return fetchAll(ctx, w, handle) })
			} else {
				running = consume(t, g, r.consumer, handle)
			}
			src := adaptertest.Source(t, g, "S/C")
			if c.empty {
				src.Pause(0)
			} else if err := src.ForceOpen(0); err != nil {
				t.Fatal(err)
			}
			close(held)
			if !c.empty {
				r.publish(t, subject, 0, n)
				adaptertest.Eventually(t, "the window is full, and no pull is open", func() bool {
					return src.State().Room == 0 && r.info(t).NumWaiting == 0
				})
			}

			time.Sleep(hold)
			if i := r.info(t); !i.Created.Equal(created) {
				t.Errorf("the consumer is of %s, and not of %s", i.Created, created)
			}
			// From here on pulls follow one another, and nats.go can leave one out: a
			// stall of 2s, which such a threshold does not outlive.
			lasting := c.consumer
			lasting.Durable, lasting.InactiveThreshold = "C", time.Minute
			if _, err := r.stream.UpdateConsumer(adaptertest.Context(t), lasting); err != nil {
				t.Fatal(err)
			}
			if c.empty {
				r.publish(t, subject, 0, n)
				adaptertest.Eventually(t, "the window is full", func() bool { return src.State().Room == 0 })
				src.Resume()
			} else if err := src.ForceClosed(); err != nil {
				t.Fatal(err)
			}
			adaptertest.Eventually(t, "all handled", func() bool { return r.info(t).AckFloor.Stream == n })
			if err := running.Stop(t); err != nil {
				t.Fatal(err)
			}
			if count() != n {
				t.Errorf("%d calls for %d messages", count(), n)
			}
			for i, is := range calls {
				if is.seq != uint64(i+1) || is.delivery != 1 {
					t.Errorf("message %d in place %d, delivery %d", is.seq, i+1, is.delivery)
				}
			}
			if i := r.info(t); !i.Created.Equal(created) || i.NumRedelivered != 0 {
				t.Errorf("the consumer is of %s and not of %s, or not: %d redelivered", i.Created, created, i.NumRedelivered)
			}
		})
	}
}

// fetchAll is a program that fetches until ctx ends.
func fetchAll(ctx context.Context, c jetstream.Consumer, handle func(context.Context, jetstream.Msg) error) error {
	for ctx.Err() == nil {
		b, err := c.Fetch(5, jetstream.FetchMaxWait(500*time.Millisecond))
		if err != nil {
			return err
		}
		for m := range b.Messages() {
			if err := handle(ctx, m); err != nil {
				return err
			}
			if err := m.Ack(); err != nil {
				return err
			}
		}
		if err := b.Error(); err != nil {
			return err
		}
	}
	return nil
}
