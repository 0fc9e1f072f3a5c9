// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// fakeSession and fakeClaim are sarama's as far as the guard looks, for instants
// that a real broker does not show on demand.
type fakeSession struct {
	ctx    context.Context
	marked atomic.Int64
	parent *fakeGroup // nil: not to be found
}

// fakeGroup is a consumer group as its session knows it.
type fakeGroup struct{ closed chan struct{} }

func (*fakeSession) Claims() map[string][]int32                             { return nil }
func (*fakeSession) MemberID() string                                       { return "member" }
func (*fakeSession) GenerationID() int32                                    { return 1 }
func (s *fakeSession) MarkOffset(_ string, _ int32, offset int64, _ string) { s.marked.Store(offset) }
func (*fakeSession) Commit()                                                {}
func (*fakeSession) ResetOffset(string, int32, int64, string)               {}
func (*fakeSession) MarkMessage(*sarama.ConsumerMessage, string)            {}
func (s *fakeSession) Context() context.Context                             { return s.ctx }

type fakePartition struct {
	sarama.PartitionConsumer
	dying    chan struct{}
	messages chan *sarama.ConsumerMessage
}

type fakeClaim struct{ sarama.PartitionConsumer }

func (fakeClaim) Topic() string              { return "orders" }
func (fakeClaim) Partition() int32           { return 0 }
func (fakeClaim) InitialOffset() int64       { return 0 }
func (fakeClaim) HighWaterMarkOffset() int64 { return 0 }
func (fakeClaim) Pause()                     {}
func (fakeClaim) Resume()                    {}

func (c fakeClaim) partition() *fakePartition {
	return c.PartitionConsumer.(*fakePartition)
}
func (c fakeClaim) Messages() <-chan *sarama.ConsumerMessage { return c.partition().messages }
func (c fakeClaim) publish(from, to int64) {
	for i := from; i < to; i++ {
		c.partition().messages <- &sarama.ConsumerMessage{Topic: "orders", Offset: i}
	}
}

func newFakeClaim() *fakeClaim {
	return &fakeClaim{&fakePartition{dying: make(chan struct{}), messages: make(chan *sarama.ConsumerMessage, 100)}}
}

// setup begins a session of a handler.
func setup(t *testing.T, h sarama.ConsumerGroupHandler) (s *fakeSession, end context.CancelCauseFunc) {
	t.Helper()
	ctx, cancel := context.WithCancelCause(context.Background())
	s = &fakeSession{ctx: ctx}
	if err := h.Setup(s); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cancel(nil) })
	return s, cancel
}

func within(t *testing.T, d time.Duration, what string, done <-chan struct{}) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(d):
		t.Fatalf("%s: not within %s", what, d)
	}
}

// A claim that waits for its name lets go when it is revoked: the session of a
// cooperative group lives on, and the whole group waits for it.
func TestRevokeOfAClaimThatWaitsForItsName(t *testing.T) {
	t.Parallel()
	g := adaptertest.Guard(t, guard.Config{})
	for _, h := range []sarama.ConsumerGroupHandler{
		Wrap(g, nothing, WithConfig(cooperativeConfig())),
		WrapHandler(g, rawHandler{func(sarama.ConsumerGroupSession, sarama.ConsumerGroupClaim) error { return nil }}, WithConfig(cooperativeConfig())),
	} {
		owner := Wrap(g, nothing, WithConfig(cooperativeConfig()))
		first, end := setup(t, owner)
		var owning sync.WaitGroup
		owning.Go(func() { _ = owner.ConsumeClaim(first, newFakeClaim()) })
		adaptertest.Source(t, g, "orders/0")

		s, _ := setup(t, h)
		c := newFakeClaim()
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = h.ConsumeClaim(s, c)
		}()
		time.Sleep(5 * nameWait)
		close(c.partition().dying)
		close(c.partition().messages)
		within(t, 30*time.Second, "the revoked claim is left", done)
		end(nil)
		owning.Wait()
	}
}

// A loop that leaves with the session's error has failed nothing: not the
// messages in its hand, and not the dependency.
func TestEndOfSessionIsNoFailure(t *testing.T) {
	t.Parallel()
	g := adaptertest.Guard(t, guard.Config{})
	var end context.CancelCauseFunc
	var failures atomic.Uint64
	h := WrapHandler(g, rawHandler{func(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
		if s.Context().Err() != nil {
			return s.Context().Err()
		}
		for range 10 {
			<-c.Messages()
		}
		src := g.Source("orders/0")
		defer func() {
			go func() {
				time.Sleep(20 * time.Millisecond)
				failures.Store(src.State().Tally.Failures)
			}()
		}()
		end(errors.New("group is rebalancing"))
		return s.Context().Err()
	}}, WithConfig(testConfig()), manyOut)
	var s *fakeSession
	s, end = setup(t, h)
	c := newFakeClaim()
	c.publish(0, 10)
	_ = h.ConsumeClaim(s, c)
	time.Sleep(100 * time.Millisecond)
	if n := failures.Load(); n > 0 {
		t.Errorf("%d failures", n)
	}
}

