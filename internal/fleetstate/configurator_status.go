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
	Configuration escrow.Configuration // the newest; number 0 if none is known
	Complete      uint64               // the highest that all have applied who lost by it
	Applied       uint64               // by this process
	Loaded        uint64               // by an operator into this process, if the configuration is static
	Members       []ConfigMember       // of the newest, by name
	Log           []Record             // of the latest writes, oldest first

	// Lacking are those who have not applied a configuration though their share shrank,
	// by name: until they do, or are evicted, nobody uses what they gave up. While
	// a cut is unheard, they admit by the larger limit.
	Lacking []string

	// Settled says that this incarnation knows that its configuration is the newest, or was after
	// its start. Before, it mints nothing.
	Settled  bool
	Member   bool
	Joining  bool
	Leaving  bool          // and gone, when not Member
	Evicted  uint64        // the latest number by which this incarnation was evicted; 0 is none
	Minting  time.Duration // until when the applier may mint; Unfenced is for ever
	Requests int           // of this process, undecided

	Away      error         // why the register cannot be reached; nil if it can
	Full      error         // why what members ask for is not written; nil if it can be
	Refused   error         // why the latest document was refused; nil if it was not
	Foreign   uint64        // packets refused, of other fleets or policies
	Differing uint64        // packets and documents refused, of another content for one number
	Differs   *DiffersError // the latest of these, nil if there was none
	Err       error         // of the applier, which refused a configuration
}

// ConfigMember is a member as this process sees it.
type ConfigMember struct {
	escrow.Member

	Known   uint64        // the newest configuration it knows, 0 if nothing was heard
	Applied uint64        // the highest that it keeps within
	Loaded  uint64        // by an operator, if the configuration is static
	Heard   time.Duration // since it was heard; -1 if it never was
	Settled bool          // it may mint
}

// Status describes it, for people and tests. It costs a copy of the roster.
func (c *Configurator) Status(now time.Duration) ConfiguratorStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := ConfiguratorStatus{
		Complete: c.complete(), Applied: c.own, Loaded: c.loaded,
		Settled: c.settled, Member: c.voter >= 0, Joining: c.joining, Leaving: c.leaving, Evicted: c.evicted, Minting: c.until, Requests: len(c.wishes),
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
		case i == c.voter:
			m.Known, m.Applied, m.Loaded, m.Heard, m.Settled = c.known(), c.own, c.loaded, 0, c.settled
		case f != nil && f.met:
			m.Known, m.Loaded, m.Heard, m.Settled = f.row.known, f.row.loaded, max(0, now-f.heard), f.row.flags&confSettled != 0
		}
		s.Members = append(s.Members, m)
	}
	return s
}

// lackingLocked are those whom configurations wait for.
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

// Number is the newest configuration that is known, and the highest that is complete; 0 if
// there is none.
func (c *Configurator) Number() (newest, complete uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.known(), c.complete()
}
