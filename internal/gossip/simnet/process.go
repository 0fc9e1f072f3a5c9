// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package simnet

import (
	"bytes"
	"net/netip"
	"time"

	"github.com/stormguard-mq/stormguard/internal/gossip"
)

// A Process is one incarnation of the program on a node. A [gossip.Session] is one. A program that
// has more to simulate wraps a session in its own Process. It hands the session its packets, adds
// its own wakes, and calls the session's Step with a [gossip.Wake] when a section has changed.
//
// All instants are on the node's own monotonic clock, whose origin differs between incarnations. A
// Process must not depend on anything but the arguments of Step, or the run does not repeat.
type Process interface {
	// Step takes in one event and appends its actions. The net hands over [gossip.Wake] and
	// [gossip.Packet]; the packet belongs to the net. The net copies outgoing packets before it
	// calls Step again, and ignores actions other than [gossip.Send].
	Step(now time.Duration, ev gossip.Event, actions []gossip.Action) []gossip.Action

	// Wake returns when the process wants its next [gossip.Wake]. The net asks after every Step. An
	// instant in the past means now; [gossip.Never] means never.
	Wake() time.Duration
}

// Member returns a process that is s. At its first step, s is told its seeds.
func Member(s *gossip.Session, seeds ...netip.AddrPort) Process {
	return &member{Session: s, seeds: seeds}
}

type member struct {
	*gossip.Session

	seeds []netip.AddrPort // seeds that the session was not told yet
}

func (m *member) Step(now time.Duration, ev gossip.Event, actions []gossip.Action) []gossip.Action {
	for _, seed := range m.seeds {
		n := len(actions)
		actions = m.Session.Step(now, gossip.Event{Kind: gossip.Join, Addr: seed, Wall: ev.Wall}, actions)
		for i := range actions[n:] {
			actions[n+i].Packet = bytes.Clone(actions[n+i].Packet) // the next Step overwrites it
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
