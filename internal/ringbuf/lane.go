// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package ringbuf

import (
	"context"
	"runtime"
	"sync"
)

// batch is how many messages a Put sizes or encodes, and then places, at a time. batchBytes
// ends a batch early when messages are large.
const (
	batch      = 64
	batchBytes = 256 << 10
)

const minSlots = 4

// shrinkAfter is when a lane gives its buffer back: after it has run empty that many times in
// a row without using an eighth of the buffer. Otherwise lanes that change between full and
// empty would allocate all the time.
const shrinkAfter = 64

// slots is a circular buffer; its length is a power of two or 0.
type slots[T any] struct {
	v     []T
	sizes []uint32 // bytes of each message, as long as v; only with a Sizer
}

// A Lane is one ordered queue of a [Ring]. Several goroutines may put and lease. The messages
// of one Put are in order only among themselves, so for order there should be one producer.
type Lane[T any] struct {
	// The fields that a call without waiting uses come first: they fill two or three cache
	// lines, which move back and forth between producer and consumer.
	mu      sync.Mutex
	head    int    // slot of the oldest message
	count   int    // messages held
	leased  int    // messages under the open lease, the oldest ones; 0 means no lease
	lease   uint64 // id of the latest lease
	bytes   int64  // of the messages held
	reserve uint64 // room that the lane has taken and not used, packed as in Ring.used
	peak    int    // most messages held since the lane was last empty

	slots slots[T]
	err   error // why the lane refuses calls, or nil

	starved bool  // the oldest of writers starves
	asleep  bool  // one of writers may not be woken
	entry   int   // index of the lane in Ring.reserves plus 1; 0 means no entry and no reserve
	readers waitq // Leases that wait
	ring    *Ring[T]
	id      uint64
	slab    *slab // with a Codec, instead of slots

	writers waitq // Puts that wait for the lane's share
	blocked int   // Puts that wait, here or in Ring.writers
	roomy   int   // how many times in a row the lane ran empty with a buffer far too large
	idle    waiters

	_ [32]byte // to 256 bytes on 64-bit machines: two lanes never share a cache line
}

// ID returns the lane's id, as given to [Ring.Lane].
func (l *Lane[T]) ID() uint64 { return l.id }

// Len returns how many messages the lane holds, leased ones included.
func (l *Lane[T]) Len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.count
}

// Put places vs behind the held messages, in order, and waits while the ring or the lane's
// share is full. It returns how many messages it placed: all, or fewer with an error. The
// error is that of ctx, [ErrTooLarge], [ErrClosed] or [ErrDropped]. Messages of other callers
// may come between those of one Put.
//
// If ctx is done on entry, Put places nothing. Waiting Puts are served oldest first as room
// allows. Smaller messages may overtake a message, but not forever, unless callers of TryPut
// keep the ring full.
func (l *Lane[T]) Put(ctx context.Context, vs ...T) (n int, err error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	if len(vs) == 1 && l.ring.codec == nil {
		return l.putOne(ctx, vs, true)
	}
	return l.put(ctx, vs, true)
}

// TryPut is [Lane.Put] without waiting: it places as many of vs as fit and
// returns [ErrFull] if the next one does not.
func (l *Lane[T]) TryPut(vs ...T) (n int, err error) {
	return l.put(context.Background(), vs, false)
}

func (l *Lane[T]) put(ctx context.Context, vs []T, wait bool) (n int, err error) {
	switch r := l.ring; {
	case r.codec != nil:
		return l.putEncoded(ctx, vs, wait)
	case len(vs) == 1:
		return l.putOne(ctx, vs, wait)
	case r.sizer != nil:
		return l.putSized(ctx, vs, wait)
	default:
		return l.push(ctx, parcel[T]{vs: vs}, wait)
	}
}

