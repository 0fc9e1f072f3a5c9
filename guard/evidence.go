// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"math"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/circuit"
)

// Poison or outage? In an outage every message fails, and none of them deserves the
// DLQ. The guard decides from evidence. A message is dead-lettered if
//
//	class   its error says that the message is at fault, or its handler said
//	        Permanent;
//	life    it failed, others succeeded, it failed again at least twice
//	        (proofs), and its attempts are used up;
//	guess   nothing can be compared: all messages here have failed, and for
//	        Retry.Patience no message has come and none has succeeded.
//
// An error that says that the dependency is down never dead-letters its message.
//
// Proof of life comes from everything that shares the breaker's scope: other keys, other
// sources, a health check. A failing head stops its lane, which then shows no life. So the
// guard looks behind the head: it tries a message further back once (the witness), and the
// head before and after the witness. A witness that succeeds is the proof of life. All
// messages in front of it then have the last word: the rest of their attempts, in order.
// Those that succeed were overtaken by one message; those that fail are poison. A look that
// finds no life is the sign of an outage, and opens the breaker. A probe of an open breaker
// is such a look, too.

// proofs is how often a message must fail after a proof of life: a single failure may be
// the beginning of the next outage.
const proofs = 2

// proofFresh is the greatest age of a success that gives the last word to a message that
// fails after it: a later failure may belong to the next outage.
const proofFresh = 5 * time.Second

// chance bounds how many healthy messages a dependency that fails at random may cost: a
// message gets so many attempts that all fail by chance once in a million. mostAttempts
// bounds the number of attempts.
const (
	chance       = 1e-6
	mostAttempts = 30
)

const (
	// maxLook is how many messages behind the head a look tries at most, and so how many
	// adjacent poison messages it can prove. maxGroup bounds a group, as a power of 2.
	maxLook  = 64
	maxGroup = 3
	// lookDelay bounds the delay between groups, and so how long a recovery may stay
	// unseen. lookAfter is how long a breaker is open before its probes look.
	lookDelay = 900 * time.Millisecond
	lookAfter = time.Second
	// lookRate is how many calls a second the looks of an open breaker may make.
	lookRate = 3
	// leastSteps and maxSteps bound the steps of lookBeside. Each step is twice as long
	// as the one before.
	leastSteps = 3
	maxSteps   = 6
	// lookShare is the share of a probe's interval, as 1/n, that the calls of its look
	// may take. After a recovery between two of these calls a message overtakes others.
	lookShare = 40
	// fewUntried is a share, as 1/n, of the messages here: while more of them are
	// untried, one success does not prove life for all.
	fewUntried = 8
	// maxDoubt bounds how often the patience before a guess doubles: once for each other
	// failing message. At the bound it is 11 minutes with the default Patience.
	maxDoubt = 6
	// quietGaps is how long a source must be quiet before a guess, as a multiple of the
	// longest time between two messages since a success.
	quietGaps = 4
	// maxGuessShift bounds the doubling of the time between guesses: 3 hours with
	// the default Patience.
	maxGuessShift = 10
)

// causeOutage is the breaker's cause when a look found nothing that succeeds.
const causeOutage breaker.Cause = "outage"

// life counts the successes of everything that shares the source's dependency.
func (c *machine[M]) life() (n uint64) {
	if c.gate != nil {
		n = c.gate.Life()
	} else {
		n = c.own()
	}
	if c.beside != nil {
		n += c.beside()
	}
	if c.health != nil {
		n += c.health.passed.Load()
	}
	return n
}

// watchEvery is how often the sweep watches life while a failed message waits.
const watchEvery = time.Second

// stale is how long a proof of life counts: long enough for a message to fail twice, even if
// its source is taken away meanwhile.
func (c *machine[M]) stale() time.Duration {
	return proofFresh + proofs*(c.policy.Retry.Max+2*max(c.policy.Timeout, c.took))
}

