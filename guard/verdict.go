// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// done takes the result of an item's handler call, and returns what to do. A failure goes one
// way: weigh (what it proves), report (tells the breaker, and may try another message first),
// decide (dead letter, or wait).
func (c *machine[M]) done(now time.Duration, it *item[M], r result) step[M] {
	word := r.outcome
	if c.offers && r.err != errNotTaken && !r.takenBack { //nolint:errorlint // the sentinel itself
		c.called(it)
	}
	if it.witness() && word != success && word != cancelled && word != backoff && !r.takenBack {
		// A witness is tried out of turn, to see whether anything can succeed. Any other result
		// will come again in its turn. For a witness that asks for time (Backoff), see back.
		it.mute = word != failure || r.class == ClassMessage
		word = failure
		if r.class == ClassMessage {
			r.class = ClassUnknown
		}
	}
	mute := it.witness() && it.mute
	if r.class == ClassUnknown && !mute && c.health != nil && c.health.failing.Load() {
		r.class, r.rule = ClassDependency, nil // no rule about a cause matches this class
	}
	c.counted(it, 1)
	if c.ended && word == failure {
		word = cancelled
	}
	if word == success || word == failure {
		c.takeUp(now, it)
	}
	if it.probe && word != cancelled {
		c.probeProvedNothing = word == ignore || word == backoff
	}
	switch word {
	case success:
		return c.succeeded(now, it)
	case ignore:
		if r.takenBack {
			c.unasked(now, it)
		}
		c.exclude(now, it)
		it.ignored = true
		if !it.witness() {
			return c.ack(it)
		}
		head := it.lane.head() // the head waits as after a look that found nothing
		st := c.ack(it)
		c.unstand(head)
		c.decide(now, head)
		return st
	case permanent:
		c.exclude(now, it)
		c.weigh(now, it, r)
		it.permanent = true
		c.undoubted(it)
		c.spendCredit(now, it)
	case backoff:
		c.exclude(now, it)
		c.counted(it, -1)
		wait := r.until.Sub(c.origin.Add(now))
		if wait <= 0 {
			wait = c.policy.Retry.Base
		}
		if until := soon(now, wait); until > c.asked {
			c.asked, c.askedFor, c.askedText = until, r.err, r.words.Message
		}
		c.back(now, it)
	case cancelled:
		c.exclude(now, it)
		c.counted(it, -1)
		c.back(now, it)
	default:
		if r.rule == nil || it.witness() || !c.book.has(*r.rule) {
			c.failed(now, it, r)
			break
		}
		c.exclude(now, it)
		c.recall(it, r)
		c.weigh(now, it, r)
		c.impound(now, it, r.rule)
	}
	return step[M]{}
}

// own is how many handler calls of this source have succeeded.
func (c *machine[M]) own() uint64 { return c.successes.Load() + c.fast() }

// firstTime is how many messages have succeeded at their first call.
func (c *machine[M]) firstTime() uint64 { return c.firsts + c.firstProbes + c.fast() }

// total is how many handler calls have succeeded, here and in beside. They earn credits.
func (c *machine[M]) total() uint64 {
	n := c.own()
	if c.beside != nil {
		n += c.beside()
	}
	return n
}

// notice tells the storm detector when the breaker has opened or closed.
func (c *machine[M]) notice(now time.Duration) {
	if closed := c.closed(); closed != c.wasClosed {
		c.wasClosed = closed
		if closed {
			c.probeProvedNothing = false
			c.storm.Thaw(now)
		} else {
			c.shutAt = now
			c.storm.Freeze(now)
		}
	}
}

func (c *machine[M]) succeeded(now time.Duration, it *item[M]) step[M] {
	c.successes.Add(1)
	c.provedAt, c.provedHere, c.recovered = now, c.unsettled(), it.tries > 1
	switch {
	case it.tries == 1 && !it.probe:
		c.firsts++
	case it.tries == 1:
		c.firstProbes++
	case c.lifelessAt < it.firstFailed:
		c.flaky.recover(now, it.relapses)
	}
	if it.probe {
		c.storm.Probe(now, true)
		c.gate.Success(now, it.token)
		c.freed = true
		c.roundOver()
		c.notice(now)
	}
	if it.witness() {
		c.tally.Overtaken++
		for _, before := range it.lane.front[:it.lane.turn] {
			before.grantLastWord(now)
		}
	}
	c.heed(now)
	return c.ack(it)
}