// putOne places a single message the short way if it can, else with pushOne.
func (l *Lane[T]) putOne(ctx context.Context, vs []T, wait bool) (n int, err error) {
	r := l.ring
	size := int64(0)
	if r.sizer != nil {
		if size = max(0, int64(r.sizer(vs[0]))); size > r.maxMessage {
			return 0, l.tooLarge(size)
		}
	}
	l.mu.Lock()
	fits := l.count < len(l.slots.v) && l.count < r.laneCount && l.bytes <= r.laneBytes-size &&
		l.err == nil && !l.starved && !r.starving.Load()
	if need := pack(1, size); fits && covers(l.reserve, need) {
		l.reserve -= need
	} else if fits {
		k, _ := l.takeLocked(nil, 1, size)
		fits = k > 0
	}
	if !fits {
		l.mu.Unlock()
		return l.pushOne(ctx, vs, size, wait)
	}
	tail := (l.head + l.count) & (len(l.slots.v) - 1)
	l.slots.v[tail] = vs[0]
	if l.slots.sizes != nil {
		l.slots.sizes[tail] = uint32(size)
	}
	l.count++
	l.bytes += size
	if l.count > l.peak {
		l.peak = l.count
	}
	if l.leased == 0 && l.readers.head != nil {
		l.wakeReader()
		return 1, nil
	}
	l.mu.Unlock()
	return 1, nil
}

// wakeReader unlocks the lane and signals the oldest Lease that waits.
func (l *Lane[T]) wakeReader() {
	reader := l.readers.first()
	l.mu.Unlock()
	if reader != nil {
		reader.signal()
	}
}

// pushOne places a single message of size bytes with push.
func (l *Lane[T]) pushOne(ctx context.Context, vs []T, size int64, wait bool) (n int, err error) {
	p := parcel[T]{vs: vs, bytes: size}
	if l.ring.sizer != nil {
		p.sizes = []uint32{uint32(size)}
	}
	return l.push(ctx, p, wait)
}

func (l *Lane[T]) putSized(ctx context.Context, vs []T, wait bool) (n int, err error) {
	sizer, limit := l.ring.sizer, uint64(l.ring.maxMessage)
	var sizes [batch]uint32
	for n < len(vs) {
		next := vs[n:min(n+batch, len(vs))]
		k, bytes, size := 0, int64(0), int64(0)
		// No value stays in a register across a call, so the sum is updated once for four calls.
		for ; k+4 <= len(next); k += 4 {
			v := next[k : k+4 : k+4]
			a, b, c, d := sizer(v[0]), sizer(v[1]), sizer(v[2]), sizer(v[3])
			if uint64(a) > limit || uint64(b) > limit || uint64(c) > limit || uint64(d) > limit {
				break
			}
			s := sizes[k : k+4 : k+4]
			s[0], s[1], s[2], s[3] = uint32(a), uint32(b), uint32(c), uint32(d)
			bytes += int64(a) + int64(b) + int64(c) + int64(d)
		}
		for ; k < len(next); k++ {
			if size = max(0, int64(sizer(next[k]))); uint64(size) > limit {
				break
			}
			sizes[k] = uint32(size)
			bytes += size
		}
		placed, err := l.push(ctx, parcel[T]{vs: next[:k], sizes: sizes[:k], bytes: bytes}, wait)
		n += placed
		if err == nil && k < len(next) {
			err = l.tooLarge(size)
		}
		if err != nil {
			return n, err
		}
	}
	return n, nil
}

func (l *Lane[T]) putEncoded(ctx context.Context, vs []T, wait bool) (n int, err error) {
	r := l.ring
	buf := getScratch()
	data := *buf
	defer func() { putScratch(buf, data) }()
	var sizes [batch]uint32
	for n < len(vs) {
		data = data[:0]
		k, bytes, size := 0, int64(0), int64(0)
		for k < batch && n+k < len(vs) && bytes < batchBytes {
			data = r.codec.Append(data, vs[n+k])
			if size = int64(len(data)) - bytes; size > r.maxMessage {
				break
			}
			sizes[k] = uint32(size)
			bytes += size
			k++
		}
		placed, err := l.push(ctx, parcel[T]{vs: vs[n : n+k], sizes: sizes[:k], bytes: bytes, data: data}, wait)
		n += placed
		if err == nil && size > r.maxMessage {
			err = l.tooLarge(size)
		}
		if err != nil {
			return n, err
		}
	}
	return n, nil
}

