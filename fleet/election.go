// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

// electLocked takes our part in a round of probes: one at a time, each process
// in its turn. What may be done at once follows from the votes alone; what
// takes patience (a turn not taken, a probe not settled) each process judges by
// its own clock.
func (v *Verdicts) electLocked(now time.Duration, sc *scope) {
	if !v.connected || !v.member || !sc.known.Open() || now < v.dueLocked(sc) {
		return
	}
	if sc.mode == probing {
		v.watchTrialLocked(now, sc)
		return
	}
	next, total, out := v.candidateLocked(now, sc)
	if out {
		sc.turn, sc.idleAt = "", never
		return
	}
	if next == "" {
		v.idleLocked(now, sc, total)
		return
	}
	sc.idleAt = never
	if sc.turn != next {
		sc.turn, sc.turnAt = next, now
	}
	// Ours ends in the middle of what the others wait, so that an announcement
	// reaches them before their patience is over.
	patience := v.cfg.Turn
	if next == v.self.Name {
		patience /= 2
	}
	switch {
	case now-sc.turnAt >= patience:
		sc.skip(next)
	case next == v.self.Name && sc.mode == held && now-v.since >= v.cfg.Settle && now-sc.wanted >= v.cfg.Settle:
		w := v.standing(sc)
		w.Phase = PhaseProbing
		v.writeLocked(now, sc, w)
		sc.mode, sc.trial = probing, trial{at: now, gen: sc.seen}
		v.actions = append(v.actions, Action{Scope: sc.name, Kind: Probe, Cause: sc.known.Cause, At: sc.known.Position})
	}
}

// candidateLocked is whose turn it is, "" for nobody; how many probes of the
// round passed; and whether one is out.
func (v *Verdicts) candidateLocked(now time.Duration, sc *scope) (next string, total int, out bool) {
	for _, n := range v.roster.Names {
		if r := sc.rows[n]; r != nil && n != v.self.Name && r.Phase == PhaseProbing && r.At == sc.known.Position &&
			now < r.opened+v.cfg.Lease+v.cfg.Settle {
			return "", 0, true // heard or not: its probe may be running
		}
	}
	round := Round{Scope: sc.name, At: sc.known.Position, Names: v.roster.Names, Skipped: sc.skipped}
	next, total = round.Next(v.cfg.Successes, func(name string) *Vote { return v.voteLocked(now, sc, name) })
	return next, total, false
}

// idleLocked is a round in which everybody with something to probe with has
// done so. Those without second the result: else a scope that few have traffic
// on could not find a quorum to close it.
func (v *Verdicts) idleLocked(now time.Duration, sc *scope, total int) {
	sc.turn = ""
	if sc.idleAt == never {
		sc.idleAt = now
	}
	idle := now - sc.idleAt
	if idle < v.cfg.Turn {
		return
	}
	if w := v.standing(sc); w.Phase == PhaseWaiting && w.Passes == 0 && total >= v.cfg.Successes {
		w.Phase = PhaseSeconded
		v.writeLocked(now, sc, w)
		v.decideLocked(now, sc)
	}
	if idle >= 2*v.cfg.Turn && len(sc.skipped) > 0 {
		clear(sc.skipped)
		sc.idleAt = never
	}
}

// watchTrialLocked ends a probe that does not end by itself.
func (v *Verdicts) watchTrialLocked(now time.Duration, sc *scope) {
	out := now - sc.trial.at
	switch {
	case sc.trial.taken && out >= v.cfg.Lease:
		v.failLocked(now, sc, breaker.CauseLost)
	case !sc.trial.taken && out >= v.cfg.Turn/2:
		v.withdrawLocked(now, sc)
	}
}

// withdrawLocked ends our turn without a probe: nothing was there to probe with
// after all. The hold takes the permit back; a probe that slipped through
// meanwhile counts for nothing.
func (v *Verdicts) withdrawLocked(now time.Duration, sc *scope) {
	sc.wants = false
	w := v.standing(sc)
	w.Phase = PhaseWaiting
	if w.Passes > 0 {
		w.Phase = PhasePassed
	}
	v.writeLocked(now, sc, w)
	v.holdLocked(now, sc)
	sc.skip(v.self.Name)
}

func (sc *scope) skip(name string) {
	if sc.skipped == nil {
		sc.skipped = make(map[string]struct{})
	}
	sc.skipped[name] = struct{}{}
}
