// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"
)

// lastCall is how long End goes on waiting after its context is over, for handlers that heed
// their own context.
const lastCall = 250 * time.Millisecond

// revokedFor is how long after a revoke handlers are cancelled. Most calls end by themselves in that
// time, and are not made again by the next owner.
const revokedFor = time.Second

// endSays is how long End waits before it logs what it waits for.
const endSays = 2 * time.Second

// End ends the source and this epoch. It stops intake, waits for handlers that run and for dead
// letters that are being written, gives all other messages back through [Port.Return], and
// flushes. No port call comes after End has returned. With [ReasonRebalance] it cancels handlers
// that still run after a second, or after half of ctx's time: the messages' next owner waits for
// them. With [ReasonLost] it cancels them at once.
//
// If ctx ends first, End cancels the handlers. 250 ms later it goes on without the calls that have
// not returned, and reports their messages: a handler that ignores its context cannot be killed.
// Such a message stays unsettled, so the broker delivers it again.
//
// Later calls wait for the first call and return its report. The context that ends first counts.
func (s *Source[M]) End(ctx context.Context, why Reason) Report {
	s.mu.Lock()
	if e := s.ending; e != nil {
		s.mu.Unlock()
		stop := context.AfterFunc(ctx, s.overdue)
		<-e.done
		stop()
		return e.report
	}
	e := &ending{reason: why, done: make(chan struct{}), over: make(chan struct{})}
	s.ending = e
	s.c.ended = true
	cancel := s.cancel
	s.revoked.Store(why == ReasonRebalance || why == ReasonLost)
	close(s.ended)
	s.unlock(s.g.now())
	switch why { //nolint:exhaustive // other ends cancel no handler
	case ReasonLost:
		cancel(errRevoked)
	case ReasonRebalance:
		wait := revokedFor
		if at, ok := ctx.Deadline(); ok {
			wait = min(wait, time.Until(at)/2)
		}
		long := time.AfterFunc(wait, func() { cancel(errRevoked) })
		defer long.Stop()
	}
	s.nudge()
	if s.writer != nil {
		s.writer.sourceEnds()
	}

	stop := context.AfterFunc(ctx, s.overdue)
	defer stop()
	said := make(chan struct{})
	says := time.AfterFunc(endSays, func() {
		defer close(said)
		s.sayEnds(ctx, why)
	})
	s.awaitLoops()
	if !says.Stop() {
		<-said
	}
	e.within(s.stopPump)
	e.within(s.settleLate)
	e.within(s.endSpill)
	rest := s.fence(e)
	s.closeSpill()
	var err error
	if e.within(func() {
		if len(rest) > 0 {
			err = s.port.Return(rest, why)
		}
		select {
		case <-e.done: // End has not waited for Return
		default:
			err = errors.Join(err, s.port.Flush())
		}
	}) {
		e.report.Err = errors.Join(e.report.Err, err)
	} else {
		e.report.Err = s.hangs()
	}
	s.mu.Lock()
	s.g.keep(s.cfg.Name, s.keepLocked(s.g.now()))
	s.c.suspects, s.left = nil, true // the suspects are the next epoch's now
	s.mu.Unlock()
	s.g.unregister(s.cfg.Name, s)
	s.flowed()
	s.release()
	close(e.done)
	args := []any{"source", s.cfg.Name, "reason", why.String(), "returned", e.report.Returned}
	if e.report.Spilled > 0 {
		args = append(args, "spilled", e.report.Spilled)
	}
	if e.report.Clean() {
		s.g.log.Debug(lineEnded, args...)
	} else {
		args = append(args, "left", len(e.report.Left))
		if len(e.report.Left) > 0 {
			args = append(args, "why", e.report.Left[0].Why)
		}
		if e.report.Err != nil {
			args = append(args, "error", e.report.Err)
		}
		s.g.journal.say(s.g.now(), line{slog.LevelWarn, lineLeft, s.topic(), false, args})
	}
	return e.report
}

// sayEnds logs what End waits for, and for how long at most.
func (s *Source[M]) sayEnds(ctx context.Context, why Reason) {
	now := s.g.now()
	s.mu.Lock()
	a, letters := s.accountLocked(now), len(s.c.writing)
	s.mu.Unlock()
	if a.Processing+a.Settling == 0 {
		return // End waits for no message
	}
	args := []any{"source", s.cfg.Name, "reason", why.String(), "handlers", a.Processing, "dead_letters", letters}
	if at, ok := ctx.Deadline(); ok {
		args = append(args, "at_most", max(0, time.Until(at)).Round(time.Millisecond))
	}
	s.g.journal.say(now, line{slog.LevelWarn, lineEnds, s.topic(), false, args})
}

