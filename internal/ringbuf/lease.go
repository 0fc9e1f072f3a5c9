// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package ringbuf

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
)

// A Lease is the right to the oldest messages of a lane. They stay in the lane,
// and in its budget, until Commit frees them. There is one open lease per lane.
//
// A Lease is a small value. All copies are the same lease: the first Commit or Release ends
// it. The zero Lease is over.
type Lease[T any] struct {
	lane *Lane[T]
	id   uint64
	n    int
}

// Len returns how many messages were leased.
func (s Lease[T]) Len() int { return s.n }

// Lease copies the oldest messages into dst, at least one and at most len(dst), and returns
// the lease on them. It waits while the lane is empty or another lease is open. The error is
// [ErrClosed], [ErrDropped], or that of ctx, also if ctx is done on entry.
//
// With a [Codec], the lease stops before the first message that cannot be decoded. If that is
// the oldest message, the error is a [*DecodeError], and the lease is open on this single
// message: Commit(1) gives the message up, Release keeps it.
func (l *Lane[T]) Lease(ctx context.Context, dst []T) (Lease[T], error) {
	if err := ctx.Err(); err != nil {
		return Lease[T]{}, err
	}
	s, err := l.TryLease(dst)
	if err == nil || !mayCome(err) {
		return s, err
	}
	runtime.Gosched() // the producer is often about to put; parking costs much more
	return l.leaseSlow(ctx, dst, false)
}

// mayCome tells whether it is worth waiting after a lease failed with err.
func mayCome(err error) bool {
	return errors.Is(err, ErrEmpty) || errors.Is(err, ErrLeased)
}

// TryLease is [Lane.Lease] without waiting: it returns [ErrLeased] while
// another lease is open, and otherwise [ErrEmpty] if the lane is empty.
func (l *Lane[T]) TryLease(dst []T) (Lease[T], error) {
	l.mu.Lock()
	s, at, err := l.leaseLocked(dst)
	l.mu.Unlock()
	if err != nil || at.c == nil {
		return s, err
	}
	return l.decode(s, at, dst)
}

func (l *Lane[T]) leaseLocked(dst []T) (Lease[T], place, error) {
	switch {
	case l.err != nil:
		return Lease[T]{}, place{}, l.err
	case len(dst) == 0:
		return Lease[T]{}, place{}, errNoDst
	case l.leased > 0:
		return Lease[T]{}, place{}, ErrLeased
	case l.count == 0:
		return Lease[T]{}, place{}, ErrEmpty
	}
	n := min(len(dst), l.count)
	l.leased = n
	l.lease++
	s := Lease[T]{lane: l, id: l.lease, n: n}
	if l.slab != nil {
		return s, l.slab.head, nil
	}
	if n == 1 {
		dst[0] = l.slots.v[l.head]
	} else if m := copy(dst[:n], l.slots.v[l.head:]); m < n {
		copy(dst[m:n], l.slots.v)
	}
	return s, place{}, nil
}

// leaseSlow waits for a lease. With behind, calls that already wait go first.
func (l *Lane[T]) leaseSlow(ctx context.Context, dst []T, behind bool) (Lease[T], error) {
	l.mu.Lock()
	w := l.idle.get()
	for {
		if !behind || l.readers.head == nil || l.err != nil {
			s, at, err := l.leaseLocked(dst)
			if err == nil || !mayCome(err) {
				l.leaveReaders(w)
				l.mu.Unlock()
				if err != nil || at.c == nil {
					return s, err
				}
				return l.decode(s, at, dst)
			}
		}
		behind = false
		if !w.queued {
			l.readers.push(w)
		}
		w.woken = false
		l.mu.Unlock()
		select {
		case <-w.ch:
			l.mu.Lock()
		case <-ctx.Done():
			l.mu.Lock()
			l.leaveReaders(w)
			next := l.nextReader()
			l.mu.Unlock()
			if next != nil {
				next.signal() // w may have been woken for a message that it does not take
			}
			return Lease[T]{}, ctx.Err()
		}
	}
}

