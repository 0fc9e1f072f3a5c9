// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"fmt"
	"time"

	"github.com/stormguard-mq/stormguard/internal/circuit"
)

const (
	// flushEvery is how many acks may be coalesced at most.
	flushEvery = 64
	// intakeAtOnce bounds how many messages are read between two steps of the machine.
	intakeAtOnce = 256
)

// Run guards the messages of in. It returns nil when in is closed and all messages are
// settled; with [Limits.EndsWithInput] it does not wait for unsettled messages. It returns
// ctx's error when ctx ends, and [ErrClosed] when the source is ended. ctx is the parent of
// every handler's context. A call that fails after the end of ctx is no failure. Call
// [Source.End] after Run.
//
// Handlers run on goroutines of the guard, so a handler that calls [runtime.Goexit] ends
// only a goroutine. With one worker, while the breaker is closed and nothing is held, the
// loop that receives a message also handles and acks it, without a lock or a second
// goroutine.
//
// Run or RunFeed may be called once; a second call returns [ErrClosed].
func (s *Source[M]) Run(ctx context.Context, in <-chan M) error { return s.run(ctx, in, nil) }

// RunFeed is [Source.Run] with the messages of [Source.Feed].
func (s *Source[M]) RunFeed(ctx context.Context) error { return s.run(ctx, nil, s.Feed()) }

// run starts and ends the goroutines of the loop, the workers and the keep-alive.
func (s *Source[M]) run(ctx context.Context, in <-chan M, feed *Feed[M]) error {
	if s.handler == nil {
		return fmt.Errorf("guard: source %s: Run needs a handler; the passive shape uses Offer", s.cfg.Name)
	}
	s.mu.Lock()
	if s.c.ended || s.ran {
		s.mu.Unlock()
		return ErrClosed
	}
	s.ran = true
	s.loops++
	s.ctx, s.cancel = context.WithCancelCause(context.WithValue(ctx, callsKey{}, &s.metrics))
	workers := s.c.policy.Workers
	s.divideLocked()
	s.mu.Unlock()
	s.g.sweeper.kick() // it wakes the loop for what an earlier epoch has left in the spill
	unhook := context.AfterFunc(ctx, s.stop)
	defer unhook()
	stopKeepAlive := s.keepAlive()
	defer stopKeepAlive()

	l := &loop[M]{s: s, ctx: ctx, in: in, feed: feed, timer: stoppedTimer(), workers: s.works()}
	defer l.timer.Stop()
	retired := make(chan struct{}, workers)
	if l.workers {
		for range workers {
			go s.work(retired)
		}
	}
	for !l.over {
		turn := make(chan struct{})
		go l.turn(turn) // a handler's Goexit ends this turn; the next turn goes on
		<-turn
	}
	if l.workers {
		s.mu.Lock()
		s.retire, s.c.stopped = true, true // End takes the messages that are left
		s.mu.Unlock()
		s.cond.Broadcast()
		for range workers {
			<-retired
		}
	}
	s.mu.Lock()
	s.loops--
	ended := s.c.ended
	s.mu.Unlock()
	s.cond.Broadcast()
	switch {
	case ended:
		return ErrClosed
	case l.closed:
		return nil
	default:
		return ctx.Err()
	}
}

// loop reads the input and, with one worker, handles it. It is used by one
// goroutine at a time.
type loop[M any] struct {
	s       *Source[M]
	ctx     context.Context //nolint:containedctx // Run's
	in      <-chan M        // the input; nil if the feed is the input
	feed    *Feed[M]
	spare   []M // the buffer of an earlier batch, for reuse
	timer   *time.Timer
	workers bool // workers call the handler
	closed  bool // the input is at its end
	told    bool // ctx has ended, and stop was called
	over    bool // no further turn
	calls   uint64
	hand    hand[M]
}

