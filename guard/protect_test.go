// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

func newFunc(t *testing.T, p Policy, f func(context.Context, int) error) (*Guard, *Func[int]) {
	t.Helper()
	g, err := New(Config{Policy: p})
	if err != nil {
		t.Fatal(err)
	}
	fn, err := Protect(g, SourceConfig{Name: "f"}, f)
	if err != nil {
		t.Fatal(err)
	}
	return g, fn
}

// Callers are refused while the dependency is down, and let in again by probes.
func TestProtectOutage(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		var down atomic.Bool
		var calls atomic.Int64
		g, fn := newFunc(t, Policy{Timeout: time.Second}, func(context.Context, int) error {
			calls.Add(1)
			if down.Load() {
				return errDown
			}
			return nil
		})
		for i := range 100 {
			if err := fn.Do(t.Context(), i); err != nil {
				t.Fatal(err)
			}
		}
		down.Store(true)
		calls.Store(0)
		var callers sync.WaitGroup
		var held, failed atomic.Int64
		for range 20 {
			callers.Go(func() {
				for range 50 {
					err := fn.Do(t.Context(), 1)
					var h *HeldError
					switch {
					case errors.As(err, &h):
						held.Add(1)
						if h.Reason != ReasonBreaker || h.Source != "f" || !errors.Is(err, errHeld) {
							t.Errorf("%+v", h)
						}
					case err != nil:
						failed.Add(1)
					default:
						t.Error("succeeded while down")
					}
					time.Sleep(100 * time.Millisecond)
				}
			})
		}
		callers.Wait()
		if n := calls.Load(); n > 60 {
			t.Errorf("%d calls while down", n)
		}
		down.Store(false)
		time.Sleep(30 * time.Second)
		for range 30 {
			_ = fn.Do(t.Context(), 1)
		}
		if err := fn.Do(t.Context(), 1); err != nil || !fn.gate.Closed() {
			t.Error(err)
		}
		if err := fn.Account().Check(); err != nil {
			t.Error(err)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if err := fn.Do(t.Context(), 1); !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	})
}

