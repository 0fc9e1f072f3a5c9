// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/circuit"
)

// Func guards a plain function that many goroutines call. It has a limiter and a breaker,
// retries on the caller's goroutine, a timeout and panic recovery. Without a broker there
// is no hold, no order and no dead letter: the caller gets an error and keeps its message.
// A refused caller gets a [*HeldError]. All methods are safe for concurrent use.
type Func[M any] struct {
	g       *Guard
	cfg     SourceConfig
	policy  Policy
	f       func(context.Context, M) error
	gate    *circuit.Leaf
	detach  func()
	metrics sourceMetrics

	// cells spread the counters of concurrent callers over cache lines.
	cells   [cellCount]cell
	closed  atomic.Bool  // no further call may begin
	paused  atomic.Int64 // when a pause ends by itself; 0 is no pause
	refused atomic.Int64 // when the breaker last refused a call that could have been a probe
	limit   Limiter
	seen    uint64 // the number of successes at the sweeper's last look; owned by the sweeper

	lastFailed atomic.Pointer[failedCall]

	mu        sync.Mutex
	ended     bool          // End was called
	overdue   bool          // over is closed
	over      chan struct{} // closed when End stops waiting
	done      chan struct{} // closed when End has finished
	ending    Report
	deliverID atomic.Uint64
}

const cellCount = 16 // a power of 2

// cell is a part of the counters, mostly used by one goroutine at a time. A call writes
// started before its other counters, and Account reads started after them.
type cell struct {
	acked    atomic.Uint64 // successes
	inner    atomic.Uint64 // successes of calls inside a probe; the probe's own success is the proof
	ignored  atomic.Uint64
	returned atomic.Uint64
	waiting  atomic.Int64 // calls that wait for a retry or for the limiter
	failures atomic.Uint64
	retries  atomic.Uint64
	probes   atomic.Uint64
	diverted atomic.Uint64
	started  atomic.Uint64
	_        [64]byte
}

// Protect guards a function. cfg.DeadLetters is not used: an error goes back to the caller.
// The Policy fields that need a broker (Order, Workers, Window, Ramp, Storm, Budget) are
// checked, but have no effect. Breaker.Slow has none, either: the guard sees a call when it
// returns. The breaker has no part in wider scopes: it does not open them, and they do not
// hold it, because the source that calls the function counts already. As in [Open], a
// Policy.Breaker that differs from the Guard's is refused. All callers call cfg.Limiter
// concurrently, under no lock.
func Protect[M any](g *Guard, cfg SourceConfig, f func(context.Context, M) error) (*Func[M], error) {
	var p problems
	policy := g.policy(cfg, &p)
	if cfg.Name == "" {
		p.addf("SourceConfig.Name: must not be empty")
	}
	if f == nil {
		p.addf("Protect: the function must not be nil")
	}
	if err := errors.Join(append(p, policy.Validate())...); err != nil {
		return nil, fmt.Errorf("guard: protect %q: %w", cfg.Name, err)
	}
	fn := &Func[M]{
		g: g, cfg: cfg, policy: policy.withDefaults(Limits{}), f: f, limit: cfg.Limiter,
		over: make(chan struct{}), done: make(chan struct{}),
	}
	fn.policy.Breaker = fn.policy.slow()
	fn.deliverID.Store(g.epochs.Add(1) << idBits)
	if !policy.NoBreaker {
		leaf, err := g.leaf(cfg, fn.policy.Breaker.Slow, (*circuit.Scopes).Aside)
		if err != nil {
			return nil, fmt.Errorf("guard: protect %q: %w", cfg.Name, err)
		}
		fn.gate, fn.detach = leaf, leaf.Attach(fn.successes)
	}
	fn.metrics = g.metrics.source(cfg)
	fn.metrics.function, fn.metrics.reasons = true, functionReasons
	fn.metrics.atRest()
	if err := g.register(cfg.Name, fn); err != nil {
		fn.release()
		return nil, err
	}
	if k := g.recall(cfg.Name); k.paused {
		fn.paused.Store(int64(k.pauseEnds))
		g.sayPaused(cfg.Name, k)
		g.sweeper.kick()
	}
	return fn, nil
}

