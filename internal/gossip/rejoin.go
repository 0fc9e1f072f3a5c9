// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"net/netip"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// A Rejoiner is a [Section] that can go on under a higher incarnation of its own name. To peers the
// lower incarnation is over then: they were told Gone, and acknowledge from 0 again. The section
// forgets what peers hold of the lower incarnation, as after a restart.
type Rejoiner interface {
	// Rejoin tells the section its incarnation from now on.
	Rejoin(now time.Duration, self crdt.Replica)
}

// An incarnation has a counter in its high bits and a random id in its low bits. At the start of a
// process the counter comes from the wall clock, which is a guess. If a peer knows a higher
// incarnation of the name, the process takes the next counter above it.
const (
	idBits     = 20
	maxCounter = 1 << (63 - idBits) // counters stay below this
)

// NewIncarnation returns the incarnation of a process that starts at that wall time. id is random.
func NewIncarnation(wall time.Time, id uint64) uint64 {
	return uint64(min(max(wall.UnixMilli(), 1), maxCounter-1))<<idBits | id&(1<<idBits-1)
}

// Limits of rejoining. Of two running processes of one name, the one that started later stays. So a
// process that peers have known for a while ends instead.
const (
	youngFor   = time.Second // since the first answer of a peer
	maxRejoins = 4           // per process, so that two that start together do not go on without end
)

// rejoins reports whether the session may go on above another incarnation of its name.
func (s *Session) rejoins(now time.Duration, above uint64) bool {
	return s.canRejoin && s.rejoined < maxRejoins && above>>idBits+1 < maxCounter && (s.metAt == Never || now-s.metAt < youngFor)
}

// rejoin takes the next incarnation above another one of the same name.
func (s *Session) rejoin(now time.Duration, above uint64) crdt.Replica {
	s.rejoined++
	s.cfg.Self.Incarnation = (above>>idBits+1)<<idBits | uint64(s.rand()*(1<<idBits))
	for k := range s.sections {
		s.sections[k].Section.(Rejoiner).Rejoin(now, s.cfg.Self) //nolint:forcetypeassert // canRejoin
	}
	for _, p := range s.peers {
		s.back(p)
		p.reset(now, p.incarnation, len(s.sections))
		s.look(now, p)
	}
	s.plan()
	return s.cfg.Self
}

// Self returns the name of this process and its incarnation now; see [Rejoined].
func (s *Session) Self() crdt.Replica { return s.cfg.Self }

// challenge handles a packet of our own name with a higher incarnation. It asks the sender to say
// so to this incarnation. A running process does that; an old or forged packet ends nothing.
func (s *Session) challenge(now time.Duration, addr netip.AddrPort, actions []Action) []Action {
	if now < s.tellAt {
		return actions
	}
	s.tellAt = now + tellEvery
	start := len(s.arena)
	s.arena = s.begin(now, 0).append(s.arena, s.cfg.Self.Name)
	return s.sent(start, addr, actions)
}
