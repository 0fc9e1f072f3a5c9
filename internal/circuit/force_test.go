// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"testing"

	"github.com/stormguard-mq/stormguard/breaker"
)

func TestForce(t *testing.T) {
	bothClocks(t, func(t *testing.T) {
		for name, prepare := range map[string]func(b *Breaker) []Token{
			"closed":   func(b *Breaker) []Token { return nil },
			"inflight": func(b *Breaker) []Token { return []Token{enter(t, b), enter(t, b)} },
			"open":     func(b *Breaker) []Token { k := enter(t, b); trip(t, b, 0); return []Token{k} },
			"half-open": func(b *Breaker) []Token {
				k := enter(t, b)
				trip(t, b, 0)
				return []Token{k, admit(t, b, sec), admit(t, b, sec)}
			},
		} {
			b := must(t, breaker.Config{Successes: 2, Probes: 2})
			old := prepare(b)
			b.Force(sec, 10*sec, "storm")
			for range 10 {
				for _, k := range old {
					b.Success(sec, k)
				}
			}
			if _, ok := b.Enter(); ok {
				t.Fatalf("%s: Enter during a force", name)
			}
			if r := refused(t, b, 11*sec-1); r.Until != 11*sec || r.Cause != "storm" {
				t.Fatalf("%s: %+v", name, r)
			}
			for _, k := range old {
				b.Success(11*sec, k)
			}
			state(t, b, 11*sec, breaker.Open)
			if !admit(t, b, 11*sec).Probe() {
				t.Fatalf("%s: not a probe", name)
			}
		}
	})
}

func TestForceExtendsAndNeverShortens(t *testing.T) {
	b := must(t, breaker.Config{})
	b.Force(0, 10*sec, "a")
	b.Force(sec, sec, "b")
	if r := refused(t, b, 5*sec); r.Until != 10*sec || r.Cause != "a" {
		t.Fatalf("%+v", r)
	}
	b.Force(sec, 20*sec, "c")
	if r := refused(t, b, 5*sec); r.Until != 21*sec || r.Cause != "c" {
		t.Fatalf("%+v", r)
	}
	b.Force(2*sec, 0, "d")
	b.Force(2*sec, sec, "e")
	b.Force(2*sec, -1, "f")
	if r := refused(t, b, never-1); r.Until != never || r.Cause != "d" {
		t.Fatalf("%+v", r)
	}
	b.Force(sec, never-1, "overflow")
	refused(t, b, never-1)
	b.Release(3 * sec)
	b.Release(3 * sec)
	state(t, b, 3*sec, breaker.HalfOpen)
	reclose(t, b, 3*sec)
	b.Release(3 * sec)
	state(t, b, 3*sec, breaker.Closed)
	trip(t, b, 4*sec)
	b.Release(4 * sec) // not a force
	state(t, b, 4*sec, breaker.Open)
	// A force over an open period of the same length is a force all the same.
	b.Force(4*sec, 100*ms, "g")
	if s := b.Snapshot(4 * sec); !s.Forced || s.Cause != "g" {
		t.Fatalf("%+v", s)
	}
}

func TestForceClosed(t *testing.T) {
	bothClocks(t, func(t *testing.T) {
		b := must(t, breaker.Config{})
		b.Failure(0, enter(t, b), true)
		b.ForceClosed(0, "operator")
		if s := b.Snapshot(0); s.State != breaker.Closed || s.Failures != 0 || s.Run != 0 {
			t.Fatalf("%+v", s)
		}
		trip(t, b, 0)
		b.Failure(sec, admit(t, b, sec), true)
		b.ForceClosed(sec, "operator")
		if s := b.Snapshot(sec); s.State != breaker.Closed || s.BackoffLevel != 0 || s.Cause != "" {
			t.Fatalf("%+v", s)
		}
		trip(t, b, sec)
		if got := refused(t, b, sec).Until; got != sec+100*ms {
			t.Fatalf("the backoff went on to %v", got)
		}
		b.Force(sec, 0, "storm")
		b.ForceClosed(2*sec, "operator")
		trip(t, b, 2*sec)
		reclose(t, b, 3*sec)
	})
}

func TestTrip(t *testing.T) {
	bothClocks(t, func(t *testing.T) {
		b := must(t, breaker.Config{})
		k := enter(t, b)
		b.Trip(0, "witness")
		b.Trip(50*ms, "again")
		b.Success(50*ms, k)
		if r := refused(t, b, 100*ms-1); r.Cause != "witness" || r.Until != 100*ms {
			t.Fatalf("%+v", r)
		}
		p := admit(t, b, 100*ms)
		b.Trip(150*ms, "witness 2")
		b.Success(150*ms, p)
		if r := refused(t, b, 150*ms); r.Cause != "witness 2" || r.Until != 250*ms {
			t.Fatalf("half-open: %+v", r)
		}
		reclose(t, b, 250*ms)
		// Whatever its pace.
		trip(t, b, sec)
		for range 5 {
			b.Success(2*sec, admit(t, b, 2*sec))
		}
		b.Trip(2*sec, "witness")
		if b.Passing() {
			t.Fatal("open, yet passing")
		}
		state(t, b, 2*sec, breaker.Open)
	})
}

func TestAttach(t *testing.T) {
	b := must(t, breaker.Config{NoRun: true})
	var n uint64 = 1000 // what it counted before is not ours
	detach := b.Attach(func() uint64 { return n })
	n += 10
	b.Tick(sec) // booked before the edge
	n += 5
	if s := b.Snapshot(sec); s.Successes != 15 {
		t.Fatalf("%+v", s)
	}
	if s := b.Snapshot(60 * sec); s.Successes != 5 {
		t.Fatalf("a minute on: %+v", s)
	}
	n = 3 // restarted
	b.Tick(2 * sec)
	n = 4
	if s := b.Snapshot(2 * sec); s.Successes != 11 {
		t.Fatalf("after a restart: %+v", s)
	}
	detach()
	n = 1000
	if s := b.Snapshot(2 * sec); s.Successes != 11 {
		t.Fatalf("after detach: %+v", s)
	}
	// What succeeds while the breaker is not closed is not in the next window.
	detach = b.Attach(func() uint64 { return n })
	defer detach()
	b.Trip(3*sec, "test")
	n += 100
	reclose(t, b, 4*sec)
	if s := b.Snapshot(4 * sec); s.Successes != 0 {
		t.Fatalf("after a close: %+v", s)
	}
}
