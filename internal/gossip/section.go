// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// A Section is one named part of what the fleet shares: the rows of a limiter,
// the votes of the breakers. The session moves it and knows nothing of it.
//
// A section numbers its changes: its mark for a peer is the number of the latest
// change that concerns the peer, and only rises. The session remembers per peer
// the mark that was acknowledged, and sends what came after it until that is
// acknowledged too, so a lost packet needs no care. Packets are lost, repeated
// and overtake each other: Merge must be commutative and idempotent.
//
// The session calls a section from one goroutine at a time; a section that is
// also used by others has its own lock.
type Section interface {
	// Mark is the section's mark for a peer. It is asked before each packet, so
	// it must be cheap.
	Mark(to crdt.Replica) uint64

	// Delta appends to b what changed after since, oldest change first, in at
	// most room bytes, and returns the mark up to which the peer is complete once
	// it has merged this: less than Mark if not all fitted. since is 0 for a peer
	// that acknowledged nothing. It is also called when there is nothing new, for
	// a keep-alive: what it appends then renews what must not grow old.
	Delta(now time.Duration, b []byte, to crdt.Replica, since uint64, room int) (_ []byte, upto uint64)

	// Merge takes in what the same section of a peer appended. It keeps nothing
	// of b. An error is counted and says that b is malformed or refused; then
	// nothing of b has been taken in, and the peer is not told to stop sending it.
	Merge(c crdt.Contact, b []byte) error

	// Gone says that a peer's incarnation is over for good: a later incarnation of its
	// name was heard, it left, or it made room for a newcomer.
	Gone(now time.Duration, peer crdt.Replica)
}

// A Keeper is a [Section] that says with whom it needs keep-alives at their full pace,
// such as a peer to which it has lent something. In a fleet of three all are kept at
// that pace. In a larger one the others rest, see [Config.KeepAlive].
type Keeper interface {
	// Keeps tells whether it needs that with a peer now. It is asked as often as Mark; a
	// section that is a [Counter] counts when it begins.
	Keeps(to crdt.Replica) bool
}

// A Counter is a [Section] that says whether anything has changed at all, so that a
// session of many peers need not ask for the mark of each.
type Counter interface {
	// Counted rises whenever the mark for any peer does. It is asked at each wake.
	Counted() uint64
}
