// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// stored is a message as its queue keeps it. The Message in it is its first
// delivery, so that a message that is delivered once costs no allocation of
// its own.
type stored struct {
	Message
	done   bool // acked
	counts Counts
}

// chunk is a run of messages made by one allocation.
type chunk struct {
	recs [chunkSize]stored
	open int // not yet acked or not yet published
}

const chunkSize = 256

// queue is one queue of a Broker. mu guards all of it, and the state of its
// deliveries; Epoch.mu may be taken before it, never after.
type queue struct {
	name string

	mu       sync.Mutex
	wake     *sync.Cond // pumps wait for something to deliver
	chunks   []*chunk   // nil where forgotten
	ready    deque
	epochs   []*Epoch // not fenced
	counts   Counts
	forget   bool
	drainers int                   // wait on wake for the last ack
	refuse   atomic.Pointer[error] // nil: acks are taken
	delay    time.Duration
	letters  *DeadLetters // made when asked for
}

// readied is a message that waits to be delivered; forced even if it is acked.
type readied struct {
	rec    *stored
	forced bool
}

func newQueue(name string) *queue {
	q := &queue{name: name}
	q.wake = sync.NewCond(&q.mu)
	return q
}

func (q *queue) publish(ms []Message) uint64 {
	if len(ms) == 0 {
		return 0
	}
	now := time.Now()
	q.mu.Lock()
	for i := range ms {
		seq := q.counts.Published
		q.counts.Published++
		if seq%chunkSize == 0 {
			q.chunks = append(q.chunks, &chunk{open: chunkSize})
		}
		r := &q.chunks[seq/chunkSize].recs[seq%chunkSize]
		r.Key, r.Body, r.Headers = ms[i].Key, ms[i].Body, ms[i].Headers
		r.Seq, r.Published, r.rec = seq+1, now, r
		r.counts.Published = 1
		q.ready.push(readied{rec: r})
	}
	last := q.counts.Published
	q.mu.Unlock()
	q.wake.Broadcast()
	return last
}

func (q *queue) find(seq uint64) *stored {
	if seq == 0 || seq > q.counts.Published || q.chunks[(seq-1)/chunkSize] == nil {
		return nil
	}
	return &q.chunks[(seq-1)/chunkSize].recs[(seq-1)%chunkSize]
}

func (q *queue) consumers() []*Epoch {
	q.mu.Lock()
	defer q.mu.Unlock()
	return slices.Clone(q.epochs)
}

// finishLocked settles a message; false if it was settled already.
func (q *queue) finishLocked(r *stored) bool {
	if r.done {
		return false
	}
	r.done = true
	if q.counts.Acked++; q.drainers > 0 && q.counts.Acked == q.counts.Published {
		q.wake.Broadcast()
	}
	r.counts.Acked++
	if q.forget {
		i := (r.Seq - 1) / chunkSize
		if c := q.chunks[i]; c != nil {
			if c.open--; c.open == 0 {
				q.chunks[i] = nil
			}
		}
	}
	return true
}

// requeueLocked makes messages ready again, in their old order in front of
// what came later.
func (q *queue) requeueLocked(recs []*stored, maxDeliver int) {
	back := make([]readied, 0, len(recs))
	for _, r := range recs {
		switch {
		case r.done:
		case maxDeliver > 0 && int(r.counts.Delivered) >= maxDeliver:
			q.counts.Spent++
			r.counts.Spent++
		default:
			back = append(back, readied{rec: r})
		}
	}
	if len(back) == 0 {
		return
	}
	for ready := q.ready.all(); len(ready) > 0 && ready[0].rec.counts.Delivered > 0; ready = ready[1:] {
		back = append(back, q.ready.pop()) // redelivered ones that wait already
	}
	slices.SortStableFunc(back, func(a, b readied) int { return cmp.Compare(a.rec.Seq, b.rec.Seq) })
	q.ready.pushFront(back)
	q.wake.Broadcast()
}

// giveUp makes deliveries late and their messages ready again.
func (q *queue) giveUp(which func(*Message) bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, e := range q.epochs {
		var back []*stored
		for m := e.out.next; m != &e.out; {
			next := m.next
			if which(m) {
				e.dropLocked(m)
				back = append(back, m.rec)
			}
			m = next
		}
		q.requeueLocked(back, e.cfg.MaxDeliver)
	}
}

func (q *queue) duplicate(seqs []uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	var again []readied
	for _, seq := range seqs {
		if r := q.find(seq); r != nil {
			again = append(again, readied{rec: r, forced: true})
		}
	}
	q.ready.pushFront(again)
	q.wake.Broadcast()
}

// deque is a queue that reuses its memory.
type deque struct {
	items []readied
	head  int
}

func (d *deque) all() []readied { return d.items[d.head:] }

func (d *deque) push(r readied) { d.items = append(d.items, r) }

func (d *deque) pushFront(rs []readied) {
	if len(rs) <= d.head {
		d.head -= len(rs)
		copy(d.items[d.head:], rs)
		return
	}
	d.items = slices.Concat(rs, d.all())
	d.head = 0
}

func (d *deque) pop() readied {
	r := d.items[d.head]
	d.items[d.head] = readied{}
	d.head++
	if d.head == len(d.items) {
		d.items, d.head = d.items[:0], 0
	} else if d.head > 1024 && d.head*2 > len(d.items) {
		n := copy(d.items, d.items[d.head:])
		clear(d.items[n:])
		d.items, d.head = d.items[:n], 0
	}
	return r
}
