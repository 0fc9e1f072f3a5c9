// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/credit"
)

// condemn dead-letters an item if the budget allows, else parks it until the
// next credit may have come. Those that wait for one have it first.
func (c *machine[M]) condemn(now time.Duration, it *item[M]) {
	if it.permanent && c.owed.len() > 0 {
		c.owed.at = now
		c.serveOwed(now)
	}
	if (!it.permanent || c.owed.len() == 0) && c.afford(now, it) {
		return
	}
	c.tally.Refused++
	if it.permanent { // no handler call is spent on looking
		c.queueUp(it, &c.owed, now+creditPoll, ReasonDLQ)
		return
	}
	c.park(it, now+c.delay(max(it.attempts, 1)), ReasonDLQ)
}

// afford dead-letters an item if the budget allows. A guess pays from the smaller part of the
// budget, and so does everything in a storm of the fleet but what its own error condemns.
func (c *machine[M]) afford(now time.Duration, it *item[M]) bool {
	class, reason := credit.Exhausted, poisonReason(it)
	if c.guilty(now, it) && (it.class == ClassMessage || !c.fleetStorm.Active) {
		class = credit.Permanent
	}
	switch {
	case it.permanent:
		class, reason = credit.Permanent, dlq.ReasonPermanent
	case it.last() && it.attempts < c.policy.Retry.Attempts:
		reason = dlq.ReasonLastDelivery
	case it.guessed:
		reason = dlq.ReasonGuess
	}
	c.earn()
	if c.letters {
		if paid, ok := c.budget.Pay(now, class); ok {
			it.credit = paid
			if it.lastWord && !it.permanent {
				c.doubt(it)
			}
			c.sentence(now, it, reason)
			return true
		}
	}
	return false
}

// queueOf has items that wait for the same thing, oldest first. The first looks for all. An
// item that something else was decided about is passed over.
type queueOf[M any] struct {
	fifo[*item[M]]
	at time.Duration // when it looks
}

// queueUp parks an item behind others that wait for the same, or where it is in the queue.
func (c *machine[M]) queueUp(it *item[M], q *queueOf[M], at time.Duration, why Reason) {
	c.park(it, never, why)
	if q.len() == 0 || at < q.at {
		q.at = at
	}
	if it.queue != q {
		it.queue = q
		q.push(it)
	}
}

// serve gives the items of a queue what they wait for, until ask has the first one wait.
func (q *queueOf[M]) serve(now time.Duration, ask func(*item[M]) (wait time.Duration)) {
	for q.len() > 0 && q.at <= now {
		it := q.pop()
		if it.queue != q {
			continue
		}
		it.queue = nil
		if wait := ask(it); wait > 0 {
			q.at, it.queue = soon(now, wait), q
			q.pushFront(it)
		}
	}
}

// serveOwed gives credits to items that wait for one.
func (c *machine[M]) serveOwed(now time.Duration) {
	c.owed.serve(now, func(it *item[M]) time.Duration {
		if it.queues() && !it.paid && !c.afford(now, it) {
			return creditPoll
		}
		return 0
	})
}

// servePaced dead-letters items that wait for the limit of dead letters.
func (c *machine[M]) servePaced(now time.Duration) {
	c.paced.serve(now, func(it *item[M]) time.Duration {
		if !it.queues() || !it.paid {
			return 0
		}
		if wait := c.letterPace.Admit(now); wait > 0 {
			return wait
		}
		it.paid = false
		c.deadLetter(it, it.verdict)
		return 0
	})
}

// queues tells whether an item waits in a queue, and not with a rule for a writer.
func (it *item[M]) queues() bool {
	return it.phase == retryWait && it.due == never && (it.paid || it.rule == nil)
}

// sentence dead-letters an item that has its credit, or lets it wait for the limit
// of dead letters, behind others: that is no attempt, and nothing asks the handler again.
func (c *machine[M]) sentence(now time.Duration, it *item[M], why dlq.Reason) {
	if c.letterPace != nil {
		c.paced.at = now
		c.servePaced(now)
		at := c.paced.at
		if c.paced.len() == 0 {
			at = soon(now, c.letterPace.Admit(now))
		}
		if at > now {
			if !it.paid {
				c.tally.Paced++
			}
			it.paid, it.verdict = true, why
			c.undoubted(it)
			c.queueUp(it, &c.paced, at, ReasonLimiter)
			return
		}
	}
	it.paid = false
	c.deadLetter(it, why)
}

// refund gives back the credit of an item that is not dead-lettered after all, or
// not at its own cost.
func (c *machine[M]) refund(it *item[M]) {
	c.unguess(it)
	c.budget.Refund(it.credit)
	it.credit, it.paid = credit.Paid{}, false
}

// earn brings the budget up to date with the successes.
func (c *machine[M]) earn() { c.budget.Successes(c.total()) }

// creditPoll is how often the first of those that wait for a credit looks for one.
const creditPoll = 250 * time.Millisecond

// byHandBatch is how many messages an operator's decision dead-letters at a time, so
// that nothing waits for the source's lock for long.
const byHandBatch = 1024

// failedWaiting is what an operator may dead-letter: the messages that have failed and
// wait, with OrderNone all of them, otherwise the head of each lane and those that are
// next to it. Where letters keep their place the head's letter keeps the others waiting.
// They come as they are found; their ids are their order.
func (c *machine[M]) failedWaiting() (all []*item[M]) {
	for _, l := range c.lanes {
		for i, it := range l.front {
			if !it.failedWaits() || l.turn > 0 || i > 0 && c.inPlace {
				break
			}
			all = append(all, it)
		}
	}
	if c.order() == OrderNone {
		c.items(func(it *item[M]) {
			if it.failedWaits() {
				all = append(all, it)
			}
		})
	}
	return all
}

// failedWaits tells whether an item has failed, and is with no handler or writer.
func (it *item[M]) failedWaits() bool {
	return it.tries > 0 && (it.phase == waiting || it.phase == retryWait)
}

// deadLetterWaiting dead-letters up to n of the next messages of an operator's choice,
// which needs neither proof nor credit, and returns those that are left. What does not
// wait any more, or has another message in front of it, is left out. It looks through
// the ready list once.
func (c *machine[M]) deadLetterWaiting(chosen []*item[M], n int) (rest []*item[M], done int) {
	looked := 0
	for _, it := range chosen {
		if done == n || looked == byHandBatch {
			break
		}
		looked++
		l := it.lane
		if !it.failedWaits() || l != nil && (l.front[0] != it || l.turn > 0) {
			continue
		}
		c.refund(it)
		c.deadLetter(it, dlq.ReasonOperator)
		if l != nil {
			l.deep = true
		}
		done++
	}
	c.tidy()
	return chosen[looked:], done
}

// tidy takes out of the ready lists what has nothing to try any more.
func (c *machine[M]) tidy() {
	for range c.again.len() {
		if it := c.again.pop(); it.phase == waiting {
			c.again.push(it)
		}
	}
	for range c.ready.len() {
		l := c.ready.pop()
		if !l.parked && !l.empty() {
			c.ready.push(l)
			continue
		}
		l.queued = false
		c.leave(l)
	}
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
		c.unguess(it) // it is not dead: the next guess is no later for it
	}
	delete(c.writing, it)
	c.part(it) // no-op if its lane went on
	c.acks.push(it)
}
