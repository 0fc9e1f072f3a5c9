// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"container/heap"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/circuit"
	"github.com/stormguard-mq/stormguard/internal/credit"
	"github.com/stormguard-mq/stormguard/internal/ringbuf"
	"github.com/stormguard-mq/stormguard/internal/storm"
)

// machine is the state machine of one source. Each method is a step over one event at an
// instant, and returns what the caller has to do. The machine owns no goroutine and no timer,
// and calls no handler and no port, only a [Limiter], a [Taker] and the breaker. The source's
// lock guards it. The loop, the workers, the passive shape and the tests drive the same machine.
//
//	         put                    next                done(nil)
//	Created ────▶ Waiting | Held ────────▶ Processing ────────────▶ Settling ─▶ Acked
//	                   ▲                       │ done(err)              ▲   └─▶ DeadLettered
//	                   │      wake             ▼         spendCredit    │
//	                   └─────────────────── RetryWait ──────────────────┘
//
// Waiting and Held are one phase, which is called Held while the source is not admitting. When the
// source ends, messages that are with no handler and no writer go to Returned.
type machine[M any] struct {
	// Settings and collaborators.
	policy  Policy
	limits  Limits
	gate    *circuit.Leaf // nil with NoBreaker
	storm   *storm.Detector
	budget  *credit.Budget
	limiter Limiter

	// The shape of the source.
	letters    bool              // the source has a dead-letter writer
	blocksLane bool              // a failed head blocks its lane until it is parked or dead-lettered
	offers     bool              // the passive shape: next offers an item, which may never be taken
	takenAt    func(M) time.Time // Taker.TakenAt; nil without a Taker
	letterPace Limiter           // the limit of dead letters; may be nil

	// What the fleet and the operator decide.
	fleetStorm dlq.FleetStorm
	book       *ruleBook  // the quarantine in force; nil for none
	unlooked   []*item[M] // items in retryWait that are to be compared with book

	rand    *rand.Rand
	origin  time.Time // wall time of the clock's 0
	reserve int       // the part of the window that the feed, or Run's batch, takes

	// Where the messages are.
	ring  *ringbuf.Ring[entry[M]]
	bulk  *ringbuf.Lane[entry[M]] // with OrderNone all messages; else nil
	lanes map[uint64]*lane[M]     // with another order: the lanes that have messages, by key
	ready fifo[*lane[M]]          // lanes that have an item to try
	again fifo[*item[M]]          // with OrderNone: items to try, or to try again
	due   dueHeap[M]              // items in retryWait, the earliest first
	owed  queueOf[M]              // items in retryWait that wait for a credit only
	paced queueOf[M]              // items in retryWait that wait for letterPace only
	busy  []*item[M]              // items in processing
	going []*item[M]              // items in settling
	acks  fifo[*item[M]]          // items to be acked: their dead letter is confirmed, or they are parked

	// toWrite collects items whose dead letter is to be written; the driver
	// takes them after each step.
	toWrite []*item[M]

	// Counts of the messages that are not settling: no step has to visit all messages.
	arrivals     ranks // arrival times, those of messages in the ring included
	calls        ranks // item.tries of the items outside the ring
	failureLives ranks // item.lifeAtFailure of the items that have failed and are not decided
	untried      int   // lanes whose head has not failed yet
	telling      int   // lanes whose head has not failed yet, or is with a handler

	// How many messages there are.
	lastID     uint64
	count      [phaseCount]int  // items by phase
	retryWaits [reasonCount]int // items in retryWait, by reason
	queued     int              // entries in the ring
	exhausted  int              // items whose attempts are used up, not settling

	// Guesses: dead letters without proof.
	guesses     int           // guesses since the latest success, without those that were parked
	guessedAt   time.Duration // when the latest guess was made, parked or not
	lifeAtGuess uint64        // the number of successes (life) at the latest guess
	burst       burst
	elsewhere   elsewhere

	round round // a probe's look that is in progress
	flaky flakiness

	// Signs of life. "life" is the number of successes, which the method life counts.
	provedAt     time.Duration      // when a call outside the closed path succeeded last
	provedHere   int                // unsettled messages at provedAt
	lastLife     uint64             // life at the latest watch
	watchedAt    time.Duration      // when lastLife was read
	looksAll     int                // failed witnesses of all lanes since looksLife
	looksLife    uint64             // life when looksAll began to count
	grewAt       time.Duration      // when life grew last, as far as watch knows
	failingAt    time.Duration      // when the first call failed since the latest success
	lifelessAt   time.Duration      // when calls had last failed for shortOutage without a success
	stoodStillAt time.Duration      // when life had last stood still for longer than stale
	suspecting   bool               // an item waits for a proof of life: exhausted, or a failed probe
	born         uint64             // life when the epoch began
	suspects     map[string]suspect // failed messages of earlier epochs; while the source ends, of this one too
	health       *health            // nil without a health check

	shutAt    time.Duration // when the breaker opened
	grantedAt time.Duration // when a probe that the fleet granted looked last

	// Arrivals, for the patience before a guess.
	came     time.Duration // when the latest message came
	gap      time.Duration // the longest time between two messages since own() was ownAtGap
	ownAtGap uint64        // own() when gap began to count

	recovered bool          // the latest success was of a message that had failed
	spentLife uint64        // successes up to this life prove nothing any more; see doubt
	took      time.Duration // duration of the latest failed call
	slowAfter time.Duration // a call that takes this long is reported as slow

	// The window.
	bytes        int64  // bytes of messages and of their failure histories
	historyBytes int64  // bytes of the failure histories alone
	doneBehind   int    // messages in the spill that are done, but not given up on the disk
	ahead        int    // the latest answer of Marker.Ahead
	aheadTurn    uint64 // the turn in which ahead was asked
	spills       bool   // Policy.Spill
	behind       int    // messages in the spill, or on their way there, that the machine has not got

	// The end of the source.
	ended   bool
	emptied bool // drain has taken all messages out
	stopped bool // the loop is to end

	// Waits that are not the breaker's.
	paused    bool
	pauseEnds time.Duration // when the pause ends by itself; never if it does not
	asked     time.Duration // until when guard.Backoff holds the source
	askedFor  error         // the error that a handler gave to Backoff
	askedText string        // the text of askedFor, to be read under a lock
	limited   time.Duration // until when the limiter refused
	refusedAt time.Duration // when the limiter refused last

	// The hold, and the drain that follows it.
	held      bool // a message was refused admission, and no drain has begun since
	draining  bool // the ramp is on
	drainFrom time.Duration
	drained   float64 // messages admitted since drainFrom

	// The breaker's answers.
	wasClosed          bool // the breaker was closed at the latest notice
	freed              bool // a probe was settled: another source of the scope may have one
	probeProvedNothing bool // the latest probe proved nothing: its handler ignored it, or asked for time

	// Dead letters at the dispatcher.
	writing map[*item[M]]struct{} // to be written, not yet confirmed
	undone  []*item[M]            // items whose letters came back unwritten when the source ended

	// For the storm detector.
	firsts      uint64        // successful first attempts, probes left out; see firstTime
	firstProbes uint64        // successful first attempts that were probes
	lookAt      time.Duration // when the storm detector is asked next

	// tally is never reset. settled counts the messages of the machine whose ack went out or
	// failed; the closed path's successes are counted in Source.started.
	tally Tally

	// successes are successful handler calls outside the closed path. The breaker reads them.
	successes atomic.Uint64
	// fast reads the closed path's successes.
	fast func() uint64
	// beside reads the successes of the source that parked these messages; nil for none.
	beside func() uint64
}