func (f *Func[M]) release() {
	if f.gate != nil {
		f.detach()
		f.g.unclaim(f.gate)
	}
}

func (f *Func[M]) successes() (n uint64) {
	for i := range f.cells {
		n += f.cells[i].acked.Load()
	}
	return n
}

// Do calls the function for m on the caller's goroutine. After a failure it calls the
// function again after a delay, up to Policy.Retry.Attempts. Do returns:
//
//   - nil after a success, and after an [Ignore] error;
//   - [Permanent] and [Backoff] errors at once;
//   - the last error when the attempts are used up, or if the guard refuses a retry;
//   - a [*HeldError] if the guard refuses the first call;
//   - ctx's error, joined with the last error, if ctx ends during a delay;
//   - [ErrClosed] after [Func.End].
//
// A panic is a [*PanicError]. A call waits up to 100 ms for the limiter before it is
// refused.
func (f *Func[M]) Do(ctx context.Context, m M) error { return f.do(ctx, m, 0) }

// Call is [Func.Do] without retries. It is for a function that cannot be called twice, or
// whose panics somebody else reports, such as an HTTP handler: a panic counts as a failure
// and goes on to the caller, with its stack.
//
// A failure does not count if ctx has ended, because the caller gave up. It counts if ctx
// has a deadline that let the function wait for about 1 s or more. If ctx itself has a
// method Excuses() bool, that method decides instead: after false the failure counts.
func (f *Func[M]) Call(ctx context.Context, m M) error { return f.do(ctx, m, once) }

// CallClosed is [Func.Call], but never a probe. Unless the breaker is closed, it returns a
// [*HeldError] whose Until is the time until a probe may be made, 0 if now. So the probes
// are left to a source of the same scope. CallClosed does not wait for the limiter.
func (f *Func[M]) CallClosed(ctx context.Context, m M) error { return f.do(ctx, m, once|noProbe) }

// how is a set of options of a call.
type how uint8

const (
	once    how = 1 << iota // no retries; a panic goes on to the caller
	noProbe                 // refused unless the breaker is closed
	again                   // the call is a retry
	inside                  // the caller is a probe of the same breaker
)

func (f *Func[M]) do(ctx context.Context, m M, how how) error {
	c := &f.cells[rand.Uint32()&(cellCount-1)]
	if f.closed.Load() {
		return ErrClosed
	}
	c.started.Add(1)
	if f.closed.Load() { // again: End sets closed before it reads the counters
		c.returned.Add(1)
		return ErrClosed
	}
	if f.paused.Load() != 0 || f.limit != nil {
		return f.slow(ctx, c, m, how)
	}
	token, ok := f.enter()
	if !ok {
		return f.slow(ctx, c, m, how)
	}
	excused, err := f.call(ctx, m, token, how, 0)
	if err == nil {
		f.count(c)
		return nil
	}
	return f.failed(ctx, c, m, token, excused, err, how)
}

// count counts a success. The first success after a rest wakes the sweeper, so that the
// breaker counts successes in the time bucket in which they happened.
func (f *Func[M]) count(c *cell) {
	c.acked.Add(1)
	if f.gate != nil {
		f.g.sweeper.kick()
	}
}

func (f *Func[M]) enter() (circuit.Token, bool) {
	if f.gate == nil {
		return circuit.Token{}, true
	}
	return f.gate.Enter()
}

// slow makes a call that the pause, the limiter or the breaker may refuse.
func (f *Func[M]) slow(ctx context.Context, c *cell, m M, how how) error {
	if how&noProbe == 0 && f.insideProbe(ctx) {
		how |= inside
	}
	token, err := f.admit(ctx, c, how)
	if err != nil {
		c.returned.Add(1)
		return err
	}
	excused, err := f.call(ctx, m, token, how, 0)
	if err == nil && how&inside != 0 {
		c.inner.Add(1)
		return nil
	}
	if err == nil {
		f.succeeded(c, token)
		return nil
	}
	return f.failed(ctx, c, m, token, excused, err, how)
}

