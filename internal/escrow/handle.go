// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"context"
	"fmt"
	"time"
)

// A Handle is the handle of one key of a [Set]. It is safe for concurrent use. Keep it:
// [Set.Key] costs more than Allow.
//
// Most calls of Allow read no clock: they subtract from a pool of tokens that were taken
// ahead. A pool has at most 64 tokens, and at most a quarter of this node's part of the
// burst. When it is empty, one call takes the set's lock and fills it again.
type Handle struct {
	pool pool
	_    [120]byte // keeps pool off the cache lines of fields that others write

	set    *Set
	key    string
	pooled *pooledHandle // only with [Pooled]; it then answers all calls

	row         *row    // nil while the node does not know the key; guarded by set.mu
	first, last *waiter // in the order in which they came; guarded by set.mu
}

// A waiter is a Wait that has not ended.
type waiter struct {
	amount     int64         // micro-tokens
	ready      chan struct{} // closed when served, and when err is set
	err        error         // ErrBurst after a change of the burst, or ErrClosed
	done       bool          // no longer in the queue
	prev, next *waiter
}

// poolMax is the most tokens in a pool.
const poolMax = 64

// Allow admits one token, or denies it at once. A denial counts as demand: the node asks
// others for the missing tokens.
func (l *Handle) Allow() bool { return l.pool.take() || l.slow(1) }

// AllowN admits n tokens, all or none. n above the burst is denied, n <= 0 is admitted.
// After a denial of n > 1 the node gathers tokens from others for 200 ms, so it is worth
// asking again.
func (l *Handle) AllowN(n int) bool {
	return n <= 0 || l.pool.takeN(int64(n)) || l.slow(n)
}

func (l *Handle) slow(n int) bool {
	if l.pooled != nil {
		return l.pooled.AllowN(n)
	}
	s := l.set
	s.lock()
	defer s.unlock()
	r := l.attach()
	amount := amountOf(n)
	if r == nil || s.closed || amount > r.burst {
		return false
	}
	r.update(s.node.now, s.node.mintAt)
	if l.first != nil { // waiters that came before are served first
		r.forecast.asked += amount
		r.sum.Denied = plus(r.sum.Denied, amount)
		return false
	}
	if !s.node.take(r, amount) {
		return false
	}
	l.fill(r)
	return true
}

// attach finds the key's row; nil if there is no room or the key is not valid. The caller
// holds the lock.
func (l *Handle) attach() *row {
	if l.row != nil {
		return l.row
	}
	r := l.set.node.row(l.key)
	if r != nil && r.handle == nil {
		l.row, r.handle, r.pool = r, l, &l.pool
	}
	return r
}

// fill takes tokens ahead into the pool. It takes none while the row holds borrowed tokens,
// since the node must watch their lease. It takes none of a small limit, since others may
// have drawn them.
func (l *Handle) fill(r *row) {
	if r.handle != l || r.pooled != 0 || r.held > 0 || r.owner != "" || l.first != nil {
		return
	}
	if n := min(poolMax, r.cap/(4*micro), r.level/micro); n > 0 {
		r.pooled = n * micro
		l.pool.fill(n)
	}
}

// Wait waits until one token is admitted, or ctx ends, or the set is closed. A closed set
// is [ErrClosed], whether ctx has ended or not. Waiters of a handle are served in the order
// in which they came, and before any later Allow.
func (l *Handle) Wait(ctx context.Context) error { return l.WaitN(ctx, 1) }

// WaitN is Wait for n tokens at once; n above the burst is [ErrBurst].
//
// If n is more than this node's share of the burst, the node gathers tokens from others. It
// waits as long as they use their tokens themselves, or cannot be reached. Nodes that gather
// at the same time get theirs one after the other, each after some refills of the burst.
func (l *Handle) WaitN(ctx context.Context, n int) error {
	if n <= 0 {
		return ctx.Err()
	}
	if err := ctx.Err(); err != nil {
		if l.set.isClosed() {
			return ErrClosed
		}
		return err
	}
	if l.pool.takeN(int64(n)) {
		return nil
	}
	if l.pooled != nil {
		return l.pooled.WaitN(ctx, n)
	}
	w := &waiter{amount: amountOf(n)}
	if err := l.enqueue(w); err != nil || w.ready == nil {
		return err
	}
	select {
	case <-w.ready:
		return w.err
	case <-ctx.Done():
	}
	if l.cancel(w) {
		return ctx.Err()
	}
	return w.err
}

// enqueue admits w at once, or queues it and makes w.ready.
func (l *Handle) enqueue(w *waiter) error {
	s := l.set
	s.lock()
	defer s.unlock()
	r := l.attach()
	switch {
	case s.closed:
		return ErrClosed
	case r == nil:
		return ErrTooManyKeys
	case w.amount > r.burst:
		return tooMuch(w.amount, r.burst)
	}
	r.update(s.node.now, s.node.mintAt)
	if l.first == nil && s.node.draw(r, w.amount) {
		r.forecast.asked += w.amount
		s.node.stir(r)
		l.fill(r)
		return nil
	}
	r.reclaim()
	w.ready, w.prev = make(chan struct{}), l.last
	if l.last != nil {
		l.last.next = w
	} else {
		l.first = w
	}
	l.last = w
	s.node.demand(r, w.amount)
	s.waiting[l] = r
	return nil
}

func tooMuch(amount, burst int64) error {
	return fmt.Errorf("%w: %d of %d", ErrBurst, amount/micro, burst/micro)
}

// cancel takes a waiter out of the queue. It returns false if w has left the queue already.
func (l *Handle) cancel(w *waiter) bool {
	s := l.set
	s.lock()
	defer s.unlock()
	if w.done {
		return false
	}
	r := s.waiting[l]
	wasFirst := l.first == w
	l.remove(w)
	r.waiting = max(0, r.waiting-w.amount)
	if wasFirst {
		l.serve(r) // the next may want less
	}
	return true
}

func (l *Handle) remove(w *waiter) {
	w.done = true
	if w.prev != nil {
		w.prev.next = w.next
	} else {
		l.first = w.next
	}
	if w.next != nil {
		w.next.prev = w.prev
	} else {
		l.last = w.prev
	}
	if l.first == nil {
		delete(l.set.waiting, l)
	}
}

// serve admits waiters from the first on, while there are tokens.
func (l *Handle) serve(r *row) {
	for l.first != nil && l.set.node.serve(r, l.first.amount) {
		w := l.first
		l.remove(w)
		close(w.ready)
	}
}

// Admit admits one token and returns 0, or admits none and returns how long to wait before
// asking again. With it a Handle is a guard's Limiter. The argument is ignored: the set has
// its own clock. A caller that is told to wait is expected to ask again, so asking twice
// does not count as twice the demand.
func (l *Handle) Admit(time.Duration) time.Duration {
	if l.pool.take() {
		return 0
	}
	if l.pooled != nil {
		return l.pooled.Admit()
	}
	s := l.set
	s.lock()
	defer s.unlock()
	r := l.attach()
	if r == nil || s.closed {
		return time.Second
	}
	r.update(s.node.now, s.node.mintAt)
	if l.first == nil && s.node.poll(r, micro) {
		l.fill(r)
		return 0
	}
	wait := r.until(r.waiting + micro)
	if !s.node.single {
		wait = min(wait, max(r.pace, controlLoop)) // another node may lend
	}
	return min(max(wait, minAsk), time.Second)
}

// minAsk is the shortest wait that Admit returns.
const minAsk = 100 * time.Microsecond