// A Tally counts since the source was opened.
type Tally struct {
	Received     uint64 // messages handed over by the adapter
	Acked        uint64
	DeadLettered uint64
	Returned     uint64 // given back unsettled, acked in vain, or taken back by the adapter

	Failures       uint64 // failed handler calls
	FailedMessages uint64 // messages that failed at least once
	Retries        uint64 // handler calls after the first
	Probes         uint64 // handler calls while the breaker was half-open
	Diverted       uint64 // messages that found the source holding
	AckFailures    uint64 // acks the broker did not take
	Ignored        uint64 // messages acked because their handler returned Ignore
	Parked         uint64 // messages acked because the adapter parked them for another try
	Refused        uint64 // dead letters put off because there was no credit
	Paced          uint64 // dead letters put off by the limit of dead letters
	Quarantined    uint64 // messages that matched a rule of the quarantine
	Spilled        uint64 // messages acked because they are in the spill, not handled yet
	Overtaken      uint64 // witnesses that succeeded, before the failing messages in front of them
	Stale          uint64 // results without effect: late or repeated Done calls, or after the end
	Timeouts       uint64
	Panics         uint64 // handler calls that panicked or called Goexit
}

// step is what the caller of next or done has to do.
type step[M any] struct {
	kind stepKind
	it   *item[M]
	at   time.Duration // of a stepWait: when to call next again; 0: only when woken
}