func (l *Lane[T]) tooLarge(size int64) error {
	l.ring.refused.Add(1)
	return &TooLargeError{Lane: l.id, Size: size, Limit: l.ring.maxMessage}
}

// A parcel has the messages of one call that are not yet placed.
type parcel[T any] struct {
	vs    []T
	sizes []uint32 // bytes of each message; nil means that bytes do not count
	bytes int64    // bytes of all messages
	data  []byte   // encodings of the messages; only with a Codec
}

// fit returns how many of the first messages fit into the given room, and their bytes.
func (p *parcel[T]) fit(count int, bytes int64) (k int, size int64) {
	k, size = len(p.vs), p.bytes
	for k > count || k > 0 && size > bytes {
		k--
		if p.sizes != nil {
			size -= int64(p.sizes[k])
		}
	}
	return k, size
}

// drop removes the first k messages, which have size bytes.
func (p *parcel[T]) drop(k int, size int64) {
	p.vs = p.vs[k:]
	p.bytes -= size
	if p.sizes != nil {
		p.sizes = p.sizes[k:]
	}
	if p.data != nil {
		p.data = p.data[size:]
	}
}

// push places a parcel and returns how many of its messages it has placed.
func (l *Lane[T]) push(ctx context.Context, p parcel[T], wait bool) (int, error) {
	n := len(p.vs)
	if n == 0 {
		return 0, nil
	}
	full, err := l.offerAll(&p, wait, nil)
	if err == nil && full != nowhere && wait {
		runtime.Gosched() // a consumer is often about to commit; parking costs much more
		full, err = l.offerAll(&p, wait, nil)
	}
	switch {
	case err != nil:
	case full == nowhere:
		return n, nil
	case wait:
		err = l.pushSlow(ctx, &p, full)
	default:
		l.ring.refused.Add(1)
		err = ErrFull
	}
	if err == nil {
		return n, nil
	}
	return n - len(p.vs), err
}

// where says which bound left no room for a message.
type where uint8

const (
	nowhere where = iota
	inLane
	inRing
)

// offerAll calls offer. If the ring seems full, it takes all reserves back and calls offer
// again.
func (l *Lane[T]) offerAll(p *parcel[T], wait bool, w *waiter) (where, error) {
	full, err := l.offer(p, wait, w)
	if full == inRing {
		r := l.ring
		r.reclaims.Add(1)
		r.reclaim()
		full, err = l.offer(p, wait, w)
		r.reclaims.Add(-1)
	}
	return full, err
}

// offer places as many of p's messages as fit. It removes the placed messages from p, unless
// it has placed all. A caller that can wait lets a starving waiter go first; w is the
// caller's own waiter, or nil.
func (l *Lane[T]) offer(p *parcel[T], wait bool, w *waiter) (where, error) {
	r := l.ring
	l.mu.Lock()
	if err := l.err; err != nil {
		l.mu.Unlock()
		return nowhere, err
	}
	full := nowhere
	k, size := p.fit(r.laneCount-l.count, r.laneBytes-l.bytes)
	if k < len(p.vs) {
		full = inLane
	}
	if wait {
		if l.starved && l.writers.head != w {
			k, full = 0, inLane
		} else if r.starving.Load() && !r.isFirst(w) {
			k, full = 0, inRing
		}
	}
	if k > 0 {
		want := k
		if k, size = l.takeLocked(p, k, size); k < want {
			full = inRing
		}
	}
	if k == 0 {
		l.mu.Unlock()
		return full, nil
	}
	if l.slab != nil {
		from := uint32(0)
		for _, n := range p.sizes[:k] {
			appendRecord(l.slab, &r.spare, p.data[from:from+n])
			from += n
		}
	} else {
		l.store(p, k)
	}
	l.count += k
	l.bytes += size
	l.peak = max(l.peak, l.count)
	var reader *waiter
	if l.leased == 0 {
		reader = l.readers.first()
	}
	l.mu.Unlock()
	if reader != nil {
		reader.signal()
	}
	if full != nowhere {
		p.drop(k, size)
	}
	return full, nil
}

