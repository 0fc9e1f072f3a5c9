// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// condemn dead-letters an item if the budget allows, else parks it until the
// next credit may have come. A guess pays from the smaller part of the budget, and so
// does everything in a storm of the fleet but what its own error condemns.
func (c *machine[M]) condemn(now time.Duration, it *item[M]) {
	class, reason := dlq.Exhausted, poisonReason(it)
	if c.guilty(now, it) && (it.class == ClassMessage || !c.fleetStorm.Active) {
		class = dlq.Permanent
	}
	switch {
	case it.permanent:
		class, reason = dlq.Permanent, dlq.ReasonPermanent
	case it.lastDelivery && it.attempts < c.policy.Retry.Attempts:
		reason = dlq.ReasonLastDelivery
	}
	c.earn()
	if c.letters {
		if paid, ok := c.budget.Pay(now, class); ok {
			it.credit = paid
			if it.lastWord && !it.permanent {
				c.doubt(it)
			}
			c.sentence(now, it, reason)
			return
		}
	}
	c.tally.Refused++
	wait := c.delay(max(it.attempts, 1))
	if it.decided() {
		wait = creditPoll // no handler call is spent on looking
	}
	c.park(it, now+wait, ReasonDLQ)
}

// sentence dead-letters an item that has its credit, or lets it wait for the limit
// of dead letters: that is no attempt, and nothing asks the handler again.
func (c *machine[M]) sentence(now time.Duration, it *item[M], why dlq.Reason) {
	if c.letterPace != nil {
		if wait := c.letterPace.Admit(now); wait > 0 {
			if !it.paid {
				c.tally.Paced++
			}
			it.paid, it.verdict = true, why
			c.undoubted(it)
			c.park(it, soon(now, wait), ReasonLimiter)
			return
		}
	}
	it.paid = false
	c.deadLetter(it, why)
}

// refund gives back the credit of an item that is not dead-lettered after all, or
// not at its own cost.
func (c *machine[M]) refund(it *item[M]) {
	c.budget.Refund(it.credit)
	it.credit, it.paid = dlq.Paid{}, false
}

// earn brings the budget up to date with the successes.
func (c *machine[M]) earn() { c.budget.Successes(c.total()) }

// creditPoll is how often a permanently failed message looks for a credit.
const creditPoll = 250 * time.Millisecond

// deadLetterWaiting dead-letters up to n messages that have failed and wait, oldest
// first: an operator's decision, which needs neither proof nor credit.
func (c *machine[M]) deadLetterWaiting(n int) (done int) {
	if !c.letters {
		return 0
	}
	for done < n {
		var oldest *item[M]
		c.items(func(it *item[M]) {
			waits := it.tries > 0 && (it.phase == waiting || it.phase == retryWait)
			head := it.lane == nil || it.lane.front[0] == it && it.lane.turn == 0
			if waits && head && (oldest == nil || it.id < oldest.id) {
				oldest = it
			}
		})
		if oldest == nil {
			break
		}
		c.unstand(oldest)
		c.refund(oldest)
		c.deadLetter(oldest, dlq.ReasonOperator)
		done++
	}
	return done
}

// deadLetter hands an item to the dead-letter writer. Its lane goes on at once, or
// when the letter is confirmed.
func (c *machine[M]) deadLetter(it *item[M], why dlq.Reason) {
	it.verdict = why
	if c.inPlace && it.lane != nil {
		it.lane.parked = true
	} else {
		c.part(it)
	}
	c.move(it, settling)
	c.writing[it] = struct{}{}
	c.condemned = append(c.condemned, it)
}

// confirmed takes the news that an item's dead letter is confirmed; parked means
// that it is no dead letter yet.
func (c *machine[M]) confirmed(now time.Duration, it *item[M], parked bool) {
	it.dead = !parked
	if parked {
		c.tally.Parked++
		c.rememberParked(now, it)
		if it.guessed { // it is not dead: the next guess is no later for it
			c.guesses = max(0, c.guesses-1)
		}
	}
	delete(c.writing, it)
	c.part(it) // no-op if its lane went on
	c.acks.push(it)
}
