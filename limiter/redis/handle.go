// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package redis

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stormguard-mq/stormguard/limiter"
)

// fresh is how long a token that was taken ahead may be used.
const fresh = time.Second

// poll is the wait that Admit returns while tokens are fetched.
const poll = time.Millisecond

// A Handle is one key of a [Store], and a [limiter.Gate]. It is safe for concurrent use,
// small, and need not be closed.
type Handle struct {
	store *Store
	keys  []string // has a single element, the key's name at Redis
	valid bool     // the key is not empty and not too long
	limit limiter.Limit
	batch int // largest number of tokens taken ahead

	waiting atomic.Int64  // tokens that callers of WaitN wait for
	turn    chan struct{} // has one element while a waiter is first in line

	// mu guards all fields below. No call waits while it holds mu.
	mu         sync.Mutex
	asking     *question // question for the waiters that is in flight, or nil
	spare      int       // tokens of the latest answer that the next waiter may take
	ahead      int       // tokens that Admit may use
	taken      time.Time // when the latest tokens of ahead came
	want       bool      // the prefetcher must fetch more
	fetches    bool      // a fetch is in flight
	giveBack   int       // tokens to give back to Redis
	prefetcher bool      // the prefetcher's goroutine runs
	again      time.Time // no fetch begins before
	failing    bool      // the latest fetch got no decision
	spent      int       // tokens that Redis admitted and that were not refunded
	opened     time.Time // latest admission that Redis did not decide
	known      bool      // left and next are set
	left       int       // tokens left in the bucket, by the latest answer
	next       time.Time // when the tokens asked for can be there, by the latest answer
}

var _ limiter.Gate = (*Handle)(nil)

// Allow is AllowN of one token.
func (h *Handle) Allow() bool { return h.AllowN(1) }

// AllowN asks Redis, and waits at most Config.Timeout; see [limiter.Gate]. n above the burst
// is denied without asking. While callers of this handle wait, everything is denied.
func (h *Handle) AllowN(n int) bool {
	if n <= 0 {
		return true
	}
	if !h.valid || n > h.limit.Burst || h.waiting.Load() > 0 {
		return false
	}
	a, err := h.take(n)
	return a.took > 0 || err != nil && h.open(err)
}

// take asks Redis for n tokens, all or none.
func (h *Handle) take(n int) (answer, error) {
	a, err := h.store.ask(h, n, n, 0)
	if err == nil {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.learn(a)
		h.spent += a.took
	}
	return a, err
}

// learn keeps the bucket's state from an answer. The caller holds mu.
func (h *Handle) learn(a answer) {
	h.known, h.left, h.next = true, a.left, time.Now().Add(a.wait)
}

// open tells whether a call with this error is admitted fail-open, and notes that.
func (h *Handle) open(err error) bool {
	if h.store.cfg.Silence != FailOpen || !errors.Is(err, ErrSilent) {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.opened = time.Now()
	return true
}

// Wait is WaitN of one token.
func (h *Handle) Wait(ctx context.Context) error { return h.WaitN(ctx, 1) }

// WaitN waits until n tokens are admitted, or ctx ends. It returns
// [context.DeadlineExceeded] at once if there cannot be n tokens before ctx's deadline.
// Waiters of this handle are served in order.
//
// While Redis does not decide, FailOpen admits. FailClosed goes on asking until ctx ends;
// then the error is [ErrSilent] as well. With FailClosed, an error answer that waiting does not
// fix, such as NOPERM, ends a wait.
func (h *Handle) WaitN(ctx context.Context, n int) error {
	if n > 0 && h.store.isClosed() {
		return limiter.ErrClosed
	}
	if err := ctx.Err(); err != nil || n <= 0 {
		return err
	}
	switch {
	case !h.valid:
		return fmt.Errorf("%w: key: %d bytes are not in [1, %d]", errConfig, len(h.keys[0])-len(h.store.cfg.Prefix)-2, limiter.MaxKey)
	case n > h.limit.Burst:
		return fmt.Errorf("%w: %d of %d", limiter.ErrBurst, n, h.limit.Burst)
	}
	h.waiting.Add(int64(n))
	defer h.leave(n)
	select { // a channel serves waiting senders in order
	case h.turn <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-h.turn }()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		q, own := h.question(n)
		if q == nil {
			return nil
		}
		select {
		case <-q.done:
		case <-ctx.Done(): // the question goes on for the waiters behind
			return h.store.gaveUp(ctx)
		}
		wait, err := q.wait, q.err
		switch {
		case q.took > 0, !own && err == nil && n < q.least: // n is less than was asked for
			continue
		case err != nil && h.open(err):
			return nil
		case err == nil:
			if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) < wait {
				return fmt.Errorf("limiter/redis: %d in %v: %w", n, wait, context.DeadlineExceeded)
			}
		case errors.Is(err, limiter.ErrClosed), errors.Is(err, errRefused):
			return err
		default:
			wait = h.store.rest()
		}
		timer.Reset(jittered(wait))
		select {
		case <-timer.C:
		case <-h.store.done:
			return limiter.ErrClosed
		case <-ctx.Done():
			return h.store.gaveUp(ctx)
		}
	}
}