type stepKind uint8

const (
	stepWait   stepKind = iota // nothing to do
	stepHandle                 // call the handler, then done
	stepAck                    // call Port.Ack, then settled
	stepLook                   // compare the message with the book, then looked
)

func (c *machine[M]) order() Order { return c.policy.Order }

// unsettled is how many messages the machine has.
func (c *machine[M]) unsettled() int {
	return c.queued + c.count[waiting] + c.count[processing] + c.count[settling] + c.count[retryWait]
}

// room is how many more messages may come in. A message that is settled behind an unsettled one
// keeps its place in the window, because the broker has not heard of it. So settling never makes
// less room, only intake does. The failure histories of up to maxLook messages do not fill the
// window: the next message may prove life.
func (c *machine[M]) room() int {
	n := c.unsettled()
	switch {
	case n == 0:
		return c.limit()
	case c.bytes >= c.policy.WindowBytes && (n > maxLook || c.bytes-c.historyBytes >= c.policy.WindowBytes):
		return 0
	case n+c.settledAhead() < c.limit():
		return c.limit() - n - c.settledAhead()
	case c.oneMore(n):
		return 1
	}
	return 0
}

// settledAhead is how many settled messages are behind an unsettled one: the broker, or the
// disk, would deliver them again.
func (c *machine[M]) settledAhead() int { return c.ahead + c.doneBehind }

// lookedAhead takes an answer of Marker.Ahead. Of two answers the one of the later turn counts:
// it has seen all acks before it.
func (c *machine[M]) lookedAhead(turn uint64, n int) {
	if turn > c.aheadTurn {
		c.aheadTurn, c.ahead = turn, n
	}
}

// limit is how many messages the machine may have: the window without reserve.
func (c *machine[M]) limit() int { return max(1, c.policy.Window-c.reserve) }

// quiet tells that the closed path may run: no message has to go first, and only the breaker
// can refuse. The closed path asks the breaker itself.
func (c *machine[M]) quiet(now time.Duration) bool {
	if c.unsettled()+c.behind > 0 || c.paused || c.ended || c.stopped || c.asked > now {
		return false
	}
	c.held, c.draining = false, false
	return true
}

// move is the only place where an item's phase changes.
func (c *machine[M]) move(it *item[M], to phase) {
	if it.phase != idle {
		c.count[it.phase]--
	}
	if it.phase == retryWait {
		c.retryWaits[it.reason]--
		c.due.remove(it)
	}
	if list := c.listed(it.phase); list != nil {
		last := len(*list) - 1
		(*list)[it.place] = (*list)[last]
		(*list)[it.place].place = it.place
		(*list)[last] = nil
		*list, it.place = (*list)[:last], -1
	}
	if it.exhausted && it.phase != settling && (to == settling || to == idle) {
		c.exhausted--
	}
	was := it.phase
	it.phase = to
	switch {
	case to.live() && !was.live():
		it.call = c.calls.add(int64(it.tries))
	case was.live() && !to.live():
		c.arrivals.drop(it.arrival)
		c.calls.drop(it.call)
		c.undoubted(it)
	}
	if it.lane != nil && it.lane.head() == it {
		c.heads(it.lane)
	}
	if to == idle {
		return
	}
	c.count[to]++
	if list := c.listed(to); list != nil {
		it.place = len(*list)
		*list = append(*list, it)
	}
}

