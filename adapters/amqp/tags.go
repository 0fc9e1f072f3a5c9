// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"cmp"
	"slices"
	"sync"
)

// tags keeps the unsettled delivery tags of one channel with one consumer, and
// says how settled ones are acked in the fewest frames. It is safe for
// concurrent use. Its memory is bounded by the prefetch: at most four entries,
// about, for each delivery that the broker may have out.
//
// Tags come from the broker in order, each once: a second one means that the
// client has put another channel under this one, and that no tag is ours any
// more.
//
// They number all deliveries of a channel from 1 on, whosever they are. Where a
// channel is not ours alone, an ack of many is safe up to the first number that
// has not come to us, and no further.
type tags struct {
	mu     sync.Mutex
	mixed  bool   // the channel may have other deliveries than ours; set before the first
	most   int    // the prefetch, 0 if it is not known
	filled bool   // as much as the prefetch was out since usedUp was asked
	fresh  int    // frames since all that was acked was known to be taken in
	whole  uint64 // all numbers up to it are ours
	high   uint64 // the latest delivered
	out    []tag  // from the oldest that is open on, in order of number
	head   int    // of out; what is before it has been acked
	due    int    // settled, not acked or rejected
	bytes  int64  // of the deliveries that the broker waits for
	rejs   int    // of due, to be rejected
	acked  int    // acked behind head
}

type tag struct {
	n    uint64
	size uint32 // of the delivery in bytes; one above 4 GiB is not possible
	is   tagState
}

type tagState uint8

const (
	tagOpen     tagState = iota // delivered
	tagSettled                  // to be acked
	tagRejected                 // to be rejected
	tagAcked                    // nothing is owed
)

// ack is one frame to send.
type ack struct {
	tag      uint64
	multiple bool
	reject   bool // instead
}

// add takes the next delivery's tag and size, and tells the bytes of all that the
// broker waits for; false for a tag that is not new.
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
		t.compact() // with less to gain it would come again at once
	}
	t.out = append(t.out, tag{n: n, size: uint32(size)})
	t.bytes += int64(size)
	if t.most > 0 && len(t.out)-t.head-t.acked >= t.most {
		t.fresh, t.filled = 0, true // the broker would not have sent it
	}
	return t.bytes, true
}

// fill says what the prefetch is from now on.
func (t *tags) fill(prefetch int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.most = prefetch
}

// unsure is how many frames were given out since all of them were known to be
// taken in.
func (t *tags) unsure() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.fresh
}

// settle marks a tag, to be acked or rejected; false if it is not open, so that
// each is settled once. due are those that wait for their frame then, and rest
// those that are not settled.
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

// find is where a tag is in out. mu is held.
func (t *tags) find(n uint64) (i int, ok bool) {
	if t.head < len(t.out) && t.out[t.head].n == n {
		return t.head, true
	}
	i, ok = slices.BinarySearchFunc(t.out[t.head:], n, func(e tag, n uint64) int { return cmp.Compare(e.n, n) })
	return i + t.head, ok
}

// take appends the frames for everything that is settled: rejects first, so that no
// ack covers them; an ack for what all before it is ours and settled too, and one
// each for the others.
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
	// An ack of many must name a tag that is still out at the broker.
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

// gone notes that the broker waits for the delivery at i no more.
func (t *tags) gone(i int) {
	t.out[i].is = tagAcked
	t.acked++
	t.bytes -= int64(t.out[i].size)
}

// trim moves head to the oldest tag that is owed something.
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

// compact drops what is acked.
func (t *tags) compact() {
	kept := t.out[:0]
	for _, e := range t.out[t.head:] {
		if e.is != tagAcked {
			kept = append(kept, e)
		}
	}
	t.out, t.head, t.acked = kept, 0, 0
}

// oldest is the oldest tag that the broker waits for, 0 if there is none, and
// the latest it has delivered.
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

// usedUp tells whether the prefetch was used up since it was asked before.
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

// unsettled is how many of those that the broker waits for are not settled.
func (t *tags) unsettled() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.out) - t.head - t.acked - t.due
}