// A question asks for tokens for all waiters, so no caller's context ends it.
type question struct {
	least int           // tokens that the first waiter needs
	done  chan struct{} // closed when answer and err are set
	answer
	err error
}

// question takes n tokens from spare, and returns nil. If spare has fewer, it returns the
// question in flight, or sends its own. Only the first in line calls it.
func (h *Handle) question(n int) (q *question, own bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.store.isClosed(): // run below refuses, which sets ErrClosed
	case h.spare >= n:
		h.spare -= n
		h.spent += n
		return nil, false
	case h.asking != nil:
		return h.asking, false
	}
	q = &question{least: n, done: make(chan struct{})}
	back, most := h.spare, int(h.waiting.Load())
	h.spare = 0 // too few for the first in line
	if h.store.run(func() { h.answer(q, most, back) }) {
		h.asking = q
	} else {
		q.err = limiter.ErrClosed
		close(q.done)
	}
	return q, true
}

// answer asks Redis, and leaves the tokens to the waiters.
func (h *Handle) answer(q *question, most, back int) {
	q.answer, q.err = h.store.ask(h, q.least, most, back)
	h.mu.Lock()
	defer h.mu.Unlock()
	if q.err == nil {
		h.learn(q.answer)
	}
	h.asking, h.spare = nil, q.took
	close(q.done)
	if h.waiting.Load() == 0 {
		h.dissolve()
	}
}

// leave takes a caller out of the line.
func (h *Handle) leave(n int) {
	if h.waiting.Add(-int64(n)) == 0 {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.dissolve()
	}
}

// dissolve gives spare tokens back when no caller waits any more. The caller holds mu.
func (h *Handle) dissolve() {
	if h.spare > 0 {
		h.giveBack, h.spare = h.giveBack+h.spare, 0
		h.send()
	}
}

// Admit uses a token that was taken ahead, and starts a fetch of more; see [limiter.Gate].
// It never waits for Redis. The first call of a handle finds no token yet.
func (h *Handle) Admit(time.Duration) time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	if h.ahead > 0 && now.Sub(h.taken) > fresh {
		h.ahead = 0
	}
	if h.ahead <= h.batch/2 && !h.fetches && h.valid && !now.Before(h.again) && h.waiting.Load() == 0 { // waiters go first
		h.want = true
		h.send()
	}
	switch {
	case h.ahead > 0:
		h.ahead--
		h.spent++
		return 0
	case (h.failing && now.Sub(h.again) <= h.store.cfg.Timeout || h.store.silent.Load()) && h.store.cfg.Silence == FailOpen && h.valid && !h.store.isClosed():
		h.opened = now
		return 0
	case !h.valid || h.store.isClosed():
		return time.Second
	case h.prefetcher:
		return poll
	}
	return max(h.again.Sub(now), poll)
}

// Refund gives tokens back in a goroutine; see [limiter.Gate]. It gives back at most as many
// tokens as Redis has admitted through this handle. For a second after an admission that
// Redis did not decide it gives back nothing, since the tokens may be of that admission.
// Tokens that cannot be sent are lost.
func (h *Handle) Refund(n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n = min(n, h.spent)
	if n <= 0 {
		return
	}
	h.spent -= n
	if !h.opened.IsZero() && time.Since(h.opened) < fresh {
		return
	}
	h.giveBack += n
	h.send()
}

// send starts the prefetcher if it does not run. The caller holds mu.
func (h *Handle) send() {
	if !h.prefetcher {
		h.prefetcher = h.store.run(h.prefetch)
	}
}

// prefetch is the prefetcher. It fetches tokens for Admit and gives owed tokens back, until
// there is nothing to do.
func (h *Handle) prefetch() {
	for {
		back, least, most, ok := h.nextFetch()
		if !ok {
			return
		}
		a, err := h.store.ask(h, least, most, back)
		h.fetched(a, err, most > 0)
	}
}

func (h *Handle) nextFetch() (back, least, most int, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.giveBack == 0 && !h.want {
		h.prefetcher = false
		return 0, 0, 0, false
	}
	back, h.giveBack = h.giveBack, 0
	if h.want {
		h.want, h.fetches = false, true
		most = max(h.batch-h.ahead, 1)
		least = 1
	}
	return back, least, most, true
}

func (h *Handle) fetched(a answer, err error, fetched bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err == nil {
		h.learn(a)
	}
	if !fetched {
		return
	}
	h.fetches = false
	now := time.Now()
	h.failing = errors.Is(err, ErrSilent)
	switch {
	case err != nil:
		h.again = now.Add(max(h.store.rest(), pause))
	case a.took == 0:
		h.again = now.Add(min(jittered(a.wait), time.Second))
	default:
		h.ahead += a.took
		h.taken = now
	}
}

// Level returns the state in the latest answer, and does not ask; see [limiter.Level]. Other
// processes may have taken tokens since.
func (h *Handle) Level() limiter.Level {
	h.mu.Lock()
	defer h.mu.Unlock()
	l := limiter.Level{Limit: h.limit}
	if h.known {
		now := time.Now()
		l.Left = h.left
		l.Next = max(0, h.next.Sub(now))
	}
	l.Next = max(l.Next, h.store.rest())
	return l
}