// admit takes a token of the breaker, and one of the limiter. It asks the limiter again
// after each wait, until patience is used up. Each wait but the last is at least as long as
// all waits before it together, so a call asks only a few times. During a wait somebody may
// pause the function, or the breaker may open: admit asks both again, too.
func (f *Func[M]) admit(ctx context.Context, c *cell, how how) (token circuit.Token, err error) {
	for waited := time.Duration(0); ; {
		now := f.g.now()
		if token, err = f.letIn(ctx, now, token, how); err != nil {
			c.diverted.Add(1)
			return token, err
		}
		if f.limit == nil {
			break
		}
		wait := f.pace(now, c, token)
		if wait <= 0 {
			break
		}
		err = &HeldError{Source: f.cfg.Name, Reason: ReasonLimiter, Until: soon(0, wait)}
		wait = max(wait, min(waited, patience-waited))
		if how&noProbe == 0 && wait <= patience-waited {
			waited += wait
			stop := f.pause(ctx, c, wait)
			if stop == nil {
				continue
			}
			if errors.Is(stop, ErrClosed) {
				err = stop
			}
		}
		f.unprobe(f.g.now(), token)
		c.diverted.Add(1)
		return token, err
	}
	if token.Probe() {
		c.probes.Add(1)
	}
	return token, nil
}

// letIn takes a token of the breaker, unless the function is paused. A call that has
// waited for the limiter keeps the probe that it had, if the breaker still has it.
func (f *Func[M]) letIn(ctx context.Context, now time.Duration, had circuit.Token, how how) (circuit.Token, error) {
	if ends := f.pausedUntil(now); ends != 0 {
		f.unprobe(now, had)
		return circuit.Token{}, &HeldError{Source: f.cfg.Name, Reason: ReasonOperator, Until: pauseHold(now, ends).Until}
	}
	if had.Probe() && f.gate.Renew(now, had) {
		return had, nil
	}
	token, ok := f.enter()
	switch {
	case ok:
		return token, nil
	case how&(inside|again) == inside && f.insideProbe(ctx):
		return circuit.Token{}, nil
	case how&noProbe != 0:
		return token, &HeldError{Source: f.cfg.Name, Reason: ReasonBreaker, Until: f.untilProbe(now)}
	}
	token, refusal := f.gate.AdmitFor(now, 0, f.policy.lease())
	if refusal.OK() {
		return token, nil
	}
	f.refused.Store(int64(now))
	until := max(0, refusal.Until-now)
	if refusal.Until == never {
		until = f.untilProbe(now)
	}
	return token, &HeldError{Source: f.cfg.Name, Reason: ReasonBreaker, Until: until}
}

// insideProbe tells whether the caller is a probe of the function's own breaker. The breaker
// may allow no other probe, so this call goes through, once. The breaker gets only the
// result of the outer probe.
func (f *Func[M]) insideProbe(ctx context.Context) bool {
	if f.gate == nil {
		return false
	}
	p, ok := ctx.Value(gateKey{f.gate.Breaker}).(*probeCall)
	return ok && f.gate.Probing(p.token)
}

// patience is how long a call waits for the limiter. A limiter that fetches tokens only
// when it is asked, as limiter/redis does, has one after a round trip, but keeps it only
// for a short time.
const patience = 100 * time.Millisecond

// pace asks the limiter. If the limiter panics or exits, that goes on to the caller, but
// first the call is counted and its probe is given back.
func (f *Func[M]) pace(now time.Duration, c *cell, token circuit.Token) time.Duration {
	returned := false
	defer func() {
		if !returned {
			f.unprobe(now, token)
			c.returned.Add(1)
		}
	}()
	wait := f.limit.Admit(now)
	returned = true
	return wait
}

// unprobe gives back the token of a probe that was not made.
func (f *Func[M]) unprobe(now time.Duration, token circuit.Token) {
	if token.Probe() {
		f.gate.Exclude(now, token)
		f.settled(token)
	}
}

// untilProbe is the time until a probe may be made, 0 if one may be made now.
func (f *Func[M]) untilProbe(now time.Duration) time.Duration {
	b := f.gate.Breaker.Snapshot(now)
	if b.State == breaker.Closed { // a wider scope is open
		return f.policy.Breaker.Base
	}
	return heldFor(b.Snapshot, f.g.fleetScope(f.gate), f.policy.Breaker.Base, now)
}

