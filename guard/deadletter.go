// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/credit"
)

// spendCredit dead-letters an item if the budget allows, else the item waits. A permanent item
// waits in owed until it has a credit, behind the items that are there already. Any other item
// waits for its next attempt.
func (c *machine[M]) spendCredit(now time.Duration, it *item[M]) {
	if it.permanent && c.owed.len() > 0 {
		c.owed.at = now
		c.serveOwed(now)
	}
	if (!it.permanent || c.owed.len() == 0) && c.afford(now, it) {
		return
	}
	c.tally.Refused++
	if it.permanent { // no handler call is spent on waiting for a credit
		c.queueUp(it, &c.owed, now+creditPoll, ReasonDLQ)
		return
	}
	c.waitRetry(it, now+c.delay(max(it.attempts, 1)), ReasonDLQ)
}

// afford dead-letters an item if the budget allows. A guess pays from the small balance
// (credit.Exhausted). In a storm of the fleet all items do, except those whose handler or whose
// own error blames them.
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
			c.paceLetter(now, it, reason)
			return true
		}
	}
	return false
}

// queueOf is a queue of items that wait for the same thing, oldest first. The first item asks
// for all. serve skips an item that does not wait in the queue any more.
type queueOf[M any] struct {
	fifo[*item[M]]
	at time.Duration // when the first item asks
}

// queueUp lets an item wait at the end of a queue, or keeps its place if it has one.
func (c *machine[M]) queueUp(it *item[M], q *queueOf[M], at time.Duration, why Reason) {
	c.waitRetry(it, never, why)
	if q.len() == 0 || at < q.at {
		q.at = at
	}
	if it.queue != q {
		it.queue = q
		q.push(it)
	}
}

// serve calls ask for each item of a queue, oldest first, until ask returns how long the item
// has to wait.
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

// queues tells whether an item waits in owed or paced. An item that matches a rule waits in neither
// if the source has no dead-letter writer.
func (it *item[M]) queues() bool {
	return it.phase == retryWait && it.due == never && (it.paid || it.rule == nil)
}

// paceLetter dead-letters an item that has its credit, or lets it wait behind others for the limit
// of dead letters. The wait is no attempt, and the handler is not called again.
func (c *machine[M]) paceLetter(now time.Duration, it *item[M], why dlq.Reason) {
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

// refund gives back the credit of an item that is not dead-lettered after all, or whose dead
// letter costs no credit.
func (c *machine[M]) refund(it *item[M]) {
	c.unguess(it)
	c.budget.Refund(it.credit)
	it.credit, it.paid = credit.Paid{}, false
}

// earn tells the budget how many calls have succeeded.
func (c *machine[M]) earn() { c.budget.Successes(c.total()) }

// creditPoll is how often the first item of owed asks for a credit.
const creditPoll = 250 * time.Millisecond

// byHandBatch is how many messages an operator's decision dead-letters at a time, so that no
// goroutine waits long for the source's lock.
const byHandBatch = 1024

// failedWaiting returns the messages that an operator may dead-letter: those that have failed
// and wait. With OrderNone these are all such messages, else the head of each lane and the
// failed messages next to it. With blocksLane it is the head alone, because its dead letter keeps
// the others waiting. The result is not sorted; the ids give the order.
func (c *machine[M]) failedWaiting() (all []*item[M]) {
	for _, l := range c.lanes {
		for i, it := range l.front {
			if !it.failedWaits() || l.turn > 0 || i > 0 && c.blocksLane {
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

// failedWaits tells whether an item has failed, and is with no handler and no writer.
func (it *item[M]) failedWaits() bool {
	return it.tries > 0 && (it.phase == waiting || it.phase == retryWait)
}

// deadLetterWaiting dead-letters up to n of the messages that an operator chose, without proof or
// credit, and returns the rest. It skips a message that does not wait any more, or has another
// message in front of it. It walks through the ready list once.
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

// tidy removes items and lanes from the ready lists that have nothing to try any more.
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
		c.dropIfEmpty(l)
	}
}

// deadLetter hands an item to the dead-letter writer. The item's lane goes on at once, with
// blocksLane when the letter is confirmed.
func (c *machine[M]) deadLetter(it *item[M], why dlq.Reason) {
	it.verdict = why
	if c.blocksLane && it.lane != nil {
		it.lane.parked = true
	} else {
		c.part(it)
	}
	c.move(it, settling)
	c.writing[it] = struct{}{}
	c.toWrite = append(c.toWrite, it)
}

// confirmed lets an item be acked whose dead letter is confirmed. parked means that the message
// was parked, and is no dead letter yet.
func (c *machine[M]) confirmed(now time.Duration, it *item[M], parked bool) {
	it.dead = !parked
	if parked {
		c.tally.Parked++
		c.rememberParked(now, it)
		c.unguess(it) // a parked message does not double the wait for the next guess
	}
	delete(c.writing, it)
	c.part(it) // no-op if the lane has gone on
	c.acks.push(it)
}
