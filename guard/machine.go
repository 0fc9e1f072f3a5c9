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

// machine is the state machine of one source: each method is a step over one
// event at an instant, and returns what the caller has to do. It owns no
// goroutine and no timer, calls no port and no handler (only a [Limiter] and the
// breaker), and is guarded by the source's lock. The loop, the workers, the passive shape and the tests drive
// the same machine.
//
//	         put                    next                done(nil)
//	Created ────▶ Waiting | Held ────────▶ Processing ────────────▶ Settling ─▶ Acked
//	                   ▲                       │ done(err)              ▲   └─▶ DeadLettered
//	                   │      wake             ▼           condemn      │
//	                   └─────────────────── RetryWait ──────────────────┘
//
// Waiting and Held are one phase: which of the two it is depends on whether the
// source is admitting. What no handler or writer has goes to Returned when the
// source ends.
type machine[M any] struct {
	policy     Policy
	limits     Limits
	gate       *circuit.Leaf // nil with NoBreaker
	storm      *storm.Detector
	budget     *credit.Budget
	limiter    Limiter
	letters    bool              // there is a dead-letter writer
	inPlace    bool              // a message keeps its lane waiting until it is parked or dead-lettered
	offers     bool              // the passive shape: what next gives out is only offered
	takenAt    func(M) time.Time // of a Taker; nil for none
	letterPace Limiter           // of dead letters; may be nil
	fleetStorm dlq.FleetStorm
	book       *ruleBook  // the quarantine in force; nil is none
	unlooked   []*item[M] // wait for a retry, and are to be compared with it
	rand       *rand.Rand
	origin     time.Time // wall time of the clock's 0
	reserve    int       // of the window: for the feed

	ring  *ringbuf.Ring[entry[M]]
	bulk  *ringbuf.Lane[entry[M]] // all messages with OrderNone
	lanes map[uint64]*lane[M]     // otherwise; those with something unsettled
	ready fifo[*lane[M]]          // lanes whose head may be tried
	again fifo[*item[M]]          // OrderNone: items to be tried (again)
	due   dueHeap[M]              // parked items
	owed  queueOf[M]              // of these, those that wait for a credit only …
	paced queueOf[M]              // … and those that have it, and wait for the limit of dead letters
	busy  []*item[M]              // processing
	going []*item[M]              // settling
	acks  fifo[*item[M]]          // dead letters confirmed, to be acked

	// condemned collects items whose dead letter is to be written; the driver
	// takes them after each step.
	condemned []*item[M]

	// Of the messages that are not settling, so that nothing looks at all of them:
	arrivals ranks // when they came, those in the ring included
	calls    ranks // tries of those outside the ring
	lucks    ranks // luck of those that have failed and are not decided
	untried  int   // lanes whose head did not fail yet
	telling  int   // … or is with a handler

	lastID     uint64
	count      [phaseCount]int
	parked     [reasonCount]int // items in retryWait, by reason
	queued     int              // entries in the ring
	exhausted  int              // items whose attempts are used up, not settling
	guesses    int              // taken for poison without proof and not parked, and no success since
	guessedAt  time.Duration    // when the last was, parked or not …
	guessLuck  uint64           // … and what life was then
	burst      burst
	elsewhere  elsewhere
	round      round // the look in progress
	flaky      flakiness
	provedAt   time.Duration      // when the latest call succeeded that was not on the closed path …
	provedHere int                // … and how many messages were here then
	lastLife   uint64             // life, when it was watched last …
	watchedAt  time.Duration      // … which was then …
	looksAll   int                // witnesses of all lanes that have failed …
	looksLife  uint64             // … since life was this
	movedAt    time.Duration      // … and when it was seen to move last
	failingAt  time.Duration      // when the first call failed since one has succeeded
	lifelessAt time.Duration      // when calls had failed for shortOutage, at last
	stillAt    time.Duration      // when it had stood still for too long, the last time
	suspecting bool               // an exhausted message waits for a proof of life
	born       uint64             // life when the epoch began
	suspects   map[string]suspect // of epochs before, and while the source ends of this one
	health     *health            // nil without a health check
	shutAt     time.Duration      // when the breaker opened
	grantedAt  time.Duration      // when a probe that the fleet granted last looked
	came       time.Duration      // when the latest message came …
	gap        time.Duration      // … the longest time between two since a success …
	gapLuck    uint64             // … as own counts them
	recovered  bool               // the latest success was of a message that had failed
	spentLife  uint64             // life that has proved what it can; see doubt
	took       time.Duration      // of the latest call that failed
	slowAfter  time.Duration      // a call is reported as slow then
	bytes      int64              // of messages and of what is kept of their failures …
	noted      int64              // … and of the latter alone
	doneBehind int                // messages in the spill that are done, and not given up there
	ahead      int                // Marker.Ahead, when an ack was looked at last …
	aheadTurn  uint64             // … and which look that was
	spills     bool               // Policy.Spill
	behind     int                // messages in the spill, or on their way there, that are not here
	ended      bool
	emptied    bool // by drain
	stopped    bool // the loop is to end
	paused     bool
	pauseEnds  time.Duration // when a pause ends by itself; never if it does not
	asked      time.Duration // until when guard.Backoff holds the source
	askedFor   error         // the error that a handler gave to Backoff
	askedText  string        // and its text, for whoever has a lock
	limited    time.Duration // the limiter refused until then …
	refusedAt  time.Duration // … when it was asked last
	held       bool          // something was refused admission and is not yet drained
	draining   bool          // the ramp is on
	drainFrom  time.Duration
	drained    float64 // admitted since drainFrom

	wasClosed   bool
	freed       bool                  // a probe was settled: another source of the scope may have one
	saysNothing bool                  // the latest probe proved nothing: its handler ignored it, or asked for time
	writing     map[*item[M]]struct{} // condemned, not yet confirmed
	undone      []*item[M]            // of these, those that went back when the source ended
	firsts      uint64                // successful first attempts, probes left out; see firstTime
	firstProbes uint64                // those that were probes
	lookAt      time.Duration         // the storm is judged again then

	// tally counts for ever. Every end of a message is counted in settled.
	tally Tally

	// successes are the handler's, outside the closed path; read by the breaker.
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
	Ignored        uint64 // acked by Ignore
	Parked         uint64 // acked because they are parked for another try
	Refused        uint64 // dead letters put off for want of a credit
	Paced          uint64 // dead letters put off by their limit
	Quarantined    uint64 // messages that matched a rule of the quarantine
	Spilled        uint64 // acked because they are in the spill, and not handled yet
	Overtaken      uint64 // messages that succeeded before one in front of them, to prove life
	Stale          uint64 // late or repeated Done calls, without effect
	Timeouts       uint64
	Panics         uint64 // Goexits too
}