// hand is the message that a goroutine is handling. A Goexit leaves it behind; see turn.
type hand[M any] struct {
	busy  bool
	item  *item[M] // nil on the closed path
	m     M
	token circuit.Token
	ctx   *callContext
}

// turn runs the loop until it is over or a handler's Goexit unwinds it.
func (l *loop[M]) turn(done chan<- struct{}) {
	defer close(done)
	defer func() {
		if !l.hand.busy {
			return
		}
		it := l.hand.item
		l.hand.item, l.hand.busy = nil, false
		if it != nil {
			l.s.finish(it, l.s.exited(it.ctx))
		} else {
			l.handOver(l.hand.m, l.s.exited(l.hand.ctx))
		}
	}()
	for l.step() {
	}
	l.s.rest()
	l.s.flush()
	l.over = true
}

// step handles one message or waits for one; false ends the loop.
func (l *loop[M]) step() bool {
	s := l.s
	switch {
	case s.slow.Load() || l.closed && s.pos == len(s.batch):
		return l.slowStep()
	case l.batched():
		if s.pos < len(s.batch) {
			m := s.batch[s.pos]
			s.pos++
			l.fast(m, true)
			return true
		}
		return l.refill() || l.slowOrBlock()
	}
	select {
	case m, ok := <-l.in:
		if l.closed = !ok; ok {
			l.fast(m, false)
		}
		return true
	default:
		return l.block(0, 0, true)
	}
}

func (l *loop[M]) slowOrBlock() bool {
	if l.closed {
		return l.slowStep()
	}
	return l.block(0, 0, true)
}

// batched tells whether messages are taken in batches that other goroutines can see: from
// a feed, or with an AckWait, when the loop's messages must be extended.
func (l *loop[M]) batched() bool { return l.feed != nil || l.s.limits.AckWait > 0 }

// refill takes the next batch; false if there is nothing.
func (l *loop[M]) refill() bool {
	s := l.s
	s.rest()
	if l.feed == nil {
		return l.refillFrom(nil)
	}
	s.mu.Lock()
	batch, done := l.feed.swap(s.batch)
	s.beginBatchLocked(batch)
	s.mu.Unlock()
	l.closed = done && len(batch) == 0
	return len(batch) > 0
}

// refillFrom makes a batch of first and of the messages that the input has ready.
func (l *loop[M]) refillFrom(first []M) bool {
	s := l.s
	l.spare = append(l.spare[:0], first...)
	for most := int(s.batchMax.Load()); len(l.spare) < most && !l.closed; {
		select {
		case m, ok := <-l.in:
			if l.closed = !ok; ok {
				l.spare = append(l.spare, m)
			}
			continue
		default:
		}
		break
	}
	s.mu.Lock()
	spent := s.batch
	s.beginBatchLocked(l.spare)
	s.mu.Unlock()
	clear(spent)
	l.spare = spent
	return len(s.batch) > 0
}

func (s *Source[M]) beginBatchLocked(batch []M) {
	s.batch, s.pos, s.diverted = batch, 0, 0
	s.batchAt = s.started + s.takenOver.Load()
}

// fast is the closed path: it calls the handler and acks. A message that does not succeed
// goes to the machine.
func (l *loop[M]) fast(m M, batched bool) {
	s := l.s
	token, ok := s.c.enter()
	if !ok {
		s.put(m, batched)
		return
	}
	s.started++
	s.word.Store(s.started<<phaseBits | uint64(processing))
	if !s.kicked {
		s.kicked = true
		s.g.sweeper.kick()
	}
	ctx := s.chunk.Load().of(l.calls)
	if ctx == nil {
		s.chunk.Store(&callChunk{base: l.calls})
		ctx = s.chunk.Load().of(l.calls)
	}
	l.calls++
	ctx.parent, ctx.timeout = s.ctx, time.Duration(s.timeout.Load())
	l.hand.m, l.hand.token, l.hand.ctx, l.hand.busy = m, token, ctx, true
	var stack []byte
	var err error
	if s.metrics.sampled(s.started) || s.metrics.tracer != nil {
		stack, err = s.observe(ctx, m, s.started)
	} else {
		stack, err = s.call(ctx, m)
	}
	if err != nil {
		r := s.outcome(ctx, err, stack)
		l.hand.busy = false
		l.handOver(m, r)
		return
	}
	l.hand.busy = false
	ctx.finish()
	s.word.Store(s.started<<phaseBits | uint64(settling))
	if s.fenced.Load() {
		s.forget(nil)
		return
	}
	if err := s.port.Ack(m); err != nil {
		s.forget(err)
	}
	if s.acks++; s.acks >= flushEvery {
		s.flush()
	}
}

