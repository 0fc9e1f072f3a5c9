// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"math"
	"math/bits"
	"time"
)

// An allowance is what one member can have lent this node of one key. A member lends
// own tokens only, so it is a bucket of the member's share: it holds the member's part
// of the burst, fills at its part of the rate, and takes back what is returned. What
// is lent beyond it is not taken, whatever the packet says.
//
// An honest lender never gets there. At any instant its level and what it has lent are
// within its part of the burst; so all that it can lend from then on is that, what it
// mints, and what comes back. It belongs to the name: a lender that starts again
// mints from nothing.
type allowance struct {
	left    int64 // micro-tokens
	cap     int64
	rate    uint64 // nano-tokens per second
	at      time.Duration
	over    int64  // refused since the bucket was last full
	rosters uint64 // of the node, when cap and rate were found
	resets  uint64 // of the configuration, then
}

// allowanceOf is the allowance of a lender, filled up to now. It is made if need be.
func (r *row) allowanceOf(n *Node, name string) *allowance {
	a := r.lenders[name]
	if a == nil {
		a = &allowance{at: n.now, resets: n.newest().Resets}
		a.cap, a.rate = n.shareOf(r, name)
		a.left, a.rosters = a.cap, n.rosters
		if a.cap == 0 {
			return a // nothing to remember
		}
		if r.lenders == nil {
			r.lenders = map[string]*allowance{}
		}
		r.lenders[name] = a
		return a
	}
	a.fill(n.now)
	if a.rosters != n.rosters {
		a.rosters = n.rosters
		a.cap, a.rate = n.shareOf(r, name)
		if resets := n.newest().Resets; resets > a.resets {
			a.left, a.resets = a.cap, resets // all buckets were filled
		}
		a.left = min(a.left, a.cap)
	}
	return a
}

func (a *allowance) fill(now time.Duration) {
	hi, lo := bits.Mul64(a.rate, uint64(max(now-a.at, 0)))
	if hi >= nanosPerMicro/4 {
		a.left = a.cap
	} else {
		more, rest := bits.Div64(hi, lo, nanosPerMicro)
		if more == 0 && rest > 0 && a.left < a.cap {
			return // or small steps would round the rate away
		}
		a.left = min(a.cap, plus(a.left, int64(min(more, maxValue))))
	}
	a.at = now
	if a.left == a.cap {
		a.over = 0
	}
}

// shareOf is the most that a name has of a key in any configuration that counts. Its clock
// and ours may differ by twice what each may be off.
func (n *Node) shareOf(r *row, name string) (burst int64, rate uint64) {
	var nanos int64
	for i, t := range n.terms {
		owner := r.owner
		if i < len(n.terms)-1 {
			owner = t.owner(r.name)
		}
		l := t.limit(r.name)
		c, m := t.share(name, l, owner)
		if c > 0 && n.cfg.OnSilence.Policy == TakeOver {
			m = int64(l.Rate * 1e9)
		}
		burst, nanos = max(burst, c), max(nanos, m)
	}
	return burst, uint64(nanos) + uint64(nanos)*3*drift/1e6
}

// grant is how much of a loan the lender can have given.
func (e *entry) grant(amount int64) (taken int64) {
	n, name := e.peer.node, e.peer.id.Name
	a := e.row.allowanceOf(n, name)
	taken = min(amount, max(a.left, 0))
	a.left -= taken
	refused := amount - taken
	if refused == 0 {
		return taken
	}
	a.over = plus(a.over, refused)
	// One who knows a later configuration may have more by it; and loans of an earlier one
	// may still be on their way. And a lender may have given tokens back, see Refund.
	if e.peer.configuration <= n.newest().Number && n.now >= n.termsTill && a.over > a.cap {
		n.refused.Loans++
		n.broke(name)
	}
	return taken
}

// giveUp puts back what was returned unspent.
func (e *entry) giveUp(amount int64) {
	if a := e.row.lenders[e.peer.id.Name]; a != nil {
		a.left = min(a.cap, plus(a.left, amount))
	}
}

// paid tells whether no lender's allowance would be another if the row were made anew,
// and forgets those.
func (r *row) paid(now time.Duration) bool {
	for name, a := range r.lenders {
		if a.fill(now); a.left == a.cap {
			delete(r.lenders, name)
		}
	}
	return len(r.lenders) == 0
}

// maxBroke bounds the names that are remembered for breaking the books.
const maxBroke = 64

func (n *Node) broke(name string) {
	if n.breaches == nil {
		n.breaches = map[string]uint64{}
	}
	if _, ok := n.breaches[name]; ok || len(n.breaches) < maxBroke {
		n.breaches[name]++
	}
}

// plus is a + b, at most what there is room for. a is not negative.
func plus(a, b int64) int64 {
	if b > 0 && a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}

// A total is a sum over all keys, which may be more than an int64 holds.
type total struct {
	hi int64
	lo uint64
}

func (t *total) add(x int64) {
	lo, carry := bits.Add64(t.lo, uint64(x), 0)
	t.lo, t.hi = lo, t.hi+(x>>63)+int64(carry)
}

func (t *total) some() bool { return t.hi > 0 || t.hi == 0 && t.lo > 0 }

// value is the sum, at most what there is room for.
func (t *total) value() int64 {
	if t.hi > 0 || t.lo > math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(t.lo)
}
