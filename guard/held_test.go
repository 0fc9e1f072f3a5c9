// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// What a protected function refuses is no outcome of the message that was handled: in an
// outage of the function's dependency the source waits, and dead-letters nothing.
func TestHeldErrorHolds(t *testing.T) {
	for _, order := range []Order{OrderSource, OrderKey, OrderNone} {
		bubble(t, order.String(), func(t *testing.T) {
			var calls atomic.Int64
			g, fn := newFunc(t, Policy{}, func(context.Context, int) error {
				calls.Add(1)
				return nil
			})
			if err := fn.ForceOpen(10 * time.Minute); err != nil {
				t.Fatal(err)
			}
			r := newRig(t, Policy{Order: order}, Limits{}, func(_ *rig, ctx context.Context, m int) error {
				if err := fn.Do(ctx, m); err != nil {
					return fmt.Errorf("charge order %d: %w", m, err)
				}
				return nil
			})
			r.send(0, 300)
			elapse(9 * time.Minute)
			a, st := r.check(), r.s.State()
			if calls.Load() > 0 || a.DeadLettered > 0 || a.Unsettled() != 300 || st.Tally.Failures > 0 || st.Tally.Retries > 0 || st.Breaker.State.String() != "closed" {
				t.Errorf("%d calls, %+v, %+v, %v", calls.Load(), a, st.Tally, st.Breaker.State)
			}
			r.mu.Lock()
			n := len(r.calls)
			r.mu.Unlock()
			if n > 30 { // with OrderNone each message has a turn
				t.Errorf("%d handler calls for nothing", n)
			}
			elapse(10 * time.Minute)
			if a := r.check(); a.Acked != 300 || len(r.letters.recs) > 0 {
				t.Errorf("%+v", a)
			}
			r.close()
			closeAll(t, g)
		})
	}
}

// A source whose handler calls a function goes on soon after a person has let that go.
func TestHeldErrorIsCleared(t *testing.T) {
	for name, c := range map[string]struct {
		stop, clear func(f *Func[int])
		within      time.Duration
	}{
		"forced":      {func(f *Func[int]) { _ = f.ForceOpen(0) }, func(f *Func[int]) { _ = f.ForceClosed() }, 30 * time.Second},
		"forced, 2 h": {func(f *Func[int]) { _ = f.ForceOpen(2 * time.Hour) }, func(f *Func[int]) { _ = f.Release() }, 30 * time.Second},
		"paused":      {func(f *Func[int]) { f.Pause(0) }, func(f *Func[int]) { f.Resume() }, time.Second},
		"paused, 2 h": {func(f *Func[int]) { f.Pause(2 * time.Hour) }, func(f *Func[int]) { f.Resume() }, time.Second},
	} {
		bubble(t, name, func(t *testing.T) {
			g, fn := newFunc(t, Policy{}, func(context.Context, int) error { return nil })
			c.stop(fn)
			r := newRig(t, Policy{Ramp: Ramp{Off: true}}, Limits{}, func(_ *rig, ctx context.Context, m int) error { return fn.Do(ctx, m) })
			r.send(0, 100)
			elapse(10*time.Minute + time.Minute/7)
			if a := r.check(); a.Acked > 0 {
				t.Errorf("%+v", a)
			}
			c.clear(fn)
			elapse(c.within + 100*time.Millisecond)
			if a := r.check(); a.Acked != 100 {
				t.Errorf("%v later: %+v", c.within, a)
			}
			r.close()
			closeAll(t, g)
		})
	}
}

// A refusal that somebody has to clear is asked about once a second, any other each 30 s at
// least; one that a probe may clear now after Retry.Base; a mark around it counts more, and
// so does a panic.
func TestHeldErrorUntil(t *testing.T) {
	for name, c := range map[string]struct {
		err   error
		after time.Duration
	}{
		"limiter":  {&HeldError{Reason: ReasonLimiter, Until: 7 * time.Second}, 7 * time.Second},
		"operator": {&HeldError{Reason: ReasonOperator}, time.Second},
		"probe":    {&HeldError{Reason: ReasonBreaker}, 50 * time.Millisecond},
		"paused":   {&HeldError{Reason: ReasonOperator, Until: time.Hour}, time.Second},
		"joined":   {errors.Join(&HeldError{Reason: ReasonBreaker, Until: 20 * time.Second}, errDown), 20 * time.Second},
		"forced":   {&HeldError{Reason: ReasonBreaker, Until: time.Hour}, 30 * time.Second},
		"year":     {&HeldError{Reason: ReasonLimiter, Until: 24 * 365 * time.Hour}, 30 * time.Second},
	} {
		bubble(t, name, func(t *testing.T) {
			var at []time.Time
			r := newRig(t, Policy{}, Limits{}, func(*rig, context.Context, int) error {
				if at = append(at, time.Now()); len(at) == 1 {
					return c.err
				}
				return nil
			})
			r.send(0, 1)
			elapse(c.after + time.Minute)
			if r.check(); len(at) != 2 || at[1].Sub(at[0]) != c.after {
				t.Errorf("called at %v", at)
			}
			r.close()
		})
	}
	held := &HeldError{Reason: ReasonBreaker}
	for _, c := range []struct {
		err  error
		want outcome
	}{
		{held, backoff},
		{Permanent(held), permanent},
		{errors.Join(held, Permanent(errDown)), permanent},
		{&PanicError{Value: held}, failure},
		{fmt.Errorf("%w: %w", ErrTimeout, held), backoff},
		{errHeld, failure},
		{sound((*HeldError)(nil)), failure},
	} {
		if got, _ := classify(c.err); got != c.want {
			t.Errorf("%v: %d, want %d", c.err, got, c.want)
		}
	}
}

// A function that calls another is not blamed for the other's refusals.
func TestHeldErrorThroughAFunction(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, inner := newFunc(t, Policy{}, func(context.Context, int) error { return nil })
		outer, err := Protect(g, SourceConfig{Name: "outer"}, inner.Do)
		if err != nil {
			t.Fatal(err)
		}
		inner.Pause(0)
		for range 100 {
			if err := outer.Do(t.Context(), 1); !errors.Is(err, errHeld) {
				t.Error(err)
			}
		}
		if st := outer.State(); st.Tally.Failures > 0 || len(st.Holds) > 0 {
			t.Errorf("%+v, %+v", st.Tally, st.Holds)
		}
		closeAll(t, g)
	})
}

// A machine that slept has a guard's clock behind the wall's. A handler's "again in 2s",
// read off the wall, is 2s all the same; so is one that stands behind its own clock.
func TestBackoffAfterASuspend(t *testing.T) {
	for _, slept := range []time.Duration{20 * time.Minute, -20 * time.Minute} {
		for _, p := range []Policy{{}, {Order: OrderNone, Workers: 2}} {
			bubble(t, fmt.Sprint(slept, p.Order), func(t *testing.T) {
				var at []time.Time
				r := newRig(t, p, Limits{}, func(*rig, context.Context, int) error {
					if at = append(at, time.Now()); len(at) == 1 {
						return Backoff(errDown, time.Now().Round(0).Add(2*time.Second))
					}
					return nil
				})
				synctest.Wait()
				r.s.mu.Lock()
				r.g.origin = r.g.origin.Round(0).Add(-slept) // as if the wall had gone on meanwhile
				r.s.c.origin = r.g.origin
				r.s.mu.Unlock()
				r.send(0, 1)
				elapse(time.Hour)
				if r.check(); len(at) != 2 || at[1].Sub(at[0]) != 2*time.Second {
					t.Errorf("called at %v", at)
				}
				r.close()
			})
		}
	}
}
