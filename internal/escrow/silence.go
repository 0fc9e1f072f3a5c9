// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

// lookSilent finds out whose share of the rate is taken over, and tells whether
// that changed what this node mints. The caller gives all rows their shares anew
// then.
func (n *Node) lookSilent() (changed bool) {
	after := n.cfg.OnSilence.After
	if n.alone || n.cfg.OnSilence.Policy != TakeOver {
		return false
	}
	silent := map[string]bool{}
	n.silentAt = never
	for _, t := range n.terms {
		present := int64(0)
		for name, w := range t.weights {
			// Mutual silence: it is not heard, and what we say is not answered.
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
