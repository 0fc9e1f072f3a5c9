// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package ringbuf

// patience is how often the oldest waiter may be passed over before later callers must queue
// behind it.
const patience = 32

// A waiter is a waiting call. It keeps its place in its queue until it leaves by itself. A
// signal means "look again", so a stale or doubled signal does no harm.
type waiter struct {
	ch         chan struct{} // capacity 1
	prev, next *waiter

	// The queue's lock guards the fields below.
	queued bool
	woken  bool  // signalled, and has not looked yet
	want   int   // messages to place
	need   int64 // bytes of the first message to place
	rest   int64 // bytes of all messages to place
	passed int   // how often room came that this waiter did not get
}

// signal tells the waiter to look again. It may be called with or without the queue's lock.
func (w *waiter) signal() {
	select {
	case w.ch <- struct{}{}:
	default:
	}
}

// A waitq is a queue of waiters, oldest first.
type waitq struct{ head, tail *waiter }

func (q *waitq) push(w *waiter) {
	w.queued, w.prev, w.next = true, q.tail, nil
	if q.tail == nil {
		q.head = w
	} else {
		q.tail.next = w
	}
	q.tail = w
}

func (q *waitq) remove(w *waiter) {
	if w.prev == nil {
		q.head = w.next
	} else {
		w.prev.next = w.next
	}
	if w.next == nil {
		q.tail = w.prev
	} else {
		w.next.prev = w.prev
	}
	w.queued, w.prev, w.next = false, nil, nil
}

// first marks the oldest waiter as woken and returns it. It returns nil if there is none, or
// if the oldest is already woken. The caller must signal the waiter.
func (q *waitq) first() *waiter {
	w := q.head
	if w == nil || w.woken {
		return nil
	}
	w.woken = true
	return w
}

// wake signals the waiters that the free room can serve, oldest first. If the oldest waiter
// starves, wake serves only that one. It returns whether the oldest starves, and whether there
// may be a waiter that is not woken.
//
// It assumes that a woken waiter takes all that it wants, which may be more than it will
// take. So every waiter that has looked calls wake again, and no room is left unused that a
// waiter could use.
func (q *waitq) wake(count int, bytes int64) (starving, asleep bool) {
	w := q.head
	for ; w != nil && count > 0; w = w.next {
		fits := w.need <= bytes
		if fits && !w.woken {
			w.woken = true
			w.signal()
		}
		if w == q.head {
			if !fits {
				w.passed++
			}
			if w.passed > patience {
				return true, true
			}
		}
		if fits {
			count -= w.want
			bytes -= w.rest
		}
		asleep = asleep || !w.woken
	}
	return q.head != nil && q.head.passed > patience, asleep || w != nil
}

func (q *waitq) wakeAll() {
	for w := q.head; w != nil; w = w.next {
		w.woken = true
		w.signal()
	}
}

// waiters is a free list of waiters. It belongs to one ring or lane, not to the process, so
// that channels never cross from one synctest bubble into another.
type waiters struct{ head *waiter }

func (f *waiters) get() *waiter {
	w := f.head
	if w == nil {
		return &waiter{ch: make(chan struct{}, 1)}
	}
	f.head, w.next = w.next, nil
	return w
}

// put keeps a waiter that is in no queue. A late signal may still use w.ch.
func (f *waiters) put(w *waiter) {
	w.woken, w.passed, w.next = false, 0, f.head
	f.head = w
}
