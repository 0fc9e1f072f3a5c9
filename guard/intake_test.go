// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

// What an intake without a broker is made of: a function for those who wait for
// an answer, a source for those who don't, one scope.

// A call is made once; its panic is counted and goes on with its own stack.
func TestProtectCall(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		calls := 0
		g, fn := newFunc(t, Policy{}, func(_ context.Context, m int) error {
			calls++
			if m == 1 {
				panicsHere()
			}
			return errDown
		})
		if err := fn.Call(t.Context(), 0); !errors.Is(err, errDown) || calls != 1 {
			t.Errorf("%v after %d calls", err, calls)
		}
		var value any
		var stack string
		func() {
			defer func() {
				stack = string(debug.Stack())
				value = recover()
			}()
			_ = fn.Call(t.Context(), 1)
		}()
		if value != "boom" || !strings.Contains(stack, "panicsHere") {
			t.Errorf("panicked with %v, stack:\n%s", value, stack)
		}
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		_ = fn.Call(gone, 0) // its caller went away: no outcome
		if b := fn.gate.Breaker.Snapshot(g.now()); b.Failures != 2 {
			t.Errorf("the breaker counts %d failures", b.Failures)
		}
		if a := fn.Account(); a.Check() != nil || a.Processing != 0 || a.Returned != 3 {
			t.Errorf("%+v", a)
		}
		for range 3 {
			_ = fn.Call(t.Context(), 0)
		}
		if fn.gate.Closed() {
			t.Error("five failures in a row did not open the breaker")
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

func panicsHere() { panic("boom") }

// A call that may not probe is told when a probe may be made.
func TestProtectCallClosed(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		calls := 0
		g, fn := newFunc(t, Policy{}, func(context.Context, int) error { calls++; return nil })
		if err := fn.CallClosed(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
		if err := fn.ForceOpen(time.Second); err != nil {
			t.Fatal(err)
		}
		for _, want := range []time.Duration{time.Second, 300 * time.Millisecond, 0, 0} {
			var held *HeldError
			if err := fn.CallClosed(t.Context(), 0); !errors.As(err, &held) || held.Reason != ReasonBreaker || held.Until != want {
				t.Errorf("%v %+v, want it to say %s", err, held, want)
			}
			time.Sleep(max(300*time.Millisecond, want-300*time.Millisecond))
		}
		if calls != 1 || fn.gate.Breaker.Snapshot(g.now()).State != breaker.Open {
			t.Errorf("%d calls, %+v", calls, fn.gate.Breaker.Snapshot(g.now()))
		}
		for range 10 { // probes close it
			if err := fn.Call(t.Context(), 0); err != nil {
				t.Error(err)
			}
		}
		if err := fn.CallClosed(t.Context(), 0); err != nil || calls != 12 {
			t.Errorf("%v after %d calls", err, calls)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// A source with a handler takes what is offered, holds it in order while the
// function of its scope keeps the breaker open, and goes on as soon as a probe
// slot is free, not when the lease of somebody's probe would have ended.
func TestOfferBesideCalls(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		down := true
		r := newRig(t, Policy{Breaker: breaker.Config{Successes: 3}}, Limits{}, func(*rig, context.Context, int) error {
			if down {
				return errDown
			}
			return nil
		})
		slow := make(chan struct{})
		fn, err := Protect(r.g, SourceConfig{Name: "live", Destination: "t"}, func(context.Context, int) error {
			if down {
				return errDown
			}
			<-slow
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		for range 5 {
			_ = fn.Call(t.Context(), 0)
		}
		for m := range 100 {
			if err := r.s.Offer(m); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		if a := r.check(); a.Held != 100 || len(r.calls) != 0 {
			t.Errorf("%+v, %d calls", a, len(r.calls))
		}
		r.s.Pause(0)
		time.Sleep(time.Second)
		down = false
		probed := make(chan error, 1)
		go func() { probed <- fn.Call(t.Context(), 0) }()
		synctest.Wait()
		r.s.Resume() // finds the only slot taken
		time.Sleep(time.Second)
		if n := len(r.done()); n > 0 {
			t.Errorf("%d handled beside the probe", n)
		}
		close(slow)
		if err := <-probed; err != nil {
			t.Error(err)
		}
		time.Sleep(2 * time.Second) // the ramp
		want := make([]int, 100)
		for i := range want {
			want[i] = i
		}
		if got := r.done(); !slices.Equal(got, want) {
			t.Errorf("handled %v", got)
		}
		if a := r.check(); a.Acked != 100 || a.Unsettled() != 0 {
			t.Errorf("%+v", a)
		}
		r.close()
	})
}

// What was offered and not handled is given back at the end, all of it.
func TestOfferedIsReturned(t *testing.T) {
	for _, p := range []Policy{{}, {Order: OrderKey, Workers: 3}, {Order: OrderNone, Workers: 3}} {
		bubble(t, p.Order.String(), func(t *testing.T) {
			r := newRig(t, p, Limits{}, ok)
			if err := r.s.Offer(0); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			r.s.Pause(0)
			for m := 1; m < 1024; m++ {
				if err := r.s.Offer(m); err != nil {
					t.Fatal(m, err)
				}
			}
			if err := r.s.Offer(1024); err != nil {
				t.Fatal(err)
			}
			if err := r.s.Offer(1025); !errors.Is(err, ErrFull) {
				t.Fatal(err)
			}
			reports, err := r.g.Close(t.Context())
			if err != nil || reports[0].Returned != 1024 || len(r.port.returned) != 1024 {
				t.Errorf("%v, %+v, the port got %d back", err, reports[0].Account, len(r.port.returned))
			}
			if got := r.done(); !slices.Equal(got, []int{0}) {
				t.Errorf("handled %v", got)
			}
			r.close()
		})
	}
}
