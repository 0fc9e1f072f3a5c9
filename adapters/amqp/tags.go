// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"cmp"
	"slices"
	"sync"
)

// tags keeps the unsettled delivery tags of one channel with one consumer, and tells how to ack
// settled ones in the fewest frames. It is safe for concurrent use. The prefetch bounds its memory:
// about four entries at most for each delivery that the broker may have out.
//
// The broker gives tags in order, each once. A second one means that the client has put another
// channel under this one, and that no tag is valid any more.
//
// Tags number all deliveries of a channel from 1 on, whichever consumer gets them. If the channel
// has other consumers, an ack of many is safe only up to the first number that did not come here.
type tags struct {
	mu     sync.Mutex
	mixed  bool   // the channel may have deliveries of other consumers; set before the first add
	most   int    // the prefetch; 0 if it is not known
	filled bool   // the whole prefetch was out since the latest call of usedUp
	fresh  int    // frames given out since the broker was known to have taken in all acks
	whole  uint64 // all tags up to this one came here
	high   uint64 // the latest delivered tag
	out    []tag  // delivered tags in ascending order; those before head are done
	head   int    // index in out of the oldest tag that the broker waits for
	due    int    // settled tags that wait for their ack or reject
	bytes  int64  // size of the deliveries that the broker waits for
	rejs   int    // tags of due that wait for a reject
	acked  int    // tags behind head that are acked
}

type tag struct {
	n    uint64
	size uint32 // of the delivery in bytes; none is above 4 GiB
	is   tagState
}

type tagState uint8

const (
	tagOpen     tagState = iota // delivered
	tagSettled                  // to be acked
	tagRejected                 // to be rejected
	tagAcked                    // acked or rejected
)

// ack is one frame to send.
type ack struct {
	tag      uint64
	multiple bool
	reject   bool // reject instead of ack
}

// add takes the tag and the size of the next delivery. It returns the bytes of all deliveries that
// the broker waits for, and false for a tag that is not new.
func (t *tags) add(n uint64, size int) (bytes int64, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n <= t.high {
		return t.bytes, false
	}
	t.high = n
	if n == t.whole+1 {
		t.whole = n
	}
	if len(t.out) == cap(t.out) && 2*(t.head+t.acked) >= len(t.out) {
		t.compact() // with fewer acked tags it would run again soon
	}
	t.out = append(t.out, tag{n: n, size: uint32(size)})
	t.bytes += int64(size)
	if t.most > 0 && len(t.out)-t.head-t.acked >= t.most {
		// A full prefetch is out. The broker would not have sent it before it had taken in all
		// acks.
		t.fresh, t.filled = 0, true
	}
	return t.bytes, true
}

// fill sets the prefetch from now on.
func (t *tags) fill(prefetch int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.most = prefetch
}

// unsure returns how many frames were given out since the broker was known to have taken in all
// acks.
func (t *tags) unsure() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.fresh
}

// settle marks a tag, to be acked or rejected. It returns false if the tag is not open, so that
// each tag is settled once. It also returns how many tags then wait for their frame (due), and how
// many are not settled (rest).
func (t *tags) settle(n uint64, to tagState) (ok bool, due, rest int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	i, ok := t.find(n)
	if !ok || t.out[i].is != tagOpen {
		return false, 0, 0
	}
	t.out[i].is = to
	t.due++
	if to == tagRejected {
		t.rejs++
	}
	return true, t.due, len(t.out) - t.head - t.acked - t.due
}

// isOpen tells whether a tag is delivered and not settled.
func (t *tags) isOpen(n uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	i, ok := t.find(n)
	return ok && t.out[i].is == tagOpen
}

// find returns the index of a tag in out. mu is held.
func (t *tags) find(n uint64) (i int, ok bool) {
	if t.head < len(t.out) && t.out[t.head].n == n {
		return t.head, true
	}
	i, ok = slices.BinarySearchFunc(t.out[t.head:], n, func(e tag, n uint64) int { return cmp.Compare(e.n, n) })
	return i + t.head, ok
}

// take appends the frames for all settled tags. Rejects come first, so that no ack covers them. One
// ack follows for all tags before the first gap: an open tag, or a tag of another consumer. The
// other settled tags have one ack each.
func (t *tags) take(dst []ack) []ack {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.due == 0 {
		return dst
	}
	before := len(dst)
	for i := t.head; t.rejs > 0; i++ {
		if t.out[i].is == tagRejected {
			dst = append(dst, ack{tag: t.out[i].n, reject: true})
			t.gone(i)
			t.due--
			t.rejs--
		}
	}
	// An ack of many must name a tag that the broker still waits for.
	last, n := -1, 0
	i := t.head
	for ; i < len(t.out) && t.out[i].is != tagOpen && (!t.mixed || t.out[i].n <= t.whole); i++ {
		if t.out[i].is == tagSettled {
			last = i
			n++
		}
	}
	if n > 0 {
		dst = append(dst, ack{tag: t.out[last].n, multiple: n > 1})
		for j := t.head; j <= last; j++ {
			if t.out[j].is == tagSettled {
				t.gone(j)
			}
		}
		t.due -= n
	}
	for ; t.due > 0; i++ {
		if t.out[i].is == tagSettled {
			dst = append(dst, ack{tag: t.out[i].n})
			t.gone(i)
			t.due--
		}
	}
	t.fresh += len(dst) - before
	t.trim()
	return dst
}

// gone notes that the broker no longer waits for the delivery at index i.
func (t *tags) gone(i int) {
	t.out[i].is = tagAcked
	t.acked++
	t.bytes -= int64(t.out[i].size)
}

// trim moves head to the oldest tag that the broker waits for.
func (t *tags) trim() {
	for t.head < len(t.out) && t.out[t.head].is == tagAcked {
		t.head++
		t.acked--
	}
	switch {
	case t.head == len(t.out):
		t.out, t.head = t.out[:0], 0
	case t.acked > 64 && 2*t.acked > len(t.out)-t.head:
		t.compact()
	}
}

// compact removes acked tags.
func (t *tags) compact() {
	kept := t.out[:0]
	for _, e := range t.out[t.head:] {
		if e.is != tagAcked {
			kept = append(kept, e)
		}
	}
	t.out, t.head, t.acked = kept, 0, 0
}

// oldest returns the oldest tag that the broker waits for, 0 if there is none, and the latest
// delivered tag.
func (t *tags) oldest() (n, high uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.head < len(t.out) {
		n = t.out[t.head].n
	}
	return n, t.high
}

// open is how many tags the broker waits for.
func (t *tags) open() int {
	n, _ := t.weight()
	return n
}

// weight is how many deliveries the broker waits for, and their bytes.
func (t *tags) weight() (n int, bytes int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.out) - t.head - t.acked, t.bytes
}

// usedUp tells whether the whole prefetch was out since the previous call.
func (t *tags) usedUp() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	was := t.filled
	t.filled = false
	return was
}

// full tells whether n deliveries are out, all of them with a tag above after.
func (t *tags) full(n int, after uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.out)-t.head-t.acked >= n && t.head < len(t.out) && t.out[t.head].n > after
}

// unsettled is how many of the deliveries that the broker waits for are not settled.
func (t *tags) unsettled() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.out) - t.head - t.acked - t.due
}
