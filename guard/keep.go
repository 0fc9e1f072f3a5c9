// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/credit"
	"github.com/stormguard-mq/stormguard/internal/storm"
)

// keepFor is how long a Guard remembers the budget and the guesses of a source
// that ended. By then the free credits of a default budget have made up for a
// balance of Exhausted that was spent, and the longest time that can be asked for
// is over. A pause it remembers until it is resumed or over.
const keepFor = 2 * time.Hour

// kept is what outlives an epoch: a channel or a claim that comes and goes must
// neither refill the DLQ budget, nor start the guesses of an outage anew, nor undo
// an operator's pause, nor call before its time a dependency that asked for time.
type kept struct {
	budget    *credit.Budget // nil if nothing is remembered but the pause
	cfg       dlq.BudgetConfig
	guesses   int // see machine
	guessedAt time.Duration
	stillAt   time.Duration // see machine
	suspects  map[string]suspect
	flaky     flakiness // by which the attempts of the suspects are judged
	paused    bool
	pauseEnds time.Duration // see machine
	asked     time.Duration // see machine
	askedFor  error
	askedText string
	succeeded int64        // see elsewhere
	storm     *storm.Saved // of a source whose breaker is not closed
	at        time.Duration
	restart   bool // by the process before
}

// keep remembers a source that has ended.
func (g *Guard) keep(name string, k kept) {
	g.mu.Lock()
	g.kept[name] = k
	g.mu.Unlock()
	g.saver.hurry()
}

// recall gives what is remembered of a name to the source that takes it up.
func (g *Guard) recall(name string) kept {
	g.mu.Lock()
	defer g.mu.Unlock()
	k := g.kept[name]
	delete(g.kept, name)
	return k
}

// forget drops what is too old. The sweeper calls it once a minute while
// sources run.
func (g *Guard) forget(now time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for name, k := range g.kept {
		switch {
		case now-k.at < keepFor:
		case k.paused && now < k.pauseEnds:
			g.kept[name] = kept{paused: true, pauseEnds: k.pauseEnds, at: k.at, restart: k.restart}
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

// keepLocked is what outlives the source. Its own budget is left to whoever
// still looks at it, and its suspects are those of the machine.
func (s *Source[M]) keepLocked(now time.Duration) kept {
	s.c.earn()
	k := kept{
		budget: s.c.budget.Continue(), cfg: s.c.policy.Budget, paused: s.c.paused, pauseEnds: s.c.pauseEnds,
		suspects: freshSuspects(now, s.c.suspects), flaky: s.c.flaky, stillAt: s.c.stillAt, succeeded: s.c.elsewhere.own.Load(), at: now,
	}
	k.flaky.seen = 0 // the next epoch counts anew
	if s.c.life() == s.c.guessLuck {
		k.guesses, k.guessedAt = s.c.guesses, s.c.guessedAt
	}
	if s.c.asked-now > s.c.policy.Retry.Base { // else it may be a Backoff of no time, by which adapters say that no attempt was made
		k.asked, k.askedFor, k.askedText = s.c.asked, s.c.askedFor, s.c.askedText
	}
	if !s.c.closed() {
		if saved, ok := s.c.storm.Save(); ok {
			k.storm = &saved
		}
	}
	return k
}

// besides counts the successes of a parent from now on, nil for none. Budget, guesses and
// proof begin at 0 with each epoch: what the parent had counted before would fill a
// balance that an earlier epoch has spent.
func besides(from parent) func() uint64 {
	if from == nil {
		return nil
	}
	base := from.successes()
	return func() uint64 { return max(from.successes(), base) - base }
}

// resumeLocked takes up what an earlier epoch left; a budget of other settings
// begins anew.
func (s *Source[M]) resumeLocked(now time.Duration, k kept) {
	s.c.paused, s.c.pauseEnds = k.paused, k.pauseEnds // the sweeper ends one whose time is over
	s.c.guesses, s.c.guessedAt, s.c.stillAt = k.guesses, k.guessedAt, k.stillAt
	s.c.asked, s.c.askedFor, s.c.askedText = k.asked, k.askedFor, k.askedText
	s.c.suspects, s.c.flaky = k.suspects, k.flaky
	s.c.elsewhere.own.Store(k.succeeded)
	s.c.guessLuck = s.c.born
	if k.budget != nil && k.cfg == s.c.policy.Budget {
		s.c.budget = k.budget
	}
	if k.storm != nil && !s.c.closed() {
		s.c.storm.Restore(now, *k.storm)
		s.c.wasClosed, s.c.shutAt = false, now // notice is to see it close
	}
}
