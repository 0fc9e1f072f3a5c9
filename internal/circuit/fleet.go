// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

// A Fleet decides about breakers together with other processes. A driver of breakers, such
// as a guard, calls it. Its instants are those of the breakers.
//
// All methods are safe for concurrent use and do no I/O. A Fleet calls methods of its
// breakers, so do not call it under a lock that those methods take.
type Fleet interface {
	// Adopt takes over the breaker of the scope at path, as given to [Scopes.Leaf]. When
	// Adopt returns, the breaker has the state that the fleet wants: call it before the
	// first delivery of the scope is handled. Each user of a breaker adopts it once and
	// leaves it once. slow is the age at which the driver reports a call as slow.
	//
	// After an error the fleet has no part in the breaker, which decides alone. The caller
	// must call Leave all the same.
	Adopt(now time.Duration, b *Breaker, path []string, slow time.Duration) error

	// Leave gives a breaker up, after the last delivery of its scope. A breaker that the
	// fleet holds becomes half-open.
	Leave(now time.Duration, b *Breaker)

	// Step makes time pass: it tells the fleet the states of the breakers, and carries out
	// the fleet's decisions on them. waiting has the breakers that are not closed and have
	// a waiting message. Call Step every 20 to 100 ms while busy, otherwise every second,
	// and at once when the function given to Attach is called.
	Step(now time.Duration, waiting map[*Breaker]bool) (busy bool)

	// Attach makes the caller the driver of the fleet. The fleet calls wake, from any
	// goroutine, when Step has something to do; wake must not block. The error says that
	// the fleet has another driver. detach ends the role.
	Attach(wake func()) (detach func(), err error)

	// Scopes describes each adopted scope, sorted by name: the leaves, and the scopes
	// above them that the fleet decides about.
	Scopes() []breaker.FleetScope

	// Scope describes the scope of a breaker; false if the breaker is not adopted. It
	// takes a lock, so do not call it on the closed path.
	Scope(b *Breaker) (breaker.FleetScope, bool)
}