// watch reads life, and notes when life has stood still for longer than stale: failures before
// that may belong to another outage. If life was not watched for proofFresh, it counts as
// moved, so that messages do not lose a proof. Only sweep and weigh call watch.
func (c *machine[M]) watch(now time.Duration) (life uint64) {
	life = c.life()
	switch {
	case now-c.watchedAt > proofFresh:
		c.grewAt = now
	case now-c.grewAt > c.stale():
		c.stoodStillAt = now
	}
	if life != c.lastLife {
		c.lastLife, c.grewAt = life, now
	}
	c.watchedAt = now
	if c.lifeless(now, shortOutage) {
		c.lifelessAt = now
	}
	return life
}

// open tells that the breaker lets only those probes through that ask whether the dependency
// is back.
func (c *machine[M]) open() bool { return !c.closed() && !c.gate.Passing() }

// stormy tells that there is a storm, here or in the fleet.
func (c *machine[M]) stormy() bool { return c.storm.Storm().Active || c.fleetStorm.Active }

// usedUp tells whether a message has had its attempts: by count, or because the
// broker will not deliver it again if this process crashes.
func (c *machine[M]) usedUp(it *item[M]) bool {
	return it.attempts >= c.policy.Retry.Attempts || it.tries >= c.policy.Retry.Attempts || it.last()
}

// guilty tells whether the evidence is against the message.
func (c *machine[M]) guilty(now time.Duration, it *item[M]) bool {
	switch it.class {
	case ClassMessage:
		return it.attempts >= c.policy.Retry.Attempts || it.last()
	case ClassDependency:
		return false
	default:
		return it.after >= proofs && (it.attempts >= c.flaky.attempts(now, c.policy.Retry.Attempts) || it.last())
	}
}

// evidence tells whether an item's last failure is evidence against the dependency. A failure
// while other messages succeed is not. If its error says that the dependency is down, then only
// a part is down that this message needs, such as one customer's address.
func (it *item[M]) evidence() bool {
	switch it.class {
	case ClassDependency:
		return it.after == 0
	case ClassUnknown:
		return !it.alive
	default:
		return false
	}
}

// lifeless tells whether calls have failed for at least since, and none has succeeded.
func (c *machine[M]) lifeless(now, since time.Duration) bool {
	return now-max(c.provedAt, c.grewAt, c.failingAt) >= since
}

// weigh records a failed call and what it proves about the message.
func (c *machine[M]) weigh(now time.Duration, it *item[M], r result) {
	c.tally.Failures++
	switch {
	case r.panicked:
		c.tally.Panics++
	case r.timedOut:
		c.tally.Timeouts++
	}
	if len(it.failures) == 0 {
		c.tally.FailedMessages++
		it.firstFailed = now
	}
	if c.failingAt <= max(c.provedAt, c.grewAt) {
		c.failingAt = now
	}
	c.took = now - it.started
	life := c.watch(now)
	if r.class == ClassUnknown && it.afterAt < c.stoodStillAt {
		it.after, it.own = 0, 0 // those failures may have been the beginning of an outage
	}
	if r.class == ClassDependency && c.lifeless(now, proofFresh) {
		it.revokeLastWord(0) // the dependency is down for all, not for this message alone
	}
	switch {
	case it.witness(): // a witness is tried for others, and judged in its own turn
		it.alive = false
	case (it.tries > 1 || it.cameBack) && it.life > max(it.lifeAtFailure, c.spentLife):
		it.alive = true
		it.own++
		it.relapses = min(it.relapses+1, mostAttempts)
		if c.provedAt > 0 && now-c.provedAt < proofFresh {
			it.grantLastWord(now)
		}
	default:
		if it.lastWord && now-it.wordAt > c.stale() {
			it.revokeLastWord(0) // the item waited for so long that this may be the next outage
		}
		it.alive = it.lastWord
	}
	if it.alive {
		it.after++
		it.afterAt = now
	}
	it.lifeAtFailure, it.class = life, r.class
	c.undoubted(it)
	it.doubtful = c.failureLives.add(int64(it.lifeAtFailure))
	c.note(now, it, r)
	switch {
	case it.witness():
	case it.probe && !c.gate.Passing() && it.evidence():
		it.probes++
	case !it.exhausted || it.alive || it.class == ClassMessage:
		it.attempts++
	}
	if !it.exhausted && !it.witness() && c.usedUp(it) {
		it.exhausted, it.exhaustedAt = true, now
		c.exhausted++
	}
	c.keepBurst(it)
}

