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
	Lent  int64 // lent, not yet reported as used or returned
	Held  int64 // borrowed and not spent

	// Pinned is the part of Lent that is with nodes that are not heard. A write-off will free
	// it.
	Pinned int64

	// Share is this node's part of the newest roster's weights. Stranded is the part of the
	// members that are not heard: nobody mints it while they are away. Both are in [0, 1].
	Share, Stranded float64

	Number    uint64 // of the newest adopted configuration
	Completed uint64 // see [Node.Completed]
	Applied   uint64 // see [Node.Applied]
	Fenced    bool   // its own tokens are void, see [Node.Mint]
	TakenOver int    // members for which it mints, see [TakeOver]

	Refused Refused

	// Broke counts refused loans by the name of their lender, for members that lent far more
	// than their share. It has at most 64 names. nil is none.
	Broke map[string]uint64
}

// Stats adds up all keys; the cost is a look at each.
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

// heard tells whether a peer counts as heard in Stats: within the last ten keep-alives.
func (n *Node) heard(p *peer) bool { return !p.gone && p.sent > 0 && n.unheard(p) < lease/2 }
