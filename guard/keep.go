// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// keepFor is how long a Guard remembers a source that ended. By then the free
// credits of a default budget have made up for a balance that was spent.
const keepFor = 2 * time.Hour

// kept is what outlives an epoch: a channel or a claim that comes and goes must
// neither refill the DLQ budget nor undo an operator's pause.
type kept struct {
	budget *dlq.Budget
	cfg    dlq.BudgetConfig
	paused bool
	at     time.Duration
}

// keep remembers a source that has ended.
func (g *Guard) keep(name string, k kept) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.kept[name] = k
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
		if now-k.at >= keepFor {
			delete(g.kept, name)
		}
	}
}

// keepLocked is what outlives the source. Its own budget is left to whoever
// still looks at it.
func (s *Source[M]) keepLocked(now time.Duration) kept {
	s.c.earn()
	return kept{budget: s.c.budget.Continue(), cfg: s.c.policy.Budget, paused: s.c.paused, at: now}
}

// resume takes up what an earlier epoch left; a budget of other settings begins
// anew.
func (s *Source[M]) resume(k kept) {
	if k.budget == nil {
		return
	}
	s.mu.Lock()
	s.c.paused = k.paused
	if k.cfg == s.c.policy.Budget {
		s.c.budget = k.budget
	}
	s.unlock(s.g.now())
}
