// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package simnet

import (
	"bytes"
	"net/netip"
	"time"

	"github.com/stormguard-mq/stormguard/internal/gossip"
)

// A Process is one incarnation of whatever runs on a node. A [gossip.Session] is one;
// a program that has more to simulate wraps a session in a Process of its own,
// hands it the packets, adds its own wakes, and calls the session's Step with a
// [gossip.Wake] when one of its sections has changed.
//
// All instants are on the node's own monotonic clock, whose origin is the
// incarnation's own. A Process must not depend on anything but what Step is given, or
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

// Member returns a process that is s, told of its seeds at its first step.
func Member(s *gossip.Session, seeds ...netip.AddrPort) Process {
	return &member{Session: s, seeds: seeds}
}

type member struct {
	*gossip.Session

	seeds []netip.AddrPort // not told yet
}

func (m *member) Step(now time.Duration, ev gossip.Event, actions []gossip.Action) []gossip.Action {
	for _, seed := range m.seeds {
		n := len(actions)
		actions = m.Session.Step(now, gossip.Event{Kind: gossip.Join, Addr: seed, Wall: ev.Wall}, actions)
		for i := range actions[n:] {
			actions[n+i].Packet = bytes.Clone(actions[n+i].Packet) // the next Step ends it
		}
	}
	m.seeds = nil
	return m.Session.Step(now, ev, actions)
}

func (m *member) Wake() time.Duration {
	if m.seeds != nil {
		return 0
	}
	return m.Session.Wake()
}
