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

// fresh is for how long a token that was taken ahead may be used.
const fresh = time.Second

// poll is after how long Admit is worth asking again while tokens are fetched.
const poll = time.Millisecond

// A Handle is one key of a [Store], and a [limiter.Gate]. It is safe for concurrent
// use, needs no Close, and is small.
type Handle struct {
	store *Store
	keys  []string // the one name at Redis
	valid bool
	limit limiter.Limit
	batch int

	waiting atomic.Int64  // tokens that callers of WaitN wait for
	turn    chan struct{} // has one element while somebody is the first in line

	// Below is guarded by mu, which nothing waits under.
	mu         sync.Mutex
	asking     *question // is on its way for the line
	spare      int       // tokens of its answer, for the next in line
	ahead      int       // tokens that Admit may use
	taken      time.Time // when the last of them came
	want       bool      // the prefetcher is to fetch more
	fetches    bool      // the prefetcher is about it
	owed       int       // to be given back
	prefetcher bool      // runs
	again      time.Time // not before is there anything to fetch
	failing    bool      // the last fetch found no decision
	spent      int       // admitted by Redis and not given back
	opened     time.Time // when something was last admitted that Redis did not decide
	known      bool      // what follows is of the last answer
	left       int
	next       time.Time
}

var _ limiter.Gate = (*Handle)(nil)

// Allow is AllowN of one.
func (h *Handle) Allow() bool { return h.AllowN(1) }

// AllowN asks Redis, for Config.Timeout at the longest; see [limiter.Gate]. More than
// the burst is denied without asking, and so is everything while others Wait.
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

// take asks for n, all or none.
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

// learn keeps what an answer says about the bucket. The caller holds mu.
func (h *Handle) learn(a answer) {
	h.known, h.left, h.next = true, a.left, time.Now().Add(a.wait)
}

// open tells whether an error admits.
func (h *Handle) open(err error) bool {
	if h.store.cfg.Silence != FailOpen || !errors.Is(err, ErrSilent) {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.opened = time.Now()
	return true
}

// Wait is WaitN of one.
func (h *Handle) Wait(ctx context.Context) error { return h.WaitN(ctx, 1) }

// WaitN waits until n are admitted, or ctx ends. It returns
// [context.DeadlineExceeded] at once if ctx has a deadline before there can be as
// many tokens. Waiters of this handle are served in their order.
//
// While Redis does not decide, FailOpen admits, and FailClosed goes on asking until
// ctx ends; the error is then [ErrSilent] as well. An answer that waiting
// does not mend, such as NOPERM, ends a wait.
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
	select { // those who wait to send are served in their order
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
		case <-ctx.Done(): // it goes on for those behind
			return h.store.gaveUp(ctx)
		}
		wait, err := q.wait, q.err
		switch {
		case q.took > 0, !own && err == nil && n < q.least: // there may be as few
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

// A question asks for all who wait, so no caller's context ends it.
type question struct {
	least int
	done  chan struct{} // closed with the answer
	answer
	err error
}

// question takes n from what the latest answer had to spare, and returns nil. Without as
// many it returns the question on its way, or else sends its own. Only the first in line
// calls it.
func (h *Handle) question(n int) (q *question, own bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.store.isClosed(): // run refuses
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

// answer asks, and leaves what comes to the line.
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

// dissolve gives back what the line has left over at its end. The caller holds mu.
func (h *Handle) dissolve() {
	if h.spare > 0 {
		h.owed, h.spare = h.owed+h.spare, 0
		h.send()
	}
}

// Admit uses a token that was taken ahead, and has more fetched; see [limiter.Gate].
// It never waits for Redis. The first call of a handle finds nothing yet.
func (h *Handle) Admit(time.Duration) time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	if h.ahead > 0 && now.Sub(h.taken) > fresh {
		h.ahead = 0
	}
	if h.ahead <= h.batch/2 && !h.fetches && h.valid && !now.Before(h.again) && h.waiting.Load() == 0 { // who waits goes first
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

// Refund gives back by a goroutine; see [limiter.Gate]. It gives back no more than Redis
// has admitted by this handle, and nothing for a second after an admission that
// Redis did not decide, since it may be that one. What cannot be sent is lost.
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
	h.owed += n
	h.send()
}

// send has a prefetcher ask what there is to ask. The caller holds mu.
func (h *Handle) send() {
	if !h.prefetcher {
		h.prefetcher = h.store.run(h.carry)
	}
}

// carry asks for what Admit wants and gives back what is owed, until there is
// neither.
func (h *Handle) carry() {
	for {
		back, least, most, ok := h.errand()
		if !ok {
			return
		}
		a, err := h.store.ask(h, least, most, back)
		h.deliver(a, err, most > 0)
	}
}

func (h *Handle) errand() (back, least, most int, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.owed == 0 && !h.want {
		h.prefetcher = false
		return 0, 0, 0, false
	}
	back, h.owed = h.owed, 0
	if h.want {
		h.want, h.fetches = false, true
		most = max(h.batch-h.ahead, 1)
		least = 1
	}
	return back, least, most, true
}

func (h *Handle) deliver(a answer, err error, fetched bool) {
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

// Level is what the last answer said, and does not ask; see [limiter.Level]. Other
// processes may have taken more since.
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