// within runs f and tells whether f returned before End stopped waiting. Otherwise f goes on by
// itself.
func (e *ending) within(f func()) bool {
	done := make(chan struct{})
	go func() {
		f()
		close(done)
	}()
	select {
	case <-done:
		return true
	case <-e.over: // maybe closed long ago, because of another call
	}
	late := time.NewTimer(lastCall)
	defer late.Stop()
	select {
	case <-done:
		return true
	case <-late.C:
		return false
	}
}

// settleLate acks dead letters that were confirmed after the loop had ended. It has its own count
// of acks, because a loop that End no longer waits for may still use s.acks.
func (s *Source[M]) settleLate() {
	for acks := 0; ; {
		s.mu.Lock()
		if s.c.acks.len() == 0 {
			s.mu.Unlock()
			return
		}
		it := s.c.acks.pop()
		s.mu.Unlock()
		if s.settleOne(it, &acks) {
			acks = 0
			s.sendAcks()
		}
	}
}

// overdue runs when End's context is over: it cancels the handlers, which then have lastCall to
// return.
func (s *Source[M]) overdue() {
	s.mu.Lock()
	cancel := s.cancel
	s.giveUp = true
	s.mu.Unlock()
	cancel(ErrClosed)
	time.AfterFunc(lastCall, s.abandonHung)
	s.nudge()
}

// abandonHung makes End go on without the calls that have not returned.
func (s *Source[M]) abandonHung() {
	s.mu.Lock()
	if !s.hung {
		s.hung = true
		close(s.ending.over)
	}
	s.mu.Unlock()
	s.cond.Broadcast()
}

// awaitLoops waits until the loop, the workers and all port calls have ended, or abandonHung runs.
func (s *Source[M]) awaitLoops() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for (s.loops > 0 || s.calls > 0 || s.pendingLocked()) && !s.hung {
		s.cond.Wait()
	}
}

// pendingLocked tells whether a handler call, a dead letter or an ack still has to finish in a
// source without a loop: a passive one, or one whose Run has returned.
func (s *Source[M]) pendingLocked() bool {
	if s.giveUp {
		return false
	}
	return s.c.count[processing] > 0 || s.c.count[settling] > s.c.acks.len()+len(s.c.undone)
}

// fence stops all port calls but End's own, and takes out the messages that are left.
func (s *Source[M]) fence(e *ending) []M {
	s.fenced.Store(true)
	// A caller announces its port call before it looks at the fence. So a call that began before
	// the fence is seen here.
	for pause := time.Microsecond; s.calling(); pause *= 2 {
		if pause >= time.Second {
			e.report.Err = s.hangs()
			break
		}
		time.Sleep(pause)
	}
	now := s.g.now()
	s.mu.Lock()
	defer s.unlock(now) // tells other sources of the scope if a probe is free
	defer s.nudge()
	rest, kept := s.c.drain(now)
	more, left := s.leaveSpillLocked()
	rest = append(rest, more...)
	w := s.word.Load()
	if n := s.batchLeftLocked(w >> phaseBits); n > 0 {
		rest = append(rest, s.batch[len(s.batch)-n:]...)
		s.giveBackLocked(n)
	}
	s.batch, s.diverted, s.batchAt = nil, 0, w>>phaseBits+s.takenOver.Load()
	if s.feed != nil {
		s.feed.Close()
		more, _ := s.feed.swap(nil)
		rest = append(rest, more...)
		s.giveBackLocked(len(more))
	}
	for _, it := range s.c.busy {
		// Its outcome will not count, so the scope's next epoch need not wait until its lease ends.
		s.c.exclude(now, it)
		e.report.Left = append(e.report.Left, Left{"processing", now - it.at, "its handler has not returned"})
	}
	for _, it := range s.c.going {
		what := "it is not acked"
		if _, writing := s.c.writing[it]; writing {
			what = "its dead letter is not confirmed"
		}
		e.report.Left = append(e.report.Left, Left{"settling", now - it.at, what})
	}
	switch phase(w & phaseMask) {
	case processing:
		e.report.Left = append(e.report.Left, Left{"processing", now - s.callBegan(now), "its handler has not returned"})
	case settling:
		e.report.Left = append(e.report.Left, Left{"settling", now - s.wordSince(now, w), "it is not acked"})
	default:
	}
	e.report.Source, e.report.Reason, e.report.Returned, e.report.Spilled = s.cfg.Name, e.reason, len(rest), kept+left
	e.report.Account = s.accountLocked(now)
	return rest
}

// calling tells whether a port call is under way.
func (s *Source[M]) calling() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls > 0 || phase(s.word.Load()&phaseMask) == settling
}

func (s *Source[M]) hangs() error {
	return fmt.Errorf("guard: source %s: a port call does not return", s.cfg.Name)
}

func (s *Source[M]) giveBackLocked(n int) {
	s.c.tally.Received += uint64(n)
	s.c.tally.Returned += uint64(n)
}
