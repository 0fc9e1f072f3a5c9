// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// tick is how often the sweeper looks at timeouts while anything moves.
const tick = 10 * time.Millisecond

// restTicks is after how many ticks without a change the sweeper parks.
const restTicks = 4

// sweeper is the goroutine that makes time pass for all sources of a Guard:
// handler timeouts, reports of slow calls, the storm detector, breaker windows. New
// starts it, the Guard owns it, Close ends it. It is parked while all sources are idle.
type sweeper struct {
	parked atomic.Bool
	wake   chan struct{}
}

// kick wakes the sweeper if it is parked.
func (w *sweeper) kick() {
	if w.parked.Load() {
		token(w.wake)
	}
}

// stir wakes the sweeper, parked or not, for a sweep at once.
func (w *sweeper) stir() { token(w.wake) }

func (g *Guard) sweep(ctx context.Context) {
	w := &g.sweeper
	timer := time.NewTimer(tick)
	defer timer.Stop()
	quiet := 0
	for {
		select {
		case <-timer.C:
		case <-w.wake: // by stir
		case <-ctx.Done():
			return
		}
		if g.sweepAll() {
			quiet = 0
		} else if quiet++; quiet >= restTicks {
			// A source stores its word before it loads parked. So either the source
			// sees the flag and kicks, or this sweep sees the word.
			w.parked.Store(true)
			if !g.sweepAll() && !g.rest(ctx) {
				return
			}
			w.parked.Store(false)
			quiet = 0
		}
		timer.Reset(tick)
	}
}

// rest parks the sweeper until it is woken; false if ctx ended. With a fleet, time passes
// for the fleet every fleetRest.
func (g *Guard) rest(ctx context.Context) bool {
	var look <-chan time.Time
	if g.fleet != nil {
		t := time.NewTicker(fleetRest)
		defer t.Stop()
		look = t.C
	}
	for {
		woken := false
		select {
		case <-g.sweeper.wake:
			woken = true
		case <-look:
		case <-ctx.Done():
			return false
		}
		if g.fleet != nil { // the fleet must not wait for the next tick
			now := g.now()
			woken = g.stepFleet(now) || woken
			woken = g.noteChanges(now) || woken
		}
		if woken {
			return true
		}
	}
}

// sweepAll sweeps all sources and steps the fleet. It tells whether any of them is moving.
func (g *Guard) sweepAll() (moving bool) {
	now := g.now()
	for _, s := range g.all() {
		if s.sweep(now) {
			moving = true
		}
	}
	if moving {
		g.saver.note()
	}
	if g.stepFleet(now) {
		moving = true
	}
	return g.noteChanges(now) || moving
}

// seen is what the sweeper last saw of a source. Only the sweeper writes it, and reads the
// fields that are not atomic.
type seen struct {
	word    uint64        // Source.word
	adopted uint64        // Source.takenOver
	since   atomic.Int64  // when word or takenOver changed; callBegan reads it, too
	mark    atomic.Uint64 // the value that since belongs to: word, plus takenOver in its number
	storm   time.Duration // when the machine is swept again
	awake   bool          // time alone may change the source: the sweeper must not park

	detected dlq.Storm // the storm detector's result at the last sweep of the machine
	counted  totals    // the counts that the fleet was told
}

// sweep makes time pass for one source. While only the closed path works, it mostly costs
// a few atomic loads.
func (s *Source[M]) sweep(now time.Duration) (moving bool) {
	w, adopted := s.word.Load(), s.takenOver.Load()
	if w != s.seen.word || adopted != s.seen.adopted {
		s.seen.word, s.seen.adopted = w, adopted
		s.seen.since.Store(int64(now))
		s.seen.mark.Store(w + adopted<<phaseBits)
		moving = true
	}
	if at := phase(w & phaseMask); at != idle {
		moving = true
		if at == processing {
			s.sweepCall(now, w>>phaseBits+adopted-1)
		}
	}
	slow := s.slow.Load()
	if !slow && now < s.seen.storm {
		return moving || s.seen.awake
	}
	s.seen.storm = now + stormEvery
	s.mu.Lock()
	resumed := s.c.paused && now >= s.c.pauseEnds
	if resumed {
		s.c.paused = false
	}
	late, changed := s.c.sweep(now, nil)
	storm := s.c.storm.Storm()
	spill := s.spillWaitsLocked(now)
	s.seen.awake = s.c.unsettled() > 0 || s.spillBusyLocked() || storm.Active || !s.c.closed() || s.c.paused && s.c.pauseEnds != never
	moving = moving || s.seen.awake
	s.unlock(now)
	s.seen.detected = storm
	for _, ctx := range late {
		ctx.end(context.DeadlineExceeded, ErrTimeout)
	}
	if resumed {
		s.resumed(now, "time")
	}
	if spill {
		s.nudge()
	}
	if changed {
		if storm.Active {
			s.metrics.stormed()
		}
		s.g.journal.storm(now, s.cfg, s.stormKey, false, storm.Active, storm.String())
		s.nudge()
	}
	return moving
}

// callBegan is when the closed path's present call began, to within a tick. It is now if
// there is no call, or the sweeper has not seen it yet. The closed path reads no clock.
func (s *Source[M]) callBegan(now time.Duration) time.Duration {
	w := s.word.Load()
	if phase(w&phaseMask) != processing {
		return now
	}
	return s.wordSince(now, w)
}

// wordSince is when the closed path's word became w, to within a tick; now if the sweeper
// has not seen that yet.
func (s *Source[M]) wordSince(now time.Duration, w uint64) time.Duration {
	if s.seen.mark.Load() != w+s.takenOver.Load()<<phaseBits {
		return now
	}
	return min(now, time.Duration(s.seen.since.Load()))
}

// sweepCall ends the context of the closed path's present call at its timeout, and reports a
// slow call to the breaker.
func (s *Source[M]) sweepCall(now time.Duration, call uint64) {
	ran := now - time.Duration(s.seen.since.Load())
	if limit := time.Duration(s.timeout.Load()); limit > 0 && ran >= limit {
		if ctx := s.chunk.Load().of(call); ctx != nil {
			ctx.end(context.DeadlineExceeded, ErrTimeout)
		}
	}
	if s.c.gate == nil || int64(ran) < s.slowAfter.Load() || s.slowAt.Load() == call+1 {
		return
	}
	s.slowAt.Store(call + 1)
	if token, ok := s.c.gate.Enter(); ok {
		s.c.gate.Slow(now, token, true)
		s.mu.Lock()
		s.c.notice(now)
		s.mu.Unlock()
	}
}
