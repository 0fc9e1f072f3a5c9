// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package scope

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// Position is a point in a scope's history. Gen counts how often the fleet has closed the scope,
// Round the open periods since. Positions are ordered, Gen first. The fleet's position only rises,
// so that nothing from before a close can reopen the scope.
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

// State is the fleet's decision about a scope. The zero State is closed. It is the state of a scope
// about which no process has ever said anything.
type State struct {
	Position

	// The fields of an open period; zero if closed.
	BackoffLevel int
	OpenFor      time.Duration // counted from when a process hears of the period
	Cause        breaker.Cause
}

// compare orders states. Two processes may decide the same step at once, each from the votes that
// it has heard: then the longer period holds.
func (s State) compare(t State) int {
	return cmp.Or(s.Position.Compare(t.Position), cmp.Compare(s.BackoffLevel, t.BackoffLevel),
		cmp.Compare(s.OpenFor, t.OpenFor), cmp.Compare(s.Cause, t.Cause))
}

// Join returns the later of two states. It is commutative, associative and idempotent, so decisions
// may arrive in any order and any number of times.
func (s State) Join(t State) State {
	if s.compare(t) < 0 {
		return t
	}
	return s
}

// Phase is what a process says about a scope.
type Phase uint8

const (
	// PhaseClosed means that nothing is wrong.
	PhaseClosed Phase = iota
	// PhaseOpen means that the process's own breaker tripped. While the fleet is closed at Gen, it
	// is a vote to open.
	PhaseOpen
	// PhaseInherited means that the trouble was taken over from an owner in PhaseOpen and not yet
	// seen here. It also means a trip that may be due to the process's own path. It is no vote.
	PhaseInherited
	// PhaseWaiting means that the scope is held with the fleet.
	PhaseWaiting
	// PhaseProbing means that a probe of the process is out, in Round.
	PhaseProbing
	// PhasePassed means that one or more probes of the process succeeded in Round: a vote to close.
	PhasePassed
	// PhaseSeconded means that the process has nothing to probe with. Once the processes that have
	// are through, it seconds their success in Round: a vote to close.
	PhaseSeconded

	// Phases is the number of phases.
	Phases
)

var phaseNames = [...]string{"closed", "open", "inherited", "waiting", "probing", "passed", "seconded"}

func (p Phase) String() string {
	if p < Phases {
		return phaseNames[p]
	}
	return fmt.Sprintf("phase(%d)", uint8(p))
}

// Vote is what one process says about one scope. Only that process writes it. Of two votes of one
// process, the one of the later incarnation holds, then the one of the higher Version.
type Vote struct {
	Scope   string
	Node    crdt.Replica
	Version uint64 // counts the changes of all votes of Node

	// Term counts the owners that took the scope over one after another. Of the owners that have
	// gone, the one with the highest Term knows best.
	Term uint64

	Phase Phase
	At    Position // the position that Phase is about; for PhaseOpen only its Gen
	Wants bool     // in At.Gen: the process has something to probe with
	Gone  bool     // the process gave the scope up

	Passes uint32 // in At.Round: number of probes that succeeded
	Failed uint32 // in At.Gen: the last round that a failed probe of the process ended; 0 is none

	// The state of the process's own breaker, in PhaseOpen and PhaseInherited.
	BackoffLevel int
	OpenFor      time.Duration
	Cause        breaker.Cause
}

// Later reports whether v is a later vote of the same process than w.
func (v *Vote) Later(w *Vote) bool {
	return cmp.Or(cmp.Compare(v.Node.Incarnation, w.Node.Incarnation), cmp.Compare(v.Version, w.Version)) > 0
}

// Troubled reports whether v still says that something is wrong, after the fleet's last close.
func (v *Vote) Troubled(gen uint64) bool { return v.Phase != PhaseClosed && v.At.Gen >= gen }

// Decide returns the state that the fleet reaches by votes, from the state that is known. names is
// the roster. vote returns the vote of a name that counts, or nil. A vote whose process cannot take
// it back any more must not count; it would be half a quorum without end. Decide is a pure
// function, and the order of names does not matter.
//
//   - Closed at a generation, the scope opens when [Need] of the roster vote to open. The level is
//     the Need-th highest of theirs: a few processes with a long trouble of their own do not make
//     the fleet's first period long.
//   - Open in a round, the scope closes when Need of the roster passed or seconded, with Successes
//     probes between them.
//
// A failed probe is the third step. It takes one process; see [After].
func Decide(c breaker.FleetConfig, names []string, known State, vote func(name string) *Vote) State {
	need := Need(c.Quorum, len(names))
	var open []*Vote
	voices, passes := 0, 0
	for _, n := range names {
		v := vote(n)
		switch {
		case v == nil || v.Gone:
		case !known.Open() && v.Phase == PhaseOpen && v.At.Gen == known.Gen:
			open = append(open, v)
		case known.Open() && v.At == known.Position:
			passes += int(v.Passes)
			if v.Passes > 0 || v.Phase == PhasePassed || v.Phase == PhaseSeconded { // or probing again, having passed before
				voices++
			}
		}
	}
	switch {
	case len(open) >= need:
		slices.SortFunc(open, func(v, w *Vote) int {
			return cmp.Or(cmp.Compare(w.BackoffLevel, v.BackoffLevel), cmp.Compare(v.Cause, w.Cause), cmp.Compare(v.Node.Name, w.Node.Name))
		})
		v := open[need-1]
		level := max(v.BackoffLevel, 1)
		return State{Position{known.Gen, 1}, level, Period(c, level), v.Cause}
	case voices >= need && passes >= c.Successes:
		return State{Position: Position{Gen: known.Gen + 1}}
	}
	return known
}

// After returns the state that follows a failed probe in s. The backoff level rises. If others had
// passed in the same round, it steps down instead: then a part of the fleet is broken, not the
// dependency, and the next round comes soon to find the other broken processes.
func After(c breaker.FleetConfig, s State, mixed bool, cause breaker.Cause) State {
	level := min(s.BackoffLevel+1, top(c))
	if mixed {
		level = max(s.BackoffLevel-1, 1)
	}
	return State{Position{s.Gen, s.Round + 1}, level, Period(c, level), cause}
}

// Period returns how long an open period at a level lasts. The first level is 1.
func Period(c breaker.FleetConfig, level int) time.Duration {
	return breaker.Config{Base: c.Base, Cap: c.Cap}.Period(level)
}

// top returns the first level whose period is Cap.
func top(c breaker.FleetConfig) int {
	n := 1
	for Period(c, n) < c.Cap {
		n++
	}
	return n
}

// Need returns how many of a roster of n make a quorum: max(2, ceil(share·n)), and 1 of one.
func Need(share float64, n int) int {
	if n <= 1 {
		return 1
	}
	// Ten percent of thirty is three, in spite of the rounding of floats.
	return min(n, max(2, int(math.Ceil(share*float64(n)-1e-9))))
}
