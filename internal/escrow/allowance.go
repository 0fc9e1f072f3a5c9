// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"math"
	"math/bits"
	"time"
)

// An allowance bounds how much one member can have lent this node of one key. A member lends
// only own tokens. So the allowance is a token bucket of the member's share: it holds the
// member's part of the burst, fills at its part of the rate, and takes returned tokens back.
// Loans beyond the allowance are refused, whatever the packet says.
//
// While configurations agree and nothing is refunded, an honest lender never exceeds it. At
// any instant its level plus its loans are within its part of the burst. From then on it can
// lend only that, newly minted tokens, and returned tokens. grant has the exceptions. The
// allowance belongs to the name, not to an incarnation: a lender that starts
// again begins with nothing.
type allowance struct {
	left    int64         // micro-tokens
	cap     int64         // the member's part of the burst, micro-tokens
	rate    uint64        // nano-tokens per second
	at      time.Duration // when left was computed
	over    int64         // micro-tokens refused since the bucket was last full
	rosters uint64        // Node.membershipVersion when cap and rate were computed
	resets  uint64        // Configuration.Resets for which left was filled
}

// allowanceOf returns the allowance of a lender, filled up to now, and makes it if there is
// none.
func (r *row) allowanceOf(n *Node, name string) *allowance {
	a := r.lenders[name]
	if a == nil {
		a = &allowance{at: n.now, resets: n.newest().Resets}
		a.cap, a.rate = n.shareOf(r, name)
		a.left, a.rosters = a.cap, n.membershipVersion
		if a.cap == 0 {
			return a // an empty bucket need not be remembered
		}
		if r.lenders == nil {
			r.lenders = map[string]*allowance{}
		}
		r.lenders[name] = a
		return a
	}
	a.fill(n.now)
	if a.rosters != n.membershipVersion {
		a.rosters = n.membershipVersion
		a.cap, a.rate = n.shareOf(r, name)
		if resets := n.newest().Resets; resets > a.resets {
			a.left, a.resets = a.cap, resets // the reset filled all buckets
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
			return // otherwise many small steps would round the rate down to nothing
		}
		a.left = min(a.cap, plus(a.left, int64(min(more, maxValue))))
	}
	a.at = now
	if a.left == a.cap {
		a.over = 0
	}
}

// shareOf returns the largest share that a name has of a key in any configuration in force.
// The rate is raised: its clock and ours may differ by twice the drift of each.
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

// grant returns how much of a loan the lender's allowance covers, and takes that from the
// allowance.
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
	// An honest lender may exceed its allowance. With a later configuration it may have a
	// larger share. Loans of an earlier configuration may still be on their way. And the
	// lender may have refunded tokens, see Refund.
	if e.peer.configuration <= n.newest().Number && n.now >= n.termsTill && a.over > a.cap {
		n.refused.Loans++
		n.broke(name)
	}
	return taken
}

// giveUp puts tokens that were returned unspent back into the lender's allowance.
func (e *entry) giveUp(amount int64) {
	if a := e.row.lenders[e.peer.id.Name]; a != nil {
		a.left = min(a.cap, plus(a.left, amount))
	}
}

// paid forgets full allowances, and tells whether all were full. Then a new row would have
// the same allowances.
func (r *row) paid(now time.Duration) bool {
	for name, a := range r.lenders {
		if a.fill(now); a.left == a.cap {
			delete(r.lenders, name)
		}
	}
	return len(r.lenders) == 0
}

// maxBroke bounds the names in Stats.Broke.
const maxBroke = 64

func (n *Node) broke(name string) {
	if n.breaches == nil {
		n.breaches = map[string]uint64{}
	}
	if _, ok := n.breaches[name]; ok || len(n.breaches) < maxBroke {
		n.breaches[name]++
	}
}

// plus returns a + b, at most math.MaxInt64. a is not negative.
func plus(a, b int64) int64 {
	if b > 0 && a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}

// A total is a sum over all keys, which may exceed an int64.
type total struct {
	hi int64
	lo uint64
}

func (t *total) add(x int64) {
	lo, carry := bits.Add64(t.lo, uint64(x), 0)
	t.lo, t.hi = lo, t.hi+(x>>63)+int64(carry)
}

func (t *total) some() bool { return t.hi > 0 || t.hi == 0 && t.lo > 0 }

// value returns the sum, at most math.MaxInt64.
func (t *total) value() int64 {
	if t.hi > 0 || t.lo > math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(t.lo)
}
