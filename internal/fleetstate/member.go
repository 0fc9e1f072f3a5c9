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

// driver drives breakers; the alias keeps the embedded field to ourselves.
type driver = scope.Driver

// Member is one process's part in a fleet as a guard drives it: it carries what
// happens between its breakers and [Verdicts], between its detectors and [Storms],
// and between its counts and [Totals]. It is what guard.WithFleet takes: a
// [breaker.Fleet] and a [storm.Fleet]. All methods are safe for concurrent use.
//
// # Which scopes
//
// A breaker's own scope is decided on, and where that is a partition, which one process
// has at a time, the topic above it, or no quorum could ever see an outage of all: a
// process says that a topic has tripped while
// Config.Quorum of its own partitions have by their own verdict, one at least. While
// the fleet holds the topic all its partitions are held, and a probe is one delivery of
// any of them. In a fleet of one a topic has no vote.
//
// # An operator's word
//
// A force stands until it ends; the hold comes back after it if there still is one. A
// breaker that is held and that somebody closed by force stays closed until it trips
// again: then it is held with the others. To the others a close by force is no recovery.
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

// NewMember returns the driver of v and s, either of which may be nil. clock is that of
// the gossip session that carries them. It need not be the one of the breakers: no
// instant passes between the two.
func NewMember(clock func() time.Duration, v *Verdicts, s *Storms) *Member {
	var m *scope.Machine
	if v != nil {
		m = v.m
	}
	return &Member{driver: scope.NewDriver(clock, m), clock: clock, s: s}
}

// OnStorm has f called, from Step, when a storm of the fleet begins or
// ends. Set it before the first Step.
func (m *Member) OnStorm(f func(StormChange)) { m.stormy = f }

// CarryTotals has what guards count carried to the other processes, and what those
// count to the guards. Without it a guard knows of its own successes only. Set it
// before the first Step.
func (m *Member) CarryTotals(t *Totals) { m.t = t }

// Step is [breaker.Fleet]'s.
func (m *Member) Step(now time.Duration, waiting map[*circuit.Breaker]bool) (busy bool) {
	if m.s != nil {
		m.s.Tick(m.clock())
		for _, c := range m.s.Changes(nil) { // who wants to know else asks Storm
			if m.stormy != nil {
				m.stormy(c)
			}
		}
	}
	return m.driver.Step(now, waiting)
}

// Pass makes time pass for a member that no guard drives: a process without one is in the
// roster like any other, and where its voice is missing a scope that others hold may never
// find the quorum to close. It does nothing while a guard drives the member. Call it again
// after the time that it returns.
func (m *Member) Pass() time.Duration {
	if !m.Driven() && m.Step(0, nil) { // no instant of a breaker: it has none
		return passSoon
	}
	return passRest
}

const (
	passSoon = 100 * time.Millisecond // while something may happen by itself
	passRest = 500 * time.Millisecond
)

// Report is [storm.Fleet]'s. The errors are those of [Storms.Report].
func (m *Member) Report(key string, s dlq.Storm) error {
	if m.s == nil {
		return nil
	}
	return m.s.Report(m.clock(), key, ReportOf(s, s.String()))
}

// Withdraw is [storm.Fleet]'s.
func (m *Member) Withdraw(key string) {
	if m.s != nil {
		m.s.Withdraw(m.clock(), key)
	}
}

// Storm is [storm.Fleet]'s.
func (m *Member) Storm(key string) dlq.FleetStorm {
	if m.s == nil {
		return dlq.FleetStorm{}
	}
	s := m.s.Storm(m.clock(), key)
	return dlq.FleetStorm{Active: s.Active, Reporters: s.Reporters, Affected: s.Affected, Need: s.Need}
}

// Count is guard.Fleet's. The errors are those of [Totals.Count].
func (m *Member) Count(key string, handled, failed, deadLettered uint64) error {
	if m.t == nil {
		return nil
	}
	return m.t.Count(m.clock(), key, handled, failed, deadLettered)
}

// OthersSucceeded is guard.Fleet's; see [Totals.OthersSucceeded].
func (m *Member) OthersSucceeded(key string) (ago time.Duration, ok bool) {
	if m.t == nil {
		return 0, false
	}
	return m.t.OthersSucceeded(m.clock(), key)
}
