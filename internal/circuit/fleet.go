// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

// A Fleet decides over breakers together with other processes: what a driver of
// breakers, such as a guard, asks of it. Instants are the breakers'.
//
// All methods are safe for concurrent use and do no I/O. A Fleet calls methods of
// the breakers it was given, so it must not be called under a lock that those
// take.
type Fleet interface {
	// Adopt takes over the breaker of the scope at path, as given to
	// [Scopes.Leaf]. When it returns the breaker is as the fleet wants it: call it
	// before the first delivery of the scope is handled. A breaker may be adopted
	// several times, once for each who uses it, and is left as many times. A call
	// of it that takes slow is reported as slow.
	//
	// After an error the fleet has no part in the breaker, which goes by itself;
	// it is to be left all the same.
	Adopt(now time.Duration, b *Breaker, path []string, slow time.Duration) error

	// Leave gives a breaker up, after the last delivery of its scope. One that the
	// fleet holds is half-open then.
	Leave(now time.Duration, b *Breaker)

	// Step makes time pass: it tells the fleet what became of the breakers and
	// does to them what the fleet asks for. waiting has the breakers, not closed,
	// that a message waits at. Call it every 20 to 100 ms while busy, at once when
	// the function given to Attach is called, and every second otherwise.
	Step(now time.Duration, waiting map[*Breaker]bool) (busy bool)

	// Attach says who drives the fleet from now on, and how it is woken: wake is
	// called, from any goroutine, when Step has something to do. It must not
	// block. The error says that somebody else drives it; detach ends that.
	Attach(wake func()) (detach func(), err error)

	// Scopes describes each scope that is adopted, sorted by name: the leaves and
	// what the fleet decides on above them.
	Scopes() []breaker.FleetScope

	// Scope describes the scope of a breaker; false if it is not adopted. It
	// takes a lock: not for the closed path.
	Scope(b *Breaker) (breaker.FleetScope, bool)
}
