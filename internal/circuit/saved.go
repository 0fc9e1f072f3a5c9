// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"math"
	"time"

	"github.com/sony/gobreaker/v2"

	"github.com/stormguard-mq/stormguard/breaker"
)

// Saved is the state of a breaker that the next process continues. The clock of the next
// process continues the clock of this one.
type Saved struct {
	State  breaker.State `json:"state"`
	Cause  breaker.Cause `json:"cause,omitempty"`
	Forced bool          `json:"forced,omitempty"`

	// Until is the deadline of an open period or a force; the largest Duration for a
	// force without end. In a closed breaker it is when the level is forgotten.
	Until time.Duration `json:"until,omitempty"`
	// Down is the start of the time without a success; 0 while closed.
	Down  time.Duration `json:"down,omitempty"`
	Level int           `json:"level,omitempty"`
	Flaps int           `json:"flaps,omitempty"`
}

// Save returns the state for the next process. It returns false if there is none: the
// breaker is closed and its level forgotten. A held breaker is saved as half-open, since
// the other processes know their own decision.
func (b *Breaker) Save(now time.Duration) (Saved, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.epoch.Load()
	s := Saved{State: e.state, Cause: e.cause, Level: b.levelLocked(now), Flaps: b.flaps}
	switch {
	case e.state == breaker.Closed:
		s.Cause, s.Until = "", max(b.remember, 0)
		return s, s.Level > 0
	case now < b.forcedUntil:
		s.State, s.Forced, s.Until = breaker.Open, true, max(b.forcedUntil, e.deadline())
	case e.held:
		s.State = breaker.HalfOpen
	case e.state == breaker.Open:
		s.Forced, s.Until = e.forced, e.deadline()
	}
	s.Down = b.downSince
	return s, true
}

// Restore continues the state that an earlier process saved. A force lasts until its end,
// an open period too, but at most Cap longer. An open period that is over or stale makes
// the breaker half-open, without a vote in a tree until a probe fails. Restore does
// nothing and returns false if the breaker has changed since New.
func (b *Breaker) Restore(now time.Duration, s Saved, stale bool) bool {
	b.mu.Lock()
	defer b.unlock(now)
	if b.epoch.Load().gen != 1 || s.State > breaker.HalfOpen {
		return false
	}
	b.level, b.flaps = min(max(s.Level, 0), b.top), min(max(s.Flaps, 0), maxFlaps)
	if s.State == breaker.Closed {
		b.remember = min(s.Until, later(now, b.cfg.Memory))
		return true
	}
	b.level = max(b.level, 1)
	b.gb = b.trippedGobreaker()
	left := s.Until - now
	if s.Until == never {
		left = never
	}
	switch {
	case s.Forced && left > 0:
		b.forcedUntil = s.Until
	case s.State == breaker.Open && !stale:
		s.Forced, left = false, min(max(left, 0), b.cfg.Cap)
	default:
		s.Forced, left = false, 0
	}
	if left > 0 {
		b.openLocked(now, s.Cause, left, s.Forced)
	} else {
		// As after Unhold: the breaker has no vote until a probe fails.
		b.byHand, b.gobreakerState = b.flaps > 0, gobreaker.StateHalfOpen
		e := &epoch{state: breaker.HalfOpen, cause: s.Cause, freed: true}
		e.until.Store(math.MinInt64)
		b.moveLocked(now, e, s.Cause, 0)
	}
	b.downSince = min(s.Down, now)
	b.tripped = b.downSince
	return true
}

// SavedScope is the saved state of a leaf's breaker, with its path.
type SavedScope struct {
	Path []string `json:"path"`
	// At is when the breaker was saved; 0 means now.
	At time.Duration `json:"at,omitempty"`
	Saved
}

// Save appends the states of the leaves for the next process, in no order.
func (s *Scopes) Save(now time.Duration, dst []SavedScope) []SavedScope {
	for _, n := range s.nodes(now) {
		if saved, ok := n.b.Save(now); ok {
			dst = append(dst, SavedScope{Path: n.path.elements(), Saved: saved})
		}
	}
	return dst
}
