// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package ringbuf

import (
	"iter"
	"math"
	"math/bits"
	"sync"
	"sync/atomic"
)

// Lock order: Ring.mu, then one Lane.mu, then Ring.qmu or spare.mu. No code of the caller
// (Sizer, Codec, iteration) runs under any of these locks.

// A Ring is a set of lanes under one budget. Many goroutines may call its methods, and those
// of its lanes and leases, at once.
type Ring[T any] struct {
	// The constructor sets the fields of this group, and nothing changes them.
	maxCount, laneCount int
	maxBytes, laneBytes int64
	maxMessage          int64
	bound               uint64 // maxCount and maxBytes, packed
	reserveMax          uint64 // largest reserve of a lane, packed; 0 means no reserves
	sizer               Sizer[T]
	codec               Codec[T]

	_    [64]byte
	used atomic.Uint64 // messages<<bytesBits | bytes, reserves included
	_    [64]byte

	reclaims atomic.Int32 // calls that take reserves back now
	crowded  atomic.Bool  // no entry of reserves was free at the latest search
	waiting  atomic.Int32 // length of writers
	// asleep says that one of writers may not be woken. A writer sets it before it reads used
	// for the last time; see reserve.go.
	asleep   atomic.Bool
	starving atomic.Bool // the oldest writer starves: other Puts must queue
	blocked  atomic.Uint64
	refused  atomic.Uint64

	qmu     sync.Mutex
	writers waitq   // Puts that wait for the shared budget; guarded by qmu
	idle    waiters // guarded by qmu

	reserves [reserveLanes]atomic.Pointer[Lane[T]] // lanes that may have a reserve

	spare spare[T]

	mu     sync.Mutex
	lanes  map[uint64]*Lane[T] // guarded by mu
	closed bool                // guarded by mu
}

// NewRing makes a ring that keeps messages as they are. A nil sizer means that
// bytes are not counted. The error is that of [Config.Validate].
func NewRing[T any](cfg Config, sizer Sizer[T]) (*Ring[T], error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	r := &Ring[T]{
		maxCount:  cfg.MaxCount,
		laneCount: max(1, int(cfg.LaneShare*float64(cfg.MaxCount))),
		maxBytes:  cfg.MaxBytes,
		laneBytes: max(1, int64(cfg.LaneShare*float64(cfg.MaxBytes))),
		sizer:     sizer,
		lanes:     make(map[uint64]*Lane[T]),
	}
	r.maxMessage = min(r.laneBytes, math.MaxUint32)
	r.bound = pack(r.maxCount, r.maxBytes)
	r.setReserves()
	r.spare.room = int64(cfg.MaxCount)
	return r, nil
}

// NewSlabRing makes a ring that keeps messages encoded by codec, in reused chunks without
// pointers. codec must not be nil. The bytes of a message are those of its encoding, at most
// 2 GiB. A Put costs an encoding and a copy, a lease costs a decoding.
func NewSlabRing[T any](cfg Config, codec Codec[T]) (*Ring[T], error) {
	r, err := NewRing[T](cfg, nil)
	if err != nil {
		return nil, err
	}
	r.codec = codec
	r.maxMessage = min(r.laneBytes, math.MaxInt32-chunkMax)
	r.spare.room = r.maxBytes
	return r, nil
}

// Lane returns the lane with the given id, and makes it if there is none. An empty lane takes
// about 256 bytes. After [Ring.Close] the returned lane is closed as well.
func (r *Ring[T]) Lane(id uint64) *Lane[T] {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.lanes[id]
	if l == nil {
		l = &Lane[T]{ring: r, id: id}
		if r.codec != nil {
			l.slab = new(slab)
		}
		if r.closed {
			l.err = ErrClosed
		}
		r.lanes[id] = l
	}
	return l
}

// Lanes yields the lanes that exist at the time of the call, in no order. No
// lock is held while the loop body runs.
func (r *Ring[T]) Lanes() iter.Seq[*Lane[T]] {
	return func(yield func(*Lane[T]) bool) {
		r.mu.Lock()
		all := make([]*Lane[T], 0, len(r.lanes))
		for _, l := range r.lanes {
			all = append(all, l)
		}
		r.mu.Unlock()
		for _, l := range all {
			if !yield(l) {
				return
			}
		}
	}
}

// Drop removes l from the ring with all its messages, and frees their budget. It returns the
// number of these messages, leased ones included. The lane's open lease is over. Calls on the
// lane return [ErrDropped], also calls that wait. If l is not, or no longer, in this ring,
// Drop does nothing.
//
// Drop is for messages that this process no longer owns, as after a revoke. To keep them, call
// [Lane.Drain] first.
func (r *Ring[T]) Drop(l *Lane[T]) int {
	r.mu.Lock()
	if r.lanes[l.id] != l {
		r.mu.Unlock()
		return 0
	}
	delete(r.lanes, l.id)
	l.mu.Lock()
	r.mu.Unlock()
	n, bytes := l.count, l.bytes
	waits := l.blocked > 0
	l.endLocked(ErrDropped)
	l.discardLocked(l.leased == 0)
	r.used.Add(-pack(n, bytes))
	l.mu.Unlock()
	r.wake()
	if waits {
		r.wakeAll()
	}
	return n
}

