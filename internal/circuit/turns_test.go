// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"fmt"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

// shutLeaves are leaves of one parent that have all tripped, and their parent with them.
func shutLeaves(t *testing.T, n int) (*Scopes, []*Leaf) {
	t.Helper()
	s, err := NewScopes(ScopesConfig{})
	if err != nil {
		t.Fatal(err)
	}
	var leaves []*Leaf
	for i := range n {
		l, err := s.Leaf("g", fmt.Sprint(i))
		if err != nil {
			t.Fatal(err)
		}
		leaves = append(leaves, l)
	}
	for _, l := range leaves {
		l.Trip(0, breaker.CauseRun)
	}
	if !s.Parents()[0].Open {
		t.Fatal("the parent is not open")
	}
	return s, leaves
}

// Under an open parent the leaves take turns: together they probe at the pace of one
// breaker, and each when it has waited for long, each as often as another, and keep the parent open. The first success lets
// all of them probe at once.
func TestLeavesTakeTurns(t *testing.T) {
	if raceEnabled {
		t.Skip("it has one goroutine: the run without the race detector has it")
	}
	const n, step, outage = 50, 10 * time.Millisecond, 10 * time.Minute
	s, leaves := shutLeaves(t, n)
	probes, alone := make([]int, n), 0
	backoff := s.Config().Breaker
	for open := time.Duration(0); open < outage; alone++ {
		open += backoff.PeriodAfter(alone+1, open)
	}
	last, longest := time.Duration(0), time.Duration(0)
	now := time.Duration(0)
	total := 0
	for ; now < outage; now += step {
		s.Tick(now)
		for i, l := range leaves {
			token, r := l.Admit(now, uint64(i+1))
			if !r.OK() {
				if r.Until <= now {
					t.Fatalf("leaf %d is told to ask at %s, now is %s", i, r.Until, now)
				}
				continue
			}
			probes[i]++
			total++
			longest, last = max(longest, now-last-now/10), now
			l.Failure(now, token, false)
		}
		if !s.Parents()[0].Open {
			t.Fatalf("the parent closed after %s", now)
		}
	}
	most := alone + 10 + n*int(outage/(turnCaps*backoff.Cap)) // none waits longer
	if total > most || longest > time.Second {
		t.Errorf("%d probes, one breaker makes %d; %s more than a tenth between two", total, alone, longest)
	}
	for i, k := range probes {
		if k < total/n-1 || k > total/n+1 {
			t.Errorf("leaf %d had %d of %d probes", i, k, total)
		}
	}
	// The dependency is back.
	for back := now; now < back+outage/10; now += step {
		for i, l := range leaves {
			token, r := l.Admit(now, uint64(i+1))
			if !r.OK() || !token.Probe() {
				continue
			}
			l.Success(now, token)
			for k, other := range leaves {
				if _, r := other.Admit(now, uint64(k+1)); !r.OK() && r.Cause == breaker.CauseQuorum {
					t.Errorf("leaf %d still waits for its turn", k)
				}
			}
			return
		}
	}
	t.Error("no probe")
}

// A probe that says nothing costs no turn, and one that fails after a success makes the
// others wait again.
func TestTurnsThatSayNothing(t *testing.T) {
	s, leaves := shutLeaves(t, 3)
	now := s.Config().Breaker.Base * 2
	token, r := leaves[0].Admit(now, 1)
	if !r.OK() {
		t.Fatalf("refused: %+v", r)
	}
	if _, r := leaves[1].Admit(now, 2); r.OK() {
		t.Error("two turns at once")
	}
	leaves[0].Exclude(now, token)
	token, r = leaves[1].Admit(now, 2)
	if !r.OK() {
		t.Fatalf("the turn is lost: %+v", r)
	}
	leaves[1].Success(now, token)
	token, r = leaves[2].Admit(now, 3)
	if !r.OK() {
		t.Fatalf("after a success: %+v", r)
	}
	leaves[2].Failure(now, token, false)
	now += time.Second
	first, r := leaves[2].Admit(now, 3)
	if !r.OK() {
		t.Fatalf("its turn: %+v", r)
	}
	leaves[2].Failure(now, first, false)
	if !leaves[2].near.paced.Load() {
		t.Error("a failure does not make the others wait")
	}
}

// One of many leaves that are down is back by itself. It is asked within four Caps of its
// own deadline, however many others wait for their turns.
func TestALeafDoesNotWaitForAll(t *testing.T) {
	if raceEnabled {
		t.Skip("it has one goroutine: the run without the race detector has it")
	}
	for _, n := range []int{4, 20, 100} {
		s, leaves := shutLeaves(t, n)
		const outage = 20 * time.Minute // periods are as long as they become
		back := time.Duration(0)
		until := make([]time.Duration, n)
		for now := time.Duration(0); now < 2*outage && back == 0; now += 10 * time.Millisecond {
			if now%(250*time.Millisecond) == 0 {
				s.Tick(now)
			}
			for i, l := range leaves {
				if now < until[i] {
					continue
				}
				tok, r := l.Admit(now, uint64(i+1))
				switch {
				case !r.OK():
					until[i] = now + 50*time.Millisecond
				case tok.Probe() && i == n/2 && now > outage:
					back = now - outage
				case tok.Probe():
					l.Failure(now, tok, false)
				}
			}
		}
		if longest := (turnCaps+1)*leaves[0].cfg.Cap + time.Second; back == 0 || back > longest {
			t.Errorf("%d leaves: the one that is back is asked after %s, more than %s", n, back, longest)
		}
	}
}
