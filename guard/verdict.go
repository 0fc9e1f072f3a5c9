// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// maxWitnesses bounds how many messages behind a failing head are tried in one
// round, so also how many adjacent poison messages an ordered source passes.
const maxWitnesses = 8

// witnessFresh is how long ago the head's attempt may have begun for a witness to
// be called: if the dependency recovers in between, the witness's success proves
// nothing against the head. A head that only ever fails slowly, as by a timeout,
// gets a witness after many more calls.
const witnessFresh = 2 * time.Second

// done takes the outcome of the handler call of it, and returns what to do.
func (c *machine[M]) done(now time.Duration, it *item[M], err error, stack []byte) step[M] {
	word, until := classify(err)
	if it.lane != nil && it.lane.turn > 0 && word != success && word != cancelled {
		// A witness is only asked whether anything can succeed; what else it has
		// to say it says again in its turn.
		word = failure
	}
	it.tries++
	if c.ended && word == failure {
		word = cancelled
	}
	switch word {
	case success:
		return c.succeeded(now, it)
	case ignore:
		c.exclude(now, it)
		c.tally.Ignored++
		return c.ack(it)
	case permanent:
		c.exclude(now, it)
		c.failedOnce(now, it, err, stack)
		it.permanent = true
		c.condemn(now, it)
	case backoff:
		c.exclude(now, it)
		it.tries--
		wait := min(until.Sub(c.origin.Add(now)), maxBackoff)
		c.asked = max(c.asked, now+max(wait, c.policy.Retry.Base))
		c.back(now, it)
	case cancelled:
		c.exclude(now, it)
		it.tries--
		c.back(now, it)
	default:
		c.failed(now, it, err, stack)
	}
	return step[M]{}
}

// total is how many handler calls have succeeded.
func (c *machine[M]) total() uint64 { return c.successes.Load() + c.fast() }

// notice tells the detector when the breaker opened or closed.
func (c *machine[M]) notice(now time.Duration) {
	if closed := c.closed(); closed != c.wasClosed {
		c.wasClosed = closed
		if closed {
			c.storm.Thaw(now)
		} else {
			c.storm.Freeze(now)
		}
	}
}

func (c *machine[M]) succeeded(now time.Duration, it *item[M]) step[M] {
	c.successes.Add(1)
	if it.tries == 1 && !it.probe {
		c.firsts++
	}
	l := it.lane
	if it.probe {
		c.storm.Probe(now, true)
		c.gate.Success(now, it.token)
		if l != nil {
			l.probe = false
		}
		c.notice(now)
	}
	if l != nil && l.turn > 0 {
		// The witness succeeded where those before it failed: they are poison.
		// Their credits were spent when the round began.
		before := l.front[:l.turn]
		l.front = l.front[l.turn:]
		l.turn = 0
		for _, poison := range before {
			poison.lane = nil
			c.bury(poison, poisonReason(poison))
		}
	}
	return c.ack(it)
}

func poisonReason[M any](it *item[M]) dlq.Reason {
	if it.probes > 0 {
		return dlq.ReasonPoisonHead
	}
	return dlq.ReasonAttempts
}

// ack sends an item to be acked, and lets its lane go on.
func (c *machine[M]) ack(it *item[M]) step[M] {
	c.part(it)
	c.move(it, settling)
	return step[M]{kind: stepAck, it: it}
}

// part takes the head off its lane.
func (c *machine[M]) part(it *item[M]) {
	l := it.lane
	if l == nil {
		return
	}
	it.lane = nil
	copy(l.front, l.front[1:])
	l.front[len(l.front)-1] = nil
	l.front = l.front[:len(l.front)-1]
	l.parked, l.turn = false, 0
	c.stand(l)
	c.leave(l)
}

// back puts an item in front of the handler again, at the end of the ready
// lanes, so that the next probe is another lane's head.
func (c *machine[M]) back(now time.Duration, it *item[M]) {
	c.move(it, waiting)
	if it.lane == nil {
		c.again.push(it)
		return
	}
	c.rewind(now, it.lane)
	it.lane.parked = false
	c.stand(it.lane)
}

