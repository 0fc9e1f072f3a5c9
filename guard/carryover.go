// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/credit"
	"github.com/stormguard-mq/stormguard/internal/storm"
)

// keepFor is how long a Guard remembers the budget and the guesses of a source that ended. In
// that time the free credits of a default budget make up for a spent balance of Exhausted, and
// the longest time that Backoff can ask for is over. A pause is remembered until it is over or
// an operator resumes the source.
const keepFor = 2 * time.Hour

// carryOver is what a source inherits from its previous epoch. A channel or a claim that comes and
// goes must not refill the DLQ budget, begin the guesses of an outage anew, or undo an operator's
// pause. It must not call a dependency that asked for time (Backoff) too early, either.
type carryOver struct {
	budget    *credit.Budget     // nil if only the pause is remembered
	cfg       dlq.BudgetConfig   // the settings of budget
	guesses   int                // machine.guesses
	guessedAt time.Duration      // machine.guessedAt
	stillAt   time.Duration      // machine.stoodStillAt
	suspects  map[string]suspect // machine.suspects
	flaky     flakiness          // needed to judge the attempts of the suspects
	paused    bool
	pauseEnds time.Duration // machine.pauseEnds
	asked     time.Duration // machine.asked
	askedFor  error         // machine.askedFor
	askedText string        // machine.askedText
	succeeded int64         // elsewhere.own
	storm     *storm.Saved  // of a source whose breaker is not closed; else nil
	at        time.Duration // when the epoch ended
	restart   bool          // the process before this one remembered it
}

// keep remembers a source that has ended.
func (g *Guard) keep(name string, k carryOver) {
	g.mu.Lock()
	g.kept[name] = k
	g.mu.Unlock()
	g.saver.hurry()
}

// recall returns what is remembered under the name of a source or a function, and forgets it.
func (g *Guard) recall(name string) carryOver {
	g.mu.Lock()
	defer g.mu.Unlock()
	k := g.kept[name]
	delete(g.kept, name)
	return k
}

// forget drops what was remembered for too long. The sweeper calls it once a minute while
// sources run.
func (g *Guard) forget(now time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for name, k := range g.kept {
		switch {
		case now-k.at < keepFor:
		case k.paused && now < k.pauseEnds:
			g.kept[name] = carryOver{paused: true, pauseEnds: k.pauseEnds, at: k.at, restart: k.restart}
		default:
			delete(g.kept, name)
		}
	}
	for key, sc := range g.restored {
		if goneScope(now, sc) {
			delete(g.restored, key)
		}
	}
}

// keepLocked returns what the next epoch inherits. The budget is a continuation: readers of this
// source still have the old one. The suspects are shared with the machine.
func (s *Source[M]) keepLocked(now time.Duration) carryOver {
	s.c.earn()
	k := carryOver{
		budget: s.c.budget.Continue(), cfg: s.c.policy.Budget, paused: s.c.paused, pauseEnds: s.c.pauseEnds,
		suspects: freshSuspects(now, s.c.suspects), flaky: s.c.flaky, stillAt: s.c.stoodStillAt, succeeded: s.c.elsewhere.own.Load(), at: now,
	}
	k.flaky.seen = 0 // the next epoch counts anew
	if s.c.life() == s.c.lifeAtGuess {
		k.guesses, k.guessedAt = s.c.guesses, s.c.guessedAt
	}
	// A shorter time may be a Backoff of no time, which adapters use to say that no attempt was made.
	if s.c.asked-now > s.c.policy.Retry.Base {
		k.asked, k.askedFor, k.askedText = s.c.asked, s.c.askedFor, s.c.askedText
	}
	if !s.c.closed() {
		if saved, ok := s.c.storm.Save(); ok {
			k.storm = &saved
		}
	}
	return k
}

// besides returns a function that counts the successes of a parent from now on; nil without a
// parent. Budget, guesses and proof begin at 0 with each epoch: earlier successes of the parent
// would fill a balance that an earlier epoch has spent.
func besides(from parent) func() uint64 {
	if from == nil {
		return nil
	}
	base := from.successes()
	return func() uint64 { return max(from.successes(), base) - base }
}

// resumeLocked takes over what the previous epoch left. A budget with other settings begins anew.
func (s *Source[M]) resumeLocked(now time.Duration, k carryOver) {
	s.c.paused, s.c.pauseEnds = k.paused, k.pauseEnds // the sweeper ends a pause whose time is over
	s.c.guesses, s.c.guessedAt, s.c.stoodStillAt = k.guesses, k.guessedAt, k.stillAt
	s.c.asked, s.c.askedFor, s.c.askedText = k.asked, k.askedFor, k.askedText
	s.c.suspects, s.c.flaky = k.suspects, k.flaky
	s.c.elsewhere.own.Store(k.succeeded)
	s.c.lifeAtGuess = s.c.born
	if k.budget != nil && k.cfg == s.c.policy.Budget {
		s.c.budget = k.budget
	}
	if k.storm != nil && !s.c.closed() {
		s.c.storm.Restore(now, *k.storm)
		s.c.wasClosed, s.c.shutAt = false, now // so that notice sees the breaker close
	}
}
