// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

// Trial is the outcome of a probe that a fleet let through a breaker that it holds.
type Trial uint8

const (
	// NoTrial means that the breaker is not held, or that no permitted probe has ended
	// since the hold began.
	NoTrial Trial = iota
	// TrialPassed means that the latest permitted probe of a held breaker succeeded.
	TrialPassed
	// TrialFailed means that the latest permitted probe of a held breaker failed, was too
	// slow or was lost.
	TrialFailed
)

// With a hold, a party above the breaker takes over its decisions: processes agree when
// their breakers open, which of them probes, and when all close. A hold is not a force,
// and neither can end the other. Hold does nothing under an operator's Force, Force
// replaces a hold, and the end of a hold does not close a forced breaker.

// Hold opens the breaker until [Breaker.Unhold] or [Breaker.CloseHeld], and raises the
// backoff to level if it is lower. Like Force it voids all tokens that are out, a permitted
// probe included. On a breaker that is held already only the backoff changes, and its vote
// in a tree lasts from now (see [Scopes]).
//
// Hold does nothing while a force lasts, also if a longer open period of the breaker's own
// hides the force. Snapshot.Barred says whether a force lasts.
func (b *Breaker) Hold(now time.Duration, level int, cause breaker.Cause) {
	b.mu.Lock()
	defer b.unlock(now)
	if now < b.forcedUntil {
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

// Permit lets one probe through a held breaker: the next call of Admit gets it. Whatever
// the outcome, the breaker stays held and its backoff stays as it is. Snapshot.Trial has
// the outcome. An excluded probe gives the permit back. Permit does nothing if the breaker
// is not held.
func (b *Breaker) Permit(now time.Duration) {
	b.mu.Lock()
	defer b.unlock(now)
	if e := b.epoch.Load(); !e.held || e.state != breaker.Open {
		return
	}
	b.halfOpenLocked(now, true)
}

// Unhold ends a hold: the breaker becomes half-open and judges its own probes. In a tree it
// has no vote until a probe fails. Unhold does nothing if the breaker is not held.
func (b *Breaker) Unhold(now time.Duration) {
	b.mu.Lock()
	defer b.unlock(now)
	if !b.epoch.Load().held {
		return
	}
	b.gb = b.trippedGobreaker()
	b.halfOpenLocked(now, false)
}

// CloseHeld closes a held breaker as if its own probes had closed it: the window is empty,
// and the level of the backoff, lowered by one, is remembered for Memory. CloseHeld does
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

// Proved reports whether the breaker is closed and probes closed it: its own probes, or
// those of the party that held it. It is false after [Breaker.ForceClosed], and for a
// breaker that was never open.
func (b *Breaker) Proved() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.epoch.Load().state == breaker.Closed && b.remember != -1
}

// Held reports whether the breaker is held, a permitted probe included: one atomic
// load.
func (b *Breaker) Held() bool { return b.epoch.Load().held }

// holdLocked begins a held open period.
func (b *Breaker) holdLocked(now time.Duration, cause breaker.Cause, t Trial) {
	e := &epoch{state: breaker.Open, cause: cause, held: true, trial: t}
	e.until.Store(int64(never))
	b.moveLocked(now, e, cause, never)
}
