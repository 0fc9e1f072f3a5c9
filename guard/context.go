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
// handler asks for Done, Err after the end, or AfterFunc: no timer, no channel,
// no registration with the parent. The sweeper ends it at the timeout.
//
// A callContext is cut from a chunk and never used again, since a handler may
// keep it.
type callContext struct {
	parent    context.Context //nolint:containedctx // it is a context itself
	timeout   time.Duration   // 0 = none
	use       atomic.Uint32   // unused, touched or finished
	selfTimed bool            // no sweeper sees to the timeout: a timer does, once somebody waits
	before    int             // attempts before this one
	probe     *probeCall      // nil unless the call is a probe
	rare      atomic.Pointer[callState]
}

// callState is what a context needs once somebody looks at it.
type callState struct {
	mu       sync.Mutex
	done     chan struct{} // made by the first Done
	err      error         // set once, by end
	cause    error
	deadline time.Time // fixed by the first Deadline
	since    time.Time // the first look of a selfTimed call
	unhook   func() bool
	timer    *time.Timer
	after    map[*afterCall]struct{}
}

type afterCall struct{ f func() }

const (
	unused   uint32 = iota
	touched         // somebody waits, or may: finish has work to do
	finished        // the handler returned
)

var _ context.Context = (*callContext)(nil)

// state is the rare part, made by the first who needs it.
func (c *callContext) state() *callState {
	if st := c.rare.Load(); st != nil {
		return st
	}
	c.rare.CompareAndSwap(nil, new(callState))
	return c.rare.Load()
}

// Deadline is the parent's or, if sooner, the timeout's, counted from the first
// call of Deadline: the sweeper, not this time, ends the context.
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

// hookLocked follows the parent's end, and time if nobody else does.
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

// waited is how long ago the call of a function looked at its context first; 0 if it did
// not.
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

// attemptKey is the key by which Attempt finds the callContext behind what wraps it.
type attemptKey struct{}

// Value is the parent's, but for attemptKey, and for the key of the breaker that the call
// probes.
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

// probeCall is what a call probes.
type probeCall struct {
	gate  *circuit.Leaf
	token circuit.Token
}

// Attempt is which attempt of its message the handler call of ctx is: 1 for the first, 0
// if ctx is not, and does not come from, a handler's context. It counts the calls in this
// process since the message was handed over, as the dead letter's Attempts do: calls that
// ended by [Backoff] or a revoke are left out. In a function of [Protect] it is the
// attempt of that call. The passive shape has no handler; see [Item.Attempt].
func Attempt(ctx context.Context) int {
	c, ok := ctx.Value(attemptKey{}).(*callContext)
	if !ok {
		return 0
	}
	return c.before + 1
}

// AfterFunc lets the context package derive contexts without a goroutine each.
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

// touch makes sure that finish ends the context, or ends it if finish was first.
func (c *callContext) touch() *callState {
	if !c.use.CompareAndSwap(unused, touched) && c.use.Load() == finished {
		c.end(context.Canceled, nil)
	}
	return c.state()
}

// finish ends the context once its handler has returned: one atomic swap, if
// the handler never waited on it.
func (c *callContext) finish() {
	if c.use.Swap(finished) == touched {
		c.end(context.Canceled, nil)
	}
}

// end ends the context, once. The functions of AfterFunc each run in a goroutine
// of their own, as the context package promises its users. A parent that is done
// and has no error, against the rules, is taken for cancelled.
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

// why is the cause of the end, nil while it lasts.
func (c *callContext) why() error {
	st := c.rare.Load()
	if st == nil {
		return nil
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.cause
}

// callChunk is a run of contexts made by one allocation, for calls numbered from
// base. The sweeper finds the context of a call by its number.
type callChunk struct {
	base uint64
	ctx  [callsPerChunk]callContext
}

const callsPerChunk = 32

// of is the context of a call, nil if the chunk is not its.
func (c *callChunk) of(call uint64) *callContext {
	if c == nil || call-c.base >= callsPerChunk {
		return nil
	}
	return &c.ctx[call-c.base]
}
