// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package process

import (
	"time"

	"github.com/stormguard-mq/stormguard/crdt/gossip"
	"github.com/stormguard-mq/stormguard/fleet"
	"github.com/stormguard-mq/stormguard/limiter"
)

const (
	micro   = 1e6
	sayKeys = 32
)

// standing is what there is to say of this process.
func (p *Process) standing() fleet.Standing {
	l := p.limits.Stats()
	s := fleet.Standing{
		Zone: p.cfg.Gossip.Zone, Region: p.cfg.Gossip.Region, Version: p.cfg.Program,
		Charter: l.Charter, Complete: l.Completed, Applied: l.Applied, Share: l.Share,
		Level: float64(l.Level) / micro, Cap: float64(l.Cap) / micro, Lent: float64(l.Lent) / micro, Pinned: float64(l.Pinned) / micro,
	}
	for _, peer := range p.node.Peers() {
		s.Unacked += peer.Unacked
		if peer.State == gossip.Fresh {
			s.SyncDelay = max(s.SyncDelay, peer.Delay)
		}
	}
	for _, v := range p.limits.Busiest(sayKeys) {
		s.Keys = append(s.Keys, fleet.KeyStanding{
			Key: v.Key, Admitted: uint64(v.Admitted() / micro), Denied: uint64(v.Sums.Denied / micro),
			Level: float64(v.Level) / micro, Cap: float64(v.Cap) / micro,
		})
	}
	return s
}

// Status is what this process knows of its fleet.
type Status struct {
	Fleet   string
	Name    string
	Members []Member // of the roster, and whoever else is heard, by name
	Charter fleet.CharterStatus
	Limits  limiter.Stats

	// Skew is the standard deviation of level over cap: 0 is even.
	Skew float64
	// SyncDelay is the longest lately from a change here to its acknowledgement by
	// a peer that is heard.
	SyncDelay time.Duration
	Journal   fleet.JournalStats
	Scopes    []Scope // of breakers, that this process has
}

// A Member is a process as another one sees it.
type Member struct {
	fleet.Standing

	Roster  bool          // is in it
	Weight  int           // there
	Known   bool          // something was heard of it
	State   string        // fresh, silent or lost; self; unknown
	Applied uint64        // the charter that it keeps within, by its own word
	Lacking bool          // others wait for it to apply a charter
	RTT     time.Duration // of the shortest round trip lately
	Offset  time.Duration // its wall clock less ours
	Broke   uint64        // stamps of it that broke the 50 ms rule
}

// A Scope is what the fleet makes of a breaker's scope.
type Scope struct {
	Name, State, Cause string
	Held, Probing      bool
}

// Status describes the fleet, for people. It costs copies of everything.
func (p *Process) Status() Status {
	s := Status{Fleet: p.cfg.Fleet, Name: p.self.Name, Limits: p.limits.Stats()}
	if p.node == nil {
		return s
	}
	now := p.clock()
	s.Charter = p.charters.Status(now)
	s.Journal = p.journal.Stats(now)
	standings := p.standings.All(now, nil)
	s.Skew = fleet.Skew(standings)
	for _, c := range p.member.Scopes() {
		s.Scopes = append(s.Scopes, Scope{Name: c.Name, State: c.State.String(), Cause: string(c.Cause), Held: c.Held, Probing: c.Probing})
	}
	at := map[string]*Member{}
	member := func(name string) *Member {
		m := at[name]
		if m == nil {
			m = &Member{State: "unknown"}
			m.Name = name
			at[name] = m
		}
		return m
	}
	for _, st := range standings {
		m := member(st.Name)
		m.Standing, m.Known, m.Applied = st, true, st.Applied
	}
	for _, c := range s.Charter.Members {
		m := member(c.Name)
		m.Roster, m.Weight, m.Applied = true, c.Weight, c.Applied
	}
	for _, name := range s.Charter.Lacking {
		member(name).Lacking = true
	}
	for _, peer := range p.node.Peers() {
		m := member(peer.Name)
		m.State, m.RTT, m.Zone, m.Region, m.Heard = peer.State.String(), peer.RTT, peer.Zone, peer.Region, peer.Heard
		m.Offset, _, m.Broke = p.journal.Clock(peer.Replica)
		if peer.State == gossip.Fresh {
			s.SyncDelay = max(s.SyncDelay, peer.Delay)
		}
	}
	member(p.self.Name).State = "self"
	s.Members = sorted(at)
	return s
}