// rest says that the loop has no message in hand. The sweeper may park from then on.
func (s *Source[M]) rest() {
	s.kicked = false
	s.word.Store(s.started<<phaseBits | uint64(idle))
}

// unstartLocked takes the message in hand back out of the closed path.
func (s *Source[M]) unstartLocked() {
	s.started--
	s.takenOver.Add(1)
	s.rest()
	s.c.tally.Received++
}

// forget counts a message of the closed path that was not acked as returned.
func (s *Source[M]) forget(err error) {
	s.mu.Lock()
	s.unstartLocked()
	s.c.tally.Returned++
	if err != nil {
		s.c.tally.AckFailures++
	} else {
		s.c.tally.Stale++
	}
	s.mu.Unlock()
}

// handOver hands a failed message of the closed path to the machine.
func (l *loop[M]) handOver(m M, r result) {
	s := l.s
	var key uint64
	var size int
	if s.begin() {
		if r.outcome == failure {
			s.describe(m, &r)
		}
		key, size = s.weigh(m)
		s.end()
	}
	now := s.g.now()
	s.mu.Lock()
	began := s.callBegan(now)
	slow := s.slowAt.Load() == l.calls
	s.unstartLocked()
	if s.fenced.Load() {
		s.c.tally.Returned++
		s.c.tally.Stale++
		s.mu.Unlock()
		return
	}
	it := s.c.takeOver(began, m, key, size)
	it.token, it.slow, it.ctx = l.hand.token, slow, l.hand.ctx
	st := s.doneUnlock(now, it, r)
	s.g.sweeper.kick()
	if st.kind == stepAck {
		s.settle(it)
	}
}

// put hands a message to the machine, and returns the room for more.
func (s *Source[M]) put(m M, batched bool) (room int) {
	s.rest()
	var key uint64
	var size int
	announced := s.begin()
	if announced {
		key, size = s.weigh(m)
	}
	now := s.g.now()
	s.mu.Lock()
	if announced {
		s.endLocked()
	}
	if s.fenced.Load() {
		s.strayLocked(batched)
		s.mu.Unlock()
		return 0
	}
	s.c.put(now, m, key, size, nil)
	if batched {
		s.diverted++
	}
	if room = s.c.room(); s.c.ended {
		room = 0
	}
	s.unlock(now)
	s.g.sweeper.kick()
	s.cond.Signal()
	return room
}

// strayLocked counts a message that the loop took when End did not wait for the loop any more.
func (s *Source[M]) strayLocked(batched bool) {
	if !batched { // End has given back the rest of a batch
		s.c.tally.Received++
		s.c.tally.Returned++
		s.c.tally.Stale++
	}
}

// slowStep is a step with the machine: it reads messages while there is room, and handles,
// acks or waits as the machine says.
func (l *loop[M]) slowStep() bool {
	s := l.s
	s.rest()
	room, more := l.intake()
	now := s.g.now()
	s.mu.Lock()
	if l.finishedLocked() {
		s.unlock(now)
		return false
	}
	if l.workers {
		at := s.lookAt
		if at > 0 && at <= now {
			at, s.lookAt = 0, 0
			s.cond.Broadcast()
		}
		s.unlock(now)
		return more || l.block(at, now, room > 0)
	}
	st := s.next(now)
	s.prepareLocked(st)
	s.unlock(now)
	switch st.kind {
	case stepHandle:
		s.handle(&l.hand, st.it)
		return true
	case stepAck:
		s.settle(st.it)
		return true
	default:
		return more || l.block(st.at, now, room > 0)
	}
}

