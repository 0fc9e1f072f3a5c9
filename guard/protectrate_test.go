// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

// A function that has been well for long sees a partial outage by its rate as soon as
// a source does: its successes are in the window when they were had.
func TestProtectSeesAPartialOutage(t *testing.T) {
	const (
		every   = 10 * time.Millisecond
		healthy = 1000 * time.Second / every
		bucket  = time.Second // of the default window
	)
	// toOpen is the time from the first failure to the open breaker.
	toOpen := func(t *testing.T, function bool) (took time.Duration) {
		synctest.Test(t, func(t *testing.T) {
			g, err := New(Config{Policy: Policy{Order: OrderNone, Breaker: breaker.Config{NoRun: true}}})
			if err != nil {
				t.Fatal(err)
			}
			var failed sync.Map // each message at most once: it is retried
			handler := func(_ context.Context, m int) error {
				if m >= int(healthy) && m%20 < 3 {
					if _, again := failed.LoadOrStore(m, true); !again {
						return errDown
					}
				}
				return nil
			}
			time.Sleep(time.Second) // the sweeper rests
			var send func(int)
			if function {
				f, err := Protect(g, SourceConfig{Name: "f"}, handler)
				if err != nil {
					t.Fatal(err)
				}
				send = func(m int) {
					if m < int(healthy) {
						_ = f.Do(t.Context(), m)
						return
					}
					go func() { _ = f.Do(t.Context(), m) }() // it may wait for a retry
				}
			} else {
				s, err := Open(g, SourceConfig{Name: "s"}, Limits{}, &testPort{}, handler)
				if err != nil {
					t.Fatal(err)
				}
				in := make(chan int)
				go func() { _ = s.Run(t.Context(), in) }()
				send = func(m int) { in <- m }
			}
			state := func() breaker.State { return g.Sources()[0].State().Breaker.State }
			for m := 0; ; m++ {
				send(m)
				if m < int(healthy) {
					time.Sleep(every)
					continue
				}
				synctest.Wait()
				if state() != breaker.Closed {
					took = time.Duration(m-int(healthy)) * every
					break
				}
				if m > 2*int(healthy) {
					t.Fatal("the breaker stays closed")
				}
				time.Sleep(every)
			}
			if _, err := g.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
		return took
	}
	want, got := toOpen(t, false), toOpen(t, true)
	if d := got - want; d < -2*bucket || d > 2*bucket || want > 40*time.Second {
		t.Errorf("the function's breaker opens after %v, a source's after %v", got, want)
	}
}

// With nothing to do the sweeper rests, and a function without a breaker neither wakes
// it nor keeps it awake.
func TestProtectLetsTheSweeperRest(t *testing.T) {
	free := &strict{}
	free.open.Store(true)
	for name, c := range map[string]struct {
		policy  Policy
		limiter Limiter
	}{"breaker": {}, "limiter": {limiter: free}, "no breaker": {policy: Policy{NoBreaker: true}}} {
		bubble(t, name, func(t *testing.T) {
			g, err := New(Config{Policy: c.policy})
			if err != nil {
				t.Fatal(err)
			}
			f, err := Protect(g, SourceConfig{Name: "f", Limiter: c.limiter}, func(context.Context, int) error { return nil })
			if err != nil {
				t.Fatal(err)
			}
			rests := func(want bool) {
				t.Helper()
				synctest.Wait()
				if got := g.sweeper.parked.Load(); got != want {
					t.Errorf("the sweeper rests: %v", got)
				}
			}
			for range 20 {
				_ = f.Do(t.Context(), 1)
				time.Sleep(5 * time.Millisecond)
			}
			rests(c.policy.NoBreaker)
			time.Sleep(time.Second)
			rests(true)
			for range 100 {
				if err := f.Do(t.Context(), 1); err != nil {
					t.Error(err)
				}
				rests(c.policy.NoBreaker)
				time.Sleep(20 * time.Millisecond)
			}
			time.Sleep(time.Second)
			rests(true)
			if _, err := g.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}
