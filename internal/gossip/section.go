// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// A Section is one named part of the fleet's shared state, such as the rows of a limiter or the
// votes of the breakers. The session moves it and does not know its content.
//
// A section numbers its changes. Its mark for a peer is the number of the latest change that
// concerns the peer; a mark only rises. The session remembers the mark that each peer acknowledged.
// It sends the changes after that mark until they are acknowledged too, so a lost packet needs no
// care. Packets are lost, repeated and overtake each other: Merge must be commutative and
// idempotent.
//
// The session calls a section from one goroutine at a time. A section that others use too has its
// own lock.
type Section interface {
	// Mark returns the section's mark for a peer. It is called before each packet, so it must be
	// cheap.
	Mark(to crdt.Replica) uint64

	// Delta appends to b the changes after since, oldest first, in at most room bytes. It returns
	// the mark up to which the peer is complete when it has merged them: less than Mark if not all
	// fitted. since is 0 for a peer that acknowledged nothing. Delta is also called for a
	// keep-alive, when there is nothing new. What it appends then renews values that must not grow
	// old.
	Delta(now time.Duration, b []byte, to crdt.Replica, since uint64, room int) (_ []byte, upto uint64)

	// Merge takes in bytes that Delta of the same section of a peer appended. It keeps nothing of
	// b. An error says that b is malformed or refused; then nothing of b was taken in. The session
	// counts the error and does not acknowledge b, so the peer sends it again with later packets.
	Merge(c crdt.Contact, b []byte) error

	// Gone says that an incarnation of a peer is over for good: a later incarnation of its name was
	// heard, the incarnation left, or it made room for a newcomer.
	Gone(now time.Duration, peer crdt.Replica)
}

// A Keeper is a [Section] that needs keep-alives at the full pace with some peers, such as a peer
// to which it has lent something. In a fleet of three all pairs have that pace. In a larger fleet
// the other pairs rest; see [Config.KeepAlive].
type Keeper interface {
	// Keeps reports whether the section needs the full pace with a peer now. It is called as often
	// as Mark. If the section is also a [Counter], Counted rises when this need begins.
	Keeps(to crdt.Replica) bool
}

// A Counter is a [Section] that says whether anything has changed at all. So a session of many
// peers need not ask for the mark of each.
type Counter interface {
	// Counted rises whenever the mark of any peer rises. It is called at each wake.
	Counted() uint64
}
