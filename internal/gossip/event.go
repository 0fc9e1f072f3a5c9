// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"math"
	"net/netip"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// Never is the wake instant of a process that waits for nothing.
const Never = time.Duration(math.MaxInt64)

// EventKind says what happened.
type EventKind uint8

const (
	// Wake says that the wake instant has come or that a section has changed.
	Wake EventKind = iota
	// Packet says that a packet came in.
	Packet
	// Join names the address of a seed, which is tried for ever.
	Join
	// Hint names an address where somebody may be. It is tried soon, and forgotten
	// like any other.
	Hint
	// Leave says that this incarnation ends now, by its own word. From then on the session
	// tells nothing but that, until all who are heard have acknowledged it.
	Leave
)

// An Event is what happens to a step machine such as a [Session].
type Event struct {
	Kind   EventKind
	Addr   netip.AddrPort // Packet: where it came from. Join and Hint: the address
	Packet []byte         // Packet: the receiver neither keeps nor changes it
	Wall   int64          // wall clock, nanoseconds since 1970, read with now; 0 is unknown
}

// ActionKind says what is to be done.
type ActionKind uint8

const (
	// Send asks for one packet to be sent, once.
	Send ActionKind = iota
	// Displaced says that a later incarnation of the session's own name is at work, or that
	// a peer gave this one up for newcomers, see [Config.MaxPeers]. It comes once and
	// last: the session is over.
	Displaced
	// Rejoined says that a higher incarnation of the session's own name was known, as
	// after a restart with a clock that is behind, and that the session goes on above it.
	// Only where every section is a [Rejoiner], and within a second of the first answer.
	Rejoined
	// Left says that all who were heard lately know that this incarnation is over. It comes
	// once and last: the session is over.
	Left
)

// An Action is what a step machine wants done.
type Action struct {
	Kind   ActionKind
	Addr   netip.AddrPort // Send
	Packet []byte         // Send: valid until the next Step
	By     crdt.Replica   // Rejoined: who the session is now. Displaced: the incarnation that took the name, or the own one if it was given up
}
