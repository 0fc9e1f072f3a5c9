// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

import (
	"fmt"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

// A Reader is a [Lease] that grows: it reads more of a lane while earlier messages are
// still handled, and gives up the oldest messages when they are done. While it is open the
// lane has no other lease. One goroutine at a time may use it.
type Reader[T any] struct {
	lane *Lane[T]
	id   uint64
}

// Reader opens a reader at the lane's oldest message. The error is [ringbuf.ErrLeased]
// while another lease is open, [ringbuf.ErrClosed] or [ringbuf.ErrDropped].
func (l *Lane[T]) Reader() (*Reader[T], error) {
	c := l.l.c
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case l.l.err != nil:
		return nil, l.l.err
	case l.l.leased:
		return nil, ringbuf.ErrLeased
	}
	l.l.leased, l.l.ends = true, nil
	l.l.lease++
	return &Reader[T]{l, l.l.lease}, nil
}

// Read copies the next messages into dst, and does not wait: 0 without an error means that
// no more messages are confirmed yet. It stops after limit bytes, as counted on the disk.
// Damage is skipped as by [Lane.Lease], which lists the errors. A [*DecodeError] is about
// the next message, which counts as read.
func (r *Reader[T]) Read(dst []T, limit int64) (n int, err error) {
	l := r.lane.l
	l.c.mu.Lock()
	if err := r.overLocked(); err != nil {
		l.c.mu.Unlock()
		return 0, err
	}
	head, tail := l.head, l.tail
	if len(l.ends) > 0 {
		head = l.ends[len(l.ends)-1]
	}
	l.c.mu.Unlock()
	if len(dst) == 0 || limit <= 0 || head == tail {
		return 0, nil
	}
	recs, err := l.read(head, tail, len(dst), limit)
	for i, rec := range recs {
		v, err := r.lane.codec.Decode(rec.data)
		if err != nil {
			keep := i
			if i == 0 {
				keep, err = 1, decodeError(l.name, rec, err)
			} else {
				err = nil
			}
			r.unread(len(recs) - keep)
			return i, err
		}
		dst[i] = v
	}
	return len(recs), err
}

// unread makes the last n messages unread again.
func (r *Reader[T]) unread(n int) {
	l := r.lane.l
	l.c.mu.Lock()
	l.ends = l.ends[:len(l.ends)-n]
	l.c.mu.Unlock()
}

// Commit gives up the oldest n of the read messages; see [Lease.Commit].
func (r *Reader[T]) Commit(n int) error {
	l := r.lane.l
	l.c.mu.Lock()
	defer l.c.mu.Unlock()
	if err := r.overLocked(); err != nil {
		return err
	}
	if n < 0 || n > len(l.ends) {
		return fmt.Errorf("spill: commit: n is %d, want 0 to %d", n, len(l.ends))
	}
	l.giveUpLocked(n)
	l.ends = l.ends[n:]
	return nil
}

// Close ends the reader and leaves uncommitted messages at the front of the lane. It may be
// called again.
func (r *Reader[T]) Close() {
	l := r.lane.l
	l.c.mu.Lock()
	defer l.c.mu.Unlock()
	if r.overLocked() != nil {
		return
	}
	l.leased, l.ends = false, nil
	l.tellLocked()
}

func (r *Reader[T]) overLocked() error {
	switch l := r.lane.l; {
	case l.err != nil:
		return l.err
	case !l.leased || l.lease != r.id:
		return ringbuf.ErrLeaseOver
	}
	return nil
}