func (l *Lane[T]) leaveReaders(w *waiter) {
	if w.queued {
		l.readers.remove(w)
	}
	l.idle.put(w)
}

// nextReader returns the waiter of the Lease to signal; nil if no lease can be taken now.
func (l *Lane[T]) nextReader() *waiter {
	if l.leased > 0 || l.count == 0 {
		return nil
	}
	return l.readers.first()
}

// decode fills dst from the records under lease s. The records do not change until the lease
// is over, so no lock is needed. If the lane is dropped meanwhile, its records are left to the
// garbage collector.
func (l *Lane[T]) decode(s Lease[T], at place, dst []T) (Lease[T], error) {
	done := false
	defer func() {
		if !done {
			s.Release() // the codec panicked
		}
	}()
	for i := range s.n {
		src := at.next()
		v, err := l.ring.codec.Decode(src)
		if err == nil {
			dst[i] = v
			continue
		}
		if s.n = i; i == 0 {
			s.n = 1
			err = &DecodeError{Lane: l.id, Data: bytes.Clone(src), Err: err}
		} else {
			err = nil
		}
		l.mu.Lock()
		if l.lease == s.id && l.leased > 0 {
			l.leased = s.n
		}
		l.mu.Unlock()
		done = true
		return s, err
	}
	done = true
	return s, nil
}

// decodeAll reads n records that no longer belong to the lane.
func (l *Lane[T]) decodeAll(at place, n int) ([]T, error) {
	vs := make([]T, 0, n)
	var errs []error
	for range n {
		src := at.next()
		v, err := l.ring.codec.Decode(src)
		if err != nil {
			errs = append(errs, &DecodeError{Lane: l.id, Data: src, Err: err})
			continue
		}
		vs = append(vs, v)
	}
	return vs, errors.Join(errs...)
}

// Commit ends the lease, frees its first n messages, and leaves the others at the front of the
// lane, in the same order. On an error nothing has changed. If the lease is over, the error is
// [ErrLeaseOver]. If n is not in 0 to Len, it is another error, and the lease stays open.
func (s Lease[T]) Commit(n int) error {
	if err := s.lock(n); err != nil {
		return err
	}
	l := s.lane
	l.commitLocked(n)
	reader := l.nextReader()
	l.mu.Unlock()
	if n > 0 {
		l.ring.wake()
	}
	if reader != nil {
		reader.signal()
	}
	return nil
}

// Next is [Lease.Commit] of n and then [Lane.Lease] into dst, and costs little more than one
// of them. On an error of Commit nothing has changed. On an error of Lease the commit is done.
// Calls that already wait for a lease go first.
func (s Lease[T]) Next(ctx context.Context, n int, dst []T) (Lease[T], error) {
	if n == 1 && len(dst) == 1 && ctx.Err() == nil {
		if next, ok := s.nextOne(dst); ok {
			return next, nil
		}
	}
	if err := s.lock(n); err != nil {
		return Lease[T]{}, err
	}
	l := s.lane
	l.commitLocked(n)
	var next Lease[T]
	var at place
	err := ctx.Err()
	others := l.readers.head != nil
	if err == nil && !others {
		next, at, err = l.leaseLocked(dst)
	}
	reader := l.nextReader()
	l.mu.Unlock()
	if n > 0 {
		l.ring.wake()
	}
	if reader != nil {
		reader.signal()
	}
	switch {
	case at.c != nil:
		return l.decode(next, at, dst)
	case err == nil && others:
		return l.leaseSlow(ctx, dst, true)
	case err != nil && mayCome(err):
		return l.Lease(ctx, dst)
	}
	return next, err
}