// DropEmpty drops every lane without messages and without waiting calls, and returns how many
// it dropped. It looks at all lanes under the ring's lock. Other lanes reuse the buffers.
//
// A caller that keeps a lane must be ready for [ErrDropped] and ask
// [Ring.Lane] again.
func (r *Ring[T]) DropEmpty() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for id, l := range r.lanes {
		l.mu.Lock()
		if l.count == 0 && l.blocked == 0 && l.readers.head == nil {
			l.endLocked(ErrDropped)
			l.discardLocked(true)
			delete(r.lanes, id)
			n++
		}
		l.mu.Unlock()
	}
	return n
}

// Close ends the ring: waiting calls, and all later calls of Put and Lease, return
// [ErrClosed]. Open leases may still be committed or released, and [Lane.Drain] takes the
// remaining messages. Close does not wait, never fails, and may be called again.
func (r *Ring[T]) Close() error {
	r.mu.Lock()
	r.closed = true
	for _, l := range r.lanes {
		l.mu.Lock()
		l.endLocked(ErrClosed)
		l.mu.Unlock()
	}
	r.mu.Unlock()
	r.spare.close()
	r.wakeAll()
	return nil
}

// Stats are the figures of a [Ring] at one instant, and its counters so far.
type Stats struct {
	Count   int    // messages held, leased ones included
	Bytes   int64  // bytes of the held messages; 0 without a Sizer or Codec
	Lanes   int    // lanes, empty ones included
	Waiting int    // Puts that wait now because the ring is full, not because of a lane's share
	Blocked uint64 // Puts that had to wait, since the ring was made
	Refused uint64 // calls that ended with ErrFull or ErrTooLarge, since the ring was made
}

// Stats takes the lock of [Ring.Lane], and briefly the locks of up to 16 lanes, one after the
// other. Count and Bytes are of the same instant; the other fields may be slightly newer.
func (r *Ring[T]) Stats() Stats {
	r.reclaims.Add(1)
	r.reclaim()
	u := r.used.Load() // only held messages, since reclaim took all reserves back
	r.reclaims.Add(-1)
	r.mu.Lock()
	lanes := len(r.lanes)
	r.mu.Unlock()
	return Stats{
		Count:   int(u >> bytesBits),
		Bytes:   int64(u & maxBytes),
		Lanes:   lanes,
		Waiting: int(r.waiting.Load()),
		Blocked: r.blocked.Load(),
		Refused: r.refused.Load(),
	}
}

func (r *Ring[T]) room() (count int, bytes int64) {
	free := r.bound - r.used.Load()
	return int(free >> bytesBits), int64(free & maxBytes)
}

// wake offers freed room to waiting writers. A writer sets asleep before it reads used for
// the last time. Freed room lowers used before wake reads asleep. So one of the two sees the
// other.
func (r *Ring[T]) wake() {
	if r.asleep.Load() {
		r.wakeSome()
	}
}

func (r *Ring[T]) wakeSome() {
	r.qmu.Lock()
	r.wakeLocked()
	r.qmu.Unlock()
}

func (r *Ring[T]) wakeLocked() {
	starving, asleep := r.writers.wake(r.room())
	r.starving.Store(starving)
	r.asleep.Store(asleep)
}

func (r *Ring[T]) wakeAll() {
	r.qmu.Lock()
	r.writers.wakeAll()
	r.qmu.Unlock()
}

// spare keeps unused buffers for the next lane that needs one. Its buffers were in use before,
// so its size is bounded by past use and by room.
type spare[T any] struct {
	mu     sync.Mutex
	room   int64          // slots or bytes that may still be kept
	slots  [25][]slots[T] // by log2 of length
	chunks [chunkClasses]*chunk
}

func (s *spare[T]) getSlots(n int, sized bool) slots[T] {
	class := bits.Len(uint(n - 1))
	s.mu.Lock()
	if k := len(s.slots[class]); k > 0 {
		b := s.slots[class][k-1]
		s.slots[class][k-1] = slots[T]{}
		s.slots[class] = s.slots[class][:k-1]
		s.room += int64(len(b.v))
		s.mu.Unlock()
		return b
	}
	s.mu.Unlock()
	b := slots[T]{v: make([]T, 1<<class)}
	if sized {
		b.sizes = make([]uint32, 1<<class)
	}
	return b
}

// putSlots keeps slots for another lane. The caller has cleared them.
func (s *spare[T]) putSlots(b slots[T]) {
	n := len(b.v)
	if n == 0 {
		return
	}
	s.mu.Lock()
	if s.room >= int64(n) {
		s.room -= int64(n)
		class := bits.Len(uint(n - 1))
		s.slots[class] = append(s.slots[class], b)
	}
	s.mu.Unlock()
}

func (s *spare[T]) getChunk(class int) *chunk {
	s.mu.Lock()
	c := s.chunks[class]
	if c != nil {
		s.chunks[class], c.next = c.next, nil
		s.room += int64(len(c.data))
	}
	s.mu.Unlock()
	return c
}

func (s *spare[T]) putChunk(c *chunk) {
	class := chunkClass(len(c.data))
	if class >= chunkClasses || len(c.data) != chunkMin<<class {
		return
	}
	s.mu.Lock()
	if s.room >= int64(len(c.data)) {
		s.room -= int64(len(c.data))
		c.next, s.chunks[class] = s.chunks[class], c
	}
	s.mu.Unlock()
}

func (s *spare[T]) close() {
	s.mu.Lock()
	s.room = 0
	clear(s.slots[:])
	clear(s.chunks[:])
	s.mu.Unlock()
}
