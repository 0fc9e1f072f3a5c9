// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"errors"
	"net/http"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// catchUp is how long a hold with a closed breaker may take to become smaller. If it does not, its
// worker is too slow for the requests that queue up behind it. They would never let it end,
// although the dependency could handle them at once.
const catchUp = 10 * time.Second

// drain watches how a hold with [guard.OrderSource] ends while requests keep coming. It starts anew
// when nothing is held, and when the breaker is not closed.
type drain struct {
	at    time.Time // when held was counted; zero for never
	held  int64     // number of held requests at the latest look
	over  bool      // requests are handled live until nothing is held
	paced time.Time // a limiter refused a request: until then requests do not pass even a full hold
}

// overtakes tells whether a request may pass the held ones. It may if the breaker is closed, and
// since then the hold was full, or has not become smaller within catchUp. The size of the hold does
// not count while its source waits for time, a limiter or an operator.
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

// giveUp lets requests pass a hold that has not become smaller, unless something other than its
// worker is the reason.
func (in *Intake) giveUp(now time.Time) bool {
	waits := false
	for _, h := range in.src.State().Holds {
		switch h.Reason {
		case guard.ReasonOperator, guard.ReasonLimiter, guard.ReasonBackpressure: // backpressure: a handler asked for time, or the ramp
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

// free tells whether live requests are let through, apart from a limiter.
func (in *Intake) free() bool { return len(in.live.State().Holds) == 0 && !in.holdAll }

// callDeferrable calls the handler for a request that can be deferred. It leaves the probes to held
// requests, unless nothing is held and the latest replay got a 4xx. For the breaker a 4xx is no
// outcome: if replays get no other answer, it would never close.
func (in *Intake) callDeferrable(c *call) error {
	if in.vain.Load() && in.waiting.Load() == 0 {
		return in.live.Call(c, c)
	}
	return in.callClosed(c)
}

// callClosed calls the handler for a request that can be deferred, never as a probe.
func (in *Intake) callClosed(c *call) error {
	err := in.live.CallClosed(c, c)
	if held, ok := errors.AsType[*guard.HeldError](err); ok && !c.started && held.Reason == guard.ReasonLimiter {
		// Held requests wait for the limiter, too: more calls at once would only take their turns.
		in.mu.Lock()
		in.drain = drain{paced: time.Now().Add(catchUp)}
		in.mu.Unlock()
	}
	return err
}

// noRoom answers a request that the hold cannot take. It handles the request live if only the order
// of the source is against that, or as a probe, see probes. Otherwise it refuses the request. Once
// the hold was full, other requests need not queue up behind it.
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

// probes handles a request that cannot be held, if it is time to probe. Under [guard.OrderKey] it
// does so only if no request of its key is held. If nothing is held, or held requests are not replayed, no other request would probe, and
// the breaker would never close.
func (in *Intake) probes(c *call, lane uint64) bool {
	if in.holdAll || in.waiting.Load() > 0 && in.free() || in.order == guard.OrderKey && in.behind(lane) {
		return false
	}
	return c.answered(in.admit(c))
}

// yields tells whether a request that cannot be held may pass the held ones.
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
