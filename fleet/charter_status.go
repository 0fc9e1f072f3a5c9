// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/limiter"
)

// CharterStatus is what one process knows about the fleet's charter.
type CharterStatus struct {
	Charter  limiter.Charter // the newest
	Complete uint64          // the highest that all have applied who lost by it
	Applied  uint64          // by this process
	Members  []CharterMember // of the newest, by name

	// Lacking are those who have not applied a charter though their share shrank,
	// by name: until they do, or are evicted, nobody uses what they gave up. While
	// a cut is unheard, they admit by the larger limit.
	Lacking []string

	// Settled says that this life knows that its charter is the newest, or was after
	// its start. Before, it mints nothing.
	Settled bool
	// Votes says that it votes for the next one. A new life begins to one charter
	// later, which it asks for.
	Votes   bool
	Member  bool
	Evicted bool          // this life is over; a new one may join
	Leaving bool          // and gone, when not Member
	Minting time.Duration // until when the books may mint; Unfenced is for ever

	Requests  int           // of this process, undecided
	Foreign   uint64        // packets refused, of other fleets or policies
	Differing uint64        // packets refused, of those with another charter of one number
	Differs   *CharterError // the latest of these, nil if there was none
	Err       error         // of the books, which refused a charter
}

// CharterMember is a member as this process sees it.
type CharterMember struct {
	limiter.Member

	Known   uint64        // the newest charter it knows, 0 if nothing was heard
	Applied uint64        // the highest that it keeps within
	Heard   time.Duration // since it was heard; -1 if it never was
	Settled bool          // it votes
}

// Status describes it, for people and tests. It costs a copy of the roster.
func (c *Charters) Status(now time.Duration) CharterStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := CharterStatus{
		Charter: c.top().Charter, Complete: c.complete(), Applied: c.own,
		Settled: c.settled, Votes: c.mayVote(), Member: c.seat >= 0, Evicted: c.over, Leaving: c.leaving, Minting: c.until,
		Requests: len(c.requests), Foreign: c.foreign, Differing: c.differing, Differs: c.differs, Err: c.broken,
	}
	s.Charter.Roster.Members = slices.Clone(s.Charter.Roster.Members)
	for i := range c.seats {
		m := CharterMember{Member: c.top().Roster.Members[i], Heard: -1, Applied: c.applied[c.seats[i].name]}
		switch f := c.seats[i].fellow; {
		case i == c.seat:
			m.Known, m.Applied, m.Heard, m.Settled = c.known(), c.own, 0, s.Votes
		case f != nil:
			m.Known, m.Heard, m.Settled = f.row.known, max(now-f.heard, 0), c.votesAt(f)
		}
		s.Members = append(s.Members, m)
	}
	for _, e := range c.chain[1:] {
		for _, name := range e.lacking {
			if !c.keepsLocked(now, name, e.Number) && !slices.Contains(s.Lacking, name) {
				s.Lacking = append(s.Lacking, name)
			}
		}
	}
	slices.Sort(s.Lacking)
	return s
}

// Number is the newest charter that is known, and the highest that is complete.
func (c *Charters) Number() (newest, complete uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.known(), c.complete()
}
