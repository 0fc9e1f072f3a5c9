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

// never is a time that does not come.
const never = time.Duration(math.MaxInt64)

// A row is one key's books at one node. All amounts are micro-tokens.
//
// What it keeps, at every instant: level + lent <= cap, where lent is all that
// borrowers were given and have not yet reported as used or returned. Since no
// borrower can hold more than that, the tokens of the fleet, wherever they are,
// never exceed the sum of all caps, which is the burst.
type row struct {
	name  string
	burst int64
	owner string // the name of the node where it lives; empty if spread
	here  bool
	cap   int64         // this node's part of the burst
	rate  uint64        // this node's part of the rate, in nano-tokens per second
	full  float64       // the whole limit's rate, micro-tokens per second
	pace  time.Duration // time between two steps
	fill  time.Duration // in which the whole burst is refilled, at most an hour
	ahead float64       // the forecast's horizon, seconds

	level    int64 // own tokens; pooled of them are in the pool
	pooled   int64
	granted  int64 // of level, at an owner: what its own waiters drew
	lent     int64 // given and not accounted for, over all borrowers
	held     int64 // borrowed and not spent, over all lenders
	mintedAt time.Duration
	minted   uint64 // the rest of the last mint, below one micro-token

	by      *peer                 // who named it, until somebody here does; nil is nobody
	lenders map[string]*allowance // by name; only those that are not full
	entries []*entry              // by the peer's slot; nil where there is nothing between the two
	cursor  int                   // the lender that is spent from
	sooner  time.Duration         // no lease of what is held ends before

	forecast  forecast
	waiting   int64 // micro-tokens that waiters want, all together
	head      int64 // what the first of them wants
	lost      int64 // denied since the last step, and not asked again
	want      int64 // denied, and asked again until wantUntil
	wantUntil time.Duration
	needing   bool // some peer has a need
	drawing   bool // at an owner: it is drawn who gets the next token
	stated    bool // some peer was told a need

	spentAt   time.Duration // when any of its tokens was last spent, or began to be waited for
	yielding  bool          // see yields, as what follows
	yieldAt   time.Duration // drawn; 0 is not yet
	yieldTill time.Duration // 0 is not begun

	last, next time.Duration // steps
	open       int64         // see admitOpen
	openAt     time.Duration
	opened     bool

	over bool // more is out than the cap

	queued int     // place in the node's queue, -1 if none
	ripe   bool    // listed for its waiters
	pool   *pool   // nil without a handle
	handle *Handle // that the row answers to, or nil

	sum Sums
}

// Sums are cumulative, in micro-tokens. They tie up exactly:
//
//	Minted + Back + Refilled = level + Own + Lent + Trimmed
//	Got = Borrowed + Returned + Voided + held
type Sums struct {
	Minted   int64 // by this node
	Own      int64 // spent of own tokens
	Lent     int64 // given to borrowers
	Back     int64 // returned by borrowers
	Got      int64 // taken from lenders
	Borrowed int64 // spent of loans
	Returned int64 // returned to lenders
	Voided   int64 // loans that ended with their lender's incarnation or lease
	Written  int64 // loans that were written off
	Denied   int64 // tokens asked for and not given
	Missed   int64 // not minted, because tokens and loans filled the cap
	Trimmed  int64 // own tokens lost, because the cap shrank or a fence came
	Refilled int64 // own tokens that a reset gave
	Open     int64 // admitted before the node might mint, see [Joining]: of nobody\'s tokens
}

func newRow(n *Node, name string) *row {
	r := &row{name: name, queued: -1, next: never}
	n.measure(r)
	r.last, r.spentAt = -r.pace, n.now
	r.forecast.since = n.now
	switch {
	case !n.alone:
		n.recall(r)
	case !n.fenced:
		r.level, r.sum.Minted, r.mintedAt = r.cap, r.cap, n.now
	}
	return r
}

// mint brings the level up to now. What would exceed the cap is lost, also when
// it is loans that fill it.
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

// until is how long the own mint takes to the level, never if it cannot get there.
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

// free are the own tokens that the node may spend here and now. At an owner that
// others need too, its own waiters have what they drew and no more.
func (r *row) free() int64 {
	if r.drawing {
		return r.granted
	}
	return r.level - r.pooled
}

// spendable are all tokens that the node may spend; call expire first.
func (r *row) spendable() int64 { return r.held + r.free() }

// spend takes what spendable has said is there: loans first, since they fill
// somebody's cap.
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

// update mints, and then takes into account what was spent from the pool. In this
// order: what was spent since was there while the cap filled, as far as anybody
// can know without a clock, and the other way round a burst could be that much
// larger.
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

// spent counts own tokens that are gone from the pool.
func (r *row) spent(amount int64) {
	r.level -= amount
	r.sum.Own = plus(r.sum.Own, amount)
	r.forecast.asked += amount
}

// reclaim empties the pool into the level, of which it is a part. The row is up
// to date.
func (r *row) reclaim() {
	if r.pooled == 0 {
		return
	}
	r.spent(r.pooled - r.pool.empty()*micro)
	r.pooled = 0
}