func (r *Ring[T]) isFirst(w *waiter) bool {
	r.qmu.Lock()
	defer r.qmu.Unlock()
	return r.writers.head == w
}

// store copies p's first k messages behind the held ones.
func (l *Lane[T]) store(p *parcel[T], k int) {
	if need := l.count + k; need > len(l.slots.v) {
		l.grow(need)
	}
	b := l.slots
	tail := (l.head + l.count) & (len(b.v) - 1)
	if k == 1 {
		b.v[tail] = p.vs[0]
		if b.sizes != nil {
			b.sizes[tail] = p.sizes[0]
		}
		return
	}
	if m := copy(b.v[tail:], p.vs[:k]); m < k {
		copy(b.v, p.vs[m:k])
	}
	if b.sizes != nil {
		if m := copy(b.sizes[tail:], p.sizes[:k]); m < k {
			copy(b.sizes, p.sizes[m:k])
		}
	}
}

func (l *Lane[T]) grow(need int) {
	r := l.ring
	old := l.slots
	b := r.spare.getSlots(max(need, minSlots), r.sizer != nil)
	m := copy(b.v, old.v[l.head:])
	copy(b.v[m:], old.v[:l.head])
	if b.sizes != nil {
		copy(b.sizes, old.sizes[l.head:])
		copy(b.sizes[m:], old.sizes[:l.head])
	}
	l.slots, l.head = b, 0
	clear(old.v)
	r.spare.putSlots(old)
}

// pushSlow waits for room and places the messages left in p; all of them if there is no error.
// full is the bound that had no room at first.
func (l *Lane[T]) pushSlow(ctx context.Context, p *parcel[T], full where) error {
	r := l.ring
	r.blocked.Add(1)
	r.qmu.Lock()
	w := r.idle.get()
	r.qmu.Unlock()
	l.mu.Lock()
	l.blocked++
	l.mu.Unlock()

	var err error
	var queue where
	before := len(p.vs)
	for {
		if queue != full {
			l.leave(w, queue)
			queue = full
		}
		want, need := len(p.vs), int64(0)
		if p.sizes != nil {
			need = int64(p.sizes[0])
		}
		l.enter(w, queue, want, need, p.bytes, want < before)
		before = want
		select {
		case <-w.ch:
		case <-ctx.Done():
			err = ctx.Err()
		}
		if err == nil {
			full, err = l.offerAll(p, true, w)
		}
		if err != nil || full == nowhere {
			break
		}
	}
	l.leave(w, queue)
	l.mu.Lock()
	l.blocked--
	l.mu.Unlock()
	r.qmu.Lock()
	r.idle.put(w)
	r.qmu.Unlock()
	return err
}

// enter puts w into the queue, or keeps its place there. Then it offers the free room to all
// waiters, w included. So room that came free since w looked is not missed, and neither is the
// end of the lane.
func (l *Lane[T]) enter(w *waiter, queue where, want int, need, rest int64, moved bool) {
	r := l.ring
	update := func(q *waitq) {
		switch {
		case moved:
			w.passed = 0
		case w.queued && w.woken:
			w.passed++
		}
		if !w.queued {
			q.push(w)
		}
		w.woken, w.want, w.need, w.rest = false, want, need, rest
	}
	if queue == inRing {
		r.qmu.Lock()
		if !w.queued {
			r.waiting.Add(1)
		}
		update(&r.writers)
		r.asleep.Store(true)
		r.qmu.Unlock()
		r.reclaim()
		r.qmu.Lock()
		r.wakeLocked()
		r.qmu.Unlock()
	}
	l.mu.Lock()
	if queue == inLane {
		update(&l.writers)
		l.wakeLocked()
	}
	if l.err != nil {
		w.signal()
	}
	l.mu.Unlock()
}

