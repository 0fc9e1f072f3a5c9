// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

// Trial is what became of the probe that a fleet let through a breaker that it holds.
type Trial uint8

const (
	// NoTrial is a breaker that is not held, or holds since before a permit.
	NoTrial Trial = iota
	// TrialPassed is a held breaker whose last permitted probe succeeded.
	TrialPassed
	// TrialFailed is one whose last permitted probe failed, was too slow or was
	// lost.
	TrialFailed
)

// A hold is how a party above the breaker takes its decisions over: processes
// that agree among themselves when their breakers open, which of them probes,
// and when all close. It is apart from a force, so that neither can end the
// other: an operator's Force stands where somebody wanted to hold, replaces a
// hold, and is not closed by the end of one.

// Hold opens the breaker until [Breaker.Unhold] or [Breaker.CloseHeld], and
// raises the backoff to level if it is lower. It voids what is out, as Force
// does, a permitted probe included; on a breaker that is held already only the
// backoff moves, and its vote in a tree lasts from now (see [Scopes]). It does
// nothing while a force lasts, be it behind a longer open period of the breaker's
// own, which Snapshot.Barred tells.
func (b *Breaker) Hold(now time.Duration, level int, cause breaker.Cause) {
	b.mu.Lock()
	defer b.unlock(now)
	if now < b.promised {
		return
	}
	e := b.epoch.Load()
	b.level = max(b.levelLocked(now), min(level, b.top))
	if !e.held || e.state != breaker.Open || e.trial != NoTrial {
		b.gb = b.trippedGobreaker()
		b.holdLocked(now, cause, NoTrial)
	}
	b.epoch.Load().stir.Store(int64(later(now, b.cfg.Period(max(b.level, 1)))))
}

// Permit lets one probe through a held breaker: the next to ask Admit gets it.
// Whatever becomes of it the breaker stays shut and the backoff where it is;
// Snapshot.Trial tells the outcome. An excluded probe gives the permit back.
// It does nothing if the breaker is not held.
func (b *Breaker) Permit(now time.Duration) {
	b.mu.Lock()
	defer b.unlock(now)
	if e := b.epoch.Load(); !e.held || e.state != breaker.Open {
		return
	}
	b.halfOpenLocked(now, true)
}

// Unhold gives a held breaker back to itself: it is half-open and judges its
// own probes. In a tree it has no vote until one of them fails. It does nothing if
// the breaker is not held.
func (b *Breaker) Unhold(now time.Duration) {
	b.mu.Lock()
	defer b.unlock(now)
	if !b.epoch.Load().held {
		return
	}
	b.gb = b.trippedGobreaker()
	b.halfOpenLocked(now, false)
}

// CloseHeld closes a held breaker as if its own probes had: the window is
// empty, and the backoff, one level lower, outlives the close by Memory. It does
// nothing if the breaker is not held.
func (b *Breaker) CloseHeld(now time.Duration, cause breaker.Cause) {
	b.mu.Lock()
	defer b.unlock(now)
	if !b.epoch.Load().held {
		return
	}
	b.gb = b.newGobreaker()
	b.closeLocked(now, cause)
}

// Proved reports whether the breaker is closed and probes closed it: its own, or those of the
// party that held it. One that [Breaker.ForceClosed] closed has shown nothing, nor has one that
// was never open.
func (b *Breaker) Proved() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.epoch.Load().state == breaker.Closed && b.remember != -1
}

// Held reports whether the breaker is held, a permitted probe included: one atomic
// load.
func (b *Breaker) Held() bool { return b.epoch.Load().held }

// holdLocked is the way into a held open period.
func (b *Breaker) holdLocked(now time.Duration, cause breaker.Cause, t Trial) {
	e := &epoch{state: breaker.Open, cause: cause, held: true, trial: t}
	e.until.Store(int64(never))
	b.moveLocked(now, e, cause, never)
}
