// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"maps"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/circuit"
	"github.com/stormguard-mq/stormguard/internal/scope"
)

// What the tests call by shorter names.
type (
	Position = scope.Position
	State    = scope.State
	Phase    = scope.Phase
	Vote     = scope.Vote
	Action   = scope.Action
)

const (
	Hold         = scope.Hold
	HalfOpen     = scope.HalfOpen
	Probe        = scope.Probe
	CauseUnknown = scope.CauseUnknown

	PhaseClosed     = scope.PhaseClosed
	PhaseOpen       = scope.PhaseOpen
	PhaseInherited  = scope.PhaseInherited
	PhaseWaiting    = scope.PhaseWaiting
	PhasePassed     = scope.PhasePassed
	PhaseSeconded   = scope.PhaseSeconded
	phases          = scope.Phases
	maxBackoffLevel = scope.MaxBackoffLevel
	maxCause        = scope.MaxCause
)

func (v *Verdicts) Adopt(now time.Duration, name string) (Action, error) { return v.m.Adopt(now, name) }
func (v *Verdicts) Leave(now time.Duration, name string)                 { v.m.Leave(now, name) }
func (v *Verdicts) Want(now time.Duration, name string, wants bool)      { v.m.Want(now, name, wants) }
func (v *Verdicts) Tick(now time.Duration)                               { v.m.Tick(now) }
func (v *Verdicts) Actions(dst []Action) []Action                        { return v.m.Actions(dst) }
func (v *Verdicts) Describe(now time.Duration, name string) breaker.FleetScope {
	return v.m.Describe(now, name)
}

func (v *Verdicts) Observe(now time.Duration, name string, s breaker.Snapshot) {
	v.m.Observe(now, name, circuit.Snapshot{Snapshot: s})
}

// book is what is known of a scope; nil if nothing is.
func (v *Verdicts) book(name string) *book {
	if sc := v.m.Get(name); sc != nil {
		return bookOf(sc)
	}
	return nil
}

// Status is what one process knows about the fleet and about one scope.
type Status struct {
	State
	Left      time.Duration // of the open period
	Connected bool
	Heard     int
	Need      int
	Votes     []Vote
	Refused   uint64
	Probing   bool
}

func (v *Verdicts) Status(now time.Duration, name string) Status {
	refused := v.Refused()
	v.m.Lock()
	defer v.m.Unlock()
	s := Status{Connected: v.m.Connected(), Heard: substrate{v}.Heard(now), Need: v.m.Need(), Refused: refused}
	b := v.book(name)
	if b == nil {
		return s
	}
	s.State, s.Probing = b.Known, b.Probing()
	if b.Known.Open() {
		s.Left = max(v.m.Due(b.Scope)-now, 0)
	}
	if b.own != nil {
		s.Votes = append(s.Votes, b.own.Vote)
	}
	for _, n := range slices.Sorted(maps.Keys(b.rows)) {
		s.Votes = append(s.Votes, b.rows[n].Vote)
	}
	return s
}

func (v *Verdicts) Scopes() (names []string) {
	v.m.Lock()
	defer v.m.Unlock()
	for _, sc := range v.m.All() {
		names = append(names, sc.Name)
	}
	slices.Sort(names)
	return names
}