func (f *Func[M]) succeeded(c *cell, token circuit.Token) {
	f.count(c)
	if token.Probe() {
		f.gate.Success(f.g.now(), token)
		f.settled(token)
	}
}

// settled follows each report to the breaker. It wakes the sweeper, which must see a change
// of state, and after a probe the sources of the scope, because a probe is free.
func (f *Func[M]) settled(token circuit.Token) {
	f.g.sweeper.kick()
	if token.Probe() {
		f.g.wakeOthers(f)
	}
}

// failed retries until the attempts are used up or the guard refuses.
func (f *Func[M]) failed(ctx context.Context, c *cell, m M, token circuit.Token, excused bool, err error, how how) error {
	first := f.g.now()
	id := f.deliverID.Add(1)
	attempts := f.policy.Retry.Attempts
	if how&once != 0 {
		attempts = 1
	}
	for tries := 1; ; {
		now := f.g.now()
		r := f.g.resultOf(err, nil)
		word := r.outcome
		if word == failure && excused {
			word = cancelled
		}
		if word == failure {
			f.lastFailed.Store(&failedCall{now, r.words.Message, r.class})
		}
		if f.gate != nil {
			switch {
			case word != failure, r.class == ClassMessage:
				f.gate.Exclude(now, token)
			case r.class == ClassDependency:
				f.gate.Unavailable(now, token, tries == 1)
			default:
				f.gate.FailureOf(now, token, tries == 1, id)
			}
			f.settled(token)
		}
		switch word {
		case ignore:
			c.ignored.Add(1)
			return nil
		case failure, permanent:
			c.failures.Add(1)
			if f.metrics.failures.Enabled(ctx) {
				f.metrics.failed(ctx, r.kind())
			}
		default:
		}
		if word != failure || tries >= attempts {
			c.returned.Add(1)
			return err
		}
		if stop := f.pause(ctx, c, f.policy.Retry.delay(tries, f.g.dice.Int64N)); stop != nil {
			c.returned.Add(1)
			return errors.Join(stop, err)
		}
		var refused error
		if token, refused = f.admit(ctx, c, how|again); refused != nil {
			c.returned.Add(1)
			return fmt.Errorf("%w (no further try: %v)", err, refused) //nolint:errorlint // it was called: that is the outcome, and not the refusal
		}
		c.retries.Add(1)
		if excused, err = f.call(ctx, m, token, how, tries); err == nil {
			f.succeeded(c, token)
			f.metrics.recovered(ctx, f.g.now()-first)
			return nil
		}
		tries++
	}
}

// excused tells whether a failure does not count, because the caller's context has ended.
func (c *protectContext) excused() bool {
	ended := c.parent.Err()
	if ended == nil {
		return false
	}
	if e, ok := c.parent.(interface{ Excuses() bool }); ok {
		return e.Excuses()
	}
	return !errors.Is(ended, context.DeadlineExceeded) || c.waited() < fairWait
}

// fairWait is how long a function must wait before the caller's deadline is no excuse for
// its failure. Otherwise a dependency that hangs would stay unseen if all callers wait less
// than Policy.Timeout. A deadline of 1 s is clearly above fairWait.
const fairWait = 900 * time.Millisecond

// pause waits for d: the delay of a retry, or the limiter.
func (f *Func[M]) pause(ctx context.Context, c *cell, d time.Duration) error {
	c.waiting.Add(1)
	t := time.NewTimer(d)
	defer t.Stop()
	var err error
	select {
	case <-t.C:
	case <-ctx.Done():
		err = ctx.Err()
	case <-f.done:
	}
	c.waiting.Add(-1)
	if f.closed.Load() { // after waiting is decremented: End sets closed before it reads the counters
		return ErrClosed
	}
	return err
}

