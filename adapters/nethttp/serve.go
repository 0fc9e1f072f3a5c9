// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"context"
	"errors"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// handler is one wrapped handler.
type handler struct {
	in     *Intake
	next   http.Handler
	defers func(*http.Request) bool
}

// insideKey is set in the context of a request that an intake has let through, live or replayed.
// The same intake lets such a request pass when it comes a second time.
type insideKey struct{ in *Intake }

// call is a live request: the context of its handler, what is recorded of its answer, and the
// argument of the function guard.
type call struct {
	context.Context //nolint:containedctx // the request's; call is a context itself
	outcome

	in      *Intake
	next    http.Handler
	req     *http.Request
	started bool
	took    time.Duration // duration of the handler
	gone    bool          // the request's context had ended before the handler returned
	excused *bool         // the result of Excuses; nil before its first call
}

func (c *call) Value(key any) any {
	switch k := key.(type) {
	case outcomeKey:
		return &c.outcome
	case insideKey:
		if k.in == c.in {
			return c
		}
	}
	return c.Context.Value(key)
}

// Excuses tells the function guard whether the end of the request excuses its failure. It does not
// if the client had waited for long, see Config.Patience.
func (c *call) Excuses() bool {
	if c.excused == nil { // a request must count once only
		excused := c.gone && !c.in.waitedFor(c)
		c.excused = &excused
	}
	return *c.excused
}

// ServeHTTP handles, holds or refuses a request.
func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	in := h.in
	in.Start()
	if r.Context().Value(insideKey{in}) != nil {
		h.next.ServeHTTP(w, r)
		return
	}
	c := &call{Context: r.Context(), in: in, next: h.next, req: r}
	c.rec.w = w
	if in.src != nil && h.defers(r) && !upgrades(r) {
		lane := in.lane(r)
		var err error
		if !in.behind(lane) {
			if err = in.callDeferrable(c); c.answered(err) {
				return
			}
		}
		if !errors.Is(err, guard.ErrClosed) {
			in.hold(w, c, lane)
			return
		}
		in.refuse(w, r, guard.ReasonShutdown, err)
		return
	}
	err := in.admit(c)
	if c.answered(err) {
		return
	}
	why := guard.ReasonShutdown
	if held, ok := errors.AsType[*guard.HeldError](err); ok {
		why = held.Reason
	}
	in.refuse(w, r, why, err)
}

// answered tells whether a call of the function guard reached the handler.
func (c *call) answered(err error) bool { return c.started || err == nil }

// upgrades tells whether a request begins another protocol. Offers of HTTP/2 and TLS do not count:
// some clients add them to each request, and Go's server goes on without them.
func upgrades(r *http.Request) bool {
	if r.Method == http.MethodConnect {
		return true
	}
	for _, line := range r.Header.Values("Upgrade") {
		for offer := range strings.SplitSeq(line, ",") {
			name, _, _ := strings.Cut(strings.ToLower(strings.TrimSpace(offer)), "/")
			if name != "" && name != "h2c" && name != "tls" {
				return true
			}
		}
	}
	return false
}

// admit calls the handler. The request may be a probe, unless held requests are to probe.
func (in *Intake) admit(c *call) error {
	if in.waiting.Load() == 0 {
		return in.live.Call(c, c)
	}
	replays, due := in.replays.Load(), in.due.Load()
	if due != nil && due.replays == replays && time.Since(due.since) >= probeGrace {
		err := in.live.Call(c, c)
		if err != nil {
			in.due.CompareAndSwap(due, nil)
		}
		return err
	}
	err := in.live.CallClosed(c, c)
	held, ok := errors.AsType[*guard.HeldError](err)
	switch free := ok && !c.started && held.Reason == guard.ReasonBreaker && held.Until <= 0; {
	case free && (due == nil || due.replays != replays):
		in.due.CompareAndSwap(due, &dueProbe{time.Now(), replays})
	case !free && due != nil:
		in.due.CompareAndSwap(due, nil)
	default:
	}
	return err
}

// handle is the function that the function guard calls. It runs the handler in the goroutine of its
// request.
func (in *Intake) handle(ctx context.Context, c *call) (err error) {
	c.started = true
	start, returned := time.Now(), false
	r := c.req.WithContext(ctx)
	defer func() {
		// Routers and the server look for these fields in their own request.
		c.req.Pattern = r.Pattern
		if c.req.MultipartForm == nil {
			c.req.MultipartForm = r.MultipartForm
		}
		c.took, c.gone = time.Since(start), c.Context.Err() != nil
		if returned && err == nil {
			in.normal.succeeded(c.took)
		}
	}()
	c.next.ServeHTTP(c.rec.writer(), r)
	err = in.result(c, r)
	returned = true
	return err
}

