// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package scope

import (
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/circuit"
)

// elect takes our part in a round of probes: one at a time, each process in its turn.
// What may be done at once follows from the votes alone; what takes patience (a turn
// not taken, a probe not settled) each process judges by its own clock.
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
	// Ours ends in the middle of what the others wait, so that news of it reaches them
	// before their patience is over.
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

// drift lets a scope go that we may not probe and that nobody else does: those who
// might are gone, or have nothing to probe with.
func (m *Machine) drift(now time.Duration, sc *Scope, out bool) {
	if out && !sc.lost() {
		sc.probed = now
	}
	m.letDrift(now, sc)
}

// letDrift lets a scope go that is adrift, as when we are cut off.
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

// adrift reports whether the round has not moved for as long as a probe and two turns may
// take. Those who may probe wait for twice that, since they are in touch: a prober may have
// died. Of them, it is one with so few calls that none comes in its turn. A round that ends
// with a lost probe has not moved either: calls that take longer than a lease are lost in each.
// Nor has one that another ends though ours passed: its path may stay broken, and no quorum be left
// to close the scope.
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

// idle is a round in which everybody with something to probe with has done so. Those
// without second the result: else a scope that few have traffic on could not find a
// quorum to close it. They do not wait for those who are outvoted.
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

// second seconds the probes that passed, unless we have a word of our own in the round.
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

// Announce makes it our vote that our probe goes out. The lock must be held.
func (m *Machine) Announce(now time.Duration, sc *Scope) {
	w := m.standing(sc)
	w.Phase = PhaseProbing
	m.write(now, sc, w)
}

// Grant lets our probe out, whose lease lasts from since. The lock must be held.
func (m *Machine) Grant(now time.Duration, sc *Scope, since time.Duration) {
	sc.mode, sc.Mine = probing, false
	sc.trial = trial{since: since, at: now, gen: sc.seen}
	m.act(sc, Action{Kind: Probe, Cause: sc.Known.Cause})
}

// Revoke takes our probe back, which counts for nothing: another may be out by now.
// The lock must be held.
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
		m.withdraw(now, sc) // forced, or held anew: what had the permit is gone
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

// watchTrial ends a probe that does not end by itself: by its lease at the latest, for
// then another may go out.
func (m *Machine) watchTrial(now time.Duration, sc *Scope) {
	over := now-sc.trial.since >= m.cfg.Lease
	switch {
	case sc.trial.taken && over:
		before := sc.Known
		m.fail(now, sc, breaker.CauseLost)
		if sc.Known == before {
			m.rehold(now, sc) // the permit is taken back at once, whenever it is decided
		}
	case !sc.trial.taken && (over || now-sc.trial.at >= m.cfg.Turn/2):
		m.withdraw(now, sc)
	}
}

// withdraw ends our turn without a probe: nothing was there to probe with after all.
// The hold takes the permit back; a probe that slipped through meanwhile counts for
// nothing.
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
	sc.release = max(sc.release, release) // a turn without a call moves nothing; Never is the least
	sc.skip(m.self)
}
