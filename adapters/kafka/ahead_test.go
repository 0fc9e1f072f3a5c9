// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// ahead is how many messages of a fake claim are settled behind one that is not.
func ahead(h sarama.ConsumerGroupHandler, s *fakeSession) int {
	return h.(*handler).session(s).open()[0].Ahead()
}

// What is handled behind a message that waits, or whose dead letter does, is a window
// at most; then the claim is not read any more, until that message is done.
func TestHandledBehindAWaitingMessageIsBounded(t *testing.T) {
	const n, window = 5000, 20
	var well atomic.Bool
	var handled atomic.Int64
	fails := func(m *sarama.ConsumerMessage) bool {
		if m.Offset == 0 && !well.Load() {
			return true
		}
		handled.Add(1)
		return false
	}
	plain := func(_ context.Context, m *sarama.ConsumerMessage) error {
		if fails(m) {
			return errDown
		}
		return nil
	}
	hopeless := func(_ context.Context, m *sarama.ConsumerMessage) error {
		handled.Add(1)
		if m.Offset == 0 {
			return guard.Permanent(errDown)
		}
		return nil
	}
	letters := WithDeadLetters(dlq.WriterFunc(func(context.Context, *dlq.Record) error {
		if well.Load() {
			return nil
		}
		return errors.New("the DLQ is down")
	}))
	marks := rawHandler{func(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
		for m := range c.Messages() {
			if fails(m) {
				_ = Fail(s, m, errDown)
			} else {
				s.MarkMessage(m, "")
			}
		}
		return nil
	}}
	batches := rawHandler{func(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
		for m := range c.Messages() {
			var last *sarama.ConsumerMessage
			for size := 0; m != nil; size++ {
				if fails(m) {
					_ = Fail(s, m, errDown)
				} else {
					last = m
				}
				m = nil
				if size < 4 {
					select {
					case m = <-c.Messages():
					case <-time.After(time.Millisecond):
					}
				}
			}
			if last != nil {
				s.MarkMessage(last, "")
			}
		}
		return nil
	}}
	config := WithConfig(testConfig())
	policy := func(p guard.Policy) Option {
		p.Window = window
		return WithPolicy(p)
	}
	for name, wrap := range map[string]func(g *guard.Guard) sarama.ConsumerGroupHandler{
		"order none": func(g *guard.Guard) sarama.ConsumerGroupHandler {
			return Wrap(g, plain, config, policy(guard.Policy{Order: guard.OrderNone}))
		},
		"order key, workers": func(g *guard.Guard) sarama.ConsumerGroupHandler {
			return Wrap(g, plain, config, policy(guard.Policy{Order: guard.OrderKey, Workers: 4}))
		},
		"dead letter": func(g *guard.Guard) sarama.ConsumerGroupHandler {
			return Wrap(g, hopeless, config, policy(guard.Policy{}), letters)
		},
		"dead letter, order key": func(g *guard.Guard) sarama.ConsumerGroupHandler {
			return Wrap(g, hopeless, config, policy(guard.Policy{Order: guard.OrderKey, Workers: 4}), letters)
		},
		"marks": func(g *guard.Guard) sarama.ConsumerGroupHandler {
			return WrapHandler(g, marks, config, policy(guard.Policy{Order: guard.OrderNone, Workers: 4}))
		},
		"batches": func(g *guard.Guard) sarama.ConsumerGroupHandler {
			return WrapHandler(g, batches, config, policy(guard.Policy{}), WithBatchMarks())
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				well.Store(false)
				handled.Store(0)
				g := adaptertest.Guard(t, guard.Config{})
				h := wrap(g)
				s, end := setup(t, h)
				c := newFakeClaim()
				var running sync.WaitGroup
				running.Go(func() { _ = h.ConsumeClaim(s, c) })
				running.Go(func() {
					for i := range int64(n) {
						select {
						case c.partition().messages <- &sarama.ConsumerMessage{Topic: "orders", Offset: i}:
						case <-s.ctx.Done():
							return
						}
					}
				})
				time.Sleep(time.Minute)
				synctest.Wait()
				src := g.Source("orders/0")
				if n := ahead(h, s); handled.Load() > window || n != window-1 || s.marked.Load() != 0 {
					t.Errorf("%d handled, %d settled behind it, marked %d", handled.Load(), n, s.marked.Load())
				}
				if st := src.State(); st.Room != 0 || !slices.ContainsFunc(st.Holds, func(h guard.Hold) bool { return h.Reason == guard.ReasonBackpressure }) {
					t.Errorf("room %d, %+v", st.Room, st.Holds)
				}
				well.Store(true)
				time.Sleep(time.Minute)
				synctest.Wait()
				if handled.Load() != n || s.marked.Load() != n {
					t.Errorf("%d handled, marked %d", handled.Load(), s.marked.Load())
				}
				end(nil)
				running.Wait()
			})
		})
	}
}

// A claim with a full window of what is settled is left at once when it is revoked.
func TestRevokeBehindAWaitingMessage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := adaptertest.Guard(t, guard.Config{})
		h := Wrap(g, func(_ context.Context, m *sarama.ConsumerMessage) error {
			if m.Offset == 0 {
				return errDown
			}
			return nil
		}, WithConfig(cooperativeConfig()), WithPolicy(guard.Policy{Order: guard.OrderNone, Window: 20}))
		s, end := setup(t, h)
		c := newFakeClaim()
		c.publish(0, 100)
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = h.ConsumeClaim(s, c)
		}()
		time.Sleep(time.Minute)
		if n := ahead(h, s); n != 19 {
			t.Errorf("%d settled behind it", n)
		}
		begun := time.Now()
		close(c.partition().dying)
		<-done
		if took := time.Since(begun); took > time.Second {
			t.Errorf("left after %s", took)
		}
		if s.marked.Load() != 0 {
			t.Errorf("marked %d", s.marked.Load())
		}
		end(nil)
	})
}
