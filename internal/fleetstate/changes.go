// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import "github.com/stormguard-mq/stormguard/internal/crdt"

// changes is what there is to tell, in the order in which it last changed.
//
// Votes of others come from those themselves: they concern a peer only if they
// were here when it was met, or if their process has fallen silent just after.
type changes struct {
	crdt.Changes[change]
	shared uint64                  // the latest change that concerns everybody
	met    map[crdt.Replica]uint64 // the mark when the peer was first sent to
	notify func()                  // nil, or whom to tell of each
}

// change is a vote, or else the state of a scope.
type change struct {
	row *row
	sc  *book
}

// vote puts a vote at the end. all says that it concerns everybody.
func (c *changes) vote(r *row, all bool) {
	if r.change == nil {
		r.change = &crdt.Change[change]{Of: change{row: r}}
	}
	c.touch(r.change, all)
}

// state puts the state of a scope at the end.
func (c *changes) state(sc *book) {
	if sc.change == nil {
		sc.change = &crdt.Change[change]{Of: change{sc: sc}}
	}
	c.touch(sc.change, true)
}

func (c *changes) touch(e *crdt.Change[change], all bool) {
	c.Touch(e)
	if all {
		c.shared = e.Mark
	}
	if c.notify != nil {
		c.notify()
	}
}

// mark is the number of the latest change that concerns a peer.
func (c *changes) mark(to crdt.Replica) uint64 {
	met, ok := c.met[to]
	if !ok {
		return c.Mark()
	}
	return max(met, c.shared)
}

// concerns reports whether a peer that was met at met needs the change of mark.
func (c change) concerns(to, self crdt.Replica, mark, met uint64) bool {
	if c.row == nil {
		return true
	}
	return c.row.Node == self || c.row.Node != to && (c.row.relay || mark <= met)
}
