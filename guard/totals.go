// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"sync/atomic"
	"time"
)

// What the other processes of a fleet succeed in is weaker evidence than a success
// here: their path to the dependency is not this process's. If that is broken, all
// messages fail here and none elsewhere, and each of them would look like poison. So a
// success elsewhere never gives a message the last word. It releases a guess from its
// doubt, and only where a broken path is unlikely; see vouched.

// maxVouched is how many messages without local proof others' successes may send to the
// dead letters, until something succeeds here.
const maxVouched = 8

// totals are what a source has counted.
type totals struct{ handled, failed, dead uint64 }

// totalSum is what the sources of one key have counted since the last look.
type totalSum struct {
	totals
	sources int
	others  time.Duration // when a call of another process succeeded, at the latest known
	err     error         // of the last Count
}

// elsewhere is what a source knows of the rest. The sweeper writes it.
type elsewhere struct {
	succeeded atomic.Int64 // when a call of another process did, by this one's clock; 0 for never
	failing   atomic.Int64 // sources of this process that fail, this one included
	own       atomic.Int64 // when a call of this source was seen to have succeeded; 0 for never
}

// burst is what has failed here since the last success.
type burst struct {
	on    bool
	came  time.Duration // when the first of it came
	luck  uint64        // life then
	spent time.Duration // when the attempts of one of it were used up first; 0 before that
}

// shareTotals tells the fleet what was counted for each topic or queue since the last
// call, and each source how the other processes fare. The sweeper calls it.
func (g *Guard) shareTotals(now time.Duration) {
	if g.fleet == nil {
		return
	}
	for _, sum := range g.totals {
		*sum = totalSum{err: sum.err}
	}
	failing, all := 0, g.all()
	add := func(s controls, open int) {
		key, since, fails := s.counted()
		if key == "" {
			return
		}
		sum := g.totals[key]
		if sum == nil {
			sum = new(totalSum)
			g.totals[key] = sum
		}
		sum.sources += open
		sum.handled += since.handled
		sum.failed += since.failed
		sum.dead += since.dead
		if fails {
			failing += open
		}
	}
	for _, s := range all {
		add(s, 1)
	}
	g.mu.Lock() // what parts from here on is in all, or told next time
	parted := g.parted
	g.parted = nil
	g.mu.Unlock()
	for _, s := range parted {
		add(s, 0)
	}
	for key, sum := range g.totals {
		err := g.fleet.Count(key, sum.handled, sum.failed, sum.dead)
		if err != nil && sum.err == nil {
			g.log.Warn("the fleet takes no totals", "key", key, "error", err)
		}
		sum.err = err
		if ago, ok := g.fleet.OthersSucceeded(key); ok {
			sum.others = max(now-ago, 1)
		}
	}
	for _, s := range all {
		s.heardTotals(g.totals, failing)
	}
	for key, sum := range g.totals {
		if sum.sources == 0 {
			delete(g.totals, key)
		}
	}
}

// counted is what the source has counted since the sweeper asked last, and whether all
// that it calls fails.
func (s *Source[M]) counted() (key string, since totals, failing bool) {
	s.mu.Lock()
	n := totals{failed: s.c.tally.Failures, dead: s.c.tally.DeadLettered}
	failing = s.c.failing()
	s.mu.Unlock()
	was := s.seen.counted
	if n.handled = max(s.successes(), was.handled); n.handled > was.handled {
		s.c.elsewhere.own.Store(int64(s.g.now()))
	}
	s.seen.counted = n
	return s.stormKey, totals{n.handled - was.handled, n.failed - was.failed, n.dead - was.dead}, failing
}

func (s *Source[M]) heardTotals(sums map[string]*totalSum, failing int) {
	if sum := sums[s.stormKey]; sum != nil {
		s.c.elsewhere.succeeded.Store(int64(sum.others))
		s.c.elsewhere.failing.Store(int64(failing))
	}
}

func (*Func[M]) counted() (key string, since totals, failing bool) { return "", totals{}, false }

func (*Func[M]) heardTotals(map[string]*totalSum, int) {}

// failing tells whether messages wait whose attempts are used up, and nothing has
// succeeded since.
func (c *machine[M]) failing() bool {
	return c.exhausted > 0 && c.burst.spent > 0 && c.life() == c.burst.luck
}

// keepBurst keeps what a message that has just failed says of the burst.
func (c *machine[M]) keepBurst(it *item[M]) {
	if b := &c.burst; !b.on || it.luck != b.luck {
		*b = burst{on: true, came: it.at, luck: it.luck}
	}
	if it.exhausted && c.burst.spent == 0 {
		c.burst.spent = it.exhaustedAt
	}
}

// vouched tells whether the other processes' successes release a guess from its doubt:
// something has succeeded there after the attempts of a message here were used up, and
// it is fresh. Where this process's path may be broken they say nothing: another source
// of it fails, too, or more fails than one small burst since the last success here.
func (c *machine[M]) vouched(now time.Duration) bool {
	b, at, life := &c.burst, time.Duration(c.elsewhere.succeeded.Load()), c.life()
	if b.spent == 0 || life != b.luck || at <= b.spent || now-at >= proofFresh || c.elsewhere.failing.Load() > 1 {
		return false
	}
	guesses := 0
	if life <= c.guessLuck {
		guesses = c.guesses
	}
	switch {
	case c.inPlace, c.storm.Storm().Active, c.gate != nil && c.gate.Held():
		return false
	case c.came > b.came+proofFresh, c.room() == 0, c.unsettled()+guesses > maxVouched:
		return false
	case guesses > 0 && c.guessedAt < b.spent: // of an earlier epoch
		return false
	}
	return true
}

// vouchedAt is when a vouched guess may be made: as soon as for one message alone, but
// where the burst came after a pause in which nothing succeeded, twice that later. The
// next message of a source that gets a few now and then tells before that.
func (c *machine[M]) vouchedAt() time.Duration {
	wait, most := c.policy.Retry.Patience, c.policy.Retry.Patience<<maxDoubt
	if own := time.Duration(c.elsewhere.own.Load()); own > 0 && c.burst.came > own {
		wait = max(wait, min(2*(c.burst.came-own), most))
	}
	return max(c.burst.spent, c.came, c.provedAt) + wait
}
