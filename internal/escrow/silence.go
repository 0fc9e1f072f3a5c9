// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

// lookSilent finds the members whose share of the rate is taken over, and tells whether
// this node's part of the rate changed. If so, the caller must reshare all rows.
func (n *Node) lookSilent() (changed bool) {
	after := n.cfg.OnSilence.After
	if n.single || n.cfg.OnSilence.Policy != TakeOver {
		return false
	}
	silent := map[string]bool{}
	n.silentAt = never
	for _, t := range n.terms {
		present := int64(0)
		for name, w := range t.weights {
			// Mutual silence: the member is not heard, and does not answer our packets.
			last := n.born
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