// rewind ends a round of witnesses without a verdict: the head is up again. The
// probe that the head failed is settled, if that was not done.
func (c *machine[M]) rewind(now time.Duration, l *lane[M]) {
	if l.probe && l.turn > 0 {
		c.gate.Failure(now, l.token, false)
	}
	for ; l.turn > 0; l.turn-- {
		c.budget.Refund(dlq.Exhausted)
	}
	l.probe = false
}

// exclude tells the breaker that an attempt said nothing.
func (c *machine[M]) exclude(now time.Duration, it *item[M]) {
	if c.gate != nil {
		c.gate.Exclude(now, it.token)
	}
}

// failedOnce keeps the history of a failed attempt.
func (c *machine[M]) failedOnce(now time.Duration, it *item[M], err error, stack []byte) {
	c.tally.Failures++
	switch {
	case errors.As(err, new(*PanicError)), errors.As(err, new(*GoexitError)):
		c.tally.Panics++
	case errors.Is(err, ErrTimeout):
		c.tally.Timeouts++
	}
	total := c.total()
	if len(it.failures) == 0 {
		c.tally.FailedMessages++
		it.firstFailed, it.firstLuck = now, total
	} else {
		it.alive = total > it.luck
	}
	it.luck = total
	it.note(now, err, stack)
}

// failed decides about an item whose attempt failed.
func (c *machine[M]) failed(now time.Duration, it *item[M], err error, stack []byte) {
	c.failedOnce(now, it, err, stack)
	l := it.lane
	head := it
	if l != nil {
		head = l.front[0]
	}
	witness := head != it
	switch {
	case it.probe:
		it.probes++
	case !witness:
		it.attempts++
	}
	if !it.probe {
		if it.tries == 1 {
			c.storm.Failure(now)
		}
		// A retry that fails although others succeeded since its first failure is
		// no evidence against the dependency, also in a gap of the traffic.
		if c.gate != nil && !it.slow && it.luck == it.firstLuck {
			c.gate.FailureOf(now, it.token, it.tries == 1, it.id)
		}
		c.notice(now)
	}
	if !head.exhausted && head.attempts > 0 && c.usedUp(head) {
		head.exhausted, head.exhaustedAt = true, now
		c.exhausted++
	}
	if l != nil && c.callWitness(now, l, head, it) {
		return
	}
	switch {
	case it.probe && it.alive:
		c.gate.Exclude(now, it.token) // others succeed: it says nothing about them
	case it.probe:
		c.storm.Probe(now, false)
		c.gate.Failure(now, it.token, it.tries == 1)
	}
	if l != nil && l.turn > 0 {
		c.move(it, waiting)
		c.rewind(now, l)
	}
	c.decide(now, head)
}

// usedUp tells whether an item may get no more attempts: by its own count, or
// because the broker will not deliver it again if this process crashes.
func (c *machine[M]) usedUp(it *item[M]) bool {
	return it.attempts >= c.policy.Retry.Attempts || it.lastDelivery
}

