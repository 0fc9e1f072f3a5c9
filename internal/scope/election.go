// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package scope

import (
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/circuit"
)

// elect plays our part in a round of probes. One process probes at a time, each in its turn. Votes
// alone decide what may be done at once. Each process judges by its own clock what takes patience:
// a turn not taken, a probe not settled.
func (m *Machine) elect(now time.Duration, sc *Scope) {
	sc.Mine = false
	if !m.connected || sc.Blind || !sc.Known.Open() || now < m.Due(sc) {
		return
	}
	if sc.mode == probing {
		m.watchTrial(now, sc)
		return
	}
	out := sc.Book.Out(now)
	if !m.sub.MayDecide() {
		m.drift(now, sc, out)
		return
	}
	round, vote := m.round(sc), func(name string) *Vote { return sc.Book.Vote(now, name) }
	next, total := round.Next(m.cfg.Successes, vote)
	if total != sc.passed {
		sc.passed, sc.probed = total, now
	}
	if sc.wants || sc.release != Never {
		m.letDrift(now, sc)
	}
	if next != "" && !sc.wants && total >= m.cfg.Successes && round.Outvoted(m.need, vote) && m.second(now, sc) {
		return
	}
	if out {
		sc.turn, sc.idleAt = "", Never
		return
	}
	if next == "" {
		m.idle(now, sc, total)
		return
	}
	sc.idleAt = Never
	if sc.turn != next {
		sc.turn, sc.turnAt = next, now
	}
	// Our own turn ends after half of the others' patience, so that they hear of it before their
	// patience is over.
	patience := m.cfg.Turn
	if next == m.self {
		patience /= 2
	}
	switch {
	case now-sc.turnAt >= patience:
		sc.skip(next)
	case next == m.self && sc.mode == held:
		sc.Mine = true
		sc.Book.Take(now)
	}
}

func (m *Machine) round(sc *Scope) Round {
	return Round{Scope: sc.Name, At: sc.Known.Position, Names: m.names, Skipped: sc.skipped}
}

// Share is a number in [0, 1) that differs by process and round. The lock must be
// held.
func (m *Machine) Share(sc *Scope) float64 { return m.round(sc).Share(m.self) }

// drift lets a scope go that we may not probe and that no other process probes: the processes that
// might are gone, or have nothing to probe with.
func (m *Machine) drift(now time.Duration, sc *Scope, out bool) {
	if out && !sc.lost() {
		sc.probed = now
	}
	m.letDrift(now, sc)
}

// letDrift lets a scope go that is adrift, like a process that is cut off does.
func (m *Machine) letDrift(now time.Duration, sc *Scope) {
	switch {
	case sc.mode != held:
	case !m.adrift(now, sc):
		sc.release = Never
	case sc.spoilt:
		m.letGo(sc) // at once: others may end the round in the meantime
	case sc.release == Never:
		sc.release = m.Solo(now, sc)
	}
}

// adrift reports whether the round has not moved for as long as a probe and two turns may take. A
// process that may probe waits for twice that, since it is in touch: a prober may have died. Among
// these the one that drifts is one with so few calls that none comes in its turn. After a lost probe
// every process waits for twice that.
//
// A round that ends with a lost probe has not moved either: calls that take longer than a lease are
// lost in each round. A round that another process ends though our probe passed has not moved
// either: that process's path may stay broken, and no quorum be left to close the scope.
func (m *Machine) adrift(now time.Duration, sc *Scope) bool {
	patience, from := m.cfg.Lease+2*m.cfg.Turn, m.Due(sc)
	if sc.vain() {
		from = sc.firm
	}
	if !sc.spoilt {
		from = max(from, sc.probed)
	}
	if m.sub.MayDecide() {
		from = max(from, m.since)
	}
	if sc.lost() || m.sub.MayDecide() {
		patience *= 2
	}
	return now >= from+patience
}

// idle handles a round in which all processes with something to probe with have probed. The
// processes without second the result. Otherwise a scope with traffic on few processes could not
// find a quorum to close it. They do not wait for outvoted processes.
func (m *Machine) idle(now time.Duration, sc *Scope, total int) {
	sc.turn = ""
	if sc.idleAt == Never {
		sc.idleAt = now
	}
	idle := now - sc.idleAt
	if idle < m.cfg.Turn {
		return
	}
	if total >= m.cfg.Successes {
		m.second(now, sc)
	}
	if idle >= 2*m.cfg.Turn && len(sc.skipped) > 0 {
		clear(sc.skipped)
		sc.idleAt = Never
	}
}

