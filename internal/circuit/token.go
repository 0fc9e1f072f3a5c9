// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

// A Token is the right to run one delivery. It is a small value and may be copied. The
// zero Token is no right: settling it does nothing.
//
// A probe settles once. A token of the closed path has no identity, since an identity
// would cost an allocation: its holder must settle it once only, or it counts twice.
//
// A token must be settled at the breaker that gave it. Nothing detects a wrong breaker.
type Token struct {
	gen   uint64
	probe *probe
}

// Probe reports whether the token is a half-open probe. A probe must be settled: it uses a
// slot until it is settled or its lease ends. A token of the closed path may be dropped,
// which is the same as excluding it.
func (t Token) Probe() bool { return t.probe != nil }

// probe is one half-open request. Its fields are guarded by Breaker.mu.
type probe struct {
	gen      uint64
	head     uint64
	lease    time.Duration
	deadline time.Duration
	done     func(error) // tells gobreaker the outcome; nil when the phase is judged by hand
	settled  bool
}

// A Refusal says why [Breaker.Admit] gave no token. The zero Refusal means that Admit gave
// a token. A refusal costs no allocation and is not an outcome.
type Refusal struct {
	// State is Open or HalfOpen; Closed means not refused.
	State breaker.State
	// Cause is why the scope is not closed.
	Cause breaker.Cause
	// Scope is the name of the breaker, or of the parent scope, that refused.
	Scope string
	// Until is when another call of Admit may succeed. Open: exactly the end of the open
	// period, or the largest Duration for a force without end. HalfOpen: the end of the
	// earliest lease of the probes that are out; a probe that settles makes room sooner.
	// Parent: now + Base, since a parent has no deadline. If the leaf waits for its turn to
	// probe below that parent: the time of the next turn, plus Base if the leaf has had one.
	Until time.Duration
}

// OK reports whether Admit gave a token.
func (r Refusal) OK() bool { return r.State == breaker.Closed }