// heed gives all messages that wait for a proof of life the last word, and wakes them.
func (c *machine[M]) heed(now time.Duration) {
	if !c.suspecting {
		return
	}
	c.suspecting = false
	var asleep []*item[M]
	c.items(func(it *item[M]) {
		if !it.exhausted && it.probes == 0 || it.alive || it.lastWord || it.class == ClassDependency || it.decided() {
			return
		}
		if it.phase == processing { // its call began before the success
			c.suspecting = true
			return
		}
		it.grantLastWord(now)
		if it.phase == retryWait {
			asleep = append(asleep, it)
		}
	})
	slices.SortFunc(asleep, func(a, b *item[M]) int { return cmp.Compare(a.id, b.id) })
	for _, it := range asleep {
		c.wake(it)
	}
}

// ack sends an item to be acked, and lets its lane go on.
func (c *machine[M]) ack(it *item[M]) step[M] {
	c.part(it)
	c.move(it, settling)
	return step[M]{kind: stepAck, it: it}
}

// part takes an item off its lane, and lets the lane go on.
func (c *machine[M]) part(it *item[M]) {
	l := it.lane
	if l == nil {
		return
	}
	place := slices.Index(l.front, it)
	rank := place - l.mutes(place)
	it.lane = nil
	l.front = slices.Delete(l.front, place, place+1)
	l.parked, l.turn, l.looks, l.groups, l.rounds, l.step, l.deep = false, 0, 0, 0, 0, 0, false
	l.beyond = max(0, l.beyond-1)
	c.heads(l)
	if place > 0 { // a witness: the head is up next
		l.beyond = max(0, rank-1-l.doubted()) // the witnesses in front of it have failed
		l.queued = true
		c.ready.pushFront(l)
	}
	c.enlist(l)
	c.dropIfEmpty(l)
}

// back lets an item wait for its handler again, at the end of the ready lanes, so that the next
// probe is another lane's head.
func (c *machine[M]) back(now time.Duration, it *item[M]) {
	c.move(it, waiting)
	if it.lane == nil {
		c.again.push(it)
		return
	}
	// A witness that only asked for time is tried once more after that time; the second Backoff
	// ends the look. Otherwise the head would each time take the turn of what the witness waits
	// for, such as the probe of a function that both call. The look ends at once if the witness
	// was cancelled while no Backoff holds the source, or if a probe's token waits (round.on).
	switch {
	case !it.witness():
	case c.round.on || now >= c.asked || it.lane.waited:
		c.endLook(now, it.lane)
	default:
		it.lane.waited = true
	}
	it.lane.parked = false
	c.enlist(it.lane)
}

// exclude tells the breaker that an attempt proves nothing.
func (c *machine[M]) exclude(now time.Duration, it *item[M]) {
	if c.gate != nil {
		c.gate.Exclude(now, it.token)
		c.freed = c.freed || it.token.Probe()
		if it.probe {
			c.roundOver()
		}
	}
}

// failed takes a failed call through weigh, report and decide.
func (c *machine[M]) failed(now time.Duration, it *item[M], r result) {
	head := it
	if l := it.lane; l != nil {
		head = l.front[0]
	}
	c.recall(it, r)
	c.weigh(now, it, r)
	if r.rule != nil { // a witness: it is compared with the quarantine again in its turn
		it.seen = 0
	}
	if !c.report(now, it, head) {
		c.decide(now, head)
	}
}

