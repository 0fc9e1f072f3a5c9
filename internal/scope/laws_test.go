// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package scope

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// latest is what a substrate does: of votes by one process the latest counts.
func latest(votes []Vote) func(name string) *Vote {
	return func(name string) (v *Vote) {
		for i := range votes {
			if w := &votes[i]; w.Node.Name == name && (v == nil || w.Later(v)) {
				v = w
			}
		}
		return v
	}
}

// drawVotes draws votes about "orders" by some of the roster and by strangers,
// several versions each.
func drawVotes(t *rapid.T, names []string) []Vote {
	votes := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) Vote {
		return Vote{
			Scope:        "orders",
			Node:         crdt.Replica{Name: rapid.SampledFrom(names).Draw(t, "node"), Incarnation: rapid.Uint64Range(1, 2).Draw(t, "incarnation")},
			Phase:        Phase(rapid.IntRange(0, int(Phases)-1).Draw(t, "phase")),
			At:           Position{rapid.Uint64Range(0, 2).Draw(t, "gen"), rapid.Uint32Range(0, 2).Draw(t, "round")},
			Gone:         rapid.IntRange(0, 5).Draw(t, "gone") == 0,
			Passes:       rapid.Uint32Range(0, 3).Draw(t, "passes"),
			BackoffLevel: rapid.IntRange(0, 4).Draw(t, "level"),
			Cause:        rapid.SampledFrom([]breaker.Cause{"", "rate", "run"}).Draw(t, "cause"),
		}
	}), 0, 12).Draw(t, "votes")
	for i := range votes {
		votes[i].Version = uint64(i + 1) // never twice
	}
	return votes
}

func drawState(t *rapid.T, name string) State {
	s := State{Position: Position{rapid.Uint64Range(0, 3).Draw(t, name+" gen"), rapid.Uint32Range(0, 2).Draw(t, name+" round")}}
	if s.Open() {
		s.BackoffLevel = rapid.IntRange(1, 4).Draw(t, name+" level")
		s.OpenFor = Period(breaker.FleetConfig{}.WithDefaults(), s.BackoffLevel)
		s.Cause = rapid.SampledFrom([]breaker.Cause{"", "rate"}).Draw(t, name+" cause")
	}
	return s
}

func TestJoinLaws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b, c := drawState(t, "a"), drawState(t, "b"), drawState(t, "c")
		switch {
		case a.Join(b) != b.Join(a):
			t.Fatal("not commutative")
		case a.Join(b.Join(c)) != a.Join(b).Join(c):
			t.Fatal("not associative")
		case a.Join(a) != a:
			t.Fatal("not idempotent")
		case a.Join(b).Compare(a.Position) < 0:
			t.Fatal("goes back")
		}
	})
}

// Decide counts a set: neither order nor repetition of votes or names matters,
// and it never goes back.
func TestDecideLaws(t *testing.T) {
	names := []string{"a", "b", "c", "d", "e"}
	rapid.Check(t, func(t *rapid.T) {
		cfg := breaker.FleetConfig{Quorum: rapid.SampledFrom([]float64{0.1, 0.5, 1}).Draw(t, "quorum"), Successes: rapid.IntRange(1, 4).Draw(t, "successes")}.WithDefaults()
		roster := names[:rapid.IntRange(1, 4).Draw(t, "roster")]
		known, votes := drawState(t, "known"), drawVotes(t, names)
		got := Decide(cfg, roster, known, latest(votes))
		again := append(rapid.Permutation(votes).Draw(t, "order"), votes...)
		turned := rapid.Permutation(roster).Draw(t, "names")
		if other := Decide(cfg, turned, known, latest(again)); other != got {
			t.Fatalf("%v and %v", got, other)
		}
		if got.Compare(known.Position) < 0 {
			t.Fatalf("from %v back to %v", known, got)
		}
		if got == known {
			return
		}
		// The step is one, and enough processes of the roster asked for it.
		voices := make(map[string]bool)
		for _, n := range roster {
			v := latest(votes)(n)
			switch {
			case v == nil || v.Gone:
			case known.Open() && v.At == known.Position && (v.Passes > 0 || v.Phase == PhasePassed || v.Phase == PhaseSeconded),
				!known.Open() && v.At.Gen == known.Gen && v.Phase == PhaseOpen:
				voices[n] = true
			}
		}
		want := Position{known.Gen, 1}
		if known.Open() {
			want = Position{known.Gen + 1, 0}
		}
		if got.Position != want || len(voices) < Need(cfg.Quorum, len(roster)) {
			t.Fatalf("from %v to %v by %d voices", known, got, len(voices))
		}
	})
}

func TestNeed(t *testing.T) {
	for _, c := range []struct {
		share   float64
		n, want int
	}{{0.5, 1, 1}, {0.5, 2, 2}, {0.5, 3, 2}, {0.5, 4, 2}, {0.5, 5, 3}, {0.5, 50, 25}, {0.1, 50, 5}, {0.1, 30, 3}, {0.1, 3, 2}, {1, 7, 7}, {0.51, 50, 26}} {
		if got := Need(c.share, c.n); got != c.want {
			t.Errorf("Need(%v, %d) = %d, want %d", c.share, c.n, got, c.want)
		}
	}
}

// The level of a first period is the Need-th highest: one process with a long
// trouble of its own does not decide how long all wait.
func TestDecideLevel(t *testing.T) {
	var votes []Vote
	for i, level := range []int{9, 2, 3, 1} {
		votes = append(votes, Vote{Scope: "s", Node: crdt.Replica{Name: fmt.Sprint(i)}, Version: 1, Phase: PhaseOpen, BackoffLevel: level, Cause: "run"})
	}
	c, roster := breaker.FleetConfig{}.WithDefaults(), []string{"0", "1", "2", "3", "4", "5"}
	got := Decide(c, roster, State{}, latest(votes))
	if want := (State{Position{0, 1}, 2, 200 * time.Millisecond, "run"}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	votes[0].Gone, votes[1].Gone = true, true
	if got := Decide(c, roster, State{}, latest(votes)); got.Open() {
		t.Errorf("by two who gave the scope up, and two: %+v", got)
	}
}

// A round that fails raises the backoff level; one in which others passed steps down.
func TestBackoff(t *testing.T) {
	c := breaker.FleetConfig{}.WithDefaults()
	s := State{Position{2, 4}, 5, Period(c, 5), "run"}
	if got, want := After(c, s, false, "probe"), (State{Position{2, 5}, 6, 3200 * time.Millisecond, "probe"}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if got, want := After(c, s, true, "probe"), (State{Position{2, 5}, 4, 800 * time.Millisecond, "probe"}); got != want {
		t.Errorf("mixed: %+v, want %+v", got, want)
	}
	s.BackoffLevel = top(c)
	if got := After(c, s, false, ""); got.BackoffLevel != top(c) || got.OpenFor != c.Cap {
		t.Errorf("at the top: %+v", got)
	}
}
