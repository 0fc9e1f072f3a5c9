// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import "github.com/stormguard-mq/stormguard/internal/crdt"

// changes has all changes to send, in the order in which each last changed.
//
// Other processes send their own votes themselves. So another process's vote concerns a peer in two
// cases only: the vote was here when the peer was first sent to, or its process fell silent soon
// after the vote came.
type changes struct {
	crdt.Changes[change]
	shared uint64                  // number of the latest change that concerns all peers
	met    map[crdt.Replica]uint64 // by peer: the mark when it was first sent to
	notify func()                  // called after each change; nil if unset
}

// change is a vote or the state of a scope.
type change struct {
	row *row
	sc  *book
}

// vote puts a vote at the end. all says that it concerns all peers.
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

// mark returns the number of the latest change that concerns a peer.
func (c *changes) mark(to crdt.Replica) uint64 {
	met, ok := c.met[to]
	if !ok {
		return c.Mark()
	}
	return max(met, c.shared)
}

// concerns reports whether a peer needs the change with the number mark. met is the mark when the
// peer was first sent to.
func (c change) concerns(to, self crdt.Replica, mark, met uint64) bool {
	if c.row == nil {
		return true
	}
	return c.row.Node == self || c.row.Node != to && (c.row.relay || mark <= met)
}
