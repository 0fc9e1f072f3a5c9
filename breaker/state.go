// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package breaker

import (
	"fmt"
	"time"
)

// State is what a breaker does with admissions. The zero State is Closed.
type State uint8

const (
	// Closed admits everything and counts.
	Closed State = iota
	// Open refuses everything until its deadline. It stays Open past the
	// deadline until somebody asks: nothing to probe with, nothing to learn.
	Open
	// HalfOpen admits probes, a few at a time, and lets them decide.
	HalfOpen
)

// String returns "closed", "open" or "half-open".
func (s State) String() string {
	switch s {
	case Closed:
		return "closed"
	case Open:
		return "open"
	case HalfOpen:
		return "half-open"
	default:
		return fmt.Sprintf("state(%d)", uint8(s))
	}
}

// Cause is why a breaker is not closed. A force or a trip from outside brings
// its own text: "operator" for a force by a person, "storm" for a trip by a guard's storm
// detector, "outage" for one because a guard found nothing that succeeds, "fleet" for a hold.
type Cause string

const (
	// CauseRate is a failure ratio above Config.Ratio.
	CauseRate Cause = "rate"
	// CauseRun is Config.Run failed attempts in a row.
	CauseRun Cause = "run"
	// CauseSlow is a trip whose last straw was a call that still ran.
	CauseSlow Cause = "slow"
	// CauseProbe is a probe's decision: failed, or, in a change to Closed,
	// enough of them succeeded.
	CauseProbe Cause = "probe"
	// CauseLost is a probe that outlived its lease.
	CauseLost Cause = "probe lost"
	// CauseQuorum is a parent scope with too many children not closed, or, in a
	// change to Closed, with no longer too many.
	CauseQuorum Cause = "quorum"
	// CauseReleased is the cause of a change to Closed of a parent scope whose
	// child was released, as by a shutdown: nothing has recovered.
	CauseReleased Cause = "released"
)

// Snapshot is what a breaker looks like at one instant.
type Snapshot struct {
	Name         string
	State        State
	Cause        Cause         // empty when closed
	Forced       bool          // open by force
	Barred       bool          // a force lasts, be it behind a longer open period of the breaker's own: a fleet cannot hold it
	Held         bool          // held by a fleet: open, or half-open for one probe
	Since        time.Duration // when the state began
	Until        time.Duration // when a call may next be admitted; 0 when closed or when there is room for a probe
	BackoffLevel int           // level of the last open period, less the closes since

	Successes uint64  // in the window, all attempts
	Failures  uint64  // in the window, first attempts
	Ratio     float64 // Failures / (Successes + Failures)
	Bound     float64 // what is compared with Config.Ratio
	Run       int     // failed attempts with no success between

	ProbesOut    int
	ProbesPassed int // successes in a row, towards Config.Successes or its multiple
	Generation   uint64
}

// FleetScope is what a fleet makes of one scope, as this process knows.
type FleetScope struct {
	// Name is the path of the scope that decides: of a breaker's own, or of the
	// one above that holds it.
	Name string
	// State is the fleet's: Open also while it probes.
	State State
	// Held says that this process's breaker is held by it. It may be held by a
	// handover although State is Closed, and free although State is Open: a
	// process that is cut off goes by itself.
	Held bool
	// Probing says that it is this process that probes.
	Probing bool
	// Cause is why the fleet opened it, or why it is held.
	Cause Cause
	// Left is what remains of the open period or of the wait, as far as is known.
	Left time.Duration
	// Round counts the open periods since the fleet last closed it.
	Round uint32
	// Heard of Need processes that make a quorum are heard, this one included.
	// With less the fleet cannot decide.
	Heard, Need int
}
