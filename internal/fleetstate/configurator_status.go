// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/internal/escrow"
)

// ConfiguratorStatus is what one process knows about the fleet's configuration.
type ConfiguratorStatus struct {
	Configuration escrow.Configuration // the newest; its number is 0 if none is known
	Complete      uint64               // the newest that all members have applied that lose by it
	Applied       uint64               // the newest that this process has applied
	Loaded        uint64               // the number that an operator loaded into this process, if static
	Members       []ConfigMember       // the members of the newest, by name
	Log           []Record             // the latest writes, oldest first

	// Lacking has the members that have not applied a configuration though their share shrank, by
	// name. Until they do, or are evicted, no member uses what they gave up. If they have not heard
	// of a lower limit, they admit by the larger one.
	Lacking []string

	// Settled says that this incarnation knows that its configuration is the newest, or was the
	// newest after its start. Before that it mints nothing.
	Settled  bool
	Member   bool
	Joining  bool
	Leaving  bool          // it asked to leave; it has left if Member is false
	Evicted  uint64        // the latest number by which this incarnation was evicted; 0 is none
	Minting  time.Duration // until when the applier may mint; Unfenced has no end
	Requests int           // undecided requests of this process

	Away      error         // why the register cannot be reached; nil if it can
	Full      error         // why the members' requests are not written; nil if they can be
	Refused   error         // why the latest document was refused; nil if it was not
	Foreign   uint64        // refused packets of other fleets or policies
	Differing uint64        // refused packets and documents with another content for one number
	Differs   *DiffersError // the latest of these differences, nil if there was none
	Err       error         // the applier's error when it refused a configuration
}

// ConfigMember is a member as this process sees it.
type ConfigMember struct {
	escrow.Member

	Known   uint64        // the newest configuration it knows, 0 if nothing was heard
	Applied uint64        // the newest configuration that it keeps within
	Loaded  uint64        // the number that an operator loaded into it, if static
	Heard   time.Duration // how long ago it was heard; -1 if it never was
	Settled bool          // it may mint
}

// Status describes the configuration, for people and tests. It copies the roster.
func (c *Configurator) Status(now time.Duration) ConfiguratorStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := ConfiguratorStatus{
		Complete: c.complete(), Applied: c.own, Loaded: c.loaded,
		Settled: c.settled, Member: c.selfIndex >= 0, Joining: c.joining, Leaving: c.leaving, Evicted: c.evicted, Minting: c.until, Requests: len(c.wishes),
		Away: c.away, Full: c.full, Refused: c.refused, Foreign: c.foreign, Differing: c.differing, Differs: c.differs, Err: c.broken,
		Lacking: c.lackingLocked(now),
	}
	if c.doc == nil {
		return s
	}
	s.Configuration, s.Log = c.doc.newest().Configuration, slices.Clone(c.doc.log)
	s.Configuration.Roster.Members = slices.Clone(s.Configuration.Roster.Members)
	for i := range c.voters {
		m := ConfigMember{Member: s.Configuration.Roster.Members[i], Heard: -1, Applied: c.applied[c.voters[i].name]}
		switch f := c.voters[i].confPeer; {
		case i == c.selfIndex:
			m.Known, m.Applied, m.Loaded, m.Heard, m.Settled = c.known(), c.own, c.loaded, 0, c.settled
		case f != nil && f.met:
			m.Known, m.Loaded, m.Heard, m.Settled = f.row.known, f.row.loaded, max(0, now-f.heard), f.row.flags&confSettled != 0
		}
		s.Members = append(s.Members, m)
	}
	return s
}

// lackingLocked returns the names that configurations wait for.
func (c *Configurator) lackingLocked(now time.Duration) (names []string) {
	for i, l := range c.chain {
		for _, name := range l.lacking {
			if i > 0 && !c.keepsLocked(now, name, l.Number) && !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	slices.Sort(names)
	return names
}

// Number returns the newest known number and the highest complete one; 0 if there is none.
func (c *Configurator) Number() (newest, complete uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.known(), c.complete()
}
