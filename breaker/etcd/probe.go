// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/fleet"
)

// electLocked finds out whether it is our turn to probe. Turns only spread the
// probes over the processes and spare etcd their races: that there is one at a time
// is the key's doing.
func (c *core) electLocked(now time.Duration, sc *scope) {
	sc.mine = false
	if !c.connected || sc.blind || !sc.known.Open() || now < c.dueLocked(sc) {
		return
	}
	if !c.decidesLocked() {
		c.driftLocked(now, sc)
		return
	}
	if sc.mode == probing {
		c.watchTrialLocked(now, sc)
		return
	}
	if sc.probe != nil {
		sc.turn, sc.idleAt = "", never
		return
	}
	next, total := c.candidateLocked(sc)
	if next == "" {
		c.idleLocked(now, sc, total)
		return
	}
	sc.idleAt = never
	if sc.turn != next {
		sc.turn, sc.turnAt = next, now
	}
	switch {
	case next == c.self.Name:
		sc.mine = sc.claimed && sc.mode == held && sc.result == pending
	case now-sc.turnAt >= c.cfg.Turn:
		sc.skip(next)
	}
}

// decidesLocked reports whether this process may decide and probe.
func (c *core) decidesLocked() bool { return c.member && c.link.late == 0 }

// driftLocked lets a scope go, as when we are cut off, that we may not probe and
// that nobody else does: those who might are gone, or have nothing to probe with.
func (c *core) driftLocked(now time.Duration, sc *scope) {
	switch {
	case sc.mode != held:
	case !c.adriftLocked(now, sc):
		sc.release = never
	case sc.release == never:
		sc.release = c.soloLocked(now, sc)
	}
}

// adriftLocked reports whether nobody has probed for as long as a probe and two
// turns may take, and it is not for us to do so.
func (c *core) adriftLocked(now time.Duration, sc *scope) bool {
	return !c.decidesLocked() && sc.probe == nil && now >= max(c.dueLocked(sc), sc.freed)+c.cfg.Lease+2*c.cfg.Turn
}

// candidateLocked is whose turn it is, "" for nobody, and how many probes of the
// round passed.
func (c *core) candidateLocked(sc *scope) (next string, total int) {
	return c.round(sc).Next(c.cfg.Successes, func(name string) *fleet.Vote {
		if w, ok := sc.votes[name]; ok {
			return &w.Vote
		}
		return nil
	})
}

func (c *core) round(sc *scope) fleet.Round {
	return fleet.Round{Scope: sc.name, At: sc.known.Position, Names: c.roster.Names, Skipped: sc.skipped}
}

// idleLocked is a round in which everybody with something to probe with has done
// so. Those without second the result: else a scope that few have traffic on could
// not find a quorum to close it.
func (c *core) idleLocked(now time.Duration, sc *scope, total int) {
	sc.turn = ""
	if sc.idleAt == never {
		sc.idleAt = now
	}
	idle := now - sc.idleAt
	if idle < c.cfg.Turn {
		return
	}
	if w := c.standing(sc); w.Phase == fleet.PhaseWaiting && w.Passes == 0 && total >= c.cfg.Successes {
		w.Phase = fleet.PhaseSeconded
		sc.own = w
	}
	if idle >= 2*c.cfg.Turn && len(sc.skipped) > 0 {
		clear(sc.skipped)
		sc.idleAt = never
	}
}

// setProbeLocked takes in who has the probe. When it is us, and the word is fresh,
// one goes out; what came late, after a lost answer, is given back.
func (c *core) setProbeLocked(now time.Duration, sc *scope, p *slot) {
	if sc.probe != nil && p == nil {
		sc.freed = now
	}
	sc.probe = p
	if p == nil || p.holder != c.self {
		sc.result = pending
		if sc.mode == probing { // its lease is over: somebody else may probe
			c.holdLocked(now, sc)
		}
		return
	}
	c.stirLocked(sc)
	if sc.mode == probing {
		return // the same again, from the list of a new session
	}
	asked := sc.trial.asked
	sc.trial.asked = never
	if !sc.claimed || sc.mode != held || !c.connected || !sc.known.Open() || p.at != sc.known.Position ||
		asked == never || now-asked >= c.cfg.Turn/2 {
		return
	}
	sc.mode, sc.mine = probing, false
	sc.trial = trial{asked: asked, granted: now, gen: sc.seen}
	c.actions = append(c.actions, fleet.Action{Scope: sc.name, Kind: fleet.Probe, Cause: sc.known.Cause, At: sc.known.Position})
}

func (c *core) observeTrialLocked(now time.Duration, sc *scope, s breaker.Snapshot) {
	if s.Generation <= sc.trial.gen {
		return
	}
	switch {
	case !s.Held, s.State == breaker.Open && s.Trial == breaker.NoTrial:
		c.withdrawLocked(now, sc) // forced, or held anew: what had the permit is gone
	case s.State == breaker.HalfOpen:
		sc.trial.taken = s.ProbesOut > 0 // an excluded probe gives the permit back
	case s.State == breaker.Open && s.Trial == breaker.TrialPassed:
		w := c.standing(sc)
		w.Phase, w.Passes = fleet.PhasePassed, w.Passes+1
		sc.mode, sc.own, sc.result = held, w, passed
	case s.State == breaker.Open && s.Trial == breaker.TrialFailed:
		c.failLocked(sc, s.Cause)
	}
}

// failLocked ends the round by our own failed probe.
func (c *core) failLocked(sc *scope, cause breaker.Cause) {
	w := c.standing(sc)
	w.Phase, w.Passes, w.Failed = fleet.PhaseWaiting, 0, sc.known.Round
	w.At.Round++
	sc.mode, sc.own, sc.result, sc.cause = held, w, failed, cut(cause)
}

// watchTrialLocked ends a probe that does not end by itself, before its lease
// does.
func (c *core) watchTrialLocked(now time.Duration, sc *scope) {
	switch {
	case now-sc.trial.asked >= c.cfg.Lease:
		if !sc.trial.taken {
			c.withdrawLocked(now, sc)
			return
		}
		c.failLocked(sc, breaker.CauseLost)
		c.reholdLocked(now, sc)
	case !sc.trial.taken && now-sc.trial.granted >= c.cfg.Turn/2:
		c.withdrawLocked(now, sc)
	}
}

// withdrawLocked ends our turn without a probe: nothing was there to probe with
// after all. The hold takes the permit back; a probe that slipped through
// meanwhile counts for nothing.
func (c *core) withdrawLocked(now time.Duration, sc *scope) {
	sc.wants = false
	w := c.standing(sc)
	w.Phase = fleet.PhaseWaiting
	if w.Passes > 0 {
		w.Phase = fleet.PhasePassed
	}
	sc.own = w
	c.holdLocked(now, sc)
	sc.skip(c.self.Name)
}

func (sc *scope) skip(name string) {
	if sc.skipped == nil {
		sc.skipped = make(map[string]struct{})
	}
	sc.skipped[name] = struct{}{}
}
