// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// Broker is an in-memory broker with at-least-once delivery, for tests. Queues
// come into being when first named, and keep their messages in the order of
// publication; a message stays until a consumer has acked it.
//
// It keeps its own books ([Broker.Stats], [Broker.Message]), independent of the
// guard's, and does on command what brokers do on bad days: it revokes, dies,
// redelivers, duplicates, reorders, delays and refuses acks.
//
// All methods may be called at any time from any goroutine. It uses no other
// clock than package time's and never spins, so it runs inside a
// testing/synctest bubble. Each epoch has one goroutine, which ends with
// [Epoch.Close]; a message costs no goroutine and no timer.
type Broker struct {
	mu     sync.Mutex
	up     *sync.Cond // on mu: Consume waits for Start
	down   bool
	queues map[string]*queue
	epochs uint64
}

// NewBroker makes a broker without queues that is up. It holds nothing that
// would have to be closed.
func NewBroker() *Broker {
	b := &Broker{queues: make(map[string]*queue)}
	b.up = sync.NewCond(&b.mu)
	return b
}

// Errors of epochs that ended; the causes of [Epoch.Context].
var (
	// errRevoked means that the broker took the queue away and expects the
	// consumer to give back what it has.
	errRevoked = errors.New("guardtest: revoked")

	// errLost means that the connection broke: whatever was unacked is
	// delivered again, and what the epoch still says is ignored.
	errLost = errors.New("guardtest: connection lost")
)

// Message is one delivery of one message. Key, Body and Headers are what
// [Broker.Publish] reads; the broker fills in the rest. A message that is
// delivered again is another *Message with the same Seq.
type Message struct {
	Key     string // "" is no key
	Body    []byte
	Headers []dlq.Header

	Seq        uint64    // position in its queue, from 1
	Published  time.Time // when it was published
	Deliveries int       // how often it was delivered, this one included
	Epoch      uint64    // number of the epoch it was delivered to, from 1 in a Broker
	Tag        uint64    // number of this delivery within the epoch, from 1

	rec        *stored
	epoch      *Epoch
	prev, next *Message  // in Epoch.out, guarded by queue.mu
	out        bool      // neither settled nor given up; guarded by queue.mu
	deadline   time.Time // of AckWait; guarded by queue.mu
	since      time.Time // delivered at, if HoldMax is set; guarded by queue.mu
	refused    bool      // its ack was refused; guarded by queue.mu
	settled    bool      // acked or returned; guarded by Epoch.mu
}

// Counts is what happened to the messages of a queue, or to one of them.
type Counts struct {
	Published uint64
	Delivered uint64 // sent to a consumer; it may still lie in the client's buffer
	Acked     uint64 // messages settled by an ack

	RepeatAcks  uint64 // acks of messages that were settled already, by another delivery
	LateAcks    uint64 // acks of deliveries that the broker had given up; of a lost epoch they change nothing
	DoubleAcks  uint64 // second acks of one delivery, or acks of a returned one: always a bug of the port's user
	RefusedAcks uint64 // see Broker.RefuseAcks

	Extends  uint64 // messages named in calls of Port.Extend
	Returned uint64 // given back by Port.Return
	Expired  uint64 // AckWait passed
	Lost     uint64 // unacked when their epoch was fenced
	Spent    uint64 // messages not delivered again because of MaxDeliver

	AfterEnd uint64 // port calls after Epoch.Close: always a bug of the port's user
	Flushes  uint64
}

// Stats is a queue at one instant.
type Stats struct {
	Counts
	Ready   int // waiting to be delivered
	Unacked int // with a consumer
}

// Publish appends messages to a queue and returns the Seq of the last. It also
// works while the broker is stopped: publishing is the test's own act. Body and
// Headers are shared with every delivery and must not be changed afterwards.
func (b *Broker) Publish(queue string, ms ...Message) uint64 {
	return b.queue(queue).publish(ms)
}

// Stats are the broker's own books of a queue.
func (b *Broker) Stats(queue string) Stats {
	q := b.queue(queue)
	q.mu.Lock()
	defer q.mu.Unlock()
	st := Stats{Counts: q.counts}
	for _, r := range q.ready.all() {
		if !r.rec.done || r.forced {
			st.Ready++
		}
	}
	for _, e := range q.epochs {
		st.Unacked += e.unacked
	}
	return st
}

// Message are the books of one message; false if there is none of that Seq, or
// its books are closed ([Broker.ForgetAcked]). Published is 1.
func (b *Broker) Message(queue string, seq uint64) (Counts, bool) {
	q := b.queue(queue)
	q.mu.Lock()
	defer q.mu.Unlock()
	if r := q.find(seq); r != nil {
		return r.counts, true
	}
	return Counts{}, false
}

