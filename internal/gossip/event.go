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

// EventKind is the kind of an [Event].
type EventKind uint8

const (
	// Wake says that the wake instant has come or that a section has changed.
	Wake EventKind = iota
	// Packet says that a packet came in.
	Packet
	// Join names the address of a seed, which is tried without end.
	Join
	// Hint names an address where somebody may be. It is tried soon, and forgotten
	// like any other.
	Hint
	// Leave ends this incarnation in order. From then on the session sends only its departure,
	// until all peers that are heard have acknowledged it.
	Leave
)

// An Event is an input of a step machine such as a [Session].
type Event struct {
	Kind   EventKind
	Addr   netip.AddrPort // Packet: where it came from. Join and Hint: the address
	Packet []byte         // Packet: the receiver neither keeps nor changes it
	Wall   int64          // wall clock, nanoseconds since 1970, read with now; 0 is unknown
}

// ActionKind is the kind of an [Action].
type ActionKind uint8

const (
	// Send asks for one packet to be sent, once.
	Send ActionKind = iota
	// Displaced says that a later incarnation of the session's own name runs, or that a peer gave
	// this one up for newcomers; see [Config.MaxPeers]. It comes once and last: the session is
	// over.
	Displaced
	// Rejoined says that a peer knew a higher incarnation of the session's own name, as after a
	// restart with a clock that is behind. The session goes on above it. This happens only if every
	// section is a [Rejoiner], and within a second of the first answer.
	Rejoined
	// Left says that all peers that were heard lately know that this incarnation is over. It comes
	// once and last: the session is over.
	Left
)

// An Action is an output of a step machine: something for its driver to do.
type Action struct {
	Kind   ActionKind
	Addr   netip.AddrPort // Send
	Packet []byte         // Send: valid until the next Step
	// Rejoined: the session's name and incarnation now. Displaced: the incarnation that took the
	// name, or the own one if a peer gave it up.
	By crdt.Replica
}