// A call that the end of its session has cut is no attempt of its message.
func TestCallCutByTheEndOfItsSessionIsNoAttempt(t *testing.T) {
	t.Parallel()
	g := adaptertest.Guard(t, guard.Config{})
	var end context.CancelCauseFunc
	var tally guard.Tally
	h := WrapHandler(g, rawHandler{func(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
		m := <-c.Messages()
		src := g.Source("orders/0")
		end(errors.New("group is rebalancing"))
		if err := Fail(s, m, fmt.Errorf("query: %w", s.Context().Err())); err != nil {
			t.Error(err)
		}
		tally = src.State().Tally
		return nil
	}}, WithConfig(testConfig()))
	var s *fakeSession
	s, end = setup(t, h)
	c := newFakeClaim()
	c.publish(0, 1)
	_ = h.ConsumeClaim(s, c)
	if tally.Failures > 0 {
		t.Errorf("%+v", tally)
	}
}

// While another claim is let go, a handler with a short timeout waits; that is no
// attempt, and no timeout.
func TestMakingWayIsNoFailure(t *testing.T) {
	t.Parallel()
	g := adaptertest.Guard(t, guard.Config{})
	var calls atomic.Int64
	policy := guard.Policy{Timeout: 100 * time.Millisecond, Retry: guard.Retry{Base: time.Millisecond, Max: time.Millisecond}, Ramp: guard.Ramp{Off: true}}
	h := Wrap(g, func(ctx context.Context, _ *sarama.ConsumerMessage) error {
		calls.Add(1)
		return ctx.Err()
	}, WithConfig(cooperativeConfig()), WithPolicy(policy))
	s, end := setup(t, h)
	c := newFakeClaim()
	var consuming sync.WaitGroup
	consuming.Go(func() { _ = h.ConsumeClaim(s, c) })
	src := adaptertest.Source(t, g, "orders/0")
	h.(*handler).session(s).makeWay()
	c.publish(0, 3)
	adaptertest.Eventually(t, "all are handled", func() bool { return src.Account().Acked == 3 })
	if n := src.State().Tally.Failures; n > 0 || calls.Load() != 3 {
		t.Errorf("%d failures, %d calls", n, calls.Load())
	}
	end(nil)
	consuming.Wait()
}

// Attempts of a message are counted over claims. A topic that was made anew has another message
// at its offset, whose attempts are its own. The spill keeps what tells the two apart.
func TestAttemptsOfATopicMadeAnew(t *testing.T) {
	t.Parallel()
	at := time.UnixMilli(1_700_000_000_123)
	first := &sarama.ConsumerMessage{Topic: "orders", Timestamp: at}
	head, body, err := (&claim{}).Spill(first)
	if err != nil {
		t.Fatal(err)
	}
	spilled, err := (&claim{}).Unspill(head, body)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		again *sarama.ConsumerMessage
		want  int // the number of its second attempt
	}{
		"again":        {&sarama.ConsumerMessage{Topic: "orders", Timestamp: at}, 4},
		"out of spill": {spilled, 4},
		"made anew":    {&sarama.ConsumerMessage{Topic: "orders", Timestamp: at.Add(time.Millisecond)}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := adaptertest.Guard(t, guard.Config{})
			policy := guard.Policy{Retry: guard.Retry{Base: time.Millisecond, Max: time.Millisecond, Attempts: 10}, NoBreaker: true}
			run := func(m *sarama.ConsumerMessage) (second int) {
				failed := make(chan int, 2)
				h := Wrap(g, func(ctx context.Context, _ *sarama.ConsumerMessage) error {
					if len(failed) == cap(failed) { // until the claim ends
						<-ctx.Done()
						return guard.Backoff(ctx.Err(), time.Time{})
					}
					failed <- guard.Attempt(ctx)
					return errDown
				}, WithConfig(testConfig()), WithPolicy(policy))
				s, end := setup(t, h)
				claim := newFakeClaim()
				claim.partition().messages <- m
				var consuming sync.WaitGroup
				consuming.Go(func() { _ = h.ConsumeClaim(s, claim) })
				src := adaptertest.Source(t, g, "orders/0")
				adaptertest.Eventually(t, "two failures", func() bool { return src.State().Tally.Failures == 2 })
				end(errors.New("group is rebalancing"))
				consuming.Wait()
				<-failed
				return <-failed
			}
			if n := run(first); n != 2 {
				t.Fatalf("the second attempt has number %d", n)
			}
			if n := run(c.again); n != c.want {
				t.Errorf("the second attempt has number %d, want %d", n, c.want)
			}
		})
	}
}