// Pending are the Seqs of all messages of a queue that nobody has acked, in order.
func (b *Broker) Pending(queue string) []uint64 {
	q := b.queue(queue)
	q.mu.Lock()
	defer q.mu.Unlock()
	var seqs []uint64
	for seq := uint64(1); seq <= q.counts.Published; seq++ {
		if r := q.find(seq); r != nil && !r.done {
			seqs = append(seqs, seq)
		}
	}
	return seqs
}

// Drained waits until every message of a queue is acked, or ctx ends.
func (b *Broker) Drained(ctx context.Context, queue string) error {
	q := b.queue(queue)
	stop := context.AfterFunc(ctx, q.wake.Broadcast)
	defer stop()
	q.mu.Lock()
	defer q.mu.Unlock()
	q.drainers++
	defer func() { q.drainers-- }()
	for q.counts.Acked < q.counts.Published && ctx.Err() == nil {
		q.wake.Wait()
	}
	return ctx.Err()
}

// ForgetAcked makes a queue drop acked messages and their books, for benchmarks
// and soaks. The default is to keep everything.
func (b *Broker) ForgetAcked(queue string) {
	q := b.queue(queue)
	q.mu.Lock()
	defer q.mu.Unlock()
	q.forget = true
}

// Revoke takes a queue away from all its consumers, as a rebalance does. Eager
// also ends [Epoch.Context] at once; otherwise the closed channel, after what
// lay in its buffer, is all they see. An epoch lives on, and settles, until its
// consumer closes it or [ConsumerConfig.RevokeGrace] has passed.
func (b *Broker) Revoke(queue string, eager bool) {
	for _, e := range b.queue(queue).consumers() {
		e.revoke(eager)
	}
}

// Kill breaks the connections of a queue's consumers: their epochs end,
// what lay in client buffers is gone, everything unacked is ready again in its old
// order, and later acks of these epochs are counted and ignored.
func (b *Broker) Kill(queue string) {
	for _, e := range b.queue(queue).consumers() {
		e.lose(errLost)
	}
}

// Stop kills the broker: every connection breaks, and Consume waits for Start.
// Messages survive.
func (b *Broker) Stop() {
	b.mu.Lock()
	b.down = true
	queues := make([]string, 0, len(b.queues))
	for name := range b.queues {
		queues = append(queues, name)
	}
	b.mu.Unlock()
	for _, name := range queues {
		b.Kill(name)
	}
}

// Start ends Stop.
func (b *Broker) Start() {
	b.mu.Lock()
	b.down = false
	b.mu.Unlock()
	b.up.Broadcast()
}

// Redeliver delivers messages again that are with a consumer, as if their
// AckWait had passed. The consumer's own delivery is late from now on: its ack
// still settles the message. Seqs that are with nobody are skipped; none means
// all that are unacked.
func (b *Broker) Redeliver(queue string, seqs ...uint64) {
	b.queue(queue).giveUp(func(m *Message) bool { return len(seqs) == 0 || slices.Contains(seqs, m.Seq) })
}

// Duplicate delivers messages once more, whatever became of them: with a
// consumer, waiting or acked. They are delivered next.
func (b *Broker) Duplicate(queue string, seqs ...uint64) {
	b.queue(queue).duplicate(seqs)
}

// Reorder hands the messages that wait to a shuffle function, such as
// [math/rand/v2.Rand.Shuffle].
func (b *Broker) Reorder(queue string, shuffle func(n int, swap func(i, j int))) {
	q := b.queue(queue)
	q.mu.Lock()
	defer q.mu.Unlock()
	all := q.ready.all()
	shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
}

// RefuseAcks makes Port.Ack fail with err until it is called with nil: only then,
// or when their AckWait passes or their epoch ends, are those messages delivered
// again.
func (b *Broker) RefuseAcks(queue string, err error) {
	q := b.queue(queue)
	if err == nil {
		q.refuse.Store(nil)
		q.giveUp(func(m *Message) bool { return m.refused })
		return
	}
	q.refuse.Store(&err)
}

// Delay makes every hand-over to a consumer take d longer: a message, or a
// batch of at most [ConsumerConfig.Buffer]. 0 ends it.
func (b *Broker) Delay(queue string, d time.Duration) {
	q := b.queue(queue)
	q.mu.Lock()
	defer q.mu.Unlock()
	q.delay = d
}

func (b *Broker) queue(name string) *queue {
	b.mu.Lock()
	defer b.mu.Unlock()
	q := b.queues[name]
	if q == nil {
		q = newQueue(name)
		b.queues[name] = q
	}
	return q
}

// await waits until the broker is up and returns the number of the next epoch.
func (b *Broker) await(ctx context.Context) (uint64, error) {
	stop := context.AfterFunc(ctx, b.up.Broadcast)
	defer stop()
	b.mu.Lock()
	defer b.mu.Unlock()
	for b.down && ctx.Err() == nil {
		b.up.Wait()
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	b.epochs++
	return b.epochs, nil
}
