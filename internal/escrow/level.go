// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"math"
	"time"
)

// Level returns the key's limit, how many tokens this node has left, and the shortest time
// until it could admit one. next is 0 if a token is left.
func (l *Handle) Level() (limit Limit, left int, next time.Duration) {
	if l.pooled != nil {
		return l.pooled.Level()
	}
	s := l.set
	s.lock()
	defer s.unlock()
	r := l.attach()
	if r == nil || s.closed {
		return Limit{}, 0, time.Second
	}
	r.update(s.node.now, s.node.mintAt)
	if r.held > 0 {
		s.node.expire(r)
	}
	there := r.held + r.level - r.waiting
	if r.drawing {
		there = r.held + r.granted - r.waiting
	}
	left = int(max(there, 0) / micro)
	if left == 0 {
		next = time.Duration(min(math.Ceil(float64(micro-there)/r.full*1e9), 1<<62))
		if !s.node.single {
			next = min(next, max(r.pace, controlLoop))
		}
	}
	return Limit{Rate: r.full / micro, Burst: int(r.burst / micro)}, left, next
}

// Refund puts admitted tokens back into this node's own level, as far as its part of the
// burst has room. It never puts back more than the node has spent of its own tokens, so it
// creates no tokens. If only borrowed tokens were spent, they are lost.
func (l *Handle) Refund(n int) {
	if n <= 0 {
		return
	}
	if l.pooled != nil {
		l.pooled.Refund(n)
		return
	}
	s := l.set
	s.lock()
	defer s.unlock()
	if r := l.attach(); r != nil && !s.closed {
		s.node.refund(r, amountOf(n))
	}
}

// Refund gives back tokens that were admitted and not used. It returns how many micro-tokens
// found room; see [Handle.Refund].
func (n *Node) Refund(now time.Duration, key string, tokens int) (back int64) {
	n.advance(now)
	if r := n.rows[key]; r != nil {
		back = n.refund(r, amountOf(tokens))
	}
	return back
}

func (n *Node) refund(r *row, amount int64) (back int64) {
	r.update(n.now, n.mintAt)
	if n.fenced {
		return 0 // behind a fence own tokens are void
	}
	back = max(0, min(amount, r.cap-r.level-r.lent, r.sum.Own))
	r.level += back
	r.sum.Own -= back
	if r.here && r.drawing {
		r.granted += min(back, max(0, r.level-r.pooled-r.granted))
	}
	n.ripen(r)
	return back
}