// finishedLocked tells whether the loop has no more work.
func (l *loop[M]) finishedLocked() bool {
	s := l.s
	switch {
	case s.fenced.Load():
		return true
	case s.c.ended:
		return s.c.count[processing] == 0 && s.c.acks.len() == 0 && (len(s.c.writing) == 0 || s.giveUp)
	case l.ctx.Err() != nil:
		return true
	default:
		return l.closed && (s.limits.EndsWithInput || s.c.unsettled()+s.c.behind == 0 && s.pos == len(s.batch))
	}
}

// intake reads the ready messages while there is room, and returns the room left. more
// says that there may be more to read: then the loop must look again, as nothing wakes it.
func (l *loop[M]) intake() (room int, more bool) {
	s := l.s
	if s.over != nil {
		more = l.spillTurn(s.g.now())
	}
	s.mu.Lock()
	room, ended, diverts := s.inputRoomLocked(), s.c.ended, s.over != nil && s.over.diverts
	s.mu.Unlock()
	switch {
	case ended:
		return 0, false
	case diverts:
		return room, more
	}
	for range intakeAtOnce {
		if room <= 0 {
			return room, more
		}
		m, batched, ok := l.poll()
		if !ok {
			return room, more
		}
		room = s.put(m, batched)
	}
	return room, more || room > 0
}

// poll reads a message if one is ready.
func (l *loop[M]) poll() (m M, batched, ok bool) {
	s := l.s
	if l.closed && s.pos == len(s.batch) {
		return m, false, false
	}
	if l.batched() {
		if s.pos >= len(s.batch) && !l.refill() { // above len only if End has not waited: a defence
			return m, false, false
		}
		s.pos++
		return s.batch[s.pos-1], true, true
	}
	select {
	case m, ok = <-l.in:
		l.closed = !ok
		return m, false, ok
	default:
		return m, false, false
	}
}

// block waits for input (if there is room), a nudge, the instant at (0: none) or the end
// of ctx. read says that the loop had room, and has read all ready messages.
func (l *loop[M]) block(at, now time.Duration, read bool) bool {
	s := l.s
	s.flush()
	s.rest()
	room := s.tellDemand()
	rest := s.over != nil && s.over.keep == nil && s.pos < len(s.batch)
	if room && (!read || rest) {
		return true // there is room again, and nothing else wakes the loop; a batch goes before new input
	}
	var tick <-chan time.Time
	if at > 0 {
		if at <= now {
			return true
		}
		l.timer.Reset(at - now)
		tick = l.timer.C
	}
	done := l.ctx.Done()
	if l.told { // the loop waits for a worker or a writer, which wakes it
		done = nil
	}
	var in <-chan M
	var ready <-chan struct{}
	if room && !l.closed {
		in = l.in
		if l.feed != nil {
			ready = l.feed.ready
		}
	}
	select {
	case m, ok := <-in:
		l.closed = !ok
		switch {
		case !ok:
		case s.slow.Load():
			s.take(m)
		case l.batched():
			l.refillFrom([]M{m})
		default:
			l.fast(m, false)
		}
	case <-ready:
	case <-s.wake:
	case <-tick:
	case <-done:
		l.told = true
		s.stop()
	}
	if tick != nil {
		l.timer.Stop()
	}
	return true
}

// stop makes the loop end, as Run's context has ended.
func (s *Source[M]) stop() {
	s.mu.Lock()
	s.c.stopped = true
	s.unlock(s.g.now())
	s.nudge()
}

func stoppedTimer() *time.Timer {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return t
}