// counted is the only place where the number of an item's calls changes.
func (c *machine[M]) counted(it *item[M], n int) {
	it.tries += n
	it.call = c.calls.move(it.call, int64(it.tries))
	if it.lane != nil && it.lane.head() == it {
		c.heads(it.lane)
	}
}

// undoubted takes an item out of failureLives: it is not failed and undecided any more.
func (c *machine[M]) undoubted(it *item[M]) {
	if it.doubtful != 0 {
		c.failureLives.drop(it.doubtful)
		it.doubtful = 0
	}
}

// heads updates untried and telling after the head of a lane has changed.
func (c *machine[M]) heads(l *lane[M]) {
	it := l.head()
	untried := it == nil || it.tries == 0
	c.countHead(l, untried, untried || it.phase == processing)
}

func (c *machine[M]) countHead(l *lane[M], untried, telling bool) {
	step := func(n *int, was *bool, is bool) {
		switch {
		case is && !*was:
			*n++
		case *was && !is:
			*n--
		}
		*was = is
	}
	step(&c.untried, &l.untried, untried)
	step(&c.telling, &l.telling, telling)
}

// listed is the list of the items in a phase, nil if there is none.
func (c *machine[M]) listed(p phase) *[]*item[M] {
	switch p {
	case processing:
		return &c.busy
	case settling:
		return &c.going
	default:
		return nil
	}
}

// put takes one message in. The caller has checked the room.
func (c *machine[M]) put(now time.Duration, m M, key uint64, size int, onDisk *spilled) {
	c.tally.Received++
	c.arrived(now)
	c.bytes += int64(size)
	if !c.admitting(now) {
		if !c.draining {
			c.hold(now) // else the first refusal would count this message, too
		}
		if onDisk == nil { // a message from the disk was counted when it came
			c.divert(now, 1)
		}
	}
	if onDisk == nil && c.spills {
		onDisk = new(spilled)
	}
	e := entry[M]{m: m, size: size, at: now, copy: onDisk, arrival: c.arrivals.add(int64(now))}
	if c.order() == OrderNone {
		c.enqueue(c.bulk, e)
		return
	}
	l := c.lane(key)
	c.enqueue(l.queue, e)
	c.heads(l)
	c.enlist(l)
	if c.blocksLane {
		return
	}
	// The first untried message behind a failed head can prove life. So it wakes an exhausted
	// head, and while the breaker is open any failed head: its lane is probed next. Further
	// messages do not wake the head: it would be called at the pace of the traffic.
	head := l.head()
	if head != nil && head.phase == retryWait && (head.exhausted || c.open()) && !head.decided() && l.queue.Len() == 1 && l.tried() {
		c.wake(head)
	}
	if l.queued && c.open() && c.ready.len() > 1 && c.ready.len() <= maxLook && c.ready.peek() != l {
		remove(&c.ready, l)
		if c.round.on { // the token of the round is for the lane in front
			front := c.ready.pop()
			c.ready.pushFront(l)
			l = front
		}
		c.ready.pushFront(l)
	}
}

// takeOver takes a message over from the closed path, which called the handler at began. The
// message is processing.
func (c *machine[M]) takeOver(began time.Duration, m M, key uint64, size int) *item[M] {
	c.arrived(max(c.came, began))
	c.bytes += int64(size)
	e := entry[M]{m: m, size: size, at: began, arrival: c.arrivals.add(int64(began))}
	if c.spills {
		e.copy = new(spilled)
	}
	it := c.item(e)
	if c.order() != OrderNone {
		l := c.lane(key)
		l.front = append(l.front, it)
		l.parked, it.lane = true, l
	}
	c.move(it, processing)
	it.started = began
	return it
}

// enqueue puts an entry into the ring. The ring is never full: it is as large as the largest
// window, and the caller has checked the window.
func (c *machine[M]) enqueue(q *ringbuf.Lane[entry[M]], e entry[M]) {
	if n, err := q.TryPut(e); n != 1 {
		panic("guard: the ring refused a message within the window: " + err.Error())
	}
	c.queued++
}