// report tells the breaker and the storm detector of a failed call, and goes on with a look if
// it can. goesOn means that a look goes on: there is nothing to decide yet.
func (c *machine[M]) report(now time.Duration, it, head *item[M]) (goesOn bool) {
	first := it.tries == 1 && c.beside == nil // a parked message has failed before
	witness := it.witness()
	if witness { // in any case the head is up again
		c.move(it, waiting)
		it.lane.turn = 0
	}
	asks := it.probe && !c.gate.Passing() && it.evidence() // the probe asks whether the dependency is back
	switch {
	case asks:
		if it.class == ClassUnknown && !it.slow && c.look(now, it, head, witness, true) {
			return true
		}
		c.storm.Probe(now, false)
		c.roundOver()
	case !first || witness && it.mute:
	case !it.probe:
		c.storm.Failure(now)
	case c.gate.Passing(): // probes carry load: a message counts once, as on the closed path
		c.storm.Probe(now, false)
	}
	switch {
	case c.gate == nil:
	case !it.evidence():
		c.exclude(now, it)
	case it.class == ClassDependency:
		c.gate.Unavailable(now, it.token, first)
	case it.probe:
		c.gate.FailureOf(now, it.token, first, it.id)
	case witness, it.slow, it.after > 0, it.doubted, !first && it.lane != nil && it.lane.witnesses() > 0:
		// A look will show what it means, or has shown it.
	default:
		c.gate.FailureOf(now, it.token, first, it.id)
	}
	c.freed = c.freed || it.probe
	if !asks && !c.open() && c.look(now, it, head, witness, false) {
		return true
	}
	if c.gate != nil && !c.open() && head.lane != nil && c.inVain(now, head) {
		c.gate.Trip(now, causeOutage)
	}
	if l := head.lane; l != nil {
		l.step = 0
	}
	c.notice(now)
	return false
}

// inVain tells whether a look has found no life: the head is exhausted, and all witnesses that
// could be tried behind it have failed, or maxLook witnesses of all lanes. If no message behind
// a head may be tried, its own attempts are enough, unless something succeeded between them. If
// the error says that the dependency is down, no look is needed, only that nothing has succeeded
// for proofFresh: the breaker need not wait for more calls of a head that was taken for poison.
func (c *machine[M]) inVain(now time.Duration, head *item[M]) bool {
	l := head.lane
	switch {
	case !head.exhausted || !head.evidence():
		return false
	case head.class == ClassDependency:
		return c.lifeless(now, proofFresh)
	case !c.looks():
		return head.class == ClassUnknown && l.behind() > 0 && !c.others(l) &&
			head.relapses == 0 && now-max(c.provedAt, c.grewAt) >= lookDelay
	default:
		all := c.looksAll >= maxLook && c.looksLife == c.lastLife
		return l.looks > 0 && (all || l.looks >= min(l.witnesses()-l.doubted(), maxLook))
	}
}

// looks tells whether messages behind a head may be tried at all. Without a dead-letter writer
// a look would not help, and with blocksLane it would prove nothing.
func (c *machine[M]) looks() bool { return c.letters && !c.blocksLane && !c.policy.StrictOrder }

// round is the look of a probe: the probe's token goes on to the next message.
type round struct {
	token       circuit.Token
	on          bool // the token waits for the next message
	step, depth int  // steps that lookBeside has made, and may make
}

// look goes on with another message after an item has failed, and tells whether there is one:
// that message is up next. A probe that asks for life keeps its token for that message.
func (c *machine[M]) look(now time.Duration, it, head *item[M], witness, asks bool) bool {
	l := it.lane
	switch {
	case l != nil && (witness || c.mayLook(l, head, asks)):
		return c.lookBehind(now, l, it, witness, asks)
	case asks && (l == nil || c.others(l)):
		return c.lookBeside(now, it)
	}
	return false
}

