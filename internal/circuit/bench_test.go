// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"errors"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sony/gobreaker/v2"

	"github.com/stormguard-mq/stormguard/breaker"
)

func TestAllocs(t *testing.T) {
	closed, open, half := must(t, breaker.Config{Ratio: 0.99, NoRun: true}), must(t, breaker.Config{}), must(t, breaker.Config{})
	open.Force(0, 0, "test")
	half.Trip(0, "test")
	probe := admit(t, half, sec)
	s := mustScopes(t, ScopesConfig{})
	a, b, c := leaf(t, s, "g", "t", "a"), leaf(t, s, "g", "t", "b"), leaf(t, s, "g", "t", "c")
	a.Trip(0, "test")
	b.Trip(0, "test")
	var n atomic.Uint64
	closed.Attach(n.Load)
	var now time.Duration
	buf := make([]Change, 0, 8)
	for name, f := range map[string]func(){
		"Enter and Success":    func() { k, _ := closed.Enter(); closed.Success(0, k) },
		"Enter and Failure":    func() { now += ms; k, _ := closed.Enter(); closed.Failure(now, k, true) },
		"reject, open":         func() { open.Admit(0, 1) },
		"reject, half-open":    func() { half.Admit(sec, 1) },
		"reject, parent":       func() { c.Enter(); c.Admit(0, 1) },
		"Tick":                 func() { now += sec; closed.Tick(now) },
		"Snapshot":             func() { closed.Snapshot(now) },
		"Life":                 func() { closed.Life() },
		"Passing":              func() { half.Passing() },
		"Renew":                func() { half.Renew(sec, probe) },
		"Changes without any":  func() { buf = closed.Changes(buf[:0]) },
		"a late token":         func() { open.Success(0, Token{gen: 1}); open.Failure(0, Token{gen: 1}, true) },
		"a settled zero token": func() { open.Exclude(0, Token{}) },
	} {
		if got := testing.AllocsPerRun(1000, f); got != 0 {
			t.Errorf("%s: %v allocations", name, got)
		}
	}
}

func rollingGobreaker() *gobreaker.CircuitBreaker[struct{}] {
	return gobreaker.NewCircuitBreaker[struct{}](gobreaker.Settings{
		Interval: 60 * sec, BucketPeriod: sec, ReadyToTrip: func(gobreaker.Counts) bool { return false },
	})
}

// The closed path around nothing, ours and gobreaker's with the same window.
func BenchmarkClosed(b *testing.B) {
	none := func() (struct{}, error) { return struct{}{}, nil }
	b.Run("Enter", func(b *testing.B) {
		br := must(b, breaker.Config{})
		for b.Loop() {
			if _, ok := br.Enter(); !ok {
				b.Fatal()
			}
		}
	})
	b.Run("Enter+Success", func(b *testing.B) {
		br := must(b, breaker.Config{})
		for b.Loop() {
			k, _ := br.Enter()
			br.Success(0, k)
		}
	})
	b.Run("leaf/Enter", func(b *testing.B) {
		l := leaf(b, mustScopes(b, ScopesConfig{}), "g", "t", "p")
		for b.Loop() {
			if _, ok := l.Enter(); !ok {
				b.Fatal()
			}
		}
	})
	b.Run("gobreaker/Execute", func(b *testing.B) {
		gb := rollingGobreaker()
		for b.Loop() {
			_, _ = gb.Execute(none)
		}
	})
}

func BenchmarkClosedParallel(b *testing.B) {
	none := func() (struct{}, error) { return struct{}{}, nil }
	b.Run("Enter+Success", func(b *testing.B) {
		br := must(b, breaker.Config{})
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				k, _ := br.Enter()
				br.Success(0, k)
			}
		})
	})
	b.Run("gobreaker/Execute", func(b *testing.B) {
		gb := rollingGobreaker()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				_, _ = gb.Execute(none)
			}
		})
	})
}

// A failed call. Ours stays closed: the limit is out of reach.
func BenchmarkFailure(b *testing.B) {
	b.Run("Enter+Failure", func(b *testing.B) {
		br := must(b, breaker.Config{Ratio: 0.9999, NoRun: true})
		br.Success(0, enter(b, br))
		for now := time.Duration(0); b.Loop(); now += 100 * time.Microsecond {
			k, ok := br.Enter()
			if !ok {
				br.ForceClosed(now, "bench")
				continue
			}
			br.Failure(now, k, true)
		}
	})
	b.Run("gobreaker/Execute", func(b *testing.B) {
		gb, err := rollingGobreaker(), errors.New("failed")
		fail := func() (struct{}, error) { return struct{}{}, err }
		for b.Loop() {
			_, _ = gb.Execute(fail)
		}
	})
}

// A refusal, with the clock read that a caller pays to ask for one, as
// gobreaker's reads its own.
func BenchmarkReject(b *testing.B) {
	b.Run("Admit", func(b *testing.B) {
		br := must(b, breaker.Config{})
		br.Force(0, 0, "bench")
		for b.Loop() {
			br.Admit(0, 1)
		}
	})
	b.Run("clock+Admit", func(b *testing.B) {
		br := must(b, breaker.Config{})
		br.Force(0, 0, "bench")
		origin := time.Now()
		for b.Loop() {
			br.Admit(time.Since(origin), 1)
		}
	})
	b.Run("gobreaker/Execute", func(b *testing.B) {
		gb := gobreaker.NewCircuitBreaker[struct{}](gobreaker.Settings{Timeout: time.Hour,
			ReadyToTrip: func(gobreaker.Counts) bool { return true }})
		none := func() (struct{}, error) { return struct{}{}, nil }
		_, _ = gb.Execute(func() (struct{}, error) { return struct{}{}, errFailed })
		for b.Loop() {
			_, _ = gb.Execute(none)
		}
	})
}

// One probe that fails, which is one open period.
func BenchmarkProbe(b *testing.B) {
	br := must(b, breaker.Config{Base: ms, Cap: ms})
	br.Trip(0, "bench")
	now := time.Duration(0)
	for b.Loop() {
		now += 10 * ms
		k, _ := br.Admit(now, 1)
		br.Failure(now, k, false)
	}
}

func BenchmarkForce(b *testing.B) {
	br := must(b, breaker.Config{})
	now := time.Duration(0)
	for b.Loop() {
		now += ms
		br.Force(now, sec, "bench")
	}
}

// The first roll after an idle gap, of every length that costs.
func BenchmarkIdleRoll(b *testing.B) {
	for _, gap := range []time.Duration{sec, 59 * sec, time.Hour} {
		b.Run(gap.String(), func(b *testing.B) {
			br := must(b, breaker.Config{})
			now := time.Duration(0)
			for b.Loop() {
				now += gap
				br.Tick(now)
			}
		})
	}
}

func BenchmarkTick10kScopes(b *testing.B) {
	s := mustScopes(b, ScopesConfig{})
	for i := range 10_000 {
		leaf(b, s, "g", strconv.Itoa(i%100), strconv.Itoa(i))
	}
	now := time.Duration(0)
	for b.Loop() {
		now += sec
		s.Tick(now)
	}
}