// call runs the function. The context ends at the timeout, counted from the first time
// that the function waits for its end: a function that never does sees no difference.
// before is the number of attempts before this one. For excused see protectContext.excused.
func (f *Func[M]) call(ctx context.Context, m M, token circuit.Token, how how, before int) (excused bool, err error) {
	cc := &protectContext{callContext{parent: ctx, timeout: f.policy.Timeout, selfTimed: true, before: before}, &f.metrics}
	if token.Probe() {
		cc.probe = &probeCall{f.gate, token}
	}
	returned := false
	defer func() {
		if returned {
			return
		}
		// A panic becomes an error. A Goexit, or a panic in Call, is counted and goes on
		// to unwind the caller's goroutine.
		cc.finish()
		if how&once == 0 {
			if v := recover(); v != nil {
				excused, err = cc.excused(), &PanicError{Value: v, Stack: debug.Stack()}
				return
			}
		}
		if f.gate != nil {
			if cc.excused() {
				f.gate.Exclude(f.g.now(), token)
			} else {
				f.gate.FailureOf(f.g.now(), token, true, f.deliverID.Add(1))
			}
			f.settled(token)
		}
		c := &f.cells[0]
		c.failures.Add(1)
		f.metrics.failed(ctx, result{panicked: true}.kind())
		c.returned.Add(1)
	}()
	err = f.f(cc, m)
	cc.finish()
	if err != nil {
		err = sound(err) // a method of err may call Goexit
	}
	returned = true
	if err == nil {
		return false, nil
	}
	if cc.why() == ErrTimeout { //nolint:errorlint // the sentinel itself
		err = fmt.Errorf("%w: %w", ErrTimeout, err)
	}
	if word, _ := classify(err); word != failure {
		return false, err
	}
	return cc.excused(), err
}

// Name is the source's name.
func (f *Func[M]) Name() string { return f.cfg.Name }

// Account sums up the counters, which are read one after the other: calls that end
// meanwhile may still show as Processing. A refused call counts as Received and Returned.
// [Tally] counts the refusals, also those of retries, as Diverted.
func (f *Func[M]) Account() Account {
	var a Account
	var ended, started uint64
	var waits int64
	for i := range f.cells {
		c := &f.cells[i]
		a.Acked += c.acked.Load() + c.inner.Load() + c.ignored.Load()
		a.Returned += c.returned.Load()
		waits += max(0, c.waiting.Load())
	}
	for i := range f.cells {
		started += f.cells[i].started.Load()
	}
	ended = a.Acked + a.Returned
	a.Received = started
	open := int(started - ended)
	a.RetryWait = int(min(waits, int64(open)))
	a.Processing = open - a.RetryWait
	return a
}

// State describes the function at one instant.
func (f *Func[M]) State() State {
	now := f.g.now()
	st := State{Source: f.cfg.Name, Now: now, Ended: f.closed.Load(), Account: f.Account(), Settings: f.policy, Storm: dlq.Storm{}}
	st.Tally.Received, st.Tally.Acked, st.Tally.Returned = st.Account.Received, st.Account.Acked, st.Account.Returned
	for i := range f.cells {
		c := &f.cells[i]
		st.Tally.Failures += c.failures.Load()
		st.Tally.Retries += c.retries.Load()
		st.Tally.Probes += c.probes.Load()
		st.Tally.Diverted += c.diverted.Load()
	}
	if ends := f.pausedUntil(now); ends != 0 {
		st.Holds = append(st.Holds, pauseHold(now, ends))
	}
	if f.gate != nil {
		st.Breaker, st.Wider, st.Fleet = f.gate.Breaker.Snapshot(now).Snapshot, f.gate.Wider(), f.g.fleetScope(f.gate)
		if st.Breaker.State != breaker.Closed || len(st.Wider) > 0 {
			st.Holds = append(st.Holds, breakerHold(&st, f.policy.Breaker.Base))
		}
	}
	return st
}

// Pause refuses calls for d, or until Resume if d is not above 0. After End the pause goes
// on in the next Func or Source of that name.
func (f *Func[M]) Pause(d time.Duration) {
	now := f.g.now()
	f.paused.Store(int64(pauseEnd(now, d)))
	f.g.journal.paused(now, f.topic(), f.cfg.Name, d)
	f.g.saver.hurry()
	f.g.sweeper.kick()
}

// Resume ends Pause.
func (f *Func[M]) Resume() {
	if f.paused.Swap(0) != 0 {
		f.resumed(f.g.now(), causeOperator)
	}
}