// lookBehind tries the messages behind a lane's head after the head was tried. Those next to
// the head are first, because a healthy message overtakes all messages in front of it. While the
// breaker lets messages through, lookBehind tries groups of 1, 2, 4 and 8, with the head's delays
// between them, and goes on from group to group. A probe that asks for life begins anew.
func (c *machine[M]) lookBehind(now time.Duration, l *lane[M], it *item[M], witness, asks bool) bool {
	switch {
	case !witness:
	case it.mute && asks:
		l.from-- // a mute item is no witness any more: the next one has its number
	case it.mute:
	case !asks:
		l.looks++
		if c.lastLife != c.looksLife {
			c.looksLife, c.looksAll = c.lastLife, 0
		}
		c.looksAll++
	}
	if l.step == 0 { // a group, or a probe's look, begins
		switch {
		case asks:
			l.depth = c.depth(now, l, it)
		default:
			l.depth = 1 << min(l.groups, maxGroup)
			l.groups++
		}
	}
	skip, place := l.doubted(), l.looks+1
	if asks {
		place = l.place(l.from + l.step + 1)
	}
	if l.step >= l.depth || skip+place > l.witnesses() || place > maxLook || c.round.on { // or another probe looks
		return false
	}
	l.step++
	l.turn, l.waited = l.stands(skip+place), false
	if asks {
		l.beyond = max(l.beyond, l.from+l.step)
		c.handOn(it)
	}
	if !witness {
		c.move(it, waiting)
	}
	l.parked, l.queued = false, true
	c.ready.pushFront(l)
	return true
}

// lookBeside lets a probe go on with another lane, or with OrderNone with another message. Its
// steps are 1, 2, 4 and more places long, because a message next to poison is often poison, too.
// It makes leastSteps to maxSteps steps: more if the time between probes is longer.
func (c *machine[M]) lookBeside(now time.Duration, it *item[M]) bool {
	r := &c.round
	if r.step == 0 {
		r.depth = maxSteps
		if !c.gate.Held() { // in a fleet's hold the turn of a process comes seldom: maxSteps
			period := c.policy.Breaker.PeriodAfter(mostAttempts, now-c.shutAt)
			r.depth = int(max(leastSteps, min(period*lookRate/time.Second, maxSteps)))
		}
	}
	if r.on || r.step == r.depth || !c.skip(1<<r.step) {
		return false
	}
	r.step++
	c.handOn(it)
	c.decide(now, it)
	return true
}

// handOn keeps a probe's token for the next message.
func (c *machine[M]) handOn(it *item[M]) {
	c.round.on, c.round.token = true, it.token
}

// roundOver ends the round of a settled probe. A token that waits is of another probe.
func (c *machine[M]) roundOver() {
	if !c.round.on {
		c.round = round{}
	}
}

// endLook ends a look early: its probe has failed.
func (c *machine[M]) endLook(now time.Duration, l *lane[M]) {
	if c.round.on { // else the message that has the token goes on with the look
		c.gate.Failure(now, c.round.token, false)
		c.freed = true
		c.round = round{}
	}
	if l != nil {
		l.turn, l.step, l.waited = 0, 0, false
	}
}

// mayLook tells whether a message behind a lane's head may be tried: the head's attempts are
// used up, the class of its error is unknown, and no other lane can tell. Exceptions: a doubted
// head need not use up its attempts. A probe does not wait for them after an operator's dead
// letter in the lane (deep), or with OrderKey: of many failing heads each is probed seldom.
func (c *machine[M]) mayLook(l *lane[M], head *item[M], asks bool) bool {
	return c.looks() && (head.exhausted || head.doubted || asks && (l.deep || c.order() == OrderKey)) && head.class == ClassUnknown &&
		!head.alive && l.witnesses() > 0 && !c.others(l)
}