// dequeue takes the oldest entry out of a ring lane as an item.
func (c *machine[M]) dequeue(q *ringbuf.Lane[entry[M]]) *item[M] {
	var buf [1]entry[M]
	lease, err := q.TryLease(buf[:])
	if err != nil {
		return nil
	}
	if err := lease.Commit(1); err != nil {
		panic("guard: the ring lost a lease: " + err.Error())
	}
	c.queued--
	it := c.item(buf[0])
	c.move(it, waiting)
	return it
}

func (c *machine[M]) item(e entry[M]) *item[M] {
	c.lastID++
	return &item[M]{entry: e, id: c.lastID, heap: -1, place: -1}
}

func (c *machine[M]) lane(key uint64) *lane[M] {
	l := c.lanes[key]
	if l == nil {
		l = &lane[M]{key: key, queue: c.ring.Lane(key)}
		c.lanes[key] = l
	}
	return l
}

// enlist puts a lane into the ready list, if it has something to try.
func (c *machine[M]) enlist(l *lane[M]) {
	if !l.queued && !l.parked && !l.empty() {
		l.queued = true
		c.ready.push(l)
	}
}

// dropIfEmpty forgets a lane without messages.
func (c *machine[M]) dropIfEmpty(l *lane[M]) {
	if l.empty() && !l.queued {
		c.countHead(l, false, false)
		delete(c.lanes, l.key)
		c.ring.Drop(l.queue)
	}
}

// waitRetry lets an item wait for its next attempt.
func (c *machine[M]) waitRetry(it *item[M], at time.Duration, why Reason) {
	c.move(it, retryWait)
	it.reason, it.due = why, at
	c.retryWaits[why]++
	heap.Push(&c.due, it)
	if it.lane != nil {
		it.lane.parked = true
	}
}

// wake ends an item's wait.
func (c *machine[M]) wake(it *item[M]) {
	c.move(it, waiting)
	if it.lane == nil {
		c.again.push(it)
		return
	}
	it.lane.parked = false
	c.enlist(it.lane)
}

// next decides what to do next.
func (c *machine[M]) next(now time.Duration) step[M] {
	if c.acks.len() > 0 {
		return step[M]{kind: stepAck, it: c.acks.pop()}
	}
	if c.ended || c.stopped {
		return step[M]{}
	}
	for len(c.due) > 0 && c.due[0].due <= now {
		if it := c.due[0]; it.permanent {
			c.spendCredit(now, it)
		} else {
			c.wake(it)
		}
	}
	c.serveOwed(now)
	c.servePaced(now)
	if c.count[processing] >= c.policy.Workers {
		return step[M]{}
	}
	if it := c.nextToLook(); it != nil {
		return c.examine(now, it)
	}
	it := c.nextItem()
	if it == nil {
		c.endLook(now, nil)
		return step[M]{at: c.wakeAt(0)}
	}
	if !c.paused && c.unseen(it) {
		return c.examine(now, it)
	}
	if until, why := c.admit(now, it); why != ReasonNone {
		delays := why == ReasonLimiter || c.asked > now && !c.round.on // these only delay a look
		if !c.draining && !delays {
			c.endLook(now, it.lane)
		}
		return step[M]{at: c.wakeAt(until)}
	}
	c.take(now, it)
	return step[M]{kind: stepHandle, it: it}
}

// wakeAt is the earliest of until, the next due item, and the next time that owed or paced is
// served. 0 means none.
func (c *machine[M]) wakeAt(until time.Duration) time.Duration {
	sooner := func(at time.Duration) {
		if until == 0 || at < until {
			until = at
		}
	}
	if len(c.due) > 0 && c.due[0].due < never {
		sooner(c.due[0].due)
	}
	for _, q := range []*queueOf[M]{&c.owed, &c.paced} {
		if q.len() > 0 {
			sooner(q.at)
		}
	}
	return until
}

