// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stormguard-mq/stormguard/internal/circuit"
)

// callContext is the context of one handler call. It costs nothing until the
// handler calls Done or AfterFunc, or Err after the end: no timer, no channel,
// no registration with the parent. The sweeper ends it at the timeout.
//
// A callContext is a part of a callChunk. It is never used for another call, because a
// handler may keep it.
type callContext struct {
	parent    context.Context //nolint:containedctx // it is a context itself
	timeout   time.Duration   // 0 = none
	use       atomic.Uint32   // unused, touched or finished
	selfTimed bool            // a timer ends the context, from the first Done or AfterFunc; the sweeper does not
	before    int             // attempts before this one
	probe     *probeCall      // nil unless the call is a probe
	rare      atomic.Pointer[callState]
}

// callState is the part of a context that is made only when the handler uses the context.
type callState struct {
	mu       sync.Mutex
	done     chan struct{} // made by the first Done
	err      error         // set once, by end
	cause    error
	deadline time.Time // fixed by the first Deadline
	since    time.Time // the first Done, AfterFunc or Deadline of a selfTimed call; see waited
	unhook   func() bool
	timer    *time.Timer
	after    map[*afterCall]struct{}
}

type afterCall struct{ f func() }

const (
	unused   uint32 = iota
	touched         // somebody may wait for the end: finish has work to do
	finished        // the handler returned
)

var _ context.Context = (*callContext)(nil)

// state is the callState, made by the first caller.
func (c *callContext) state() *callState {
	if st := c.rare.Load(); st != nil {
		return st
	}
	c.rare.CompareAndSwap(nil, new(callState))
	return c.rare.Load()
}

// Deadline is the sooner of the parent's deadline and of the timeout, counted from the
// first call of Deadline. It is an estimate: the sweeper ends the context.
func (c *callContext) Deadline() (time.Time, bool) {
	at, ok := c.parent.Deadline()
	if c.timeout <= 0 {
		return at, ok
	}
	st := c.state()
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.deadline.IsZero() {
		now := time.Now()
		st.deadline = now.Add(c.timeout)
		c.lookedLocked(st, now)
	}
	if ok && at.Before(st.deadline) {
		return at, true
	}
	return st.deadline, true
}

// Done is closed when the context ends.
func (c *callContext) Done() <-chan struct{} {
	st := c.touch()
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.done == nil {
		st.done = make(chan struct{})
		if st.err != nil {
			close(st.done)
		} else {
			c.hookLocked(st)
		}
	}
	return st.done
}

// hookLocked makes the end of the parent end the context, and starts the timer of a
// selfTimed one.
func (c *callContext) hookLocked(st *callState) {
	if st.unhook == nil && c.parent.Done() != nil {
		st.unhook = context.AfterFunc(c.parent, func() { c.end(c.parent.Err(), context.Cause(c.parent)) })
	}
	if c.selfTimed {
		c.lookedLocked(st, time.Now())
	}
	if st.timer == nil && c.selfTimed && c.timeout > 0 {
		st.timer = time.AfterFunc(c.timeout, func() { c.end(context.DeadlineExceeded, ErrTimeout) })
	}
}

func (c *callContext) lookedLocked(st *callState, now time.Time) {
	if st.since.IsZero() {
		st.since = now
	}
}

// waited is how long ago the function first asked its context for Done, AfterFunc or
// Deadline; 0 if it never did.
func (c *callContext) waited() time.Duration {
	st := c.rare.Load()
	if st == nil {
		return 0
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.since.IsZero() {
		return 0
	}
	return time.Since(st.since)
}

// Err is nil until the context ends.
func (c *callContext) Err() error {
	if c.use.Load() == finished {
		c.end(context.Canceled, nil)
	}
	if st := c.rare.Load(); st != nil {
		st.mu.Lock()
		err := st.err
		st.mu.Unlock()
		if err != nil {
			return err
		}
	}
	return c.parent.Err()
}

// attemptKey is the key by which Attempt finds the callContext behind derived contexts.
type attemptKey struct{}

// Value is the parent's, except for attemptKey and for the gateKey of the breaker that
// the call probes.
func (c *callContext) Value(key any) any {
	switch k := key.(type) {
	case attemptKey:
		return c
	case gateKey:
		if c.probe != nil && c.probe.gate.Breaker == k.breaker && c.use.Load() != finished {
			return c.probe
		}
	}
	return c.parent.Value(key)
}

// gateKey is the key by which a function finds that its caller is a probe of its own breaker.
type gateKey struct{ breaker *circuit.Breaker }

// probeCall is the breaker that a call probes, and its token.
type probeCall struct {
	gate  *circuit.Leaf
	token circuit.Token
}

// Attempt is the number of the attempt that a handler runs with ctx: 1 for the first, 0
// if ctx does not come from a handler's context. It counts the message's calls in this
// process since the message was handed over, like the Attempts of a dead letter. Calls that
// ended with [Backoff] or because the source ended do not count. In a function of
// [Protect] it is the attempt of that call. The passive shape has [Item.Attempt] instead.
func Attempt(ctx context.Context) int {
	c, ok := ctx.Value(attemptKey{}).(*callContext)
	if !ok {
		return 0
	}
	return c.before + 1
}

// AfterFunc lets the context package derive contexts without a goroutine for each.
func (c *callContext) AfterFunc(f func()) (stop func() bool) {
	call := &afterCall{f}
	st := c.touch()
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.err != nil {
		go f()
		return func() bool { return false }
	}
	if st.after == nil {
		st.after = make(map[*afterCall]struct{})
	}
	st.after[call] = struct{}{}
	c.hookLocked(st)
	return func() bool {
		st.mu.Lock()
		defer st.mu.Unlock()
		_, waiting := st.after[call]
		delete(st.after, call)
		return waiting
	}
}

// touch makes finish end the context, or ends the context if finish has already run.
func (c *callContext) touch() *callState {
	if !c.use.CompareAndSwap(unused, touched) && c.use.Load() == finished {
		c.end(context.Canceled, nil)
	}
	return c.state()
}

// finish ends the context after its handler has returned. It costs one atomic swap, if
// the handler never waited for the end.
func (c *callContext) finish() {
	if c.use.Swap(finished) == touched {
		c.end(context.Canceled, nil)
	}
}

// end ends the context, once. The functions of AfterFunc each run in a goroutine
// of their own, as the context package promises its users. If the parent is done but
// has no error, against the rules, the context is cancelled.
func (c *callContext) end(err, cause error) {
	if err == nil {
		err = context.Canceled
	}
	st := c.state()
	st.mu.Lock()
	if st.err != nil {
		st.mu.Unlock()
		return
	}
	st.err, st.cause = err, cause
	if st.done != nil {
		close(st.done)
	}
	after, unhook, timer := st.after, st.unhook, st.timer
	st.after, st.unhook = nil, nil
	st.mu.Unlock()
	if unhook != nil {
		unhook()
	}
	if timer != nil {
		timer.Stop()
	}
	for call := range after {
		go call.f()
	}
}

// why is the cause of the end, nil before the end.
func (c *callContext) why() error {
	st := c.rare.Load()
	if st == nil {
		return nil
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.cause
}

// callChunk has the contexts of callsPerChunk calls, numbered from base, in one
// allocation. The sweeper finds the context of a call by its number.
type callChunk struct {
	base uint64
	ctx  [callsPerChunk]callContext
}

const callsPerChunk = 32

// of is the context of a call, nil if the call is not in this chunk.
func (c *callChunk) of(call uint64) *callContext {
	if c == nil || call-c.base >= callsPerChunk {
		return nil
	}
	return &c.ctx[call-c.base]
}