func TestProtectRetriesAndWords(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		calls := 0
		g, fn := newFunc(t, Policy{Timeout: time.Second}, func(ctx context.Context, m int) error {
			calls++
			switch {
			case m == 1 && calls < 3:
				return errDown
			case m == 2:
				return Permanent(errDown)
			case m == 3:
				return Ignore(errDown)
			case m == 4:
				panic("x")
			case m == 5:
				<-ctx.Done()
				return ctx.Err()
			}
			return nil
		})
		for _, want := range []struct {
			m, calls int
			is       error
		}{{1, 3, nil}, {2, 1, errDown}, {3, 1, nil}, {5, 5, ErrTimeout}, {0, 1, nil}} {
			calls = 0
			err := fn.Do(t.Context(), want.m)
			if calls != want.calls || !errors.Is(err, want.is) {
				t.Errorf("%+v: %d calls, %v", want, calls, err)
			}
		}
		var p *PanicError
		if err := fn.Do(t.Context(), 4); !errors.As(err, &p) || len(p.Stack) == 0 {
			t.Error(err)
		}
		var gone sync.WaitGroup
		gone.Go(func() {
			_ = fn.Do(t.Context(), 0)
			fn.f = func(context.Context, int) error { runtime.Goexit(); return nil }
			_ = fn.Do(t.Context(), 0)
			t.Error("came back from Goexit")
		})
		gone.Wait()
		if a := fn.Account(); a.Check() != nil || a.Processing != 0 {
			t.Errorf("%+v", a)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// The context of a call is what the context package promises, at any time.
func TestCallContext(t *testing.T) {
	type key struct{}
	bubble(t, "", func(t *testing.T) {
		parent, cancel := context.WithCancelCause(context.WithValue(t.Context(), key{}, "v"))
		fresh := func() *callContext { return &callContext{parent: parent, timeout: time.Second} }

		c := fresh()
		if c.Err() != nil || c.Value(key{}) != "v" {
			t.Error("a fresh context has ended")
		}
		if at, ok := c.Deadline(); !ok || time.Until(at) != time.Second {
			t.Error("deadline", at)
		}
		child, stop := context.WithCancel(c)
		defer stop()
		before := runtime.NumGoroutine()
		for range 10 {
			_, s := context.WithCancel(c)
			defer s()
		}
		if n := runtime.NumGoroutine(); n != before {
			t.Errorf("deriving contexts started %d goroutines", n-before)
		}
		c.end(context.DeadlineExceeded, ErrTimeout)
		<-c.Done()
		<-child.Done()
		if !errors.Is(c.Err(), context.DeadlineExceeded) || !errors.Is(child.Err(), context.DeadlineExceeded) {
			t.Error(c.Err(), child.Err())
		}

		c = fresh()
		c.finish()
		<-c.Done() // one who looks too late sees the end
		if !errors.Is(c.Err(), context.Canceled) {
			t.Error(c.Err())
		}

		c = fresh()
		ran := make(chan struct{})
		context.AfterFunc(c, func() { close(ran) })
		kept := context.AfterFunc(c, func() { t.Error("stopped function ran") })
		if !kept() {
			t.Error("not stopped")
		}
		c.finish()
		<-ran

		c = fresh()
		done := c.Done()
		cancel(errRevoked)
		<-done
		synctest.Wait()
		if !errors.Is(c.Err(), context.Canceled) || c.why() != errRevoked {
			t.Error(c.Err(), c.why())
		}
	})
}

// errorless breaks the rules: it is done and has no error.
type errorless struct{ context.Context }

func (errorless) Err() error { return nil }

// A parent without an error ends the context all the same, and once.
func TestCallContextOfErrorlessParent(t *testing.T) {
	parent, cancel := context.WithCancel(t.Context())
	c := &callContext{parent: errorless{parent}}
	done := c.Done()
	cancel()
	<-done
	if err := c.Err(); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	c.finish()
	if err := c.Err(); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// exacting is a caller whose end is no excuse from the second failure on.
type exacting struct {
	context.Context
	failures *int
}

func (s exacting) Excuses() bool { return *s.failures < 2 }

// The end of a caller's context excuses its failures and panics, unless it says not.
func TestExcuses(t *testing.T) {
	for name, fails := range map[string]func() error{"error": func() error { return errDown }, "panic": func() error { panic("boom") }} {
		bubble(t, name, func(t *testing.T) {
			failures := 0
			g, fn := newFunc(t, Policy{Breaker: breaker.Config{Run: 2}}, func(context.Context, int) error {
				failures++
				return fails()
			})
			call := func(ctx context.Context) {
				defer func() { _ = recover() }()
				_ = fn.Call(ctx, 1)
			}
			ended, cancel := context.WithCancel(t.Context())
			cancel()
			for range 20 {
				call(ended)
			}
			failures = 0
			call(exacting{ended, &failures})
			if st := fn.State().Breaker; st.State != breaker.Closed || st.Run != 0 {
				t.Errorf("excused failures count: %+v", st)
			}
			call(exacting{ended, &failures})
			if st := fn.State().Breaker; st.Run != 1 {
				t.Errorf("a failure that is not excused: %+v", st)
			}
			call(exacting{ended, &failures})
			if st := fn.State().Breaker; st.State != breaker.Open {
				t.Errorf("two failures that are not excused: %+v", st)
			}
			if _, err := g.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// A dependency that hangs is seen by callers that wait for less than the timeout; those that
// leave, and those that wait for less than a second, say nothing.
func TestDeadlineOfACaller(t *testing.T) {
	hang := func(ctx context.Context, _ int) error { <-ctx.Done(); return ctx.Err() }
	for _, c := range []struct {
		name string
		ctx  func(context.Context) (context.Context, context.CancelFunc)
		f    func(context.Context, int) error
		open bool
	}{
		{"2 s", func(ctx context.Context) (context.Context, context.CancelFunc) {
			return context.WithTimeout(ctx, 2*time.Second)
		}, hang, true},
		{"its deadline is read", func(ctx context.Context) (context.Context, context.CancelFunc) {
			return context.WithTimeout(ctx, 2*time.Second)
		}, func(ctx context.Context, _ int) error {
			at, _ := ctx.Deadline()
			time.Sleep(time.Until(at))
			return os.ErrDeadlineExceeded
		}, true},
		{"0.5 s", func(ctx context.Context) (context.Context, context.CancelFunc) {
			return context.WithTimeout(ctx, 500*time.Millisecond)
		}, hang, false},
		{"leaves", func(ctx context.Context) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(ctx)
			time.AfterFunc(2*time.Second, cancel)
			return ctx, cancel
		}, hang, false},
	} {
		bubble(t, c.name, func(t *testing.T) {
			g, fn := newFunc(t, Policy{}, c.f)
			for range 30 {
				ctx, cancel := c.ctx(t.Context())
				if err := fn.Do(ctx, 1); err == nil {
					t.Error("no error")
				}
				cancel()
				synctest.Wait()
			}
			if st := fn.State().Breaker; (st.State == breaker.Open) != c.open {
				t.Errorf("%+v", st)
			}
			if _, err := g.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// Everyone may look at a context while it ends.
func TestCallContextRaces(t *testing.T) {
	for range 300 {
		parent, cancel := context.WithCancel(t.Context())
		c := &callContext{parent: parent}
		var all sync.WaitGroup
		for _, f := range []func(){
			func() { <-c.Done() }, func() { <-c.Done() }, func() { _ = c.Err() },
			func() { context.AfterFunc(c, func() {}) }, c.finish, cancel,
			func() { c.end(context.DeadlineExceeded, ErrTimeout) },
		} {
			all.Go(f)
		}
		all.Wait()
		if c.Err() == nil {
			t.Fatal("not ended")
		}
	}
}

// A function's errors say whose fault they are: a caller's broken document opens no
// breaker, and a dependency that refuses connections needs one call's retries to.
func TestFuncClasses(t *testing.T) {
	garbage := json.Unmarshal([]byte("{x"), new(any))
	for _, tt := range []struct {
		err  error
		open bool
	}{{garbage, false}, {errRefused, true}} {
		synctest.Test(t, func(t *testing.T) {
			g, err := New(Config{})
			if err != nil {
				t.Fatal(err)
			}
			f, err := Protect(g, SourceConfig{Name: "f"}, func(context.Context, int) error { return tt.err })
			if err != nil {
				t.Fatal(err)
			}
			for range 2 { // two calls of five attempts
				_ = f.Do(t.Context(), 1)
			}
			if got := f.State().Breaker.State != breaker.Closed; got != tt.open {
				t.Errorf("%v: %+v", tt.err, f.State().Breaker)
			}
			if _, err := g.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// fetching is a limiter that fetches a token when it is asked, in a millisecond, and keeps
// it for a second.
type fetching struct{ comes time.Time }

func (l *fetching) Admit(time.Duration) time.Duration {
	switch age := time.Since(l.comes); {
	case age < 0:
		return time.Millisecond
	case age <= time.Second:
		l.comes = time.Time{}
		return 0
	}
	l.comes = time.Now().Add(time.Millisecond)
	return time.Millisecond
}

// Rare calls get through a limiter that has nothing until it is asked, as probes too.
func TestProtectWaitsForTheLimiter(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		called := 0
		f, err := Protect(g, SourceConfig{Name: "f", Limiter: &fetching{}}, func(context.Context, int) error { called++; return nil })
		if err != nil {
			t.Fatal(err)
		}
		rarely := func() {
			called = 0
			for range 20 {
				_ = f.Do(t.Context(), 1)
				time.Sleep(2 * time.Second)
			}
			if called != 20 {
				t.Errorf("%d of 20 are called", called)
			}
		}
		rarely()
		if err := f.ForceOpen(time.Second); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		rarely()
		if st := f.State().Breaker; st.State != breaker.Closed {
			t.Errorf("%+v", st)
		}
		closeAll(t, g)
	})
}

// A call waits for the limiter for 100 ms at the longest, and not beyond its context or the
// function's end; one that can be held does not wait.
func TestProtectWaitsNotForLong(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		f, err := Protect(g, SourceConfig{Name: "f", Limiter: &strict{wait: 30 * time.Millisecond}}, func(context.Context, int) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		brief, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		for _, c := range []struct {
			call func(context.Context, int) error
			ctx  context.Context
			took time.Duration
		}{{f.CallClosed, t.Context(), 0}, {f.Do, brief, 10 * time.Millisecond}, {f.Do, t.Context(), patience}} {
			start := time.Now()
			err := c.call(c.ctx, 1)
			held, ok := errors.AsType[*HeldError](err)
			if took := time.Since(start); took != c.took || !ok || held.Reason != ReasonLimiter || held.Until != 30*time.Millisecond {
				t.Errorf("%v after %v, want %v", err, took, c.took)
			}
		}
		late := make(chan error)
		go func() { late <- f.Do(t.Context(), 1) }()
		synctest.Wait() // it waits
		closeAll(t, g)
		if err := <-late; !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
		if a := f.Account(); a.Check() != nil || a.Returned != 4 {
			t.Errorf("%+v", a)
		}
	})
}

// delaying is a limiter that admits when it is asked again.
type delaying struct{ asked bool }

func (l *delaying) Admit(time.Duration) time.Duration {
	if l.asked {
		return 0
	}
	l.asked = true
	return 60 * time.Millisecond
}

// A call that waits for the limiter does not begin after a pause, a force or a trip. A probe stays
// the call's own, or is given back.
func TestProtectAsksAgainAfterItsWait(t *testing.T) {
	pause := func(f *Func[int]) { f.Pause(0) }
	force := func(f *Func[int]) { _ = f.ForceOpen(0) }
	trip := func(f *Func[int]) { f.gate.Trip(f.g.now(), breaker.CauseRun) }
	for name, c := range map[string]struct {
		probe     bool
		meanwhile func(*Func[int])
		want      Reason
	}{
		"pause":   {false, pause, ReasonOperator},
		"force":   {false, force, ReasonBreaker},
		"trip":    {false, trip, ReasonBreaker},
		"nothing": {false, func(*Func[int]) {}, ReasonNone},

		"a probe and a pause": {true, pause, ReasonOperator},
		"a probe and a force": {true, force, ReasonBreaker},
		"a probe and a trip":  {true, trip, ReasonBreaker},
		"a probe and nothing": {true, func(*Func[int]) {}, ReasonNone},
	} {
		bubble(t, name, func(t *testing.T) {
			g, err := New(Config{})
			if err != nil {
				t.Fatal(err)
			}
			called := 0
			f, err := Protect(g, SourceConfig{Name: "f", Limiter: new(delaying)}, func(context.Context, int) error { called++; return nil })
			if err != nil {
				t.Fatal(err)
			}
			if c.probe {
				if err := f.ForceOpen(time.Second); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Second)
			}
			late := make(chan error)
			go func() { late <- f.Do(t.Context(), 1) }()
			synctest.Wait() // it waits
			if st := f.State(); st.Account.RetryWait != 1 || (st.Breaker.ProbesOut == 1) != c.probe {
				t.Errorf("%+v", st)
			}
			c.meanwhile(f)
			err = <-late
			reason := ReasonNone
			if held, ok := errors.AsType[*HeldError](err); ok {
				reason = held.Reason
			}
			if reason != c.want || (err == nil) != (called == 1) || (err == nil) != (c.want == ReasonNone) {
				t.Errorf("%v, and %d calls", err, called)
			}
			st := f.State()
			if st.Breaker.ProbesOut != 0 || (st.Tally.Probes == 1) != (c.probe && err == nil) || (st.Tally.Diverted == 1) != (err != nil) || st.Account.Check() != nil {
				t.Errorf("%+v", st)
			}
			closeAll(t, g)
		})
	}
}