// nextItem is the next item to try, nil if there is none. The item stays in its list.
func (c *machine[M]) nextItem() *item[M] {
	if c.order() == OrderNone {
		// While the breaker is open, a new message is probed before a failed one. One new message
		// also goes before an exhausted one that waits for a witness: slow retries of a few
		// messages would leave no time for the witness.
		if c.again.len() == 0 || c.queued > 0 && c.yields(c.again.peek()) {
			if it := c.dequeue(c.bulk); it != nil {
				c.again.pushFront(it)
			}
		}
		if c.again.len() == 0 {
			return nil
		}
		rotate(c, &c.again, func(it *item[M]) *item[M] { return it })
		return c.again.peek()
	}
	if c.ready.len() == 0 {
		return nil
	}
	rotate(c, &c.ready, (*lane[M]).head)
	l := c.ready.peek()
	for l.turn >= len(l.front) {
		it := c.dequeue(l.queue)
		it.lane = l
		l.front = append(l.front, it)
	}
	return l.front[l.turn]
}

// yields tells whether, with OrderNone, the next item lets a new message go first.
func (c *machine[M]) yields(it *item[M]) bool {
	switch {
	case it.tries == 0:
		return false
	case c.open():
		return true
	case it.exhausted && !it.alive && !it.passed && !it.decided():
		it.passed = true
		return true
	}
	return false
}

// rotate brings items forward that are worth a probe, while the breaker is open. An item that
// failed a probe although others have succeeded may itself be at fault, and must not keep the
// breaker open for all. It lets the others go first, but once only: they may be as bad, and
// stand before healthy messages.
func rotate[M, T any](c *machine[M], q *fifo[T], head func(T) *item[M]) {
	if !c.open() || c.round.on {
		return
	}
	for range q.len() {
		it := head(q.peek())
		if it == nil || it.probes == 0 || c.life() == it.lifeAtFailure || it.passed {
			return
		}
		it.passed = true
		q.push(q.pop())
	}
}

// take starts an attempt of the item that is up.
func (c *machine[M]) take(now time.Duration, it *item[M]) {
	if it.lane == nil {
		c.again.pop()
	} else {
		c.ready.pop()
		it.lane.queued, it.lane.parked = false, true
	}
	c.move(it, processing)
	it.started, it.slow, it.passed = now, false, false
	if it.tries > 0 || c.beside != nil {
		it.life = c.life()
	}
	it.serial++
	if !c.offers {
		c.called(it)
	}
}

// called counts a handler call when it begins. In the passive shape it counts the call at its
// Done, because an offered message may be taken back.
func (c *machine[M]) called(it *item[M]) {
	if it.tries > 0 {
		c.tally.Retries++
	}
	if it.probe {
		c.tally.Probes++
	}
}

// unstand takes a woken item out of the list that wake put it into.
func (c *machine[M]) unstand(it *item[M]) {
	if l := it.lane; l != nil {
		if l.queued {
			remove(&c.ready, l)
			l.queued = false
		}
		return
	}
	remove(&c.again, it)
}

func remove[T comparable](q *fifo[T], v T) {
	for range q.len() {
		if w := q.pop(); w != v {
			q.push(w)
		}
	}
}

// closed tells whether the breaker and its scopes let everything through.
func (c *machine[M]) closed() bool { return c.gate == nil || c.gate.Closed() }

// admitting tells whether a message that comes now can be handled without
// being held first.
func (c *machine[M]) admitting(now time.Duration) bool {
	return !c.held && !c.draining && !c.paused && c.asked <= now && c.closed()
}

// limiterWord bounds how long a limiter that refused is not asked for a probe again. To ask it
// takes a slot of the breaker, and giving the slot back wakes the sources that wait for one: each
// such source would wake the others. After limiterWord the limiter's answer may have changed, so
// it is asked when anything wakes the source.
const limiterWord = time.Second

