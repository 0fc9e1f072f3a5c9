// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"maps"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// came notes that a packet of a member came, even if it is refused: the member runs, and mints its
// share. It may only have other settings.
func (n *Node) came(c crdt.Contact) {
	if n.cfg.OnSilence.Policy != TakeOver || !n.member(c.From.Name) {
		return
	}
	n.cameAt[c.From.Name] = n.now + c.Rest
	if n.silent[c.From.Name] {
		n.lookSilent()
		n.eachRow(n.reshare)
	}
}

// member tells whether a roster in force has the name.
func (n *Node) member(name string) bool {
	for _, t := range n.terms {
		if _, ok := t.weights[name]; ok {
			return true
		}
	}
	return false
}

// lookSilent finds the members whose share of the rate is taken over, and tells whether
// this node's part of the rate changed. If so, the caller must reshare all rows.
func (n *Node) lookSilent() (changed bool) {
	after := n.cfg.OnSilence.After
	if n.single || n.cfg.OnSilence.Policy != TakeOver {
		return false
	}
	maps.DeleteFunc(n.cameAt, func(name string, _ time.Duration) bool { return !n.member(name) })
	silent := map[string]bool{}
	n.silentAt = never
	for _, t := range n.terms {
		present := int64(0)
		for name, w := range t.weights {
			// Mutual silence: the member is not heard, and does not answer our packets.
			last := max(n.born, n.cameAt[name])
			if p := n.peers[name]; p != nil {
				last = max(last, p.heard+p.rest, p.echo)
			}
			switch {
			case name == n.self.Name:
			case n.now-last >= after:
				silent[name] = true
				continue
			default:
				n.silentAt = min(n.silentAt, last+after)
			}
			present += w
		}
		changed = changed || present != t.present
		t.present = present
	}
	n.silent = silent
	return changed
}
