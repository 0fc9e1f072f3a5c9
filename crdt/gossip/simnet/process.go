// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package simnet

import (
	"time"

	"github.com/stormguard-mq/stormguard/crdt/gossip"
)

// A Process is one life of whatever runs on a node. A [gossip.Session] is one;
// a program that has more to simulate wraps a session in a Process of its own,
// hands it the packets, adds its own wakes, and calls the session's Step with a
// [gossip.Wake] when one of its sections has changed.
//
// All instants are on the node's own monotonic clock, whose origin is the
// life's own. A Process must not depend on anything but what Step is given, or
// the run does not repeat.
type Process interface {
	// Step takes in one event and appends what is to be done. The net hands over
	// [gossip.Wake] and [gossip.Packet]; the packet belongs to the net. It takes
	// copies of what is to be sent before it calls Step again, and ignores
	// actions other than [gossip.Send].
	Step(now time.Duration, ev gossip.Event, actions []gossip.Action) []gossip.Action

	// Wake is when the process wants its next [gossip.Wake], asked after every
	// Step. An instant in the past is now; [gossip.Never] is never.
	Wake() time.Duration
}
