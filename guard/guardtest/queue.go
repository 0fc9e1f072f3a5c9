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

// stored is a message as its queue keeps it. Its Message is the first delivery, so a
// message that is delivered once costs no further allocation.
type stored struct {
	Message
	done   bool // acked
	counts Counts
}

// chunk is a run of messages made by one allocation.
type chunk struct {
	recs [chunkSize]stored
	open int // messages not yet acked, or not yet published
}

const chunkSize = 256

// queue is one queue of a Broker. mu guards all its fields and the state of its deliveries.
// Lock order: Epoch.mu, then mu.
type queue struct {
	name string

	mu       sync.Mutex
	wake     *sync.Cond // pumps wait on it for messages, Drained for the last ack
	chunks   []*chunk   // nil for a forgotten chunk
	ready    deque
	epochs   []*Epoch // epochs that are not fenced
	counts   Counts
	forget   bool
	drainers int                   // calls of Drained that wait on wake
	refuse   atomic.Pointer[error] // error of every ack; nil: acks are accepted
	delay    time.Duration
	letters  *DeadLetters // made by the first call of Broker.DeadLetters
}

// readied is a message that waits for delivery. With forced it is delivered even if it is
// acked.
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

// finishLocked settles a message. It returns false if the message was settled before.
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

// requeueLocked makes messages ready again, in their old order and in front of messages
// that were never delivered.
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
		back = append(back, q.ready.pop()) // redeliveries that wait already
	}
	slices.SortStableFunc(back, func(a, b readied) int { return cmp.Compare(a.rec.Seq, b.rec.Seq) })
	q.ready.pushFront(back)
	q.wake.Broadcast()
}

// giveUp makes the deliveries that which selects late, and their messages ready again.
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
