// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"
)

// call runs the handler. A panic becomes an error with a stack. A Goexit goes on unwinding: the
// owner of the goroutine handles it.
func (s *Source[M]) call(ctx context.Context, m M) (stack []byte, err error) {
	returned := false
	defer func() {
		if returned {
			return
		}
		if v := recover(); v != nil {
			stack = debug.Stack()
			err = &PanicError{Value: v, Stack: stack}
		}
	}()
	err = s.handler(ctx, m)
	returned = true
	return nil, err
}

// explain adds to the error what the guard did to the call's context: timeout or cancel.
func (s *Source[M]) explain(ctx *callContext, err error) error {
	if err == nil {
		return nil
	}
	err = sound(err)
	if ctx != nil && ctx.why() == ErrTimeout { //nolint:errorlint // the sentinel itself
		return fmt.Errorf("%w: %w", ErrTimeout, err)
	}
	if s.ctx.Err() != nil {
		return mark(err, cancelled, time.Time{})
	}
	return err
}

// outcome turns the error of a call into a result. The methods of the error are user code, and
// may call Goexit: so the caller must still count as busy.
func (s *Source[M]) outcome(ctx *callContext, err error, stack []byte) result {
	if ctx != nil {
		ctx.finish()
	}
	r := s.g.resultOf(s.explain(ctx, err), stack)
	if r.outcome == failure {
		s.failed.Store(failedAt(s.g.now(), r))
		r.rule = s.g.rules.Load().ofCause(r.class, r.err, r.stack)
	}
	if r.outcome == backoff {
		// In a suspend the wall clock goes on while the guard's clock stands still. The handler
		// has read the wall clock a moment ago, so only the difference from now counts.
		r.until = s.g.origin.Add(soon(s.g.now(), time.Until(r.until)))
	}
	return r
}

// exited is the outcome of a call that ended by Goexit. Deferred functions call it.
func (s *Source[M]) exited(ctx *callContext) result {
	err := &GoexitError{Stack: debug.Stack()}
	return s.outcome(ctx, err, err.Stack)
}

// meta asks the port for a message's Meta, outside any lock. A panic or a Goexit becomes an
// error; the first one of the source is logged.
func (s *Source[M]) meta(m M) (meta Meta, err error) {
	err = apart(metaCall, func() error {
		meta = s.port.Meta(m)
		return nil
	})
	if err != nil && s.metaLost.CompareAndSwap(false, true) {
		s.g.log.Warn("a port does not describe a message: its dead letter waits, and traces and MaxDeliver go without it",
			"source", s.cfg.Name, "error", err)
	}
	return meta, err
}

// weigh asks the port for size and lane, outside any lock. Size comes first, because it
// announces the message to the port.
func (s *Source[M]) weigh(m M) (key uint64, size int) {
	if s.fenced.Load() { // End no longer waits for Meta
		return 0, 0
	}
	size = s.port.Size(m)
	if s.c.policy.Order == OrderKey && !s.fenced.Load() {
		key = s.laneOf(m)
	}
	return key, size
}

// laneOf is the message's lane. A user's function may choose the key. If the function panics, the
// message is in lane 0: otherwise the message would end one process after the other. The first
// such panic of the source is logged.
func (s *Source[M]) laneOf(m M) (key uint64) {
	defer func() {
		if v := recover(); v != nil {
			key = 0
			if s.laneLost.CompareAndSwap(false, true) {
				s.g.log.Warn("the key of a message cannot be found: it and others like it keep their order among each other only",
					"source", s.cfg.Name, "panic", fmt.Sprint(v), "help", "mend the function that chooses the key")
			}
		}
	}()
	return s.port.Lane(m)
}

// flush sends coalesced acks, unless there are none.
func (s *Source[M]) flush() {
	shared := s.shared()
	if shared {
		s.mu.Lock()
	}
	due := s.acks > 0
	s.acks = 0
	if shared {
		s.mu.Unlock()
	}
	switch {
	case !due:
	case !shared && phase(s.word.Load()&phaseMask) == settling: // the word announces the flush
		if !s.fenced.Load() {
			s.countFlush(s.port.Flush())
		}
	default:
		s.sendAcks()
	}
}

// sendAcks announces and calls [Port.Flush].
func (s *Source[M]) sendAcks() {
	if s.begin() {
		s.countFlush(s.port.Flush())
		s.end()
	}
}

func (s *Source[M]) countFlush(err error) {
	if err != nil {
		s.mu.Lock()
		s.c.tally.AckFailures++
		s.mu.Unlock()
	}
}

