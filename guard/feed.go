// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"slices"
	"sync"
)

// A Feed hands batches from an adapter's reader, on a goroutine of its own, to
// the source's loop. The two sides exchange two buffers: the loop takes all messages
// that the reader has put. So a message costs a short uncontended lock, and a side is
// woken only if it waits. (A full channel wakes the reader at each receive.)
//
// Lock order: Source.mu, then Feed.mu.
type Feed[M any] struct {
	mu      sync.Mutex
	max     int // messages each buffer may hold
	buf     []M
	closed  bool
	waiting bool // the reader waits for room

	ready chan struct{} // holds a token when the loop must look at buf; capacity 1
	space chan struct{} // holds a token when the reader must look for room; capacity 1
}

func newFeed[M any]() *Feed[M] {
	return &Feed[M]{ready: make(chan struct{}, 1), space: make(chan struct{}, 1)}
}

// resize changes how many messages each buffer may hold. Messages above the limit stay,
// and Put waits until they are taken.
func (f *Feed[M]) resize(limit int) {
	f.mu.Lock()
	f.max = limit
	f.buf = slices.Grow(f.buf, max(0, limit-len(f.buf)))
	wake := f.waiting && len(f.buf) < limit
	f.waiting = f.waiting && !wake
	f.mu.Unlock()
	if wake {
		token(f.space)
	}
}

// Put hands messages over and waits while there is no room. It returns how many it
// handed over: all, unless ctx ended (ctx's error) or the feed is closed ([ErrClosed]).
// Only one goroutine at a time may call Put.
func (f *Feed[M]) Put(ctx context.Context, ms ...M) (int, error) {
	placed := 0
	for {
		f.mu.Lock()
		if f.closed {
			f.mu.Unlock()
			return placed, ErrClosed
		}
		was := len(f.buf)
		n := max(0, min(f.max-was, len(ms)-placed))
		f.buf = append(f.buf, ms[placed:placed+n]...)
		placed += n
		f.waiting = placed < len(ms)
		f.mu.Unlock()
		if was == 0 && n > 0 {
			token(f.ready)
		}
		if placed == len(ms) {
			return placed, nil
		}
		select {
		case <-f.space:
		case <-ctx.Done():
			return placed, ctx.Err()
		}
	}
}

// Close ends the feed. The reader calls it when no more messages come. The loop still
// takes the messages in the feed; Put fails with [ErrClosed].
func (f *Feed[M]) Close() {
	f.mu.Lock()
	f.closed = true
	f.mu.Unlock()
	token(f.ready)
	token(f.space)
}

// Len is how many messages wait in the feed.
func (f *Feed[M]) Len() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.buf)
}

// swap takes all messages, and leaves the emptied buffer spent in the feed. done means
// that no more messages follow.
func (f *Feed[M]) swap(spent []M) (batch []M, done bool) {
	clear(spent)
	f.mu.Lock()
	batch, f.buf = f.buf, spent[:0]
	done = f.closed
	wake := f.waiting
	f.waiting = false
	f.mu.Unlock()
	if wake {
		token(f.space)
	}
	return batch, done
}

// peek appends the waiting messages to dst.
func (f *Feed[M]) peek(dst []M) []M {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append(dst, f.buf...)
}

// token leaves a token in a channel of capacity 1.
func token(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