// second seconds the probes that passed, unless we have a vote of our own in the round.
func (m *Machine) second(now time.Duration, sc *Scope) bool {
	w := m.standing(sc)
	if w.Phase != PhaseWaiting || w.Passes > 0 {
		return false
	}
	w.Phase = PhaseSeconded
	m.write(now, sc, w)
	sc.Book.Decide(now)
	return true
}

// Announce makes our vote say that our probe goes out. The lock must be held.
func (m *Machine) Announce(now time.Duration, sc *Scope) {
	w := m.standing(sc)
	w.Phase = PhaseProbing
	m.write(now, sc, w)
}

// Grant lets our probe out. Its lease lasts from since. The lock must be held.
func (m *Machine) Grant(now time.Duration, sc *Scope, since time.Duration) {
	sc.mode, sc.Mine = probing, false
	sc.trial = trial{since: since, at: now, gen: sc.seen}
	m.act(sc, Action{Kind: Probe, Cause: sc.Known.Cause})
}

// Revoke takes our probe back. It counts for nothing, since another may be out by now. The lock
// must be held.
func (m *Machine) Revoke(now time.Duration, sc *Scope) {
	if sc.mode == probing {
		m.hold(now, sc)
	}
}

func (m *Machine) observeTrial(now time.Duration, sc *Scope, s circuit.Snapshot) {
	if s.Generation <= sc.trial.gen {
		return
	}
	switch {
	case !s.Held, s.State == breaker.Open && s.Trial == circuit.NoTrial:
		m.withdraw(now, sc) // forced, or held anew: the permit is gone
	case s.State == breaker.HalfOpen:
		sc.trial.taken = s.ProbesOut > 0 // an excluded probe gives the permit back
	case s.State == breaker.Open && s.Trial == circuit.TrialPassed:
		w := m.standing(sc)
		w.Phase, w.Passes = PhasePassed, w.Passes+1
		sc.mode, sc.Own = held, w
		sc.Book.Settle(now, sc.Known)
	case s.State == breaker.Open && s.Trial == circuit.TrialFailed:
		m.fail(now, sc, s.Cause)
	}
}

// fail ends the round by our own failed probe.
func (m *Machine) fail(now time.Duration, sc *Scope, cause breaker.Cause) {
	mixed := false
	for _, n := range m.names {
		v := sc.Book.Vote(now, n)
		mixed = mixed || v != nil && v.At == sc.Known.Position && v.Passes > 0
	}
	next := After(m.cfg, sc.Known, mixed, Cut(cause))
	w := m.standing(sc)
	w.Phase, w.At, w.Passes, w.Failed = PhaseWaiting, next.Position, 0, sc.Known.Round
	sc.mode, sc.Own = held, w
	sc.Book.Settle(now, next)
}

// watchTrial ends a probe that does not end by itself. It does so when the lease ends at the
// latest, since then another probe may go out.
func (m *Machine) watchTrial(now time.Duration, sc *Scope) {
	over := now-sc.trial.since >= m.cfg.Lease
	switch {
	case sc.trial.taken && over:
		before := sc.Known
		m.fail(now, sc, breaker.CauseLost)
		if sc.Known == before {
			m.rehold(now, sc) // the permit is taken back at once, even if the decision comes later
		}
	case !sc.trial.taken && (over || now-sc.trial.at >= m.cfg.Turn/2):
		m.withdraw(now, sc)
	}
}

// withdraw ends our turn without a probe, since there was nothing to probe with after all. The hold
// takes the permit back. A probe that slipped through meanwhile counts for nothing.
func (m *Machine) withdraw(now time.Duration, sc *Scope) {
	sc.wants = false
	w := m.standing(sc)
	w.Phase = PhaseWaiting
	if w.Passes > 0 {
		w.Phase = PhasePassed
	}
	m.write(now, sc, w)
	release := sc.release
	m.hold(now, sc)
	sc.release = max(sc.release, release) // a turn without a call keeps the release; Never is the smallest instant
	sc.skip(m.self)
}