// decide sends a failed item to its retry or to the dead letters. The first line that applies
// decides:
//
//	the evidence is against the message    dead letter; but not in a storm with Budget.Off
//	nothing can be compared, for long      a guess: dead letter
//	the breaker is open                    hold: the item is the next probe
//	attempts are left                      retry
//	storm, or no dead-letter writer        retry, with that reason
//	otherwise                              retry: there may be a proof of life by then
//
// Each dead letter also needs a credit; see spendCredit.
func (c *machine[M]) decide(now time.Duration, it *item[M]) {
	open := c.open()
	if open && it.lastWord { // this failure may belong to the next outage
		after := 0
		if c.gate.Held() { // a fleet's hold is open between its probes: each probe must prove life anew
			after = it.after
		}
		it.revokeLastWord(after)
	}
	guessAt := c.guessAt(now, it)
	c.suspecting = c.suspecting || (it.exhausted || it.probes > 0) && !it.alive
	switch {
	case c.letters && c.guilty(now, it) && !(c.stormy() && c.policy.Budget.Off):
		c.spendCredit(now, it)
	case now >= guessAt:
		c.guess(now, it)
	case open:
		// Not longer than the breaker is open: the item may be the only one to probe with.
		c.waitRetry(it, now+min(c.delay(it.probes), c.policy.Breaker.PeriodAfter(it.probes, now-c.shutAt)), ReasonNone)
	case !it.exhausted:
		c.waitRetry(it, now+c.delay(it.attempts), ReasonNone)
	case c.stormy():
		c.waitRetry(it, now+c.suspectDelay(it), ReasonStorm)
	case !c.letters:
		c.waitRetry(it, now+c.delay(it.attempts), ReasonDLQ)
	default:
		c.waitRetry(it, min(now+c.suspectDelay(it), guessAt), ReasonNone)
	}
}

// suspectDelay is the delay of a message whose attempts are used up. The delay is short while
// there is something to learn: the message has the last word, others succeed, or the look behind
// it goes on.
func (c *machine[M]) suspectDelay(it *item[M]) time.Duration {
	switch {
	case it.lastWord: // with a flaky dependency it may take thirty calls
		return c.delay(min(it.after, c.policy.Retry.Attempts))
	case it.alive:
		return c.delay(min(it.attempts, c.policy.Retry.Attempts))
	case it.lane != nil && it.lane.groups > 0 && it.lane.looks < maxLook && it.lane.witnesses() > 0:
		top := min(c.policy.Retry.Base<<min(it.lane.groups, 10), lookDelay)
		return top/2 + time.Duration(c.rand.Int64N(int64(top/2)+1))
	case c.beside != nil: // a parked message has no breaker that makes the calls rarer
		return c.delay(it.tries)
	}
	return c.delay(it.attempts)
}

func (c *machine[M]) delay(n int) time.Duration { return c.policy.Retry.delay(n, c.rand.Int64N) }

// delay is the full-jitter backoff before the n-th retry.
func (r Retry) delay(n int, random func(int64) int64) time.Duration {
	top := r.Max
	if shift := min(max(n, 1)-1, 62); r.Base < top>>shift {
		top = r.Base << shift
	}
	return 1 + time.Duration(random(int64(top)))
}

// settled ends an item: its ack went out, or failed. If the item was ignored, [ErrTakenBack] means
// that the adapter keeps the message: it comes again, and goes on where it was. The caller passes
// the sentinel itself, without a wrapper.
func (c *machine[M]) settled(now time.Duration, it *item[M], err error) {
	c.move(it, idle)
	c.bytes -= int64(it.size)
	c.keeps(-it.historyBytes)
	switch {
	case it.ignored && err == ErrTakenBack: //nolint:errorlint // the sentinel itself
		c.tally.Returned++
		it.tries-- // no handler was called this time
		c.remember(now, it)
		return
	case err != nil:
		c.tally.AckFailures++
		c.tally.Returned++
	case it.dead:
		c.tally.DeadLettered++
	default:
		c.tally.Acked++
	}
	if it.ignored {
		c.tally.Ignored++
	}
}

// poisonReason is the reason of a dead letter that has no other reason: it tells whether a probe of
// the message has failed.
func poisonReason[M any](it *item[M]) dlq.Reason {
	if it.probes > 0 {
		return dlq.ReasonPoisonHead
	}
	return dlq.ReasonAttempts
}
