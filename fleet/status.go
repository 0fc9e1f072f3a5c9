// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"maps"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

// Status is what one process knows about the fleet and about one scope.
type Status struct {
	State
	// Left is what remains of the open period, 0 when it is over or there is
	// none.
	Left time.Duration

	Connected bool // a quorum of the roster is heard, so the fleet can decide
	Heard     int  // of the roster, this process included
	Need      int  // the quorum
	Claimed   bool // this process has the scope
	Probing   bool // and its probe is out
	Votes     []Vote
	Refused   uint64 // votes and scopes left out for want of room, of all scopes
}

// Status describes a scope, for people and tests. It costs a copy of its votes.
func (v *Verdicts) Status(now time.Duration, name string) Status {
	v.mu.Lock()
	defer v.mu.Unlock()
	s := Status{Connected: v.connected, Heard: v.heardLocked(now), Need: v.need, Refused: v.refused}
	sc := v.scopes[name]
	if sc == nil {
		return s
	}
	s.State, s.Claimed, s.Probing = sc.known, sc.claimed, sc.mode == probing
	if sc.known.Open() {
		s.Left = max(v.dueLocked(sc)-now, 0)
	}
	if sc.own != nil {
		s.Votes = append(s.Votes, sc.own.Vote)
	}
	for _, n := range slices.Sorted(maps.Keys(sc.rows)) {
		s.Votes = append(s.Votes, sc.rows[n].Vote)
	}
	return s
}

// Scopes lists the scopes that are known, sorted: those of other processes
// too.
func (v *Verdicts) Scopes() []string {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.Sorted(maps.Keys(v.scopes))
}

// brief is a scope as a guard shows it.
func (v *Verdicts) brief(now time.Duration, name string) breaker.FleetScope {
	v.mu.Lock()
	defer v.mu.Unlock()
	b := breaker.FleetScope{Name: name, Heard: v.heardLocked(now), Need: v.need}
	sc := v.scopes[name]
	if sc == nil {
		return b
	}
	b.Cause, b.Round, b.Probing = sc.known.Cause, sc.known.Round, sc.mode == probing
	switch {
	case sc.known.Open():
		b.State = breaker.Open
		b.Left = max(v.dueLocked(sc)-now, 0)
	case sc.asking:
		b.Left = max(v.start+v.cfg.Start-now, 0)
	case sc.release != never:
		b.Left = max(sc.release-now, 0)
	}
	return b
}
