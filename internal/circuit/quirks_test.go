// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/sony/gobreaker/v2"

	"github.com/stormguard-mq/stormguard/breaker"
)

// What this package leans on in gobreaker, and what it works around. A test
// that fails here after an upgrade names the assumption that is gone.

type twoStep = gobreaker.TwoStepCircuitBreaker[struct{}]

func rawTripped(t *testing.T, s gobreaker.Settings) *twoStep {
	t.Helper()
	s.Timeout = time.Nanosecond
	s.IsExcluded = isExcluded
	s.ReadyToTrip = func(gobreaker.Counts) bool { return true }
	gb := gobreaker.NewTwoStepCircuitBreaker[struct{}](s)
	done, err := gb.Allow()
	if err != nil {
		t.Fatal(err)
	}
	done(errFailed)
	return gb
}

func allow(t *testing.T, gb *twoStep) func(error) {
	t.Helper()
	done, err := gb.Allow()
	if err != nil {
		t.Fatalf("refused: %v", err)
	}
	return done
}

func TestQuirkNanosecondTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gb := rawTripped(t, gobreaker.Settings{MaxRequests: 2})
		if got := gb.State(); got != gobreaker.StateOpen {
			t.Fatalf("%v with a clock that stands still: byHand is no longer needed", got)
		}
		if _, err := gb.Allow(); err != gobreaker.ErrOpenState {
			t.Fatalf("Allow with a clock that stands still: %v", err)
		}
		time.Sleep(1)
		if got := gb.State(); got != gobreaker.StateOpen {
			t.Fatalf("%v at the deadline itself", got)
		}
		time.Sleep(1)
		if got := gb.State(); got != gobreaker.StateHalfOpen {
			t.Fatalf("%v after the deadline", got)
		}
		gb = rawTripped(t, gobreaker.Settings{MaxRequests: 2})
		time.Sleep(2)
		allow(t, gb)
	})
}

func TestQuirkHalfOpenJudgement(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var moves []gobreaker.State
		gb := rawTripped(t, gobreaker.Settings{MaxRequests: 3, OnStateChange: func(_ string, _, to gobreaker.State) {
			moves = append(moves, to)
		}})
		time.Sleep(2)
		gb.State()
		// Width: requests that succeeded or are out, excluded ones given back.
		a, b, c := allow(t, gb), allow(t, gb), allow(t, gb)
		if _, err := gb.Allow(); err != gobreaker.ErrTooManyRequests {
			t.Fatalf("a fourth of three: %v", err)
		}
		c(errExcluded)
		c = allow(t, gb)
		a(nil)
		b(nil)
		if _, err := gb.Allow(); err != gobreaker.ErrTooManyRequests {
			t.Fatalf("two passed, one out, three wanted: %v", err)
		}
		c(nil) // OnStateChange runs before done returns
		if len(moves) != 3 || moves[0] != gobreaker.StateOpen || moves[1] != gobreaker.StateHalfOpen || moves[2] != gobreaker.StateClosed {
			t.Fatalf("moves %v", moves)
		}

		gb = rawTripped(t, gobreaker.Settings{MaxRequests: 3})
		time.Sleep(2)
		a, b = allow(t, gb), allow(t, gb)
		a(errFailed)
		time.Sleep(2)
		gb.State()
		b(nil) // of the phase before: dropped
		if got := gb.Counts().TotalSuccesses; got != 0 {
			t.Fatalf("a late result counts: %d", got)
		}
	})
}

// Why a token of ours settles once and has a lease.
func TestQuirkNoOnceNoLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gb := rawTripped(t, gobreaker.Settings{MaxRequests: 3})
		time.Sleep(2)
		done := allow(t, gb)
		done(nil)
		done(nil)
		done(nil)
		if got := gb.State(); got != gobreaker.StateClosed {
			t.Fatalf("one probe three times: %v; done is once-only now", got)
		}
		gb = rawTripped(t, gobreaker.Settings{MaxRequests: 1})
		time.Sleep(2)
		allow(t, gb)
		time.Sleep(30 * 24 * time.Hour)
		if _, err := gb.Allow(); err != gobreaker.ErrTooManyRequests {
			t.Fatalf("a lost probe after 30 days: %v; half-open has a deadline now", err)
		}
	})
}

func TestClockUnderGobreaker(t *testing.T) {
	phase := func(t *testing.T) *Breaker {
		b := must(t, breaker.Config{})
		trip(t, b, 0)
		admit(t, b, sec)
		return b
	}
	synctest.Test(t, func(t *testing.T) {
		if !phase(t).byHand {
			t.Error("a clock that stands still, yet gobreaker judges: the tests of both clocks test one")
		}
	})
	b := must(t, breaker.Config{})
	trip(t, b, 0)
	for t0 := time.Now(); time.Since(t0) < time.Millisecond; {
	}
	admit(t, b, sec)
	if b.byHand {
		t.Error("a clock that runs, yet gobreaker does not judge")
	}
}

// Should gobreaker ever refuse in the middle of a phase, the phase goes on
// without it, and nothing of it leaks into the next.
func TestGobreakerRefusesMidPhase(t *testing.T) {
	b := must(t, breaker.Config{Successes: 3})
	trip(t, b, 0)
	for t0 := time.Now(); time.Since(t0) < time.Millisecond; {
	}
	stolen := []func(error){allow(t, b.gb), allow(t, b.gb), allow(t, b.gb)}
	p := admit(t, b, sec)
	if !b.byHand {
		t.Fatal("gobreaker has more room than its width")
	}
	for _, done := range stolen {
		done(errExcluded)
	}
	b.Failure(sec, p, true)
	state(t, b, sec, breaker.Open)
	b.Success(2*sec, admit(t, b, 2*sec))
	b.Success(2*sec, admit(t, b, 2*sec))
	state(t, b, 2*sec, breaker.HalfOpen)
	b.Success(2*sec, admit(t, b, 2*sec))
	state(t, b, 2*sec, breaker.Closed)
}