// leave takes w out of its queue, and offers the free room to the others.
func (l *Lane[T]) leave(w *waiter, queue where) {
	r := l.ring
	switch queue {
	case nowhere:
	case inLane:
		l.mu.Lock()
		l.writers.remove(w)
		w.passed = 0
		l.wakeLocked()
		l.mu.Unlock()
	case inRing:
		r.qmu.Lock()
		r.writers.remove(w)
		r.waiting.Add(-1)
		w.passed = 0
		r.wakeLocked()
		r.qmu.Unlock()
	}
}

// wakeLocked wakes the Puts that the lane's share has room for.
func (l *Lane[T]) wakeLocked() {
	l.starved, l.asleep = l.writers.wake(l.ring.laneCount-l.count, l.ring.laneBytes-l.bytes)
}

// Snapshot appends all messages of the lane to dst, oldest first, leased ones included, and
// returns the result. It copies under the lane's lock. With a [Codec] it allocates, and
// decodes every message. A [*DecodeError] names the first message that cannot be decoded;
// earlier messages are in the result.
func (l *Lane[T]) Snapshot(dst []T) ([]T, error) {
	l.mu.Lock()
	if l.slab == nil {
		defer l.mu.Unlock()
		return l.appendLocked(dst), nil
	}
	n := l.count
	data := make([]byte, 0, l.slab.held)
	ends := make([]int, n)
	at := l.slab.head
	for i := range n {
		data = append(data, at.next()...)
		ends[i] = len(data)
	}
	l.mu.Unlock()
	from := 0
	for _, end := range ends {
		src := data[from:end:end]
		v, err := l.ring.codec.Decode(src)
		if err != nil {
			return dst, &DecodeError{Lane: l.id, Data: src, Err: err}
		}
		dst, from = append(dst, v), end
	}
	return dst, nil
}

func (l *Lane[T]) appendLocked(dst []T) []T {
	m := min(l.count, len(l.slots.v)-l.head)
	dst = append(dst, l.slots.v[l.head:l.head+m]...)
	return append(dst, l.slots.v[:l.count-m]...)
}

// Drain takes all messages out of the lane, oldest first, and frees their budget. It may be
// called before or after [Ring.Close]. While a lease is open it returns [ErrLeased]. With a
// [Codec] some messages may be undecodable: the error joins one [*DecodeError] for each, and
// the others are in the result.
func (l *Lane[T]) Drain() ([]T, error) {
	r := l.ring
	l.mu.Lock()
	if l.leased > 0 {
		l.mu.Unlock()
		return nil, ErrLeased
	}
	n, bytes := l.count, l.bytes
	if n == 0 {
		l.mu.Unlock()
		return nil, nil
	}
	var vs []T
	var at place
	if l.slab == nil {
		vs = l.appendLocked(make([]T, 0, n))
	} else {
		at = l.slab.head
	}
	l.discardLocked(l.slab == nil)
	l.wakeLocked()
	l.freeLocked(n, bytes)
	l.mu.Unlock()
	r.wake()
	if r.codec == nil {
		return vs, nil
	}
	return l.decodeAll(at, n)
}

// discardLocked empties the lane. Without recycle it leaves the chunks of a slab to the garbage
// collector, because a lease or Drain may still read them.
func (l *Lane[T]) discardLocked(recycle bool) {
	r := l.ring
	if l.slab != nil {
		if recycle {
			for c := l.slab.head.c; c != nil; {
				next := c.next
				r.spare.putChunk(c)
				c = next
			}
		}
		*l.slab = slab{}
	} else {
		clear(l.slots.v)
		r.spare.putSlots(l.slots)
		l.slots = slots[T]{}
	}
	l.count, l.bytes, l.leased, l.head, l.peak = 0, 0, 0, 0, 0
}

// endLocked makes every call on the lane return err from now on.
func (l *Lane[T]) endLocked(err error) {
	l.err = err
	l.yieldLocked()
	l.readers.wakeAll()
	l.writers.wakeAll()
}
