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
	idle       phase = iota // nowhere: only the closed path's word uses it
	processing              // its handler runs
	settling                // acked or dead-lettered, not yet confirmed
	waiting                 // in front of the handler; held, if the source is not admitting
	retryWait               // failed; waits for its delay, a credit or a witness
	phaseCount
)

// live tells whether a message of that phase still needs its handler or a verdict.
func (p phase) live() bool { return p == processing || p == waiting || p == retryWait }

// entry is a message in the ring: this process has it, and has never handled it.
type entry[M any] struct {
	m       M
	size    int
	at      time.Duration // when this process got the message
	copy    *spilled      // the copy on the disk; nil if the source does not spill
	arrival int32         // the place in machine.arrivals
}

// item is a message outside the ring: up next, being handled, or failed.
type item[M any] struct {
	entry[M]
	id    uint64   // unique within the Guard; ascends in the order of the source
	lane  *lane[M] // nil with OrderNone
	phase phase

	// The handler calls, and what they prove. "life" is machine.life, the number of successes.
	serial   uint64 // times the item was given to a handler
	tries    int    // handler calls so far, without those that said nothing; see counted
	call     int32  // the place of tries in machine.calls, while the item is not settling
	doubtful int32  // the place of lifeAtFailure in machine.failureLives, 0 for none
	// attempts are failed calls that count towards Retry.Attempts: no probe that asks for life, and
	// no call as a witness. Once exhausted, a failure counts only with alive or ClassMessage.
	attempts    int
	probes      int // failed probes
	firstFailed time.Duration
	exhausted   bool // the attempts are used up
	exhaustedAt time.Duration
	class       Class // of the latest error
	// life is machine.life when the latest call began, from the second call on; with
	// machine.beside from the first.
	life          uint64
	lifeAtFailure uint64        // life at the latest failure
	after         int           // failures after a proof of life
	alive         bool          // the latest failure was after a proof of life
	afterAt       time.Duration // when the latest failure after a proof of life was
	own           int           // failures in after that had a new success since the failure before
	relapses      int           // failures with a success of others since the failure before
	wordAt        time.Duration // when the item got the last word
	lastWord      bool          // something has succeeded: the item has the rest of its attempts
	doubted       bool          // the item had the last word, and lost it when another was found guilty
	// mute: as a witness the item told nothing about the dependency, because it was ignored,
	// permanent or itself at fault.
	mute   bool
	passed bool // the item has let others go first since its latest attempt

	// The dead letter.
	permanent    bool        // the handler said Permanent: the item waits for a credit only
	paid         bool        // the credit is paid, and the item waits for the limit of dead letters only
	credit       credit.Paid // the credit of the dead letter
	begun        bool        // the dead letter was given to the writer, maybe in vain
	tried        bool        // an attempt to write it has failed, other than by being put off
	failures     []attempt   // the first failure and the latest ones
	historyBytes int         // how many of the machine's bytes failures takes
	reason       Reason      // why the item is in retryWait

	due   time.Duration // in retryWait: when to try again
	heap  int           // index in machine.due, -1 outside
	queue *queueOf[M]   // the queue that has a place for the item, nil for none

	// The latest call.
	token   circuit.Token
	probe   bool
	ctx     *callContext // in the function shape
	started time.Duration
	slow    bool // the breaker was told that the call is slow
	offered bool // the item is on Ready, and nobody has taken it yet
	place   int  // index in the machine's list of the phase, -1 outside

	name         string     // the name of the message over epochs; empty until it has failed
	lastDelivery bool       // the broker would not deliver the message again; see last
	verdict      dlq.Reason // why the item is dead-lettered
	rule         *dlq.Rule  // the quarantine rule that the item matches, nil for none
	seen         uint64     // version of the quarantine that the item was compared with
	wasParked    bool       // the item was in retryWait before it was taken aside to be compared
	dead         bool       // the dead letter is confirmed
	ignored      bool       // the handler returned Ignore
	guessed      bool       // the item was taken for poison without proof
	cameBack     bool       // the message failed at lifeAtFailure, and was parked
}

// context is the context of the latest call, with the call's span if there is one.
func (it *item[M]) context() context.Context {
	if it.ctx == nil {
		return context.Background()
	}
	return it.ctx
}

// decided tells whether no handler will be called for it again.
func (it *item[M]) decided() bool { return it.permanent || it.paid || it.rule != nil }

// witness tells whether an item is up out of turn, behind a failing head.
func (it *item[M]) witness() bool {
	l := it.lane
	return l != nil && l.turn > 0 && l.turn < len(l.front) && l.front[l.turn] == it
}

// attempt is one failed handler call.
type attempt struct {
	n     int
	at    time.Duration
	words dlq.ErrorInfo // type and capped text of the error
	err   error         // nil unless this is the latest attempt
	stack []byte        // nil unless this is the latest attempt
}

// maxFailures bounds the history of one item: the first failure and the latest ones.
const maxFailures = 8

// attemptBytes is the size of an attempt without its texts.
const attemptBytes = 128

// note adds a failure to the item's history. Of earlier failures only the words stay: an error
// may hold much more than its text, such as a stack or a response. The bytes of the window
// include the history.
func (c *machine[M]) note(now time.Duration, it *item[M], r result) {
	if n := len(it.failures); n > 0 {
		it.failures[n-1].err, it.failures[n-1].stack = nil, nil
	}
	if len(it.failures) == maxFailures {
		it.failures = append(it.failures[:1], it.failures[2:]...)
	}
	it.failures = append(it.failures, attempt{it.tries, now, r.words, r.err, r.stack})
	was := it.historyBytes
	it.historyBytes = 0
	for _, a := range it.failures {
		it.historyBytes += attemptBytes + len(a.words.Type) + len(a.words.Message) + len(a.stack)
	}
	c.keeps(it.historyBytes - was)
}

// keeps adds n bytes of failure histories; n may be negative.
func (c *machine[M]) keeps(n int) {
	c.bytes += int64(n)
	c.historyBytes += int64(n)
}

// lane is a sequence of messages that must be handled in order: those of the source, or of one key.
type lane[M any] struct {
	key   uint64
	queue *ringbuf.Lane[entry[M]] // messages in the ring
	front []*item[M]              // messages taken from queue, in order

	// The look behind the head. A look with the breaker closed goes in groups; the look of a
	// probe is a round.
	turn   int  // index in front of the item that is up: 0, the head, or in a look a witness
	waited bool // the witness at turn has asked for time
	looks  int  // witnesses behind this head that failed while the breaker was closed
	groups int  // groups that have begun behind this head
	rounds int  // rounds that have begun behind this head
	step   int  // witnesses called in this group or round
	depth  int  // the most witnesses of this group or round
	from   int  // witnesses that this round skips, because earlier rounds have tried them
	beyond int  // how far behind this head rounds have come
	deep   bool // an operator has dead-lettered the previous head: the next round goes as far as it may

	queued bool // the lane is in the machine's ready list
	parked bool // front[turn] is processing or waits for a retry

	untried, telling bool // whether the machine's counts of that name include the lane; see heads
}

// head is the lane's first item, nil if the first message is still in the ring.
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
	it := x.(*item[M]) //nolint:forcetypeassert // only waitRetry pushes
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

// last tells whether the message would be lost if this process crashed: the broker will not
// deliver it again, and it is not on the disk.
func (it *item[M]) last() bool { return it.lastDelivery && !it.copy.onDisk() }

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