func (f *Func[M]) resumed(now time.Duration, reason string) {
	f.g.journal.resumed(now, f.topic(), f.cfg.Name, reason)
	f.g.saver.hurry()
}

// pausedUntil is when the pause ends by itself, 0 if there is none any more.
func (f *Func[M]) pausedUntil(now time.Duration) time.Duration {
	if ends := f.paused.Load(); int64(now) < ends {
		return time.Duration(ends)
	}
	return 0
}

// ForceOpen opens the breaker, as [Source.ForceOpen].
func (f *Func[M]) ForceOpen(d time.Duration) error {
	if f.gate == nil {
		return errNoBreaker
	}
	forceOpen(f.gate, f.g.now(), d)
	f.g.sweeper.kick()
	return nil
}

// Release ends a ForceOpen, as [Source.Release].
func (f *Func[M]) Release() error {
	if f.gate == nil {
		return errNoBreaker
	}
	f.gate.Release(f.g.now())
	f.g.sweeper.kick()
	return nil
}

// ForceClosed closes the breaker, as [Source.ForceClosed].
func (f *Func[M]) ForceClosed() error {
	if f.gate == nil {
		return errNoBreaker
	}
	f.gate.ForceClosed(f.g.now(), causeOperator)
	f.g.sweeper.kick()
	return nil
}

// GrantCredits does nothing: a function has no dead letters.
func (*Func[M]) GrantCredits(float64) {}

// DeadLetterWaiting does nothing: a function has no dead letters.
func (*Func[M]) DeadLetterWaiting(int) int { return 0 }

// Update is refused: a function's policy is fixed.
func (f *Func[M]) Update(Policy) error {
	return fmt.Errorf("guard: source %s: the policy of a protected function cannot change", f.cfg.Name)
}

// End refuses further calls and retries with [ErrClosed]. It waits for running calls until
// ctx ends, and reports the calls that are left.
//
// Later calls of End wait for the first and return its report. All stop waiting when the
// first of their contexts ends.
func (f *Func[M]) End(ctx context.Context, why Reason) Report {
	stop := context.AfterFunc(ctx, f.hurry)
	defer stop()
	f.mu.Lock()
	if f.ended {
		f.mu.Unlock()
		<-f.done
		return f.ending
	}
	f.ended = true
	f.mu.Unlock()
	f.closed.Store(true)
	wait := time.NewTicker(tick)
	defer wait.Stop()
wait:
	for f.Account().Processing > 0 {
		select {
		case <-wait.C:
		case <-f.over:
			break wait
		}
	}
	a := f.Account()
	rep := Report{Source: f.cfg.Name, Reason: why, Account: a}
	for range a.Processing {
		rep.Left = append(rep.Left, Left{State: "processing", Why: "the call has not returned"})
	}
	f.ending = rep
	now := f.g.now()
	if ends := f.pausedUntil(now); ends != 0 {
		f.g.keep(f.cfg.Name, carryOver{paused: true, pauseEnds: ends, at: now})
	}
	f.g.unregister(f.cfg.Name, f)
	f.release()
	close(f.done)
	return rep
}

// hurry makes End go on without the running calls.
func (f *Func[M]) hurry() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.overdue {
		f.overdue = true
		close(f.over)
	}
}

func (*Func[M]) nudge() {}

// sweep ends a pause whose time is over. moving tells whether a pause with an end goes on,
// or calls have succeeded since the last sweep. A failure updates the breaker by itself.
func (f *Func[M]) sweep(now time.Duration) (moving bool) {
	n := f.successes()
	moving = n != f.seen && f.gate != nil
	f.seen = n
	ends := f.paused.Load()
	if ends != 0 && int64(now) >= ends && f.paused.CompareAndSwap(ends, 0) {
		f.resumed(now, "time")
	}
	return moving || ends != 0 && ends != int64(never)
}

func (f *Func[M]) measured() *sourceMetrics { return &f.metrics }

func (*Func[M]) lag() int64 { return -1 }

func (*Func[M]) parked() (now int, followed uint64, ok bool) { return 0, 0, false }
