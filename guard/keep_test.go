// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// hopeless is a port of messages that are only numbers.
type hopeless struct{}

func (hopeless) Lane(int) uint64                  { return 0 }
func (hopeless) Size(int) int                     { return 1 }
func (hopeless) Ack(int) error                    { return nil }
func (hopeless) Extend([]int)                     {}
func (hopeless) Return([]int, guard.Reason) error { return nil }
func (hopeless) Demand(int)                       {}
func (hopeless) Flush() error                     { return nil }
func (hopeless) Meta(m int) guard.Meta {
	return guard.Meta{
		Origin:     dlq.Origin{System: "test", MessageID: fmt.Sprint(m)},
		Properties: []dlq.Header{{Name: "content-type", Value: "text/plain"}},
	}
}

// Epochs that come and go, as in a rebalance storm, do not refill the budget,
// and an operator's pause outlives them.
func TestWhatOutlivesAnEpoch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, err := guard.New(guard.Config{Policy: guard.Policy{Budget: dlq.BudgetConfig{PermanentBalance: 3, FreeEvery: time.Hour}}})
		if err != nil {
			t.Fatal(err)
		}
		var letters atomic.Int64
		w := dlq.WriterFunc(func(_ context.Context, r *dlq.Record) error {
			letters.Add(1)
			if v, ok := dlq.LookupText(r.Properties, "content-type"); !ok || v != "text/plain" {
				t.Errorf("the broker's properties are lost: %v", r.Properties)
			}
			return nil
		})
		in := make(chan int, 100)
		epoch := func(between func(*guard.Source[int])) {
			src, err := guard.Open(g, guard.SourceConfig{Name: "orders", DeadLetters: w}, guard.Limits{EndsWithInput: true}, hopeless{},
				func(context.Context, int) error { return guard.Permanent(errors.New("no such order")) })
			if err != nil {
				t.Fatal(err)
			}
			done := make(chan struct{})
			go func() { defer close(done); _ = src.Run(context.Background(), in) }()
			time.Sleep(time.Second)
			between(src)
			src.End(context.Background(), guard.ReasonRebalance)
			<-done
		}
		for i := range 5 {
			in <- i
			epoch(func(*guard.Source[int]) {})
		}
		if letters := letters.Load(); letters != 3 {
			t.Errorf("%d dead letters of a balance of 3", letters)
		}
		epoch(func(s *guard.Source[int]) { s.GrantCredits(2); s.Pause(0) })
		in <- 5
		epoch(func(s *guard.Source[int]) {
			if st := s.State(); letters.Load() != 3 || len(st.Holds) == 0 || st.Holds[0].Reason != guard.ReasonOperator {
				t.Errorf("%d dead letters; not paused: %+v", letters.Load(), st.Holds)
			}
			s.Resume()
			time.Sleep(time.Second)
			if letters := letters.Load(); letters != 4 {
				t.Errorf("%d dead letters after a grant", letters)
			}
		})
		if _, err := g.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
}

// Time that a handler asked for is kept by the next epoch too; a Backoff of no
// time, by which an adapter says that no attempt was made, is nobody's wish.
func TestTimeAskedForOutlivesAnEpoch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, err := guard.New(guard.Config{Policy: guard.Policy{Ramp: guard.Ramp{Off: true}}})
		if err != nil {
			t.Fatal(err)
		}
		asked := time.Now().Add(3 * time.Minute)
		until, calls := asked, 0
		in := make(chan int, 10)
		epoch := func(lasts time.Duration) (first, last guard.State) {
			src, err := guard.Open(g, guard.SourceConfig{Name: "orders"}, guard.Limits{EndsWithInput: true}, hopeless{}, func(context.Context, int) error {
				calls++
				return guard.Backoff(errors.New("429 Too Many Requests"), until)
			})
			if err != nil {
				t.Fatal(err)
			}
			first = src.State()
			in <- 1
			done := make(chan struct{})
			go func() { defer close(done); _ = src.Run(t.Context(), in) }()
			time.Sleep(lasts)
			synctest.Wait()
			last = src.State()
			src.End(t.Context(), guard.ReasonBackpressure)
			<-done
			return first, last
		}
		epoch(30 * time.Second)
		for range 3 {
			before := time.Until(asked)
			st, _ := epoch(30 * time.Second)
			if len(st.Holds) != 1 || st.Holds[0].Reason != guard.ReasonBackpressure || st.Holds[0].Until != before || st.Holds[0].Detail != "asked for time: 429 Too Many Requests" {
				t.Errorf("with %s to go: %+v", before, st.Holds)
			}
		}
		if calls != 1 {
			t.Errorf("%d calls in the time that was asked for", calls)
		}
		until = time.Time{}
		if _, st := epoch(time.Minute + 10*time.Millisecond); calls < 2 || len(st.Holds) == 0 {
			t.Errorf("%d calls after it; %+v", calls, st.Holds)
		}
		if st, _ := epoch(time.Second); len(st.Holds) != 0 {
			t.Errorf("a Backoff of no time was kept: %+v", st.Holds)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}
