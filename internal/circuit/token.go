// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

// A Token is the right to run one delivery. It is a small value and may be
// copied. The zero Token is no right: settling it does nothing.
//
// A probe settles once. A token of the closed path has no identity, or it would cost
// an allocation: whoever holds it settles it once, and twice counts twice.
//
// A token belongs to the breaker that gave it; settling it at another is a
// bug that goes unseen.
type Token struct {
	gen   uint64
	probe *probe
}

// Probe reports whether the token is a half-open probe. A probe must be
// settled: until then, or until its lease ends, it holds a slot. A token of
// the closed path may be dropped, which is the same as excluding it.
func (t Token) Probe() bool { return t.probe != nil }

// probe is one half-open request. Its fields are guarded by Breaker.mu.
type probe struct {
	gen      uint64
	head     uint64
	lease    time.Duration
	deadline time.Duration
	done     func(error) // of gobreaker; nil when the phase is judged by hand
	settled  bool
}

// A Refusal says why [Breaker.Admit] gave no token. The zero Refusal means it
// gave one. A refusal costs no allocation and is not an outcome.
type Refusal struct {
	// State is Open or HalfOpen; Closed means not refused.
	State breaker.State
	// Cause is why the scope is not closed.
	Cause breaker.Cause
	// Scope names what refused: the breaker, or a parent of its leaf.
	Scope string
	// Until is when asking again is worth it. Open: the end of the open
	// period, exactly, or never (the largest Duration) for a force without
	// end. HalfOpen: the end of the earliest lease among the probes that are
	// out; a probe that settles makes room sooner. Parent: now + Base, since a
	// parent has no deadline.
	Until time.Duration
}

// OK reports that the admission was not refused.
func (r Refusal) OK() bool { return r.State == breaker.Closed }
