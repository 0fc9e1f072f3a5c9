// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"testing"

	"github.com/stormguard-mq/stormguard/breaker"
)

// One probe goes through by permit, and the breaker stays shut whatever becomes
// of it, until whoever holds it closes it.
func TestPermit(t *testing.T) {
	for _, c := range []struct {
		name   string
		settle func(*Breaker, Token)
		trial  Trial
		cause  breaker.Cause
	}{
		{"passed", func(b *Breaker, k Token) { b.Success(2*sec, k) }, TrialPassed, "fleet"},
		{"failed", func(b *Breaker, k Token) { b.Failure(2*sec, k, true) }, TrialFailed, breaker.CauseProbe},
		{"slow", func(b *Breaker, k Token) { b.Slow(2*sec, k, true) }, TrialFailed, breaker.CauseSlow},
		{"lost", func(b *Breaker, _ Token) { b.Tick(sec + b.Config().Lease) }, TrialFailed, breaker.CauseLost},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := must(t, breaker.Config{Probes: 3, Successes: 1})
			b.Hold(0, 3, "fleet")
			refused(t, b, 1000*sec)
			b.Permit(sec)
			k := admit(t, b, sec)
			refused(t, b, sec)
			c.settle(b, k)
			s := b.Snapshot(2 * sec)
			if s.State != breaker.Open || !s.Held || s.Trial != c.trial || s.Cause != c.cause || s.BackoffLevel != 3 {
				t.Fatalf("after the probe: %+v", s)
			}
			refused(t, b, 1000*sec)
			b.CloseHeld(1000*sec, "fleet")
			state(t, b, 1000*sec, breaker.Closed)
			trip(t, b, 1001*sec)
			if s := b.Snapshot(1001 * sec); s.BackoffLevel != 2 {
				t.Errorf("the backoff is at %d after a close at 3, want 2", s.BackoffLevel)
			}
		})
	}
}

// An operator's force outlives a hold, and a hold a release.
func TestHoldAndForce(t *testing.T) {
	b := must(t, breaker.Config{})
	b.Hold(0, 1, "fleet")
	b.Release(0)
	state(t, b, 0, breaker.Open)
	b.Force(0, 10*sec, "operator")
	b.CloseHeld(sec, "fleet")
	b.Unhold(sec)
	b.Permit(sec)
	if r := refused(t, b, 10*sec-1); r.Cause != "operator" || r.Until != 10*sec {
		t.Fatalf("refused with %+v", r)
	}
	b.Hold(sec, 9, "fleet")
	admit(t, b, 10*sec)

	b = must(t, breaker.Config{})
	b.Force(0, 0, "operator")
	b.Hold(0, 1, "fleet")
	b.Unhold(0)
	state(t, b, 0, breaker.Open)
	b.Release(0)
	state(t, b, 0, breaker.HalfOpen)
}

// Probes prove something; an operator's close does not, nor a breaker that was never open.
func TestProved(t *testing.T) {
	b := must(t, breaker.Config{})
	proved := func(when string, want bool) {
		t.Helper()
		if got := b.Proved(); got != want {
			t.Errorf("%s: %v", when, got)
		}
	}
	proved("new", false)
	b.Hold(0, 1, "fleet")
	proved("held", false)
	b.CloseHeld(sec, "fleet")
	proved("closed by who held it", true)
	trip(t, b, 2*sec)
	proved("open", false)
	b.ForceClosed(3*sec, "operator")
	proved("closed by force", false)
	trip(t, b, 4*sec)
	reclose(t, b, 5*sec)
	proved("closed by its own probes", true)
}

// A probe that is out when the hold is renewed counts for nothing.
func TestHoldVoidsPermit(t *testing.T) {
	b := must(t, breaker.Config{})
	b.Hold(0, 1, "fleet")
	b.Permit(0)
	k := admit(t, b, 0)
	b.Hold(0, 2, "fleet")
	b.Success(0, k)
	if s := b.Snapshot(0); s.Trial != NoTrial || s.State != breaker.Open || s.BackoffLevel != 2 {
		t.Fatalf("%+v", s)
	}
	b.Unhold(0)
	reclose(t, b, 0)
}