// nextOne commits one message and leases the next one the short way. If it cannot, it returns
// false and changes nothing.
func (s Lease[T]) nextOne(dst []T) (next Lease[T], ok bool) {
	l := s.lane
	if l == nil || l.ring.codec != nil {
		return s, false
	}
	l.mu.Lock()
	if l.lease != s.id || l.leased == 0 || l.count < 2 || l.asleep || l.err != nil || l.readers.head != nil {
		l.mu.Unlock()
		return s, false
	}
	var zero T
	var bytes int64
	v := l.slots.v
	v[l.head] = zero
	if l.slots.sizes != nil {
		bytes = int64(l.slots.sizes[l.head])
	}
	l.head = (l.head + 1) & (len(v) - 1)
	l.count--
	l.bytes -= bytes
	if room := l.reserve + pack(1, bytes); l.entry != 0 && l.ring.calm() && covers(l.ring.reserveMax, room) {
		l.reserve = room
	} else {
		l.freeLocked(1, bytes)
	}
	dst[0] = v[l.head]
	l.leased = 1
	l.lease++
	next = Lease[T]{lane: l, id: l.lease, n: 1}
	l.mu.Unlock()
	l.ring.wake()
	return next, true
}

// lock takes the lane's lock if the lease is open and n of its messages can be
// committed.
func (s Lease[T]) lock(n int) error {
	l := s.lane
	if l != nil && uint(n) <= uint(s.n) {
		l.mu.Lock()
		if l.lease == s.id && l.leased > 0 {
			return nil
		}
		l.mu.Unlock()
	}
	return s.misused(n)
}

func (s Lease[T]) misused(n int) error {
	if s.lane != nil && uint(n) > uint(s.n) {
		return fmt.Errorf("ringbuf: commit: n is %d, want 0 to %d", n, s.n)
	}
	return ErrLeaseOver
}

// commitLocked ends the open lease and frees its first n messages.
func (l *Lane[T]) commitLocked(n int) {
	l.leased = 0
	if n == 0 {
		return
	}
	r := l.ring
	var bytes int64
	if l.slab != nil {
		bytes = discardRecords(l.slab, &r.spare, n)
	} else {
		bytes = l.clearLocked(n)
	}
	l.count -= n
	l.bytes -= bytes
	l.freeLocked(n, bytes)
	if l.count == 0 {
		l.emptyLocked()
	}
	if l.asleep {
		l.wakeLocked()
	}
}

// clearLocked empties the first n slots, so that they keep nothing alive, and
// returns the bytes of their messages.
func (l *Lane[T]) clearLocked(n int) (bytes int64) {
	b, head := l.slots, l.head
	l.head = (head + n) & (len(b.v) - 1)
	if n == 1 {
		var zero T
		b.v[head] = zero
		if b.sizes != nil {
			bytes = int64(b.sizes[head])
		}
		return bytes
	}
	last := min(head+n, len(b.v))
	wrapped := head + n - last
	clear(b.v[head:last])
	clear(b.v[:wrapped])
	if b.sizes != nil {
		bytes = sum(b.sizes[head:last]) + sum(b.sizes[:wrapped])
	}
	return bytes
}

// sum adds eight sizes at a time, which takes half as long as one at a time.
func sum(sizes []uint32) (bytes int64) {
	for ; len(sizes) >= 8; sizes = sizes[8:] {
		s := (*[8]uint32)(sizes)
		bytes += int64(s[0]) + int64(s[1]) + int64(s[2]) + int64(s[3]) + int64(s[4]) + int64(s[5]) + int64(s[6]) + int64(s[7])
	}
	for _, size := range sizes {
		bytes += int64(size)
	}
	return bytes
}

// emptyLocked is called when the lane has become empty. It starts again at the front of the
// buffer, where memory is warm. It gives back a buffer that was far too large for a long time.
func (l *Lane[T]) emptyLocked() {
	r := l.ring
	l.head = 0
	switch {
	case l.slab != nil:
		rewindRecords(l.slab, &r.spare)
	case len(l.slots.v) <= 4*minSlots || l.peak > len(l.slots.v)/8:
		l.roomy = 0
	default:
		if l.roomy++; l.roomy >= shrinkAfter {
			r.spare.putSlots(l.slots)
			l.slots, l.roomy = slots[T]{}, 0
		}
	}
	l.peak = 0
}

// Release ends the lease and leaves all its messages at the front of the lane, in the same
// order. If the lease is over it does nothing, so it may be deferred.
func (s Lease[T]) Release() {
	_ = s.Commit(0)
}
