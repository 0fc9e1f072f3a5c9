// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"sync/atomic"
	"time"
)

// A success in another process of the fleet is weaker evidence than a success here,
// because that process has its own path to the dependency. If the path of this process is
// broken, all messages fail here and none elsewhere, and each message would look like
// poison. So a success elsewhere never gives a message the last word. It only makes the
// wait for a guess shorter, and only if a broken path is unlikely; see vouched.

// maxVouched is how many messages without a local proof may be dead-lettered because of
// successes in other processes, until something succeeds here.
const maxVouched = 8

// totals are the counts of a source.
type totals struct{ handled, failed, dead uint64 }

// totalSum is the sum of the counts of one key's sources since the last shareTotals.
type totalSum struct {
	totals
	sources int           // open sources of the key
	others  time.Duration // when a call of another process last succeeded, as far as known
	err     error         // error of the latest Count
}

// elsewhere is what a source knows about other processes and sources. The sweeper writes it.
type elsewhere struct {
	succeeded atomic.Int64 // when a call of another process last succeeded, by this process's clock; 0 for never
	failing   atomic.Int64 // failing sources of this process, this source included
	own       atomic.Int64 // when a call of this source was last seen to succeed; 0 for never
}

// burst is the group of messages that have failed here since the last success.
type burst struct {
	on            bool
	came          time.Duration // when the first message of the burst came
	lifeAtFailure uint64        // the number of successes (life) when that message failed
	spent         time.Duration // when the attempts of a message of the burst were first used up; 0 before that
}

// shareTotals tells the fleet the counts of each topic or queue since the last call, and
// tells each source the successes of the other processes. The sweeper calls it.
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
	g.mu.Lock() // a source that ends after this is in all, or is counted next time
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

// counted returns the source's counts since its last call, and whether all of its handler
// calls fail. The sweeper calls it.
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

// failing tells whether messages with used up attempts wait, and nothing has succeeded
// since.
func (c *machine[M]) failing() bool {
	return c.exhausted > 0 && c.burst.spent > 0 && c.life() == c.burst.lifeAtFailure
}

// keepBurst adds a message that has just failed to the burst.
func (c *machine[M]) keepBurst(it *item[M]) {
	if b := &c.burst; !b.on || it.lifeAtFailure != b.lifeAtFailure {
		*b = burst{on: true, came: it.at, lifeAtFailure: it.lifeAtFailure}
	}
	if it.exhausted && c.burst.spent == 0 {
		c.burst.spent = it.exhaustedAt
	}
}

// vouched tells whether successes in other processes make the wait for a guess shorter: a
// call succeeded there lately, after the attempts of a message here were used up. They
// prove nothing if this process's path may be broken: another source of this process
// fails, too, or more than one small burst has failed since the last success here.
func (c *machine[M]) vouched(now time.Duration) bool {
	b, at, life := &c.burst, time.Duration(c.elsewhere.succeeded.Load()), c.life()
	if b.spent == 0 || life != b.lifeAtFailure || at <= b.spent || now-at >= proofFresh || c.elsewhere.failing.Load() > 1 {
		return false
	}
	guesses := 0
	if life <= c.lifeAtGuess {
		guesses = c.guesses
	}
	switch {
	case c.blocksLane, c.storm.Storm().Active, c.gate != nil && c.gate.Held():
		return false
	case c.came > b.came+proofFresh, c.room() == 0, c.unsettled()+guesses > maxVouched:
		return false
	case guesses > 0 && c.guessedAt < b.spent: // the guesses are of an earlier epoch
		return false
	}
	return true
}

// vouchedAt is when a vouched guess may be made: after Patience, as for a single message.
// If nothing had succeeded for a while before the burst, it is after twice that while: on
// a source with few messages, the next message then comes before the guess.
func (c *machine[M]) vouchedAt() time.Duration {
	wait, most := c.policy.Retry.Patience, c.policy.Retry.Patience<<maxDoubt
	if own := time.Duration(c.elsewhere.own.Load()); own > 0 && c.burst.came > own {
		wait = max(wait, min(2*(c.burst.came-own), most))
	}
	return max(c.burst.spent, c.came, c.provedAt) + wait
}
