// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// Poison or outage? A message that fails while others succeed is poison; while
// nothing succeeds nothing is. So each verdict here waits for the success of another
// message, had in one of three ways; the fourth is a guess:
//
//	alive    a message failed twice in its own turn, and others succeeded between
//	witness  in sequence nobody else has a turn: the message behind a suspect head is
//	         tried at once, and its success condemns the head. Such tries behind one
//	         failure of the head are a round
//	others   other lanes' heads, and with a fleet other processes', are witnesses in
//	         their own turn
//	guess    nothing can be compared: the message is alone, or all that is here failed
//	         often and for long (lonely). It is dead-lettered without proof, and each
//	         further guess waits twice as long
//
// What is condemned needs a credit of the budget too; decide, in verdict.go, puts it
// all in order.

// maxWitnesses bounds how many messages behind a failing head are tried in one
// round. A late head has longer ones, each by one than the last and up to
// farWitnesses, as far as they get within witnessFresh: so many adjacent poison messages
// an ordered source passes by proof. More, or slower ones, wait for an operator.
const (
	maxWitnesses = 8
	farWitnesses = 64
)

// witnessFresh is how long ago the head's attempt may have begun for a witness to
// be called: if the dependency recovers in between, the witness's success proves
// nothing against the head. A head that only ever fails slowly, as by a timeout,
// gets a witness after many more calls.
const witnessFresh = 2 * time.Second

// lateRounds: when a head has failed in many rounds, as in a long outage, only every
// third tries more than one witness, or one behind a slow failure. Where the outage
// ends within a round, the head and those that were tried in vain before the one that
// succeeds are lost.
const lateRounds = 3

// usedUp tells whether an item may get no more attempts: by its own count, or
// because the broker will not deliver it again if this process crashes.
func (c *machine[M]) usedUp(it *item[M]) bool {
	return it.attempts >= c.policy.Retry.Attempts || it.lastDelivery
}

// suspect tells whether an item has failed as often as it may without proof
// that anything else succeeds.
func (c *machine[M]) suspect(it *item[M]) bool {
	if it.probe {
		enough := c.policy.Breaker.PoisonAfter
		if it.permit { // the other processes' heads are witnesses, in their turn
			enough *= lonelyProbes
		}
		return it.probes >= enough && it.tries >= c.policy.Retry.Attempts
	}
	return it.exhausted && !it.alive
}

// callWitness tries the message behind a suspect head at once. In sequence
// nothing else can tell a poison message from an outage: if the witness
// succeeds, the head is poison; if it fails too, nothing was done that a dead
// letter of the head would not have done, and the head is kept. A witness that
// has failed as often as a message may gets one of its own: so adjacent poison is
// passed, and nothing is condemned that did not have its attempts.
//
// The first costs a credit in advance: when it succeeds the head must be
// dead-lettered, since it must not be handled after it. Each further one takes one if
// there is one. Else what it overtakes waits for its credit, or two adjacent poison
// messages would wait for ever for two credits, with nothing to earn them. Beyond
// maxWitnesses none is taken in advance: a round in vain must not hold many.
func (c *machine[M]) callWitness(now time.Duration, l *lane[M], head, it *item[M]) bool {
	if !c.letters || c.inPlace || !c.suspect(head) || !l.more() || c.others(l) {
		return false
	}
	if l.turn >= c.witnesses(now, head) || it != head && it.tries < c.policy.Retry.Attempts {
		return false
	}
	c.earn()
	if l.turn < maxWitnesses {
		if paid, ok := c.budget.Pay(now, dlq.Exhausted); ok {
			l.paid = append(l.paid, paid)
		} else {
			c.tally.Refused++
			if l.turn == 0 {
				return false
			}
		}
	}
	if l.turn == 0 || it.probe { // the breaker may have opened since the head
		l.token, l.probe = it.token, it.probe
	}
	c.move(it, waiting)
	l.turn++
	l.parked, l.queued = false, true
	c.ready.pushFront(l)
	return true
}

// witnesses is how many may be called in the round of a head; fewer, or 0, once its
// attempt is too long ago.
func (c *machine[M]) witnesses(now time.Duration, head *item[M]) int {
	switch late := c.late(head); {
	case late && head.tries%lateRounds == 0 && now-head.started <= witnessFresh:
		return min(maxWitnesses+head.tries/lateRounds, farWitnesses)
	case late && head.tries%lateRounds == 0:
		return maxWitnesses
	case now-head.started > witnessFresh:
		return 0
	case late:
		return 1
	default:
		return maxWitnesses
	}
}

