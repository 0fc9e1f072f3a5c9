// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import "time"

// returnIdle is how long a borrowed token of a small limit stays unspent before it goes back
// to the owner.
const returnIdle = 300 * time.Millisecond

// stepOwner runs at the owner of a small limit. It draws for each token which node gets it,
// with odds by need. The owner's own waiters are in the draw: if they were served first,
// they would get half of all tokens.
func (n *Node) stepOwner(r *row) {
	total := n.needs(r)
	if total == 0 {
		r.granted, r.drawing = 0, false
		return
	}
	own := min(max(0, r.owed()+r.lost-r.granted), r.burst) // bounded like the needs of others
	if r.yielding {
		own, r.granted = 0, 0
	}
	stuck := n.stuck(r)
	for r.level-r.granted >= micro && total+own > 0 {
		// Many tokens are drawn in bundles, so that a large burst does not make a long loop.
		bundle := max(1, (r.level-r.granted)/(64*micro)) * micro
		e := n.drawn(r, total, own, stuck)
		if e == nil {
			x := min(bundle, roundUp(own))
			r.granted += x
			own = max(0, own-x)
			continue
		}
		x := min(bundle, roundUp(e.itsNeed))
		e.lend(x)
		had := e.itsNeed
		e.itsNeed = max(0, e.itsNeed-x)
		total -= had - e.itsNeed
	}
	if r.drawing = total > 0; !r.drawing {
		r.granted = 0
	}
}

// drawn returns the entry that gets the next token; nil means this node's own waiters. It
// draws at random. If the row is stuck, the node that lacks least gets the token.
func (n *Node) drawn(r *row, total, own int64, stuck bool) *entry {
	if stuck {
		if e := n.nearest(r); e != nil && (own == 0 || e.itsNeed < own) {
			return e
		}
		return nil
	}
	draw := n.rand.Int64N(total+own) - own
	if draw < 0 {
		return nil
	}
	for _, e := range r.entries {
		if e == nil || e.itsNeed == 0 || !n.lendable(e.peer) {
			continue
		}
		if draw -= e.itsNeed; draw < 0 {
			return e
		}
	}
	return nil
}

// roundUp rounds the amount up to whole tokens.
func roundUp(amount int64) int64 { return (amount + micro - 1) / micro * micro }

// stepAway is a step at a node that is not the key's owner: it only borrows.
func (n *Node) stepAway(r *row) {
	owed := r.owed()
	for _, e := range r.entries {
		if e != nil && e.held() > 0 && owed == 0 && (n.now-e.borrowed.last >= returnIdle || len(n.terms) > 1) {
			e.giveBack(e.held())
		}
	}
	_, ahead := r.plan()
	short := owed + r.lost + ahead/micro*micro - r.held
	need := min(roundUp(max(0, short)), r.burst)
	if r.yielding {
		need = 0
	}
	r.stated = false
	p := n.peers[r.owner]
	if p == nil {
		return
	}
	if n.unheard(p) >= lease {
		need = 0
	}
	e := r.with(p)
	if e == nil {
		if need == 0 {
			return
		}
		e = r.entry(p)
	}
	n.state(e, need)
	r.stated = e.need > 0
}
