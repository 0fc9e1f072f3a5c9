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

// Lock order: Ring.mu, then one Lane.mu, then Ring.qmu or spare.mu; never the
// other way round. No code of the caller (Sizer, Codec, iteration) runs under any of
// them.

// A Ring is a set of lanes under one budget. All its methods, and those of its
// lanes and leases, may be called by many goroutines at once.
type Ring[T any] struct {
	// Set once by the constructor.
	maxCount, laneCount int
	maxBytes, laneBytes int64
	maxMessage          int64
	bound               uint64 // maxCount and maxBytes
	reserveMax          uint64 // the most in a lane's reserve; 0 means that there are none
	sizer               Sizer[T]
	codec               Codec[T]

	_    [64]byte
	used atomic.Uint64 // messages<<bytesBits | bytes, reserves included
	_    [64]byte

	reclaims atomic.Int32 // calls that take reserves back now
	crowded  atomic.Bool  // no entry of reserves was free when somebody last looked
	waiting  atomic.Int32 // length of writers
	asleep   atomic.Bool  // one of writers may not be woken; set before it looks at used for the last time; see reserve.go
	starving atomic.Bool  // the oldest writer starves: other Puts must queue
	blocked  atomic.Uint64
	refused  atomic.Uint64

	qmu     sync.Mutex
	writers waitq   // guarded by qmu: Puts that wait for the shared budget
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

// NewSlabRing makes a ring that keeps messages encoded by codec, which must not
// be nil, in reused chunks without pointers. The bytes of a message are those
// of its encoding, at most 2 GiB. Put costs an encoding and a copy, a lease a
// decoding.
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

// Lane returns the lane with the given id and makes it if need be. An empty
// lane takes about 256 bytes. After [Ring.Close] the lane it returns is closed
// as well.
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

// Drop takes l out of the ring with all that it holds, gives the budget back and
// returns how many messages that were, leased ones included. The lane's open
// lease is over, and calls on it return [ErrDropped], those that wait as well.
// A lane that is not of this ring, or no longer, is left alone.
//
// Drop is for messages that are no longer ours, as after a revoke. To keep them,
// call [Lane.Drain] first.
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

// DropEmpty drops every lane that holds nothing and on which no call waits, and
// returns how many those were. It looks at all lanes under the ring's lock. Its
// buffers serve other lanes.
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

// Close ends the ring: calls that wait, and all later ones to Put and Lease,
// return [ErrClosed]. Open leases may still be committed or released, and
// [Lane.Drain] takes what is left. It does not wait, never fails, and may be
// called again.
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

// Stats is what a [Ring] holds, at one instant, and what it has refused so far.
type Stats struct {
	Count   int    // messages held, leased ones included
	Bytes   int64  // their bytes; 0 without a Sizer or Codec
	Lanes   int    // lanes, empty ones included
	Waiting int    // Puts that wait now because the ring is full; lane shares not included
	Blocked uint64 // Puts that had to wait, ever
	Refused uint64 // calls that ended with ErrFull or ErrTooLarge, ever
}

// Stats takes the lock that [Ring.Lane] takes, and for a moment those of up to 16
// lanes, one after the other. Count and Bytes belong together; the other fields
// may be a moment younger.
func (r *Ring[T]) Stats() Stats {
	r.reclaims.Add(1)
	r.reclaim()
	u := r.used.Load() // without reserves: what is held
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

// wake lets waiting writers have what was freed. A writer raises asleep before
// it looks at used for the last time, and used is lowered before wake looks at
// asleep, so one of the two sees the other.
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

// spare keeps the buffers that no lane needs for the next lane that does. What
// it holds was in use before, so it is bounded by the past and by room.
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

// putSlots takes slots that have been cleared.
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