// suspect tells whether an item has failed as often as it may without proof
// that anything else succeeds.
func (c *machine[M]) suspect(it *item[M]) bool {
	if it.probe {
		return it.probes >= c.policy.Breaker.PoisonAfter && it.tries >= c.policy.Retry.Attempts
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
// Each witness costs a credit in advance: when it succeeds the head must be
// dead-lettered, since it must not be handled after it.
func (c *machine[M]) callWitness(now time.Duration, l *lane[M], head, it *item[M]) bool {
	if !c.letters || !c.suspect(head) || !l.more() || c.others(l) {
		return false
	}
	if now-head.started > witnessFresh && head.tries < c.policy.Retry.Attempts+lonelyProbes*c.policy.Breaker.PoisonAfter {
		return false
	}
	if l.turn == maxWitnesses || it != head && it.tries < c.policy.Retry.Attempts {
		return false
	}
	c.earn()
	if !c.budget.Spend(now, dlq.Exhausted) {
		c.tally.Refused++
		return false
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

// decide sends a failed item to its retry or to the dead letters.
func (c *machine[M]) decide(now time.Duration, it *item[M]) {
	switch {
	case c.letters && c.poisonHead(it):
		c.condemn(now, it)
	case c.letters && c.lonely(now, it) && c.mayGuess(now):
		c.guess(now, it)
	case !c.closed():
		c.back(now, it) // the ladder is its delay
	case !it.exhausted:
		c.park(it, now+c.delay(it.attempts), ReasonNone)
	case c.storm.Storm().Active:
		c.park(it, now+c.delay(it.attempts), ReasonStorm)
	case !c.letters:
		c.park(it, now+c.delay(it.attempts), ReasonDLQ)
	case it.alive:
		c.condemn(now, it)
	case c.alone() && c.mayGuess(now) && now-it.exhaustedAt >= c.policy.Retry.Patience:
		c.guess(now, it)
	default:
		at := now + c.delay(it.attempts)
		if c.alone() && c.mayGuess(now) {
			at = min(at, it.exhaustedAt+c.policy.Retry.Patience)
		}
		c.park(it, at, ReasonNone)
	}
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
	if c.queued > 0 {
		return true
	}
	c.items(func(it *item[M]) { found = found || it.tries == 0 })
	return found
}

// alone tells whether nothing is left but messages whose attempts are used up:
// no witness can be had.
func (c *machine[M]) alone() bool { return c.unsettled()-c.count[settling] == c.exhausted }

func (c *machine[M]) delay(n int) time.Duration { return c.policy.Retry.delay(n, c.rand.Int64N) }

// delay is the full-jitter backoff before the n-th retry.
func (r Retry) delay(n int, random func(int64) int64) time.Duration {
	top := r.Max
	if shift := min(max(n, 1)-1, 62); r.Base < top>>shift {
		top = r.Base << shift
	}
	return 1 + time.Duration(random(int64(top)))
}

// condemn dead-letters an item if the budget allows, else parks it until the
// next credit may have come.
func (c *machine[M]) condemn(now time.Duration, it *item[M]) {
	class, reason := dlq.Exhausted, poisonReason(it)
	switch {
	case it.permanent:
		class, reason = dlq.Permanent, dlq.ReasonPermanent
	case it.lastDelivery && it.attempts < c.policy.Retry.Attempts:
		reason = dlq.ReasonLastDelivery
	}
	c.earn()
	if c.letters && c.budget.Spend(now, class) {
		c.part(it)
		c.bury(it, reason)
		return
	}
	c.tally.Refused++
	wait := c.delay(max(it.attempts, 1))
	if it.permanent {
		wait = creditPoll // no handler call is spent on looking
	}
	c.park(it, now+wait, ReasonDLQ)
}

// earn brings the budget up to date with the successes.
func (c *machine[M]) earn() { c.budget.Successes(c.total()) }

// creditPoll is how often a permanently failed message looks for a credit.
const creditPoll = 250 * time.Millisecond

// buryWaiting dead-letters up to n messages that have failed and wait, oldest
// first: an operator's decision, which needs neither proof nor credit.
func (c *machine[M]) buryWaiting(n int) (buried int) {
	if !c.letters {
		return 0
	}
	for buried < n {
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
		c.part(oldest)
		c.bury(oldest, dlq.ReasonOperator)
		buried++
	}
	return buried
}

// bury hands an item to the dead-letter writer.
func (c *machine[M]) bury(it *item[M], why dlq.Reason) {
	it.verdict = why
	c.move(it, settling)
	c.writing[it] = struct{}{}
	c.condemned = append(c.condemned, it)
}

// buried takes the news that an item's dead letter is confirmed.
func (c *machine[M]) buried(it *item[M]) {
	it.buried = true
	delete(c.writing, it)
	c.acks.push(it)
}

// settled ends an item: its ack went out, or could not.
func (c *machine[M]) settled(it *item[M], err error) {
	c.move(it, idle)
	c.bytes -= int64(it.size)
	switch {
	case err != nil:
		c.tally.AckFailures++
		c.tally.Returned++
	case it.buried:
		c.tally.DeadLettered++
	default:
		c.tally.Acked++
	}
}