// depth is how many messages the look of a failed probe may try. The longer the time between
// probes, the more: up to 8, and each fourth time up to 64. Their calls may take a small share
// of that time only. A round that cannot go that far goes on where the last one ended. If
// several processes probe, their heads tell, too: then each second probe looks, and later
// probes look deeper.
func (c *machine[M]) depth(now time.Duration, l *lane[M], it *item[M]) int {
	open := now - c.shutAt
	if l.deep {
		l.deep, l.from = false, 0
		return maxLook
	}
	l.rounds++
	deepest, most := time.Duration(8), time.Duration(lookShare)
	switch { // sometimes a look may take longer, or one with slow calls would never get far
	case l.rounds%16 == 0:
		deepest, most = maxLook, 1
	case l.rounds%4 == 0:
		deepest, most = maxLook, lookShare/10
	}
	held := c.gate.Held()
	if !held && open < lookAfter && l.witnesses() > maxLook {
		return 0 // the look before the breaker opened has told
	}
	period := c.policy.Breaker.PeriodAfter(mostAttempts, open)
	if held { // the fleet has its own backoff and grants probes in turns: other heads tell, too
		period = (now - max(c.grantedAt, c.shutAt)) / time.Duration(max(c.fleetStorm.Reporters, 1))
		c.grantedAt = now
		if c.fleetStorm.Reporters != 1 {
			if deepest = time.Duration(l.rounds % 2 * (1 + l.rounds/8)); deepest == 0 {
				return 0
			}
		}
	}
	share := period / most / max(now-it.started, 1)
	depth := int(max(1, min(share, period*lookRate/time.Second, deepest)))
	l.from = 0
	if far := l.rounds%4 == 0 || held && l.rounds%3 != 0; far && depth < maxLook {
		if l.from = l.beyond; l.from >= min(l.witnesses()-l.doubted(), maxLook) {
			l.from, l.beyond = 0, 0
		}
	}
	return depth
}

// place is the number of the witness that a probe's look tries as its n-th. It is the n-th
// behind the head, but in a short lane an untried witness goes first.
func (l *lane[M]) place(n int) int {
	if l.witnesses() > maxLook || l.doubted() > 0 {
		return n
	}
	for i := 1; i < len(l.front); i++ {
		if l.front[i].tries == 0 {
			return i - l.mutes(i)
		}
	}
	if l.queue.Len() > 0 {
		return len(l.front) - l.mutes(len(l.front))
	}
	return n
}

// skip brings the lane that is n places on to the front, or with OrderNone the message. Among
// adjacent poison messages the next one would tell nothing.
func (c *machine[M]) skip(n int) bool {
	if c.order() != OrderNone {
		for range min(n-1, c.ready.len()-1) {
			c.ready.push(c.ready.pop())
		}
		for range c.ready.len() { // the next that was never tried, if there is one
			if it := c.ready.peek().head(); it == nil || it.tries == 0 {
				break
			}
			c.ready.push(c.ready.pop())
		}
		return c.ready.len() > 0
	}
	for range min(n-1, c.queued-1) {
		c.again.push(c.dequeue(c.bulk))
	}
	return c.queued > 0 || c.again.len() > 0
}

// grantLastWord gives an item the last word, because something has succeeded a short time ago.
func (it *item[M]) grantLastWord(now time.Duration) {
	it.lastWord, it.doubted, it.wordAt = true, false, now
}

// revokeLastWord takes the last word back. after is how many failures after a proof of life still count.
func (it *item[M]) revokeLastWord(after int) {
	it.lastWord, it.alive, it.after, it.own = false, false, after, min(it.own, after)
}

// doubt takes the last word back from all other items after one was found guilty. While more
// successes may come, one success proves life for one message only: otherwise a short recovery
// would cost all messages that had failed before it. More may come if a message has come since
// the success, or if more than a few of the messages at that time were never tried. A success
// of a message that had failed is a sign of such a recovery, too.
func (c *machine[M]) doubt(guilty *item[M]) {
	if !c.recovered && c.came <= c.provedAt && c.unfailed() <= c.provedHere/fewUntried {
		return
	}
	c.spentLife = c.life()
	c.items(func(it *item[M]) {
		if it.lastWord && it != guilty {
			it.revokeLastWord(it.own)
			it.doubted = true
		}
	})
}

