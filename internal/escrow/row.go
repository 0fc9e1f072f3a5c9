// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"math"
	"math/bits"
	"time"
)

// nanosPerMicro is how many nano-tokens per second times nanoseconds make a
// micro-token.
const nanosPerMicro = 1e12

// never is a time that is never reached.
const never = time.Duration(math.MaxInt64)

// A row is the state of one key at one node. All amounts are micro-tokens.
//
// Invariant at every instant: level + lent <= cap. lent counts the tokens that borrowers
// have not yet reported as used or returned. No borrower can hold more than that. So the
// tokens of the fleet never exceed the sum of all caps, which is the burst.
type row struct {
	name  string
	burst int64         // of the whole limit
	owner string        // name of the key's owner; empty if the limit is spread
	here  bool          // this node is the owner
	cap   int64         // this node's part of the burst
	rate  uint64        // this node's part of the rate, in nano-tokens per second
	full  float64       // rate of the whole limit, in micro-tokens per second
	pace  time.Duration // time between two steps
	fill  time.Duration // time in which the rate refills the whole burst, at most an hour
	ahead float64       // horizon of the forecast, in seconds

	level    int64 // own tokens, with those in the pool
	pooled   int64 // part of level that is in the pool
	granted  int64 // at an owner: part of level that its own waiters drew
	lent     int64 // lent and not yet reported as used or returned, over all borrowers
	held     int64 // borrowed and not spent, over all lenders
	mintedAt time.Duration
	minted   uint64 // remainder of the latest mint, below one micro-token

	namedByPeer  *peer                 // the peer that named the key; nil once this node uses it
	lenders      map[string]*allowance // by name of the lender; full ones are left out
	entries      []*entry              // by the peer's slot; nil without loans and needs
	cursor       int                   // index in entries of the lender whose loan is spent next
	leaseCheckAt time.Duration         // lower bound of the expiry of held tokens' leases

	forecast  forecast
	waiting   int64         // sum of the amounts of all waiters
	head      int64         // amount of the first waiter
	lost      int64         // denied since the latest step, not expected again
	want      int64         // denied; the caller is expected to ask again until wantUntil
	wantUntil time.Duration // end of want
	needing   bool          // a peer has a need
	drawing   bool          // at an owner: tokens are drawn between peers and own waiters
	stated    bool          // a peer was told a need

	spentAt   time.Duration // when a token was last spent, or when the oldest present wait began
	yielding  bool          // the row yields now, see Node.yields
	yieldAt   time.Duration // random time before which the row does not yield; 0 is not drawn
	yieldTill time.Duration // end of the yield; 0 is not begun

	last, next time.Duration // times of the latest and the next step
	open       int64         // left in the fail-open bucket, see Node.admitOpen
	openAt     time.Duration // when open was last refilled
	opened     bool          // the fail-open bucket has begun

	overCap bool // lent exceeds the cap

	queued int     // index in Node.queue, -1 if not there
	ripe   bool    // listed in Node.ripe
	pool   *pool   // nil without a handle
	handle *Handle // the handle that owns pool, or nil

	sum Sums
}

// Sums are cumulative, in micro-tokens. They add up exactly:
//
//	Minted + Back + Refilled = level + Own + Lent + Trimmed
//	Got = Borrowed + Returned + Voided + held
type Sums struct {
	Minted   int64 // minted by this node
	Own      int64 // own tokens spent
	Lent     int64 // lent to borrowers
	Back     int64 // returned by borrowers
	Got      int64 // borrowed from lenders
	Borrowed int64 // borrowed tokens spent
	Returned int64 // returned to lenders
	Voided   int64 // borrowed tokens lost with the lender's incarnation, epoch or series
	Written  int64 // loans that were written off
	Denied   int64 // tokens asked for and not given
	Missed   int64 // not minted, because tokens and loans filled the cap
	Trimmed  int64 // own tokens lost, because the cap shrank or a fence passed
	Refilled int64 // own tokens that a reset gave
	Open     int64 // admitted fail-open before the node might mint, without tokens; see [Joining]
}

