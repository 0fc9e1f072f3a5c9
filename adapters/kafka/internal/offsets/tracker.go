// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package offsets knows which messages of a partition are settled, and which offsets can be
// committed.
package offsets

import "sync"

// A Tracker knows which offsets of a claim were handed over and settled, and so up to where the
// claim may be marked. It is a queue of the offsets that came, in their order. Offsets have gaps
// (compaction, control records, aborted transactions), so no offset is computed from another.
//
// It is safe for concurrent use. It holds one entry for each message from the oldest unsettled
// one on, so about the source's window: the guard asks for Ahead.
type Tracker struct {
	mu     sync.Mutex
	queue  []delivered // by offset; the first entry is not settled
	done   int         // settled entries of queue
	last   int64       // the highest offset handed over, -1 for none
	next   int64       // the offset after the settled prefix, -1 for none
	marked int64       // the mark that Take returned last, -1 for none
	given  int64       // marked, but -1 from a ResetOffset to the next mark
	meta   string      // metadata of the mark at next
	reset  bool        // ResetOffset was called: no mark until the user marks again
}

type delivered struct {
	offset int64
	done   bool
	meta   string
}

// New makes a tracker to which nothing was handed over.
func New() *Tracker { return &Tracker{last: -1, next: -1, marked: -1, given: -1} }

// Deliver announces a message that is not settled at once.
func (t *Tracker) Deliver(offset int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if offset <= t.last {
		return
	}
	t.last = offset
	t.queue = append(t.queue, delivered{offset: offset})
}

// Settle says that a message is done. A message that Deliver has not announced has just been
// handed over, after all announced ones.
func (t *Tracker) Settle(offset int64, meta string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if offset > t.last {
		t.last = offset
		if len(t.queue) == 0 {
			t.next, t.meta = offset+1, meta
			return
		}
		t.queue = append(t.queue, delivered{offset, true, meta})
		t.done++
		return
	}
	i := t.find(offset)
	if i < 0 {
		return
	}
	if !t.queue[i].done {
		t.done++
	}
	t.queue[i].done, t.queue[i].meta = true, meta
	if i > 0 {
		return
	}
	n := 0
	for n < len(t.queue) && t.queue[n].done {
		n++
	}
	t.done -= n
	t.next, t.meta = t.queue[n-1].offset+1, t.queue[n-1].meta
	t.queue = t.queue[n:]
}

// find is the place of an offset in the queue, -1 if it is not there.
func (t *Tracker) find(offset int64) int {
	low, high := 0, len(t.queue)
	for low < high {
		if mid := (low + high) / 2; t.queue[mid].offset < offset {
			low = mid + 1
		} else {
			high = mid
		}
	}
	if low == len(t.queue) || t.queue[low].offset != offset {
		return -1
	}
	return low
}

// Take returns the mark that is due, if it was not taken yet.
func (t *Tracker) Take() (offset int64, meta string, due bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.reset || t.next <= t.marked {
		return 0, "", false
	}
	t.marked, t.given = t.next, t.next
	return t.next, t.meta, true
}

// Rewound stops marks: the user has reset the offset. The group need not commit earlier marks.
func (t *Tracker) Rewound() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.reset, t.given = true, -1
}

// Resumed lets marks go on.
func (t *Tracker) Resumed() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.reset = false
}

// Position returns at, the offset of the oldest unsettled message. If all are settled, at is the
// offset after the last one; -1 if nothing was handed over yet. given is the mark that Take
// returned last; -1 if there was none, or none since the user has reset the offset.
func (t *Tracker) Position() (at, given int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.queue) > 0 {
		return t.queue[0].offset, t.given
	}
	return t.next, t.given
}

// Ahead is how many messages are settled after the oldest unsettled one.
func (t *Tracker) Ahead() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.done
}

// Settled returns the position, -1 if nothing was handed over yet, and the settled offsets after
// it.
func (t *Tracker) Settled() (at int64, ahead []int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.queue) == 0 {
		return t.next, nil
	}
	for _, d := range t.queue {
		if d.done {
			ahead = append(ahead, d.offset)
		}
	}
	return t.queue[0].offset, ahead
}
