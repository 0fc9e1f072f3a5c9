// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"container/heap"
	"context"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/circuit"
	"github.com/stormguard-mq/stormguard/internal/credit"
	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

// phase is where an unsettled message is.
type phase uint8

const (
	idle       phase = iota // nowhere: only the closed path's word says so
	processing              // its handler runs
	settling                // acked or dead-lettered, not yet confirmed
	waiting                 // in front of the handler; held, if the source is not admitting
	retryWait               // failed; waits its delay, a credit or a witness
	phaseCount
)

// live tells whether a message of that phase still needs its handler or its verdict.
func (p phase) live() bool { return p == processing || p == waiting || p == retryWait }

// entry is a message in the ring: handed over, never handled yet.
type entry[M any] struct {
	m       M
	size    int
	at      time.Duration // when this process was handed it
	copy    *spilled      // on the disk; nil where the source does not spill
	arrival int32         // its place in the machine's arrivals
}

// item is a message outside the ring: up next, being handled, or failed.
type item[M any] struct {
	entry[M]
	id    uint64   // within the Guard; in the order of the source
	lane  *lane[M] // nil with OrderNone
	phase phase

	serial      uint64 // times it was given to a handler
	tries       int    // handler calls so far, those that said nothing left out; see counted
	call        int32  // the place of tries in the machine's calls, while it is not settling
	doubtful    int32  // the place of luck in the machine's lucks, 0 for none
	attempts    int    // those that count towards Retry.Attempts: not a probe that asks for life, not a witness
	probes      int    // failed probes
	firstFailed time.Duration
	exhausted   bool // its attempts are used up
	exhaustedAt time.Duration
	class       Class         // of its last error
	life        uint64        // the machine's life when its latest call began, from the second on
	luck        uint64        // the same when it last failed
	after       int           // failures after a proof of life
	alive       bool          // so was the last one
	afterAt     time.Duration // when it was the last time
	own         int           // of these, such as came after another success than the one before
	relapses    int           // failures after others had succeeded since the one before
	wordAt      time.Duration // when it got the last word
	lastWord    bool          // a message behind it has succeeded: it has the rest of its attempts
	doubted     bool          // it had the last word, and lost it to another
	mute        bool          // as a witness it was ignored, permanent or at fault itself, which says nothing about the dependency
	passed      bool          // let others go first since its last attempt
	permanent   bool          // its verdict waits for a credit only
	paid        bool          // it has its credit, and waits for the limit of dead letters only
	credit      credit.Paid   // what its dead letter costs
	begun       bool          // … and was handed to the writer, maybe in vain
	tried       bool          // … which failed, and did not put it off
	failures    []attempt     // the first and the latest ones …
	noted       int           // … and how many of the machine's bytes they are
	reason      Reason        // why it is parked

	due   time.Duration // retryWait: when to try again
	heap  int           // index in the machine's due heap, -1 outside
	queue *queueOf[M]   // the one that it has a place in, nil for none

	token   circuit.Token
	probe   bool
	ctx     *callContext // of its latest call, in the function shape
	started time.Duration
	slow    bool // reported to the breaker as slow already
	offered bool // on Ready, not yet taken: nobody has it
	place   int  // index in the machine's list of its phase, -1 outside

	name         string     // over epochs; empty until it failed
	lastDelivery bool       // the broker would not deliver it again; see last
	verdict      dlq.Reason // why it is dead-lettered
	rule         *dlq.Rule  // of the quarantine that it matches, nil for none
	seen         uint64     // version of the book that it was compared with
	wasParked    bool       // before it was taken aside to be compared
	dead         bool       // its dead letter is confirmed
	ignored      bool       // its handler said Ignore
	guessed      bool       // it was taken for poison without proof
	cameBack     bool       // it failed before it was parked, when life was luck
}

// context is that of its latest call, with the call's span if there is one.
func (it *item[M]) context() context.Context {
	if it.ctx == nil {
		return context.Background()
	}
	return it.ctx
}

// decided tells whether no handler will be called for it again.
func (it *item[M]) decided() bool { return it.permanent || it.paid || it.rule != nil }

// witness tells whether an item is up out of turn, behind a head that fails.
func (it *item[M]) witness() bool {
	l := it.lane
	return l != nil && l.turn > 0 && l.turn < len(l.front) && l.front[l.turn] == it
}

// attempt is one failed handler call.
type attempt struct {
	n     int
	at    time.Duration
	words dlq.ErrorInfo // of err: type and capped text
	err   error         // of the latest only, as its stack
	stack []byte
}

