// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limiter

import (
	"context"
	"math"
	"time"
)

// A Gate is a limit, whatever keeps it: a [Limiter] of one process or of a fleet,
// a handle of limiter/redis, several together ([All]), or one that only counts
// ([Observe]). It is safe for concurrent use.
type Gate interface {
	// Allow admits one, or denies it. It waits for nobody but the store, if there
	// is one.
	Allow() bool
	// AllowN is Allow for n, all or none. n <= 0 is admitted.
	AllowN(n int) bool
	// Wait waits until one is admitted, or ctx ends, or no wait would help.
	Wait(ctx context.Context) error
	// WaitN is Wait for n, all at once; [ErrBurst] if that can never be.
	WaitN(ctx context.Context, n int) error
	// Admit is Allow for a guard's source: it takes one admission and returns 0, or
	// takes none and returns how long to wait before it is worth asking again. It
	// does no I/O and waits for nobody. now may be ignored.
	Admit(now time.Duration) time.Duration
	// Refund gives back n admissions that were not used, once for each, and soon.
	// What does not fit any more is lost. It does not block.
	//
	// An admission on its way back is out of the books: what is neither used nor
	// given back yet when an interval begins may come on top of the limit in it.
	Refund(n int)
}

// A Meter is a Gate that knows something of itself. All of this module do, except
// that a Gate of [All] knows as much as its parts.
type Meter interface {
	// Level looks, and takes nothing. It asks nobody.
	Level() Level
}

// A Level is what a gate knows at an instant, for people and headers: by the time
// it is read it may be wrong.
type Level struct {
	// Limit is zero where there is none, or it is not known.
	Limit Limit
	// Left is how many tokens are there. Of a fleet's limit it is what this process
	// has, and others may lend.
	Left int
	// Next is the least time until one more can be admitted, 0 if one can be now.
	Next time.Duration
}

// levelOf is the level of a gate that may not know it: then there is no limit to
// name, and a second is as good as any other time.
func levelOf(g Gate) Level {
	if m, ok := g.(Meter); ok {
		return m.Level()
	}
	return Level{Next: time.Second}
}

var (
	_ Gate  = (*Limiter)(nil)
	_ Meter = (*Limiter)(nil)
)

// Level is what this node has of the key, and when it could admit one at the
// soonest; in a fleet others may lend within 20 ms. It takes the set's lock.
func (l *Limiter) Level() Level {
	if l.pooled != nil {
		return l.pooled.Level()
	}
	s := l.set
	s.lock()
	defer s.unlock()
	r := l.attach()
	if r == nil || s.closed {
		return Level{Next: time.Second}
	}
	r.update(s.node.now, s.node.mintAt)
	if r.held > 0 {
		s.node.expire(r)
	}
	there := r.held + r.level - r.waiting
	if r.drawing {
		there = r.held + r.granted - r.waiting
	}
	v := Level{Limit: Limit{Rate: r.full / micro, Burst: int(r.burst / micro)}, Left: int(max(there, 0) / micro)}
	if v.Left == 0 {
		v.Next = time.Duration(min(math.Ceil(float64(micro-there)/r.full*1e9), 1<<62))
		if !s.node.alone {
			v.Next = min(v.Next, max(r.pace, controlLoop))
		}
	}
	return v
}

// Refund puts admitted tokens back into this node's own level, as far as its part
// of the burst has room, and never more than it has spent of its own: so it makes
// no tokens, but what was spent of loans is lost if nothing own was.
func (l *Limiter) Refund(n int) {
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

// Refund gives back tokens that were taken and not used; it returns how many
// micro-tokens found room. See [Limiter.Refund].
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
		return 0 // what is its own is void
	}
	back = max(0, min(amount, r.cap-r.level-r.lent-r.reserved, r.sum.Own))
	r.level += back
	r.sum.Own -= back
	if r.here && r.drawing {
		r.granted += min(back, max(0, r.level-r.pooled-r.granted))
	}
	n.ripen(r)
	return back
}
