// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import "time"

// Nodes that wait for many tokens at once keep the tokens that they have gathered. If each
// has some and none has enough, all caps are full, nothing is minted, and all would wait
// forever. A row is stuck when none of its tokens was spent for longer than a whole refill
// takes. Then, at a random instant, it yields for a while: it states no need, returns its
// loans and lends its level. A stuck row lends only to the peer that lacks least, so that
// one peer gets enough.

// yieldFor is how long a row yields: loans need that time to go back and be lent again.
const yieldFor = 4 * maxPace

// yieldLater is how much later a row yields if it has nearly enough tokens.
const yieldLater = 8 * patience

// owed is the amount that callers wait for, or were denied and will ask for again.
func (r *row) owed() int64 {
	if r.yielding {
		return 0
	}
	return r.waiting + r.want
}

// begins notes the start of a wait, if no caller waited before.
func (r *row) begins(now time.Duration) {
	if r.waiting == 0 && r.want == 0 {
		r.spentAt, r.yieldAt = now, 0
	}
}

// stuck tells whether, as far as this node can see, all tokens are held by nodes that wait
// for more.
func (n *Node) stuck(r *row) bool { return n.now-r.spentAt > r.fill+patience }

// yields tells whether the row gives its gathered tokens to others now. The more it has of
// the owed amount, the later it yields, so that others yield first.
func (n *Node) yields(r *row) bool {
	owed := r.waiting + r.want
	if owed <= micro || !n.stuck(r) {
		r.yieldAt, r.yieldTill = 0, 0
		return false
	}
	if n.now < r.yieldTill {
		return true
	}
	if r.yieldAt == 0 || r.yieldTill != 0 {
		r.yieldAt, r.yieldTill = n.now+time.Duration(n.rand.Int64N(int64(patience))), 0
	}
	had := min(float64(r.level+r.held)/float64(owed), 1)
	if n.now < r.yieldAt+time.Duration(had*float64(yieldLater)) {
		return false
	}
	r.yieldTill = n.now + yieldFor
	return true
}

// nearest returns the lendable peer with the smallest need; nil if none has a need.
func (n *Node) nearest(r *row) (least *entry) {
	for _, e := range r.entries {
		if e != nil && e.itsNeed > 0 && n.lendable(e.peer) && (least == nil || e.itsNeed < least.itsNeed) {
			least = e
		}
	}
	return least
}
