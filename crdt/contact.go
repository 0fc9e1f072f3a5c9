// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import "time"

// Contact is what a packet of another replica says beside the state it carries. All times are monotonic,
// each process's from an origin of its own.
type Contact struct {
	From Replica
	Now  time.Duration // own clock, at receipt
	Sent time.Duration // the peer's clock, at sending; repeated and older packets have a lower one
	Echo time.Duration // own clock: the latest Sent of ours that the peer had heard when it sent; 0 is none
}
