// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"errors"
	"net/http"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// catchUp is how long a hold with a closed breaker may take to become smaller. One that
// does not has too slow a worker for the requests that queue up behind it: they would
// keep it for ever where their handlers at once are no trouble for the dependency.
const catchUp = 10 * time.Second

// drain is what is known of how a hold with [guard.OrderSource] ends while requests keep
// coming. It starts anew when nothing is held and when the breaker is not closed.
type drain struct {
	at    time.Time // of the last look; zero for none
	held  int64     // what was held then
	over  bool      // requests are handled live until nothing is held
	paced time.Time // a limiter refused one: not even a full hold is overtaken until then
}

// overtakes tells whether a request may go before those that are held: the breaker is
// closed, and the hold was full since, or has not become smaller within catchUp. One
// whose source waits for time, a limiter or an operator is not judged by its size.
func (in *Intake) overtakes() bool {
	free, now := in.free(), time.Now()
	in.mu.Lock()
	d, n := &in.drain, in.waiting.Load()
	switch {
	case !free:
		*d = drain{paced: d.paced}
	case d.over || n == 0:
		in.mu.Unlock()
		return true
	case d.at.IsZero() || n < d.held && now.Sub(d.at) >= catchUp:
		d.at, d.held = now, n
	case now.Sub(d.at) >= catchUp:
		in.mu.Unlock()
		return in.giveUp(now)
	default:
	}
	in.mu.Unlock()
	return false
}

// giveUp ends the queue behind a hold that has not become smaller, unless something
// else than its worker is why.
func (in *Intake) giveUp(now time.Time) bool {
	waits := false
	for _, h := range in.src.State().Holds {
		switch h.Reason {
		case guard.ReasonOperator, guard.ReasonLimiter, guard.ReasonBackpressure: // the last: a handler asked for time, or the ramp
			waits = true
		default:
		}
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	switch {
	case in.waiting.Load() <= 0:
	case waits:
		in.drain.at, in.drain.held = now, in.waiting.Load()
		return false
	default:
		in.drain.over = true
	}
	return true
}

// free tells whether live requests are let through, but for a limiter.
func (in *Intake) free() bool { return len(in.live.State().Holds) == 0 && !in.holdAll }

// callDeferrable calls the handler for a request that can be deferred. It leaves the probes
// to the held ones, unless nothing is held and the latest replay got a 4xx: to the breaker
// that is no outcome, so as long as replays get no other it would never close.
func (in *Intake) callDeferrable(c *call) error {
	if in.vain.Load() && in.waiting.Load() == 0 {
		return in.live.Call(c, c)
	}
	return in.callClosed(c)
}

// callClosed calls the handler for a request that can be deferred: it is no probe.
func (in *Intake) callClosed(c *call) error {
	err := in.live.CallClosed(c, c)
	if held, ok := errors.AsType[*guard.HeldError](err); ok && !c.started && held.Reason == guard.ReasonLimiter {
		// What is held waits for the limiter too: more calls at once would only take
		// its turns.
		in.mu.Lock()
		in.drain = drain{paced: time.Now().Add(catchUp)}
		in.mu.Unlock()
	}
	return err
}

// noRoom answers a request that the hold cannot take: live, if its order is all that
// speaks against it, or as a probe if nothing is held, else by a refusal. Once the hold was
// full, others need not queue up behind it either.
func (in *Intake) noRoom(w http.ResponseWriter, c *call, lane uint64, full bool) {
	why := guard.ReasonBackpressure
	if in.order == guard.OrderSource && in.yields(full) {
		err := in.callClosed(c)
		if c.answered(err) {
			return
		}
		if errors.Is(err, guard.ErrClosed) {
			why = guard.ReasonShutdown
		}
	} else if in.probes(c, lane) {
		return
	}
	in.refuse(w, c.req, why, nil)
}

// probes handles a request that cannot be held, if it is the breaker's turn to probe and no
// held one of its key waits. Where nothing is held, or what is held is not replayed, no
// other would, and the breaker would never close.
func (in *Intake) probes(c *call, lane uint64) bool {
	if in.holdAll || in.waiting.Load() > 0 && in.free() || in.order == guard.OrderKey && in.behind(lane) {
		return false
	}
	return c.answered(in.admit(c))
}

// yields tells whether a request that cannot be held may be handled.
func (in *Intake) yields(full bool) bool {
	if !in.free() {
		return false
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if time.Now().Before(in.drain.paced) {
		return false
	}
	in.drain.over = in.drain.over || full && in.waiting.Load() > 0
	return true
}