// doubted is how many witnesses next to the head had the last word before: they tell nothing.
func (l *lane[M]) doubted() (n int) {
	for i := 1; i < len(l.front) && (l.front[i].doubted || l.front[i].mute); i++ {
		if !l.front[i].mute {
			n++
		}
	}
	return n
}

// others tells whether another lane has a head that has not failed yet, or is with a handler:
// the result of that head will tell.
func (c *machine[M]) others(l *lane[M]) bool {
	if len(c.lanes) > len(c.due)+c.ready.len()+1 {
		return true // not all can be looked at, nor need be
	}
	return c.telling > 1 || c.telling == 1 && !l.telling
}

// behind is how many messages stand behind the head.
func (l *lane[M]) behind() int { return max(0, len(l.front)-1) + l.queue.Len() }

// witnesses is how many messages behind the head can tell something: all but the mute ones.
func (l *lane[M]) witnesses() int { return l.behind() - l.mutes(len(l.front)) }

// mutes is how many mute messages stand between the head and a place of the lane.
func (l *lane[M]) mutes(place int) (n int) {
	for i := 1; i < place; i++ {
		if l.front[i].mute {
			n++
		}
	}
	return n
}

// stands is the place of the n-th witness.
func (l *lane[M]) stands(n int) int {
	place := 0
	for ; n > 0; n-- {
		place++
		for place < len(l.front) && l.front[place].mute {
			place++
		}
	}
	return place
}

// guessAt is when a message may be taken for poison without proof; never if it may not. Until
// something succeeds, each guess waits twice as long as the last. A small burst that fails while
// other processes of the fleet succeed waits no longer than one message; see vouched.
func (c *machine[M]) guessAt(now time.Duration, it *item[M]) time.Duration {
	// With StrictOrder no message behind a head may be tried, so untried messages must not hold
	// the head without end. Once all heads have failed, they wait as long as a guess can wait.
	fresh := c.fresh()
	blind := fresh && c.policy.StrictOrder && c.order() != OrderNone && c.untried == 0
	if !c.letters || !it.exhausted || it.class == ClassDependency || it.alive || c.fleetStorm.Active || c.stormy() && c.policy.Budget.Off ||
		fresh && !blind {
		return never
	}
	if !blind && c.vouched(now) {
		return c.vouchedAt()
	}
	doubt := min(c.unsettled()-1, maxDoubt)
	if c.blocksLane { // messages behind a head were never tried, and say nothing
		doubt = min(max(c.exhausted-1, 0), maxDoubt)
	}
	if blind || c.room() == 0 || doubt > 0 && c.storm.Storm().Active { // full: others cannot be tried
		doubt = maxDoubt
	}
	patience := c.policy.Retry.Patience
	quiet := patience << doubt
	// The next message may tell. But parked messages (blocksLane) come when they are due.
	if c.own() == c.ownAtGap && !c.blocksLane {
		quiet = max(quiet, min(quietGaps*c.gap, patience<<maxDoubt))
	}
	at := max(it.exhaustedAt, c.came, c.provedAt) + quiet
	if c.guessedAt > 0 && c.life() <= c.lifeAtGuess {
		at = max(at, c.guessedAt+patience<<min(c.guesses, maxGuessShift))
	}
	return at
}

// arrived notes an arrival, and the longest time between two arrivals since a success.
func (c *machine[M]) arrived(now time.Duration) {
	switch own := c.own(); {
	case own != c.ownAtGap:
		c.gap, c.ownAtGap = 0, own
	case c.came > 0:
		c.gap = max(c.gap, now-c.came)
	}
	c.came = now
}