// tellDemand calls [Port.Demand] when intake is to stop or to start: at room 0, and again when
// the room is at least half of the machine's limit. While nothing moves, any room is enough,
// because only a new message may get things moving. After Offer has refused a message, the port is
// told even if that changes nothing. room tells whether there is room now: if not, the goroutine
// that makes some wakes the loop when the port is to be told.
func (s *Source[M]) tellDemand() (room bool) {
	s.mu.Lock()
	n := s.inputRoomLocked()
	tell := s.demandDueLocked()
	if tell {
		s.demanded = n
	}
	told := s.demanded
	tell = (tell || s.refused) && !s.fenced.Load()
	s.refused = false
	if tell {
		s.calls++
	}
	room = n > 0 && !s.c.ended
	s.mu.Unlock()
	if tell {
		s.port.Demand(told)
		s.end()
	}
	return room
}

func (s *Source[M]) demandDueLocked() bool {
	room := s.inputRoomLocked()
	if s.demanded == 0 {
		return room > 0 && (s.c.still() || 2*room >= s.c.limit())
	}
	return s.demanded < 0 || room == 0
}

// prepareLocked gives an item its context before the handler is called.
func (s *Source[M]) prepareLocked(st step[M]) {
	if st.kind == stepHandle && s.handler != nil {
		st.it.ctx = &callContext{parent: s.ctx, timeout: s.c.policy.Timeout, before: st.it.tries}
		if st.it.probe {
			st.it.ctx.probe = &probeCall{s.c.gate, st.it.token}
		}
	}
}

// handle calls the handler for an item of the machine, and takes the outcome to the machine.
func (s *Source[M]) handle(h *hand[M], it *item[M]) {
	s.g.sweeper.kick()
	h.item, h.busy = it, true
	var stack []byte
	var err error
	if s.metrics.sampled(it.id) || s.metrics.tracer != nil {
		stack, err = s.observe(it.ctx, it.m, it.id)
	} else {
		stack, err = s.call(it.ctx, it.m)
	}
	r := s.outcome(it.ctx, err, stack)
	h.item, h.busy = nil, false
	s.finish(it, r)
}

// doneUnlock takes a call's outcome to the machine, ends the critical section, and adds to the
// metrics what the machine counted.
func (s *Source[M]) doneUnlock(now time.Duration, it *item[M], r result) step[M] {
	ctx := it.context() // the next attempt has another context
	failures, overtaken := s.c.tally.Failures, s.c.tally.Overtaken
	st := s.c.done(now, it, r)
	failed, overtook := s.c.tally.Failures != failures, s.c.tally.Overtaken != overtaken
	s.unlock(now)
	if failed {
		s.metrics.failed(ctx, r.kind())
	}
	if overtook {
		s.metrics.overtook()
	}
	return st
}

// finish takes an item's outcome to the machine and settles it if it is done.
func (s *Source[M]) finish(it *item[M], r result) {
	if r.outcome == failure && it.name == "" && s.begin() {
		s.describe(it.m, &r)
		s.end()
	}
	now := s.g.now()
	s.mu.Lock()
	if s.fenced.Load() {
		s.c.abandon(it)
		s.mu.Unlock()
		return
	}
	st := s.doneUnlock(now, it, r)
	if st.kind == stepAck {
		s.settle(it)
	}
}

// settle acks an item of the machine.
func (s *Source[M]) settle(it *item[M]) {
	if s.settleOne(it, &s.acks) {
		s.flush()
	}
}

// settleOne acks an item and counts the ack in acks. It tells whether a flush is due.
func (s *Source[M]) settleOne(it *item[M], acks *int) (due bool) {
	if !s.begin() {
		s.mu.Lock()
		s.c.abandon(it)
		s.mu.Unlock()
		return false
	}
	var err error
	if s.ackHere(it) {
		err = s.port.Ack(it.m)
	}
	if errors.Is(err, ErrTakenBack) {
		err = ErrTakenBack
	}
	turn, ahead := s.lookAhead()
	ctx, now := it.context(), s.g.now()
	s.mu.Lock()
	s.c.settled(now, it, err)
	s.c.lookedAhead(turn, ahead)
	*acks++
	due = *acks >= flushEvery
	s.endLocked()
	s.unlock(now)
	if err == nil && len(it.failures) > 0 && !it.dead && !it.ignored {
		s.metrics.recovered(ctx, now-it.firstFailed)
	}
	return due
}

// lookAhead asks [Marker.Ahead], if the port is a Marker.
func (s *Source[M]) lookAhead() (turn uint64, ahead int) {
	if s.marker == nil || s.fenced.Load() { // fenced: End no longer waits for the ack
		return 0, 0
	}
	turn = s.looks.Add(1)
	return turn, s.marker.Ahead()
}

// begin announces a port call, so that End waits for the call. It returns false if the source is
// fenced; otherwise the caller calls end after the port call. The closed path announces its acks,
// and the flushes after them, by word instead.
func (s *Source[M]) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fenced.Load() {
		return false
	}
	s.calls++
	return true
}

func (s *Source[M]) end() {
	s.mu.Lock()
	s.endLocked()
	s.mu.Unlock()
}

func (s *Source[M]) endLocked() {
	if s.calls--; s.calls == 0 && s.ending != nil {
		s.cond.Broadcast()
	}
}