// result is the outcome of a live request.
func (in *Intake) result(c *call, r *http.Request) error {
	refused, err := c.said()
	switch {
	case refused != nil:
		return guard.Ignore(errRefused)
	case err != nil:
		return err
	case c.rec.silent() && r.Context().Err() != nil: // the handler gave up; without an answer the server would send 200
		err = r.Context().Err()
		if c.Context.Err() != nil {
			err = errGone
		}
		http.Error(c.rec.writer(), http.StatusText(http.StatusGatewayTimeout), http.StatusGatewayTimeout)
		return err
	default:
		return in.o.judge(r, c.status(), false)
	}
}

// waitedFor tells whether a request that failed after its client had left is the dependency's
// failure. If Config.Patience is set, it alone decides. An answer that had begun well may only have
// been too slow for the client's line: such a request has the longest time.
func (in *Intake) waitedFor(c *call) bool {
	switch answering := !c.rec.silent() && c.status() < http.StatusInternalServerError; {
	case in.cfg.Patience > 0:
		return c.took >= in.cfg.Patience
	case answering:
		return c.took >= longestPatience
	default:
		return in.normal.abandoned(c.took)
	}
}

// The headers that an intake sets.
const (
	// HeaderReason has the reason of a refusal: a word of [guard.Reason].
	HeaderReason = "Stormguard-Reason"

	// HeaderHold says in a 202 where the request is held, and so what the 202 promises:
	// [HoldMemory] or [HoldDisk].
	HeaderHold = "Stormguard-Hold"

	// HeaderHoldID has the ID of a held request, which is also in its dead letter and its spans.
	HeaderHoldID = "Stormguard-Hold-Id"

	// HoldMemory means that a crash of the process loses the request.
	HoldMemory = "memory"

	// HoldDisk means that the request survives a crash: see guard.Policy.Spill.
	HoldDisk = "disk"
)

// A Refusal says why a request is neither handled nor held.
type Refusal struct {
	// Reason is breaker, limiter, operator, backpressure or shutdown. Backpressure means that the
	// hold has no room for the request. Shutdown means the end of the intake. It can also mean that
	// the context of a request that was to be held has ended, by its server, a middleware or its
	// client.
	Reason guard.Reason
	// Status is the status of the default answer: 503, or 429 for a limiter.
	Status int
	// RetryAfter is the value of the Retry-After header: at least 1s, in whole seconds.
	RetryAfter time.Duration
}

// refuse answers a request that is neither handled nor held.
func (in *Intake) refuse(w http.ResponseWriter, r *http.Request, why guard.Reason, err error) {
	if why == guard.ReasonBackpressure {
		in.full.Add(1)
	} else {
		in.refused.Add(1)
	}
	held, ok := errors.AsType[*guard.HeldError](err)
	if !ok {
		held = &guard.HeldError{Source: in.cfg.Name, Reason: why}
	}
	until := in.until(why, held.Until)
	if o := outcomeOf(r.Context()); o != nil { // the outcome of an intake further out
		o.mu.Lock()
		o.refused = &guard.HeldError{Source: held.Source, Reason: why, Until: until}
		o.mu.Unlock()
	}
	ref := Refusal{Reason: why, Status: http.StatusServiceUnavailable, RetryAfter: until}
	if why == guard.ReasonLimiter {
		ref.Status = http.StatusTooManyRequests
	}
	h := w.Header()
	h.Set("Retry-After", strconv.FormatInt(int64(until/time.Second), 10))
	h.Set(HeaderReason, why.String())
	if in.o.refused != nil {
		rec := &recorder{w: w}
		if in.o.refused(rec.writer(), r, ref); !rec.silent() {
			return
		}
	}
	http.Error(w, http.StatusText(ref.Status), ref.Status) // without an answer the server would send 200
}

// until returns when a refused client should come back: at the end of the open period, or soon if
// probes are under way. If no time is known, it is Config.RetryAfter. In whole seconds, rounded up.
func (in *Intake) until(why guard.Reason, until time.Duration) time.Duration {
	if why == guard.ReasonBreaker || why == guard.ReasonBackpressure {
		st := in.live.State()
		switch {
		case st.Breaker.ProbesOut > 0: // Until is when the probes are given up
			until = time.Second
		case len(st.Holds) > 0 && st.Holds[len(st.Holds)-1].Reason == guard.ReasonBreaker:
			until = max(st.Holds[len(st.Holds)-1].Until, 1)
		default:
		}
	}
	if until <= 0 || until > 24*time.Hour {
		return in.cfg.RetryAfter
	}
	return time.Duration(math.Ceil(until.Seconds())) * time.Second
}
