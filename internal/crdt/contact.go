// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import "time"

// Contact is what a packet of another replica says beside the state it carries. All times are
// monotonic, each process's from an origin of its own.
type Contact struct {
	From Replica
	Now  time.Duration // own clock, at receipt
	Sent time.Duration // the peer's clock, at sending; repeated and older packets have a lower one
	Echo time.Duration // own clock: the latest Sent of ours that the peer had heard when it sent; 0 is none

	// Hears is the own instant as of which the peer is known to hear us: Echo, or later
	// where little is sent to it and it had heard all of that. 0 is Echo.
	Hears time.Duration

	// Rest is by how much later than a keep-alive the next packet of the peer, or our next
	// one to it, may come. In a fleet of three it is 0; see package gossip.
	Rest time.Duration
}