func newRow(n *Node, name string) *row {
	r := &row{name: name, queued: -1, next: never}
	n.measure(r)
	r.last, r.spentAt = -r.pace, n.now
	r.forecast.since = n.now
	switch {
	case !n.single:
		n.recall(r)
	case !n.fenced:
		r.level, r.sum.Minted, r.mintedAt = r.cap, r.cap, n.now
	}
	return r
}

// mint brings the level up to now. Tokens for which the cap has no room are lost, even if
// loans fill the cap.
func (r *row) mint(now, from time.Duration) {
	since := max(r.mintedAt, from)
	if now <= since {
		return
	}
	r.mintedAt = now
	due := int64(maxValue)
	hi, lo := bits.Mul64(r.rate, uint64(now-since))
	lo, carry := bits.Add64(lo, r.minted, 0)
	if hi += carry; hi < nanosPerMicro/4 {
		var q uint64
		q, r.minted = bits.Div64(hi, lo, nanosPerMicro)
		due = int64(q)
	}
	made := min(due, max(0, r.cap-r.level-r.lent))
	if made < due {
		r.minted = 0
		r.sum.Missed = plus(r.sum.Missed, min(due-made, r.cap))
	}
	r.level += made
	r.sum.Minted = plus(r.sum.Minted, made)
}

// until is how long minting takes to reach the level; never if it cannot reach it.
func (r *row) until(level int64) time.Duration {
	missing := level - r.level
	switch {
	case missing <= 0:
		return 0
	case r.rate == 0 || level > r.cap:
		return never
	}
	hi, lo := bits.Mul64(uint64(missing), nanosPerMicro)
	lo, borrow := bits.Sub64(lo, r.minted, 0)
	if hi -= borrow; hi >= r.rate {
		return never
	}
	d, rest := bits.Div64(hi, lo, r.rate)
	if rest > 0 {
		d++
	}
	if d >= 1<<62 {
		return never
	}
	return time.Duration(d)
}

// free is how many own tokens the node may spend now. While an owner's peers have needs,
// its own waiters have only the tokens that they drew.
func (r *row) free() int64 {
	if r.drawing {
		return r.granted
	}
	return r.level - r.pooled
}

// spendable is how many tokens the node may spend, own and borrowed; call expire first.
func (r *row) spendable() int64 { return r.held + r.free() }

// spend takes an amount that spendable has reported. It spends loans first, since they
// fill the cap of their lender.
func (r *row) spend(amount int64) {
	for n := len(r.entries); r.held > 0 && amount > 0 && n > 0; n-- {
		if r.cursor >= len(r.entries) {
			r.cursor = 0
		}
		if e := r.entries[r.cursor]; e != nil && e.held() > 0 {
			x := min(amount, e.held())
			e.borrowed.used += x
			e.borrowed.last = e.peer.node.now
			e.dirty = true
			e.peer.held.add(-x)
			r.held -= x
			r.sum.Borrowed = plus(r.sum.Borrowed, x)
			if amount -= x; amount == 0 {
				return
			}
		}
		r.cursor++
	}
	r.level -= amount
	r.granted = max(0, r.granted-amount)
	r.sum.Own = plus(r.sum.Own, amount)
}

// update mints, and then counts tokens that were spent from the pool. The order matters:
// the pool reads no clock, so such a token counts as present while the cap filled. In the
// other order a burst could be larger by the tokens spent from the pool.
func (r *row) update(now, from time.Duration) {
	r.mint(now, from)
	if r.pooled > 0 {
		left := r.pool.left() * micro
		if left < r.pooled {
			r.spentAt = now
		}
		r.spent(r.pooled - left)
		r.pooled = left
	}
}

// spent counts own tokens that callers took from the pool.
func (r *row) spent(amount int64) {
	r.level -= amount
	r.sum.Own = plus(r.sum.Own, amount)
	r.forecast.asked += amount
}

// reclaim empties the pool into the rest of the level. The caller has called update.
func (r *row) reclaim() {
	if r.pooled == 0 {
		return
	}
	r.spent(r.pooled - r.pool.empty()*micro)
	r.pooled = 0
}
