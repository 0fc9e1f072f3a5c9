// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package breaker

import (
	"fmt"
	"time"
)

// State says what a breaker does with calls. The zero State is Closed.
type State uint8

const (
	// Closed admits every call and counts outcomes.
	Closed State = iota
	// Open refuses every call until its deadline. The breaker stays Open past the
	// deadline until the next call asks, which becomes a probe: without a call there is
	// nothing to probe with.
	Open
	// HalfOpen admits a few calls at a time, the probes. Their outcomes decide.
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

// Cause is why a breaker is not closed. Besides the constants below there are the texts of
// actions from outside. "operator" is a force by a person, "storm" a trip by a guard's storm
// detector, "outage" a trip by a guard that found nothing that succeeds, "fleet" a hold.
type Cause string

const (
	// CauseRate means that the failure ratio is above Config.Ratio.
	CauseRate Cause = "rate"
	// CauseRun means Config.Run failed attempts in a row.
	CauseRun Cause = "run"
	// CauseSlow means that a call that still ran, reported as slow, opened the breaker.
	CauseSlow Cause = "slow"
	// CauseProbe means that a probe failed. In a change to Closed it means that enough
	// probes succeeded.
	CauseProbe Cause = "probe"
	// CauseLost means that a probe was not settled within its lease.
	CauseLost Cause = "probe lost"
	// CauseQuorum means that too many children of a parent scope are not closed. In a
	// change to Closed it means that they are no longer too many.
	CauseQuorum Cause = "quorum"
	// CauseReleased means that a parent scope closed because a child was released, for
	// example by a shutdown. Nothing has recovered.
	CauseReleased Cause = "released"
)

// Snapshot is the state of a breaker at one instant.
type Snapshot struct {
	Name   string
	State  State
	Cause  Cause // empty when closed
	Forced bool  // open by force
	// Barred says that a force lasts, so a fleet cannot hold the breaker. Forced is false
	// then if the breaker's own open period is longer than the force.
	Barred       bool
	Held         bool          // held by a fleet: open, or half-open for one probe
	Since        time.Duration // when the state began
	Tripped      time.Duration // when the breaker ceased to be closed; 0 when closed
	Until        time.Duration // when a call may next be admitted; 0 when closed or when there is room for a probe
	BackoffLevel int           // level of the last open period, minus the closes since

	Successes uint64  // successes in the window, of all attempts
	Failures  uint64  // failures in the window, of first attempts
	Ratio     float64 // Failures / (Successes + Failures)
	Bound     float64 // lower bound of Ratio, which is compared with Config.Ratio
	Run       int     // failed attempts in a row

	ProbesOut    int
	ProbesPassed int // successes in a row; Config.Successes, or a multiple of it, close the breaker
	Generation   uint64
}

// FleetScope is what a fleet has decided about one scope, as far as this process knows.
type FleetScope struct {
	// Name is the path of the scope that decides: the breaker's own scope, or the scope
	// above that holds the breaker.
	Name string
	// State is the fleet's state: Open also while the fleet probes.
	State State
	// Held says that the fleet holds this process's breaker. During a handover it may do
	// so although State is Closed. A process that is cut off decides alone: its breaker is
	// not held although State is Open.
	Held bool
	// Probing says that this process probes.
	Probing bool
	// Cause is why the fleet opened the scope, or why the breaker is held.
	Cause Cause
	// Left is the rest of the open period or of the wait, as far as this process knows.
	Left time.Duration
	// Round counts the open periods since the fleet last closed the scope.
	Round uint32
	// Heard is how many processes of the roster are heard, this process included. Need is
	// how many make a quorum. While Heard is below Need the fleet cannot decide.
	Heard, Need int
}
