// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/crdt"
)

// Position is how far a scope's history is: Gen counts how often the fleet has
// closed it, Round the open periods since. It is ordered, Gen first. The fleet
// only goes up, so that nothing from before a close can reopen.
type Position struct {
	Gen   uint64
	Round uint32 // 0: closed
}

// Open reports whether the fleet holds the scope open.
func (p Position) Open() bool { return p.Round > 0 }

// Compare orders positions.
func (p Position) Compare(q Position) int {
	return cmp.Or(cmp.Compare(p.Gen, q.Gen), cmp.Compare(p.Round, q.Round))
}

func (p Position) String() string {
	if !p.Open() {
		return fmt.Sprintf("closed %d", p.Gen)
	}
	return fmt.Sprintf("open %d.%d", p.Gen, p.Round)
}

// State is what the fleet decided about a scope. The zero State is closed, and
// what a scope that nobody ever spoke of is in.
type State struct {
	Position

	// Of an open period; zero if closed.
	Rung    int
	OpenFor time.Duration // from when a process hears of it
	Cause   breaker.Cause
}

// compare orders states. Two processes may decide the same step at once, each
// from what it has heard: the longer period holds.
func (s State) compare(t State) int {
	return cmp.Or(s.Position.Compare(t.Position), cmp.Compare(s.Rung, t.Rung),
		cmp.Compare(s.OpenFor, t.OpenFor), cmp.Compare(s.Cause, t.Cause))
}

// Join is the later of two states. It is commutative, associative and
// idempotent, so decisions may arrive in any order and any number of times.
func (s State) Join(t State) State {
	if s.compare(t) < 0 {
		return t
	}
	return s
}

// Phase is what a process says about a scope.
type Phase uint8

const (
	// PhaseClosed is nothing wrong.
	PhaseClosed Phase = iota
	// PhaseOpen is tripped by its own verdict: while the fleet is closed at Gen,
	// a vote to open.
	PhaseOpen
	// PhaseInherited is taken over from another that was in PhaseOpen, and not yet
	// seen for itself. No vote.
	PhaseInherited
	// PhaseWaiting is held with the fleet.
	PhaseWaiting
	// PhaseProbing is a probe that is out, in Round.
	PhaseProbing
	// PhasePassed is a probe, or several, that succeeded in Round: a vote to
	// close.
	PhasePassed
	// PhaseSeconded is a process that has nothing to probe with and, once those
	// that have are through, seconds their success in Round: a vote to close.
	PhaseSeconded

	phases
)

var phaseNames = [...]string{"closed", "open", "inherited", "waiting", "probing", "passed", "seconded"}

func (p Phase) String() string {
	if p < phases {
		return phaseNames[p]
	}
	return fmt.Sprintf("phase(%d)", uint8(p))
}

// Vote is what one process says about one scope. Only that process writes it;
// of two the one of the later life, and then of the higher Version, holds.
type Vote struct {
	Scope   string
	Node    crdt.Replica
	Version uint64 // counts the changes of all votes of Node

	// Term counts the owners that took the scope over one after another. Of those
	// that have gone, the highest knows best.
	Term uint64

	Phase Phase
	At    Position // what Phase is about; only Gen for PhaseOpen
	Wants bool     // in At.Gen: has something to probe with
	Gone  bool     // gave the scope up

	Passes uint32 // in At.Round: probes that succeeded
	Failed uint32 // in At.Gen: the last round that a probe of its ended; 0 is none

	// Of the process's own breaker, in PhaseOpen and PhaseInherited.
	Rung    int
	OpenFor time.Duration
	Cause   breaker.Cause
}

// later reports whether v is a later word of the same process than w.
func (v *Vote) later(w *Vote) bool {
	return cmp.Or(cmp.Compare(v.Node.Incarnation, w.Node.Incarnation), cmp.Compare(v.Version, w.Version)) > 0
}

// Troubled reports whether v still says, after the fleet's last close, that
// something is wrong.
func (v *Vote) Troubled(gen uint64) bool { return v.Phase != PhaseClosed && v.At.Gen >= gen }

// Decide is what the fleet makes of votes, from the state that it is known to
// be in. It is a pure function: of votes by one process the latest counts, of
// votes by processes that the roster does not name none, and their order does
// not matter. The caller leaves out the votes of processes that are not heard,
// or a vote that was never taken back would be half a quorum for ever.
//
//   - Closed at a generation, the scope opens when [Need] of the roster vote
//     so. The rung is the Need-th highest among theirs: a few processes with
//     a long trouble of their own do not make the fleet's first period long.
//   - Open in a round, the scope closes when Need of the roster passed or
//     seconded, with Successes probes between them.
//
// A failed probe is the third step. It takes one process, which says so as a
// state of its own, and Join takes that in.
func Decide(c Config, r Roster, known State, votes []Vote) State {
	c = c.WithDefaults()
	latest := make(map[string]*Vote, len(votes))
	for i := range votes {
		v := &votes[i]
		if w := latest[v.Node.Name]; w == nil || v.later(w) {
			latest[v.Node.Name] = v
		}
	}
	t := tally{cfg: c, need: Need(c.Quorum, len(r.Names)), known: known}
	for _, n := range r.Names {
		if v := latest[n]; v != nil {
			t.add(v)
		}
	}
	return t.result()
}

// tally counts votes of different processes of the roster.
type tally struct {
	cfg    Config
	need   int
	known  State
	open   []*Vote
	voices int
	passes int
}

func (t *tally) add(v *Vote) {
	switch {
	case v.Gone:
	case v.Phase == PhaseOpen && !t.known.Open() && v.At.Gen == t.known.Gen:
		t.open = append(t.open, v)
	case (v.Phase == PhasePassed || v.Phase == PhaseSeconded) && v.At == t.known.Position:
		t.voices++
		t.passes += int(v.Passes)
	case v.At == t.known.Position: // probing again, having passed before
		t.passes += int(v.Passes)
		if v.Passes > 0 {
			t.voices++
		}
	}
}

func (t *tally) result() State {
	switch {
	case len(t.open) >= t.need:
		slices.SortFunc(t.open, func(v, w *Vote) int {
			return cmp.Or(cmp.Compare(w.Rung, v.Rung), cmp.Compare(v.Cause, w.Cause), cmp.Compare(v.Node.Name, w.Node.Name))
		})
		v := t.open[t.need-1]
		rung := max(v.Rung, 1)
		return State{Position{t.known.Gen, 1}, rung, t.cfg.Period(rung), v.Cause}
	case t.known.Open() && t.voices >= t.need && t.passes >= t.cfg.Successes:
		return State{Position: Position{Gen: t.known.Gen + 1}}
	}
	return t.known
}

// After is the state that a failed probe makes of s, with c's defaults filled in. The ladder climbs. Only
// where others had passed in the same round does it step down: then a part of
// the fleet is broken and not the dependency, and the next round comes soon to
// find who else.
func (c Config) After(s State, mixed bool, cause breaker.Cause) State {
	rung := min(s.Rung+1, c.top())
	if mixed {
		rung = max(s.Rung-1, 1)
	}
	return State{Position{s.Gen, s.Round + 1}, rung, c.Period(rung), cause}
}