// guess dead-letters an item without proof, if the budget allows.
func (c *machine[M]) guess(now time.Duration, it *item[M]) {
	if c.life() > c.lifeAtGuess {
		c.guesses = 0
	}
	before := len(c.toWrite)
	it.guessed = true
	c.spendCredit(now, it)
	if it.guessed = it.paid || len(c.toWrite) > before; it.guessed { // paid: letterPace lets it wait
		c.guesses++
		c.guessedAt, c.lifeAtGuess = now, c.life()
	}
}

// unfailed is how many unsettled messages have not failed yet.
func (c *machine[M]) unfailed() int {
	if c.blocksLane && !c.fresh() { // messages behind a head say nothing
		return 0
	}
	n := c.queued
	if !c.calls.empty() && c.calls.least() == 0 {
		n += int(c.calls.at(c.calls.first).n)
	}
	return n
}

// fresh tells whether any unsettled message has not failed yet.
func (c *machine[M]) fresh() bool {
	if c.blocksLane && c.order() != OrderNone {
		return c.untried > 0
	}
	return c.queued > 0 || !c.calls.empty() && c.calls.least() == 0
}

// farWitnesses is how many messages may come beyond a full window; see oneMore.
const farWitnesses = 64

// oneMore tells whether one message may come beyond the window. It may if the window is full of
// messages that were settled out of order, and no unsettled message can go on by itself. The new
// message may prove life for failed ones. Its success may earn a part of the credit that another
// waits for. Or it may be the probe, while all other messages are being dead-lettered.
func (c *machine[M]) oneMore(n int) bool {
	if c.settledAhead() == 0 || !c.letters || n >= c.limit() || n+c.settledAhead() >= c.limit()+farWitnesses || c.fresh() {
		return false
	}
	if c.retryWaits[ReasonDLQ] > 0 {
		return true
	}
	if c.failureLives.empty() {
		return !c.closed()
	}
	return c.failureLives.most() >= int64(c.life()) // one new message for each failure
}

// flakiness counts messages that succeed only at a second call or later, and how often these
// fail again, over about a minute. Messages that failed in an outage are left out.
type flakiness struct {
	recovered, all float64 // messages that succeeded after a failure, and all that succeeded
	relapses       float64 // calls of recovered messages that failed after others had succeeded
	seen           uint64
	at             time.Duration
}

// shortOutage is how long nothing succeeds in an outage, at least. A dependency that comes and
// goes faster is flaky.
const shortOutage = 2 * time.Second

// flakyHalf is the half-life of the counts of flakiness.
const flakyHalf = 30 * time.Second

// attempts is how many calls of a message must fail before chance cannot explain it, and never
// below least. Poison never succeeds, so it does not count. A message that has failed may fail
// again more often than others fail first, as with a dependency that comes and goes.
func (f *flakiness) attempts(now time.Duration, least int) int {
	f.fade(now)
	if f.recovered < 5 {
		return least
	}
	once := f.recovered / max(f.all, f.recovered+1)
	again := min(max(once, f.relapses/(f.relapses+f.recovered)), mostAgain)
	n := 1 + math.Ceil(math.Log(chance/once)/math.Log(again))
	return max(least, int(min(n, mostAttempts)))
}

// mostAgain bounds the share of calls that fail again: it may be estimated from few messages.
const mostAgain = 0.9

// recover counts a message that succeeded after it had failed.
func (f *flakiness) recover(now time.Duration, relapses int) {
	f.fade(now)
	f.recovered++
	f.all++
	f.relapses += float64(relapses)
}

// count takes the number of messages that have succeeded at their first call so far.
func (f *flakiness) count(now time.Duration, firsts uint64) {
	f.fade(now)
	f.all += float64(firsts - min(f.seen, firsts))
	f.seen = firsts
}

func (f *flakiness) fade(now time.Duration) {
	if halves := float64((now - f.at) / flakyHalf); halves > 0 {
		f.at += time.Duration(halves) * flakyHalf
		f.recovered *= math.Pow(0.5, halves)
		f.all *= math.Pow(0.5, halves)
		f.relapses *= math.Pow(0.5, halves)
	}
}
