// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"maps"
	"time"
)

// Stats are one node's figures over all keys, for metrics. Amounts are in
// micro-tokens.
type Stats struct {
	Keys  int
	Level int64 // own tokens
	Cap   int64 // this node's part of all bursts
	Lent  int64 // given to others and not accounted for
	Held  int64 // borrowed and not spent

	// Pinned are the tokens of Lent that are with nodes which are not heard, or not
	// any more: what a write-off will free.
	Pinned int64

	// Share is this node's part of the newest roster's weights, and Stranded that of
	// members which are not heard: what nobody mints while they are away. Both are in
	// [0, 1].
	Share, Stranded float64

	Number    uint64 // the newest adopted
	Completed uint64
	Applied   uint64
	Fenced    bool // its own tokens are void, see [Node.Mint]
	TakenOver int  // members for which it mints, see [TakeOver]

	Refused Refused

	// Broke counts, for members that lent far more than their share, how many loans
	// were refused, by name. At most 64 names are remembered. nil is none.
	Broke map[string]uint64
}

// Stats adds up all keys; it costs a look at each.
func (n *Node) Stats(now time.Duration) Stats {
	n.advance(now)
	t := n.newest()
	s := Stats{
		Keys: len(n.rows), Number: t.Number, Completed: n.told, Applied: n.Applied(),
		Fenced: n.fenced, TakenOver: len(n.silent), Refused: n.refused, Share: 1, Broke: maps.Clone(n.breaches),
	}
	for _, r := range n.rows {
		r.update(n.now, n.mintAt)
		s.Level = plus(s.Level, r.level)
		s.Cap = plus(s.Cap, r.cap)
		s.Lent = plus(s.Lent, r.lent)
		s.Held = plus(s.Held, r.held)
	}
	for _, p := range n.slots {
		if p != nil && !n.heard(p) {
			s.Pinned = plus(s.Pinned, p.lent.value())
		}
	}
	if t.sum > 0 {
		absent := int64(0)
		for name, w := range t.weights {
			if p := n.peers[name]; name != n.self.Name && (p == nil || !n.heard(p)) {
				absent += w
			}
		}
		s.Share = float64(t.weights[n.self.Name]) / float64(t.sum)
		s.Stranded = float64(absent) / float64(t.sum)
	}
	return s
}

// heard tells whether a peer is there, for people: ten keep-alives.
func (n *Node) heard(p *peer) bool { return !p.gone && p.sent > 0 && n.unheard(p) < lease/2 }
