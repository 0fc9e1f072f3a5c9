// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"fmt"
	"math"
	"testing"
	"time"
)

// A hold within a drain, an operator's, a breaker's or one that a handler asked for,
// takes nothing of the ramp: what is left drains from its start, however long the hold was.
func TestHoldWithinADrain(t *testing.T) {
	for _, by := range []string{"pause", "backoff", "breaker"} {
		for _, lasts := range []time.Duration{3 * time.Second, 30 * time.Second} {
			t.Run(fmt.Sprint(by, lasts), func(t *testing.T) {
				const n = 10_000
				s := newSim(t, Policy{Window: n})
				ask := false
				handler := func(int) (time.Duration, error) {
					if ask {
						ask = false
						return 0, Backoff(errDown, s.origin.Add(s.now+lasts))
					}
					return 0, nil
				}
				second := func() int {
					before := len(s.handled)
					s.run(s.now+time.Second, handler, nil)
					return len(s.handled) - before
				}
				want := s.policy.Ramp.Start / math.Ln2
				follows := func(got int) {
					t.Helper()
					if math.Abs(float64(got)-want) > 0.1*want {
						t.Errorf("%d admitted in the first second, the formula says %.0f", got, want)
					}
				}
				s.paused = true
				s.run(s.now+time.Second, handler, counter(n, 0))
				s.paused = false
				follows(second())
				switch by {
				case "pause":
					s.paused = true
					s.run(s.now+lasts, handler, nil)
					s.paused = false
				case "breaker":
					s.gate.Force(s.now, 0, causeOperator)
					s.run(s.now+lasts, handler, nil)
					s.gate.ForceClosed(s.now, causeOperator)
				default:
					ask = true
					for s.asked == 0 {
						s.run(s.now+time.Millisecond, handler, nil)
					}
					s.run(s.asked, handler, nil)
				}
				follows(second())
				inOrder(t, s.handled, one)
				if s.tally.Diverted != n {
					t.Errorf("%d diverted of %d", s.tally.Diverted, n)
				}
			})
		}
	}
}

// A Backoff of no time, by which adapters say that no attempt was made, only delays a
// drain: many of them do not keep it at the ramp's start.
func TestBackoffOfNoTimeInADrain(t *testing.T) {
	const n, lasts = 10_000, 4 * time.Second
	s := newSim(t, Policy{Window: n})
	asked := make(map[int]bool)
	handler := func(m int) (time.Duration, error) {
		if m%50 == 0 && !asked[m] {
			asked[m] = true
			return 0, Backoff(errDown, time.Time{})
		}
		return 0, nil
	}
	s.paused = true
	s.run(s.now+time.Second, handler, counter(n, 0))
	s.paused = false
	s.run(s.now+lasts, handler, nil)
	want := s.policy.Ramp.Start / math.Ln2 * (math.Exp2(lasts.Seconds()) - 1)
	if got := float64(len(s.handled)); math.Abs(got-want) > 0.2*want || len(asked) < 20 {
		t.Errorf("%.0f admitted in %v, the formula says %.0f; %d asked", got, lasts, want, len(asked))
	}
}

// Where the machine sees every message a hold ends with its last one, as it does on
// the closed path: what comes an hour later is not held.
func TestHoldEndsWithItsMessages(t *testing.T) {
	handler := func(context.Context, int) error { return nil }
	free := &strict{}
	free.open.Store(true)
	for name, c := range map[string]struct {
		policy  Policy
		limiter Limiter
		handler func(context.Context, int) error
	}{
		"one worker": {handler: handler},
		"workers":    {policy: Policy{Order: OrderKey, Workers: 4}, handler: handler},
		"limiter":    {limiter: free, handler: handler},
		"passive":    {},
	} {
		bubble(t, name, func(t *testing.T) {
			g, err := New(Config{Policy: c.policy})
			if err != nil {
				t.Fatal(err)
			}
			s, err := Open(g, SourceConfig{Name: "s", Limiter: c.limiter}, Limits{}, &testPort{keys: 8}, c.handler)
			if err != nil {
				t.Fatal(err)
			}
			over := make(chan struct{})
			go func() {
				defer close(over)
				if c.handler != nil {
					_ = s.Run(t.Context(), nil)
					return
				}
				for item := range s.Ready() {
					s.Done(item.Token, nil)
				}
			}()
			offer := func(from, to int) {
				for m := from; m < to; m++ {
					if err := s.Offer(m); err != nil {
						t.Error(err)
					}
				}
			}
			s.Pause(0)
			offer(0, 20)
			time.Sleep(time.Second)
			s.Resume()
			time.Sleep(time.Second)
			if a := s.Account(); a.Acked != 20 || len(s.State().Holds) > 0 {
				t.Errorf("drained: %+v, %+v", a, s.State().Holds)
			}
			before := s.State().Tally.Diverted
			time.Sleep(time.Hour)
			offer(20, 70)
			time.Sleep(20 * time.Millisecond)
			if st := s.State(); st.Account.Acked != 70 || st.Tally.Diverted != before || before == 0 {
				t.Errorf("an hour later: %+v, %d diverted, %d before", st.Account, st.Tally.Diverted, before)
			}
			if _, err := g.Close(t.Context()); err != nil {
				t.Error(err)
			}
			<-over
		})
	}
}

// A message that finds its source holding is counted once, whoever is the first to
// notice: the message that comes, or the one that is refused.
func TestDivertedOnce(t *testing.T) {
	for name, shut := range map[string]func(*sim){
		"breaker": func(s *sim) { s.gate.Force(s.now, time.Second, causeOperator) },
		"pause":   func(s *sim) { s.paused = true },
		"asked":   func(s *sim) { s.asked = s.now + time.Second },
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t, Policy{})
			diverted := func(want uint64) {
				t.Helper()
				if got, seen := s.tally.Diverted, s.storm.Storm().Diverted; got != want || seen != want {
					t.Errorf("%d diverted, the detector has %d, want %d", got, seen, want)
				}
			}
			put := func(m int) {
				s.put(s.now, m, 0, 1)
				s.next(s.now)
			}
			s.put(s.now, 0, 0, 1)
			s.put(s.now, 1, 0, 1)
			diverted(0)
			shut(s)
			put(2)
			diverted(3)
			put(3)
			diverted(4)

			s = newSim(t, Policy{})
			s.put(s.now, 0, 0, 1)
			shut(s)
			s.next(s.now) // refused, and nothing has come
			diverted(1)
		})
	}
	t.Run("limiter", func(t *testing.T) {
		s := newSim(t, Policy{})
		s.limiter = &strict{wait: time.Minute}
		s.put(s.now, 0, 0, 1)
		s.gate.Force(s.now, time.Second, causeOperator)
		s.now += time.Second
		s.next(s.now) // the probe is refused by the limiter, which holds nothing
		if s.tally.Diverted != 0 {
			t.Errorf("%d diverted by a pace", s.tally.Diverted)
		}
		s.next(s.now) // the breaker is not asked again
		if s.tally.Diverted != 1 || !s.held {
			t.Errorf("%d diverted, held %v", s.tally.Diverted, s.held)
		}
	})
}
