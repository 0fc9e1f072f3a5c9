// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"math"
	"time"

	"github.com/sony/gobreaker/v2"

	"github.com/stormguard-mq/stormguard/breaker"
)

// Saved is what a breaker leaves to the next process, whose clock goes on where this one's
// would be.
type Saved struct {
	State  breaker.State `json:"state"`
	Cause  breaker.Cause `json:"cause,omitempty"`
	Forced bool          `json:"forced,omitempty"`

	// Until is the deadline of an open period or a force; the largest Duration for a
	// force without end. Closed, it is how long the level is remembered.
	Until time.Duration `json:"until,omitempty"`
	// Down is since when nothing succeeds; 0 while closed.
	Down  time.Duration `json:"down,omitempty"`
	Level int           `json:"level,omitempty"`
	Flaps int           `json:"flaps,omitempty"`
}

// Save is what the next process has to know, and false if that is nothing: a closed
// breaker whose level is forgotten. Held by others it is half-open: what they decided
// they know themselves.
func (b *Breaker) Save(now time.Duration) (Saved, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.epoch.Load()
	s := Saved{State: e.state, Cause: e.cause, Level: b.levelLocked(now), Flaps: b.flaps}
	switch {
	case e.state == breaker.Closed:
		s.Cause, s.Until = "", max(b.remember, 0)
		return s, s.Level > 0
	case now < b.promised:
		s.State, s.Forced, s.Until = breaker.Open, true, max(b.promised, e.deadline())
	case e.held:
		s.State = breaker.HalfOpen
	case e.state == breaker.Open:
		s.Forced, s.Until = e.forced, e.deadline()
	}
	s.Down = b.down
	return s, true
}

// Restore takes up what an earlier process saved. A force lasts until its end. An open period does, too, but no longer than Cap; one that
// is over, or is stale, leaves the breaker half-open, without a vote in a tree until a probe
// has failed. Restore reports false and does
// nothing if the breaker has changed since it was made.
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
		b.promised = s.Until
	case s.State == breaker.Open && !stale:
		s.Forced, left = false, min(max(left, 0), b.cfg.Cap)
	default:
		s.Forced, left = false, 0
	}
	if left > 0 {
		b.openLocked(now, s.Cause, left, s.Forced)
	} else {
		// As by Unhold: there is nothing yet that it could vote by.
		b.byHand, b.judged = b.flaps > 0, gobreaker.StateHalfOpen
		e := &epoch{state: breaker.HalfOpen, cause: s.Cause, freed: true}
		e.until.Store(math.MinInt64)
		b.moveLocked(now, e, s.Cause, 0)
	}
	b.down = min(s.Down, now)
	return true
}

// SavedScope is a leaf's breaker, and its path.
type SavedScope struct {
	Path []string `json:"path"`
	// At is when it was saved; 0 is as of now.
	At time.Duration `json:"at,omitempty"`
	Saved
}

// Save appends what the leaves leave to the next process, in no order.
func (s *Scopes) Save(now time.Duration, dst []SavedScope) []SavedScope {
	for _, n := range s.nodes(now) {
		if saved, ok := n.b.Save(now); ok {
			dst = append(dst, SavedScope{Path: n.path.elements(), Saved: saved})
		}
	}
	return dst
}