// maxFailures bounds the history kept of one item: the first and the latest.
const maxFailures = 8

// attemptBytes is the size of an attempt without its texts.
const attemptBytes = 128

// note keeps the latest failure as it is, and those before it in words: an error may hold
// much more than its text, such as a stack or a response. The window's bytes include them.
func (c *machine[M]) note(now time.Duration, it *item[M], r result) {
	if n := len(it.failures); n > 0 {
		it.failures[n-1].err, it.failures[n-1].stack = nil, nil
	}
	if len(it.failures) == maxFailures {
		it.failures = append(it.failures[:1], it.failures[2:]...)
	}
	it.failures = append(it.failures, attempt{it.tries, now, r.words, r.err, r.stack})
	was := it.noted
	it.noted = 0
	for _, a := range it.failures {
		it.noted += attemptBytes + len(a.words.Type) + len(a.words.Message) + len(a.stack)
	}
	c.keeps(it.noted - was)
}

// keeps counts bytes of histories.
func (c *machine[M]) keeps(n int) {
	c.bytes += int64(n)
	c.noted += int64(n)
}

// lane is what must be handled in sequence: the source, or one key.
type lane[M any] struct {
	key    uint64
	queue  *ringbuf.Lane[entry[M]]
	front  []*item[M] // taken from the queue, in order
	turn   int        // which of front is up: the head, or in a look a witness behind it
	waited bool       // that witness has asked for time
	looks  int        // witnesses that failed behind this head, while the breaker was closed
	groups int        // … in so many groups
	rounds int        // looks of probes that this head failed
	step   int        // witnesses called in this group or round …
	depth  int        // … of so many …
	from   int        // … behind so many, which earlier rounds have tried
	beyond int        // how far behind this head rounds have come
	deep   bool       // an operator has just dead-lettered in front: the next round goes as far as it may
	queued bool       // stands in the machine's ready list
	parked bool       // front[turn] is processing or waits for a retry

	untried, telling bool // as the machine's counts have it; see heads
}

// head is the lane's first item, nil if that is still in the ring.
func (l *lane[M]) head() *item[M] {
	if len(l.front) == 0 {
		return nil
	}
	return l.front[0]
}

// tried tells whether every message of the lane that is not in the ring has failed.
func (l *lane[M]) tried() bool {
	return !slices.ContainsFunc(l.front, func(it *item[M]) bool { return it.tries == 0 })
}

func (l *lane[M]) empty() bool { return len(l.front) == 0 && l.queue.Len() == 0 }

// dueHeap orders parked items by the time of their next attempt.
type dueHeap[M any] []*item[M]

func (h dueHeap[M]) Len() int { return len(h) }
func (h dueHeap[M]) Less(i, j int) bool {
	if h[i].due != h[j].due {
		return h[i].due < h[j].due
	}
	return h[i].id < h[j].id
}

func (h dueHeap[M]) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].heap, h[j].heap = i, j
}

func (h *dueHeap[M]) Push(x any) {
	it := x.(*item[M]) //nolint:forcetypeassert // only park pushes
	it.heap = len(*h)
	*h = append(*h, it)
}

func (h *dueHeap[M]) Pop() any {
	old := *h
	it := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	it.heap = -1
	return it
}

func (h *dueHeap[M]) remove(it *item[M]) {
	if it.heap >= 0 {
		heap.Remove(h, it.heap)
	}
}

// last tells whether nobody will have the message again if this process crashes: the broker
// has delivered it as often as it does, and it is not on the disk.
func (it *item[M]) last() bool { return it.lastDelivery && !it.copy.kept() }

// fifo is a queue that reuses its memory.
type fifo[T any] struct {
	items []T
	head  int
}

func (q *fifo[T]) len() int { return len(q.items) - q.head }

func (q *fifo[T]) push(v T) { q.items = append(q.items, v) }

// pushFront puts v before all others.
func (q *fifo[T]) pushFront(v T) {
	if q.head == 0 {
		q.items = append(q.items, v)
		copy(q.items[1:], q.items)
		q.items[0] = v
		return
	}
	q.head--
	q.items[q.head] = v
}

func (q *fifo[T]) peek() T { return q.items[q.head] }

func (q *fifo[T]) pop() T {
	var zero T
	v := q.items[q.head]
	q.items[q.head] = zero
	q.head++
	if q.head == len(q.items) {
		q.items, q.head = q.items[:0], 0
	} else if q.head > 64 && q.head*2 > len(q.items) {
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:])
		q.items, q.head = q.items[:n], 0
	}
	return v
}
