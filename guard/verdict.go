// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import "time"

// done takes the result of the handler call of it, and returns what to do.
func (c *machine[M]) done(now time.Duration, it *item[M], r result) step[M] {
	word := r.word
	if c.offers && r.err != errNotTaken { //nolint:errorlint // the sentinel itself
		c.called(it)
	}
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
		it.ignored = true
		return c.ack(it)
	case permanent:
		c.exclude(now, it)
		c.failedOnce(now, it, false, r)
		it.permanent = true
		c.condemn(now, it)
	case backoff:
		c.exclude(now, it)
		it.tries--
		wait := r.until.Sub(c.origin.Add(now))
		if until := soon(now, max(wait, c.policy.Retry.Base)); until > c.asked {
			c.asked, c.askedFor = until, r.err
		}
		c.back(now, it)
	case cancelled:
		c.exclude(now, it)
		it.tries--
		c.back(now, it)
	default:
		c.failed(now, it, r)
	}
	return step[M]{}
}

// total is how many handler calls have succeeded, here and beside.
func (c *machine[M]) total() uint64 {
	n := c.successes.Load() + c.fast()
	if c.beside != nil {
		n += c.beside()
	}
	return n
}

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
		c.freed = true
		if l != nil {
			l.probe = false
		}
		c.notice(now)
	}
	if l != nil && l.turn > 0 {
		// The witness succeeded where those before it failed: they are poison.
		// What they could get of credits was spent when they had failed.
		before, paid := l.front[:l.turn], l.paid
		l.front = l.front[l.turn:]
		l.turn, l.paid = 0, nil
		for i, poison := range before {
			poison.lane = nil
			if i < len(paid) {
				poison.credit = paid[i]
				c.sentence(now, poison, poisonReason(poison))
				continue
			}
			poison.overtaken = true
			c.condemn(now, poison)
		}
	}
	return c.ack(it)
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
		c.freed = true
	}
	for _, paid := range l.paid {
		c.budget.Refund(paid)
	}
	l.turn, l.paid, l.probe = 0, nil, false
}

// exclude tells the breaker that an attempt said nothing.
func (c *machine[M]) exclude(now time.Duration, it *item[M]) {
	if c.gate != nil {
		c.gate.Exclude(now, it.token)
		c.freed = c.freed || it.token.Probe()
	}
}

// failedOnce keeps the history of a failed attempt. What a witness had failed
// beside is over when it stands in its own turn: the success of the head that it was
// asked for is no proof against it.
func (c *machine[M]) failedOnce(now time.Duration, it *item[M], witness bool, r result) {
	c.tally.Failures++
	switch {
	case r.panicked:
		c.tally.Panics++
	case r.timedOut:
		c.tally.Timeouts++
	}
	total := c.total()
	if len(it.failures) == 0 {
		c.tally.FailedMessages++
		it.firstFailed, it.firstLuck = now, total
	}
	switch {
	case witness:
	case it.own:
		it.alive = total > it.luck
	default:
		it.own, it.firstLuck = true, total
	}
	it.luck = total
	it.note(now, r.err, r.stack)
}

// failed decides about an item whose attempt failed.
func (c *machine[M]) failed(now time.Duration, it *item[M], r result) {
	l := it.lane
	head := it
	if l != nil {
		head = l.front[0]
	}
	witness := head != it
	c.failedOnce(now, it, witness, r)
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
		c.exclude(now, it) // others succeed: it says nothing about them
	case it.probe:
		c.storm.Probe(now, false)
		c.gate.Failure(now, it.token, it.tries == 1)
		c.freed = true
	}
	if l != nil && l.turn > 0 {
		c.move(it, waiting)
		c.rewind(now, l)
	}
	c.decide(now, head)
}

// decide sends a failed item to its retry or to the dead letters. The first that
// holds decides:
//
//	breaker open, has had its probes and calls, others succeed   dead letter
//	nothing here succeeds, for long, and it has failed often     a guess: dead letter
//	breaker open                                                 retry: it is held
//	attempts left                                                retry
//	storm, or no dead-letter writer                              retry, parked with the reason
//	others succeed                                               dead letter
//	alone for Retry.Patience                                     a guess: dead letter
//	otherwise                                                    retry: a witness may come
//
// Each dead letter also needs a credit; see condemn.
func (c *machine[M]) decide(now time.Duration, it *item[M]) {
	switch {
	case c.letters && c.poisonHead(it):
		c.condemn(now, it)
	case c.letters && c.lonely(now, it) && c.mayGuess(now):
		c.guess(now, it)
	case !c.closed():
		// No longer than the ladder: it may be the only one left to probe with.
		c.park(it, now+min(c.delay(it.probes), c.policy.Breaker.Period(it.probes)), ReasonNone)
	case !it.exhausted:
		c.park(it, now+c.delay(it.attempts), ReasonNone)
	case c.storm.Storm().Active || c.fleetStorm.Active:
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

func (c *machine[M]) delay(n int) time.Duration { return c.policy.Retry.delay(n, c.rand.Int64N) }

// delay is the full-jitter backoff before the n-th retry.
func (r Retry) delay(n int, random func(int64) int64) time.Duration {
	top := r.Max
	if shift := min(max(n, 1)-1, 62); r.Base < top>>shift {
		top = r.Base << shift
	}
	return 1 + time.Duration(random(int64(top)))
}

// settled ends an item: its ack went out, or could not. The adapter that keeps it
// says [ErrTakenBack] itself, nothing around it.
func (c *machine[M]) settled(it *item[M], err error) {
	c.move(it, idle)
	c.bytes -= int64(it.size)
	switch {
	case it.ignored && err == ErrTakenBack: //nolint:errorlint // the sentinel itself
		c.tally.Returned++
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
