// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/circuit"
	"github.com/stormguard-mq/stormguard/internal/scope"
	"github.com/stormguard-mq/stormguard/internal/storm"
)

// driver drives breakers. The alias keeps the embedded field unexported.
type driver = scope.Driver

// Member connects a guard to the fleet. It carries events between the guard's breakers and
// [Verdicts], between its detectors and [Storms], and between its counts and [Totals]. It is for
// guard.WithFleet, and implements [circuit.Fleet] and [storm.Fleet]. All methods are safe for
// concurrent use.
//
// # Which scopes
//
// The fleet decides about a breaker's own scope. If that is a partition, which one process has at a
// time, it also decides about the topic above it: otherwise no quorum could see an outage of all
// partitions. A process votes that a topic has tripped while Config.Quorum of its own partitions
// have tripped by their own verdict, at least one. While the fleet holds the topic, all its
// partitions are held, and a probe is one delivery of any of them. In a fleet of one a topic has no
// vote.
//
// # Operators
//
// A forced state stays until the operator ends it. If the fleet still holds the breaker then, it is
// held again. A held breaker that was forced closed stays closed until it trips again: then it is
// held with the others. For the other processes a forced close is no recovery.
type Member struct {
	*driver
	clock  func() time.Duration
	s      *Storms // may be nil
	t      *Totals // may be nil
	stormy func(StormChange)
}

var (
	_ circuit.Fleet = (*Member)(nil)
	_ storm.Fleet   = (*Member)(nil)
)

// ErrAttached means that a [Member] is driven already.
var ErrAttached = scope.ErrAttached

// NewMember returns the driver of v and s, either of which may be nil. clock is the clock of the
// gossip session that carries them. The breakers may have another clock: no instant passes between
// the two.
func NewMember(clock func() time.Duration, v *Verdicts, s *Storms) *Member {
	var m *scope.Machine
	if v != nil {
		m = v.m
	}
	return &Member{driver: scope.NewDriver(clock, m), clock: clock, s: s}
}

// OnStorm makes Step call f when a storm of the fleet begins or ends. Call it before the first
// Step.
func (m *Member) OnStorm(f func(StormChange)) { m.stormy = f }

// CarryTotals connects the guards' counts with those of other processes. Without it a guard knows
// only its own successes. Call it before the first Step.
func (m *Member) CarryTotals(t *Totals) { m.t = t }

// Step implements [circuit.Fleet].
func (m *Member) Step(now time.Duration, waiting map[*circuit.Breaker]bool) (busy bool) {
	if m.s != nil {
		m.s.Tick(m.clock())
		for _, c := range m.s.Changes(nil) { // without a callback, callers ask Storm
			if m.stormy != nil {
				m.stormy(c)
			}
		}
	}
	return m.driver.Step(now, waiting)
}

// Pass makes time pass for a member that no guard drives. Such a process is in the roster, too:
// without its vote, a scope that others hold may never find the quorum to close. Pass does nothing
// while a guard drives the member. Call it again after the returned time.
func (m *Member) Pass() time.Duration {
	if !m.Driven() && m.Step(0, nil) { // the instant is for breakers, and there is none
		return passSoon
	}
	return passRest
}

const (
	passSoon = 100 * time.Millisecond // while something may happen without a guard
	passRest = 500 * time.Millisecond
)

// Report implements [storm.Fleet]. The errors are those of [Storms.Report].
func (m *Member) Report(key string, s dlq.Storm) error {
	if m.s == nil {
		return nil
	}
	return m.s.Report(m.clock(), key, ReportOf(s, s.String()))
}

// Withdraw implements [storm.Fleet].
func (m *Member) Withdraw(key string) {
	if m.s != nil {
		m.s.Withdraw(m.clock(), key)
	}
}

// Storm implements [storm.Fleet].
func (m *Member) Storm(key string) dlq.FleetStorm {
	if m.s == nil {
		return dlq.FleetStorm{}
	}
	s := m.s.Storm(m.clock(), key)
	return dlq.FleetStorm{Active: s.Active, Reporters: s.Reporters, Affected: s.Affected, Need: s.Need}
}

// Count implements guard.Fleet. The errors are those of [Totals.Count].
func (m *Member) Count(key string, handled, failed, deadLettered uint64) error {
	if m.t == nil {
		return nil
	}
	return m.t.Count(m.clock(), key, handled, failed, deadLettered)
}

// OthersSucceeded implements guard.Fleet; see [Totals.OthersSucceeded].
func (m *Member) OthersSucceeded(key string) (ago time.Duration, ok bool) {
	if m.t == nil {
		return 0, false
	}
	return m.t.OthersSucceeded(m.clock(), key)
}
