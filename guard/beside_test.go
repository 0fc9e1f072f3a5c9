// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"testing"

	"github.com/stormguard-mq/stormguard/internal/credit"
)

// What succeeded in a parent before an epoch of its parked messages earns that epoch
// nothing, and is no success since a guess; what succeeds from then on is both.
func TestSuccessesOfAParentBeginWithTheEpoch(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		handle := func(context.Context, int) error { return nil }
		parent, err := Open(g, SourceConfig{Name: "s", DeadLetters: &testWriter{}}, Limits{}, &testPort{}, handle)
		if err != nil {
			t.Fatal(err)
		}
		beside := &parent.c.successes
		beside.Store(1000)
		open := func() *Source[int] {
			s, err := OpenParked(parent, "s/retry", Port[int](&testPort{}), handle)
			if err != nil {
				t.Fatal(err)
			}
			return s
		}
		s := open()
		s.mu.Lock()
		s.c.earn()
		for range 20 {
			if !s.c.budget.Spend(0, credit.Exhausted) {
				t.Error("no credit")
			}
		}
		s.c.guesses, s.c.guessedAt = 3, g.now()
		s.mu.Unlock()
		for _, c := range []struct {
			more    uint64
			balance float64
			may     bool
		}{{0, 0, false}, {0, 0, false}, {10, 1, true}} {
			s.End(t.Context(), ReasonRebalance)
			s = open()
			beside.Add(c.more)
			s.mu.Lock()
			s.c.earn()
			if got, may := s.c.budget.Balance(credit.Exhausted), s.c.guesses == 0 || s.c.life() > s.c.lifeAtGuess; got != c.balance || may != c.may {
				t.Errorf("after %d more: balance %v, may guess %v", c.more, got, may)
			}
			s.mu.Unlock()
		}
		beside.Store(0) // it must not fall; if it does, nothing is earned
		s.mu.Lock()
		if s.c.earn(); s.c.budget.Balance(credit.Exhausted) != 1 {
			t.Errorf("a counter that fell: %v", s.c.budget.Balance(credit.Exhausted))
		}
		s.mu.Unlock()
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}