// admit takes one admission for the item, or returns why the item has to wait and until when. An
// until of 0 means that something else has to end the wait, such as the end of a pause. The
// limiter is asked last, so that no refusal spends anything.
func (c *machine[M]) admit(now time.Duration, it *item[M]) (until time.Duration, why Reason) {
	if c.paused {
		c.hold(now)
		return 0, ReasonOperator
	}
	if c.asked > now {
		if !c.draining || c.asked-now > c.policy.Retry.Base {
			c.hold(now) // a Backoff of no time only delays a drain
		}
		return c.asked, ReasonBackpressure
	}
	it.probe = false
	if c.round.on { // the look of a probe goes on with this item
		c.round.on = false
		if c.gate.Renew(now, c.round.token) {
			if c.limiter != nil {
				if wait := c.limiter.Admit(now); wait > 0 {
					c.round.on = true
					c.endLook(now, it.lane)
					c.limited, c.refusedAt = soon(now, wait), now
					return c.limited, ReasonLimiter
				}
			}
			it.token, it.probe = c.round.token, true
			return 0, ReasonNone
		}
		c.round = round{}
		c.endLook(now, it.lane) // the breaker was forced or held meanwhile
		return now + 1, ReasonBreaker
	}
	token, closed := c.enter()
	if !closed {
		if c.limited > now && now-c.refusedAt < limiterWord {
			c.hold(now)
			return c.limited, ReasonBreaker
		}
		if c.gate.Passing() { // its probes carry load already: the ramp paces them, too
			if until := c.ramp(now); until > 0 {
				return until, ReasonBackpressure
			}
		}
		var refusal circuit.Refusal
		token, refusal = c.gate.AdmitFor(now, it.id, c.policy.lease())
		if !refusal.OK() {
			if c.open() {
				c.hold(now)
			}
			return max(refusal.Until, now+1), ReasonBreaker
		}
		it.probe = token.Probe()
	}
	if !it.probe {
		if until := c.ramp(now); until > 0 {
			return until, ReasonBackpressure
		}
	}
	if c.limiter != nil {
		if wait := c.limiter.Admit(now); wait > 0 {
			if it.probe {
				c.gate.Exclude(now, token)
				c.freed = true
			}
			c.limited, c.refusedAt = soon(now, wait), now
			return c.limited, ReasonLimiter
		}
		c.limited = 0
	}
	if c.draining {
		c.drained++
	}
	it.token = token
	return 0, ReasonNone
}

func (c *machine[M]) enter() (circuit.Token, bool) {
	if c.gate == nil {
		return circuit.Token{}, true
	}
	return c.gate.Enter()
}

// hold begins a hold, if there is none, and counts the waiting messages as diverted. A hold ends
// a drain. What the drain has left was counted before, and drains later from the start of the
// ramp: the time of a hold is not the ramp's.
func (c *machine[M]) hold(now time.Duration) {
	if c.held {
		return
	}
	if !c.draining {
		c.divert(now, c.queued+c.count[waiting])
	}
	c.held, c.draining = true, false
}

// ramp tells until when a drain has to wait, 0 if it may go on.
func (c *machine[M]) ramp(now time.Duration) time.Duration {
	if !c.held && !c.draining {
		return 0
	}
	if c.policy.Ramp.Off || c.policy.Ramp.For == 0 {
		c.held, c.draining = false, false
		return 0
	}
	if !c.draining {
		c.held, c.draining, c.drainFrom, c.drained = false, true, now, 0
	}
	at := c.drainFrom + c.policy.Ramp.At(c.drained)
	if c.rampOver(now); !c.draining {
		return 0
	}
	if at > now {
		return at
	}
	return 0
}

// rampOver ends a drain whose time is over, even if nothing asks the ramp any more.
func (c *machine[M]) rampOver(now time.Duration) {
	if c.draining && now-c.drainFrom >= c.policy.Ramp.For {
		c.draining = false
	}
}

// still tells whether nothing moves until a message comes or a wait is over: no handler has a
// message, and no message waits for the ramp. A message that waits for a credit does not move.
func (c *machine[M]) still() bool {
	if c.count[processing] > 0 {
		return false
	}
	return !c.draining || c.ready.len()+c.again.len() == 0 && (c.order() != OrderNone || c.queued == 0)
}

// divert counts n messages that find the source holding.
func (c *machine[M]) divert(now time.Duration, n int) {
	if n > 0 {
		c.tally.Diverted += uint64(n)
		c.storm.Diverted(now, n)
	}
}
