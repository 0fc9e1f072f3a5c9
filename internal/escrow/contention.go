// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import "time"

// Nodes that wait for many tokens at once keep what they have gathered. When each
// has a part and none enough, all caps are full, nothing is minted, and all would
// wait for ever. A row is stuck when it saw none of its tokens spent for longer
// than a whole refill takes. Then, at a random instant, it yields for a while: it
// needs nothing, returns its loans and lends its level. And who is stuck lends to
// the one that lacks least, so that somebody gets enough.

// yieldFor is how long a row yields: for its loans to go back and to be lent anew.
const yieldFor = 4 * maxPace

// yieldLater is how much later a row yields that has nearly all.
const yieldLater = 8 * patience

// owed is what is waited for, or was denied and will be asked for again.
func (r *row) owed() int64 {
	if r.yielding {
		return 0
	}
	return r.waiting + r.want
}

// begins notes that something is waited for, if nothing was.
func (r *row) begins(now time.Duration) {
	if r.waiting == 0 && r.want == 0 {
		r.spentAt, r.yieldAt = now, 0
	}
}

// stuck tells whether tokens are all held by those who wait for more, as far as
// can be seen from here.
func (n *Node) stuck(r *row) bool { return n.now-r.spentAt > r.fill+patience }

// yields tells whether the row lets others have what it has gathered. The more it
// has of what it owes, the later it does: others will be first.
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

// nearest is the peer that lacks least, of those to whom may be lent; nil if none
// lacks anything.
func (n *Node) nearest(r *row) (least *entry) {
	for _, e := range r.entries {
		if e != nil && e.itsNeed > 0 && n.lendable(e.peer) && (least == nil || e.itsNeed < least.itsNeed) {
			least = e
		}
	}
	return least
}