// step is what the caller of next or done has to do.
type step[M any] struct {
	kind stepKind
	it   *item[M]
	at   time.Duration // stepWait: look again then; 0 = only when woken
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

// room is how many more messages may come in. What is settled behind one that is not
// takes its place in the window, too: the broker has not heard of it. To settle such
// a message moves its place and no more, so only intake makes less room. The histories of
// as many messages as a look asks fill no window: what comes may prove life.
func (c *machine[M]) room() int {
	n := c.unsettled()
	switch {
	case n == 0:
		return c.limit()
	case c.bytes >= c.policy.WindowBytes && (n > maxLook || c.bytes-c.noted >= c.policy.WindowBytes):
		return 0
	case n+c.settledAhead() < c.limit():
		return c.limit() - n - c.settledAhead()
	case c.oneMore(n):
		return 1
	}
	return 0
}

// settledAhead is how many messages are settled behind one that is not: the broker, or the
// disk, would bring them again.
func (c *machine[M]) settledAhead() int { return c.ahead + c.doneBehind }

// lookedAhead takes what the port said of the messages that are settled ahead. Of two
// looks that of the later turn has seen all acks before it.
func (c *machine[M]) lookedAhead(turn uint64, n int) {
	if turn > c.aheadTurn {
		c.aheadTurn, c.ahead = turn, n
	}
}

// limit is how many messages the machine may have: the feed has its own part of
// the window.
func (c *machine[M]) limit() int { return max(1, c.policy.Window-c.reserve) }

// quiet tells that the closed path may run: nothing is here that has to go
// first, and nothing but the breaker, which the path asks itself, can refuse.
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
		c.parked[it.reason]--
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

// undoubted takes an item off those that have failed and are not decided.
func (c *machine[M]) undoubted(it *item[M]) {
	if it.doubtful != 0 {
		c.lucks.drop(it.doubtful)
		it.doubtful = 0
	}
}

// heads brings the counts of heads up to date with a lane whose head has changed.
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

// put takes one message in. The caller saw to the room.
func (c *machine[M]) put(now time.Duration, m M, key uint64, size int, onDisk *spilled) {
	c.tally.Received++
	c.arrived(now)
	c.bytes += int64(size)
	if !c.admitting(now) {
		if !c.draining {
			c.hold(now) // or the first refusal would count this one too
		}
		if onDisk == nil { // else it was counted when it came
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
	c.stand(l)
	if c.inPlace {
		return
	}
	// The first message behind suspects can tell something new about them, and, while the
	// breaker is open, behind any that have failed: its lane is probed next. A head that
	// has an untried one behind it keeps its delay: woken by each message, it would be
	// called at the pace of the traffic.
	head := l.head()
	if head != nil && head.phase == retryWait && (head.exhausted || c.open()) && !head.decided() && l.queue.Len() == 1 && l.tried() {
		c.wake(head)
	}
	if l.queued && c.open() && c.ready.len() > 1 && c.ready.len() <= maxLook && c.ready.peek() != l {
		remove(&c.ready, l)
		if c.round.on { // its token is for the lane in front
			front := c.ready.pop()
			c.ready.pushFront(l)
			l = front
		}
		c.ready.pushFront(l)
	}
}

// adopt takes over a message that the closed path began at an instant: it is
// processing.
func (c *machine[M]) adopt(began time.Duration, m M, key uint64, size int) *item[M] {
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

// enqueue puts an entry into the ring, whose own bound is never reached: the
// window was checked, and the ring is as large.
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

// stand puts a lane into the ready list, if it has something to try.
func (c *machine[M]) stand(l *lane[M]) {
	if !l.queued && !l.parked && !l.empty() {
		l.queued = true
		c.ready.push(l)
	}
}

// leave forgets a lane without messages.
func (c *machine[M]) leave(l *lane[M]) {
	if l.empty() && !l.queued {
		c.countHead(l, false, false)
		delete(c.lanes, l.key)
		c.ring.Drop(l.queue)
	}
}

// park lets an item wait for its next attempt.
func (c *machine[M]) park(it *item[M], at time.Duration, why Reason) {
	c.move(it, retryWait)
	it.reason, it.due = why, at
	c.parked[why]++
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
	c.stand(it.lane)
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
			c.condemn(now, it)
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
	it := c.up()
	if it == nil {
		c.endLook(now, nil)
		return step[M]{at: c.wakeAt(0)}
	}
	if !c.paused && c.unseen(it) {
		return c.examine(now, it)
	}
	if until, why := c.admit(now, it); why != ReasonNone {
		delays := why == ReasonLimiter || c.asked > now && !c.round.on // a look, and no more
		if !c.draining && !delays {
			c.endLook(now, it.lane)
		}
		return step[M]{at: c.wakeAt(until)}
	}
	c.take(now, it)
	return step[M]{kind: stepHandle, it: it}
}

// wakeAt is the soonest of until, the next due item and the next look for a credit or at the
// limit of dead letters; 0 means none.
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

// up is the item whose turn it is, nil if there is none. It stays where it is.
func (c *machine[M]) up() *item[M] {
	if c.order() == OrderNone {
		// While the breaker is open another delivery is probed first. One goes before
		// a message that waits for a witness, too: slow retries of a few would leave no
		// time for it.
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

// yields tells whether an item that is up lets a new delivery go first, with
// OrderNone.
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

// rotate brings forward what is worth a probe: while the breaker is not closed,
// an item that failed a probe and saw others succeed since may be its own
// problem, and must not keep the breaker open for all. It lets the others go
// first, once: they may turn out to be as bad, and stand before what is healthy.
func rotate[M, T any](c *machine[M], q *fifo[T], head func(T) *item[M]) {
	if !c.open() || c.round.on {
		return
	}
	for range q.len() {
		it := head(q.peek())
		if it == nil || it.probes == 0 || c.life() == it.luck || it.passed {
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

// called counts a handler call: when it begins, in the passive shape with its Done,
// since what was offered may be taken back.
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

// limiterWord is for how long a limiter that refused is not asked for a probe again,
// if it does not say less: to ask it takes a slot of the breaker, and giving that
// back wakes the sources that wait for one. Each such source would wake the others so.
// It may have changed its mind after that, and is asked when anything wakes the source.
const limiterWord = time.Second

// admit takes one admission for the item, or tells why not and until when; 0
// means that somebody else has to clear the way. What is taken is taken last,
// so that no refusal spends anything.
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
	if c.round.on { // a probe goes on with another message
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
		if c.gate.Passing() { // it carries its load already, and drains at the ramp, too
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

// hold begins a hold, if there is none: what stands in front finds it so. A drain is
// over then, and what it has left, counted when it came, drains from the ramp's start:
// the time of a hold is not the ramp's.
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

// rampOver ends a drain whose time is over, if nothing has asked the ramp since.
func (c *machine[M]) rampOver(now time.Duration) {
	if c.draining && now-c.drainFrom >= c.policy.Ramp.For {
		c.draining = false
	}
}

// still tells whether nothing moves before a message comes or a wait is over: no handler
// has a message, and none waits for the ramp. Messages that wait for a credit do not.
func (c *machine[M]) still() bool {
	if c.count[processing] > 0 {
		return false
	}
	return !c.draining || c.ready.len()+c.again.len() == 0 && (c.order() != OrderNone || c.queued == 0)
}

// divert counts messages that find the source holding.
func (c *machine[M]) divert(now time.Duration, n int) {
	if n > 0 {
		c.tally.Diverted += uint64(n)
		c.storm.Diverted(now, n)
	}
}
