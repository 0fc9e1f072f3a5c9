// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import "time"

// Contact has the sender and the times of a packet from another replica. All times are
// monotonic; each process has its own origin.
type Contact struct {
	From Replica
	Now  time.Duration // own clock, at receipt
	Sent time.Duration // peer's clock, at sending; never higher in a repeated or older packet

	// Echo is on our clock: when we sent our newest packet that the peer had heard when it
	// sent this one. 0 is none.
	Echo time.Duration

	// Hears is on our clock: the latest instant as of which the peer is known to hear us. It
	// is Echo, or later if little is sent to the peer and it had heard all of that. 0 means
	// Echo.
	Hears time.Duration

	// Rest is how much later than a keep-alive the next packet between us and the peer may
	// come, in either direction. In a fleet of three it is 0; see package gossip.
	Rest time.Duration
}
