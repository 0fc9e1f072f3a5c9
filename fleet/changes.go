// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import "github.com/stormguard-mq/stormguard/crdt"

// changes is what there is to tell, in the order in which it last changed. It
// numbers the changes, and a peer needs those after its mark.
//
// Votes of others come from those themselves: they concern a peer only if they
// were here when it was met, or if their process has fallen silent just after.
type changes struct {
	seq         uint64
	shared      uint64 // the latest change that concerns everybody
	first, last *change
	met         map[crdt.Replica]uint64 // seq when the peer was first sent to
	notify      func()                  // nil, or whom to tell of each
}

// change is a vote, or else the state of a scope, in a list that is linked both
// ways.
type change struct {
	num        uint64
	row        *row
	sc         *scope
	prev, next *change
}

// vote puts a vote at the end. all says that it concerns everybody.
func (c *changes) vote(r *row, all bool) {
	if r.change == nil {
		r.change = &change{row: r}
	}
	c.touch(r.change, all)
}

// state puts the state of a scope at the end.
func (c *changes) state(sc *scope) {
	if sc.change == nil {
		sc.change = &change{sc: sc}
	}
	c.touch(sc.change, true)
}

func (c *changes) touch(e *change, all bool) {
	if e.num > 0 {
		c.remove(e)
	}
	c.seq++
	e.num = c.seq
	if all {
		c.shared = c.seq
	}
	e.prev, e.next = c.last, nil
	if c.last == nil {
		c.first = e
	} else {
		c.last.next = e
	}
	c.last = e
	if c.notify != nil {
		c.notify()
	}
}

func (c *changes) remove(e *change) {
	if e == nil {
		return
	}
	if e.prev == nil {
		c.first = e.next
	} else {
		e.prev.next = e.next
	}
	if e.next == nil {
		c.last = e.prev
	} else {
		e.next.prev = e.prev
	}
}

// mark is the number of the latest change that concerns a peer.
func (c *changes) mark(to crdt.Replica) uint64 {
	met, ok := c.met[to]
	if !ok {
		return c.seq
	}
	return max(met, c.shared)
}

// after is the first change with a number above since.
func (c *changes) after(since uint64) *change {
	var found *change
	for e := c.last; e != nil && e.num > since; e = e.prev {
		found = e
	}
	return found
}

// concerns reports whether a peer that was met at met needs c.
func (c *change) concerns(to, self crdt.Replica, met uint64) bool {
	if c.row == nil {
		return true
	}
	return c.row.Node == self || c.row.Node != to && (c.row.relay || c.num <= met)
}