// late tells whether an item has failed for so long that proof is worth a risk.
func (c *machine[M]) late(it *item[M]) bool {
	return it.tries >= c.policy.Retry.Attempts+lonelyProbes*c.policy.Breaker.PoisonAfter
}

// others tells whether other lanes have a head that did not fail yet, or is with
// a handler: a witness in its turn.
func (c *machine[M]) others(l *lane[M]) bool {
	if len(c.lanes) > len(c.due)+c.ready.len()+maxWitnesses {
		return true // not all can be looked at, nor need be
	}
	for _, other := range c.lanes {
		if other == l {
			continue
		}
		if it := other.head(); it == nil || it.tries == 0 || it.phase == processing {
			return true
		}
	}
	return false
}

const (
	// lonelyProbes is how many times PoisonAfter probes must have failed with a
	// head, and lonelyPatience how many times Patience must have passed since it
	// first failed, before it is taken for poison although no witness can be had.
	lonelyProbes   = 3
	lonelyPatience = 60
)

// poisonHead tells whether a head may be dead-lettered although the breaker is
// not closed: it has had all its calls, several as a probe, and others succeed.
func (c *machine[M]) poisonHead(it *item[M]) bool {
	return !c.closed() && it.alive && it.probes >= c.policy.Breaker.PoisonAfter && it.tries >= c.policy.Retry.Attempts
}

// lonely tells whether a message that breaker or storm keeps waiting may be taken
// for poison: it failed often and for long, and so did everything else that is
// here, so that a window of poison alone does not wedge the source for ever.
func (c *machine[M]) lonely(now time.Duration, it *item[M]) bool {
	often := it.probes >= lonelyProbes*c.policy.Breaker.PoisonAfter || it.exhausted && c.closed()
	return often && now-it.firstFailed >= lonelyPatience*c.policy.Retry.Patience && !c.fresh()
}

// mayGuess tells whether a message may be taken for poison without proof. Until
// something succeeds, each further one waits twice as long as the last, so that
// a long outage costs a handful and a window full of poison still comes loose.
func (c *machine[M]) mayGuess(now time.Duration) bool {
	if c.guesses == 0 || c.total() > c.guessLuck {
		return true
	}
	wait := lonelyPatience * c.policy.Retry.Patience << min(c.guesses, maxGuessShift)
	return now-c.guessedAt >= wait
}

// maxGuessShift bounds the doubling: 7 days with the default Patience.
const maxGuessShift = 10

// guess takes an item for poison without proof.
func (c *machine[M]) guess(now time.Duration, it *item[M]) {
	if c.guesses > 0 && c.total() > c.guessLuck {
		c.guesses = 0
	}
	before := len(c.condemned)
	c.condemn(now, it)
	if len(c.condemned) > before {
		c.guesses++
		c.guessedAt, c.guessLuck = now, c.total()
	}
}

// fresh tells whether any unsettled message has not failed yet.
func (c *machine[M]) fresh() (found bool) {
	if c.inPlace && c.order() != OrderNone {
		return c.untried()
	}
	if c.queued > 0 {
		return true
	}
	c.items(func(it *item[M]) { found = found || it.tries == 0 })
	return found
}

// oneMore tells whether one message may come beyond the window, whose rest is settled
// behind what is here: where nothing here can go on by itself. It may be the witness of
// what has failed, its success a part of the credit that another waits for, or the probe
// that what is being dead-lettered cannot be. At most farWitnesses of them come so.
func (c *machine[M]) oneMore(n int) bool {
	if c.ahead == 0 || !c.letters || n >= c.limit() || n+c.ahead >= c.limit()+farWitnesses || c.fresh() {
		return false
	}
	if c.parked[ReasonDLQ] > 0 {
		return true
	}
	total, able, proof := c.total(), false, false
	c.items(func(it *item[M]) {
		if it.tries > 0 && !it.decided() {
			able = true
			proof = proof || it.luck == total // one for each time it fails
		}
	})
	return proof || !able && !c.closed()
}

// alone tells whether nothing is left but messages whose attempts are used up:
// no witness can be had.
func (c *machine[M]) alone() bool {
	if c.inPlace && c.order() != OrderNone {
		return !c.untried() && len(c.lanes) == c.exhausted
	}
	return c.unsettled()-c.count[settling] == c.exhausted
}

// untried tells whether a lane has a head that has not failed yet. Where letters
// keep their place, what stands behind a head can prove nothing.
func (c *machine[M]) untried() bool {
	for _, l := range c.lanes {
		if it := l.head(); it == nil || it.tries == 0 {
			return true
		}
	}
	return false
}
