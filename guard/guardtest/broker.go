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

// Broker is an in-memory broker with at-least-once delivery, for tests. The first use of a
// name creates its queue. A queue keeps its messages in the order of publication, and each
// message until a consumer acks it.
//
// The broker counts for itself ([Broker.Stats], [Broker.Message]), independently of the
// guard. On command it does what brokers do on bad days: it revokes, dies, redelivers,
// duplicates, reorders, delays and refuses acks.
//
// All methods may be called at any time from any goroutine. The only clock is that of
// package time, and no code spins, so a Broker runs inside a testing/synctest bubble. Each
// epoch has one goroutine, which ends with [Epoch.Close]. A message costs no goroutine and
// no timer.
type Broker struct {
	mu     sync.Mutex
	up     *sync.Cond // on mu: Consume waits for Start
	down   bool
	queues map[string]*queue
	epochs uint64
}

// NewBroker returns a broker without queues that is up. It needs no close.
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

	// errLost means that the connection broke: unacked messages are delivered again, and
	// later acks of the epoch are ignored.
	errLost = errors.New("guardtest: connection lost")
)

// Message is one delivery of one message. [Broker.Publish] reads Key, Body and Headers;
// the broker sets the other fields. A redelivery is another *Message with the same Seq.
type Message struct {
	Key     string // "" for no key
	Body    []byte
	Headers []dlq.Header

	Seq        uint64    // position in its queue, from 1
	Published  time.Time // when it was published
	Deliveries int       // how often it was delivered, this one included
	Epoch      uint64    // number of the epoch that got the delivery, from 1 in a Broker
	Tag        uint64    // number of this delivery within the epoch, from 1

	rec        *stored
	epoch      *Epoch
	prev, next *Message  // in Epoch.out, guarded by queue.mu
	out        bool      // neither settled nor given up; guarded by queue.mu
	deadline   time.Time // end of the AckWait; guarded by queue.mu
	since      time.Time // time of the delivery, if HoldMax is set; guarded by queue.mu
	refused    bool      // its ack was refused; guarded by queue.mu
	settled    bool      // acked or returned; guarded by Epoch.mu
}

// Counts has the counters of a queue, or of one message.
type Counts struct {
	Published uint64
	Delivered uint64 // messages sent to a consumer; some may still be in the client's buffer
	Acked     uint64 // messages settled by an ack

	RepeatAcks  uint64 // acks of messages that another delivery had settled
	LateAcks    uint64 // acks of deliveries that the broker had given up; they change nothing if their epoch is lost
	DoubleAcks  uint64 // second acks of one delivery, or acks of returned messages: always a bug of the port's user
	RefusedAcks uint64 // see Broker.RefuseAcks

	Extends  uint64 // messages in calls of Port.Extend
	Returned uint64 // messages given back by Port.Return
	Expired  uint64 // deliveries whose AckWait passed
	Lost     uint64 // unacked deliveries of fenced epochs
	Spent    uint64 // messages not delivered again because of MaxDeliver

	AfterEnd uint64 // port calls after Epoch.Close: always a bug of the port's user
	Flushes  uint64
}

// Stats is the state of a queue at one instant.
type Stats struct {
	Counts
	Ready   int // messages that wait for delivery
	Unacked int // unacked messages of all consumers
}

// Publish appends messages to a queue and returns the Seq of the last. It also works while
// the broker is stopped, since the test itself publishes. Every delivery shares Body and
// Headers: do not change them afterwards.
func (b *Broker) Publish(queue string, ms ...Message) uint64 {
	return b.queue(queue).publish(ms)
}

// Stats returns the broker's own counts of a queue.
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

// Message returns the counts of one message, with Published 1. It returns false if there is
// no message with that Seq, or its counts are dropped ([Broker.ForgetAcked]).
func (b *Broker) Message(queue string, seq uint64) (Counts, bool) {
	q := b.queue(queue)
	q.mu.Lock()
	defer q.mu.Unlock()
	if r := q.find(seq); r != nil {
		return r.counts, true
	}
	return Counts{}, false
}

// Pending returns the Seqs of all unacked messages of a queue, in order.
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

// ForgetAcked makes a queue drop acked messages and their counts, for benchmarks and soaks.
// By default a queue keeps everything.
func (b *Broker) ForgetAcked(queue string) {
	q := b.queue(queue)
	q.mu.Lock()
	defer q.mu.Unlock()
	q.forget = true
}

// Revoke takes a queue away from all its consumers, as a rebalance does. Each consumer sees
// its channel closed, after the messages in the buffer; with eager, [Epoch.Context] ends at
// once, too. An epoch may still settle until its consumer closes it or
// [ConsumerConfig.RevokeGrace] has passed.
func (b *Broker) Revoke(queue string, eager bool) {
	for _, e := range b.queue(queue).consumers() {
		e.revoke(eager)
	}
}

// Kill breaks the connections of a queue's consumers. Their epochs end and client buffers
// are lost. All unacked messages become ready again, in their old order. Later acks of
// these epochs are counted and ignored.
func (b *Broker) Kill(queue string) {
	for _, e := range b.queue(queue).consumers() {
		e.lose(errLost)
	}
}

// Stop stops the broker: every connection breaks, and Consume waits for Start. The broker
// keeps its messages.
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

// Start starts a stopped broker again.
func (b *Broker) Start() {
	b.mu.Lock()
	b.down = false
	b.mu.Unlock()
	b.up.Broadcast()
}

// Redeliver delivers unacked messages of consumers again, as if their AckWait had passed.
// Without seqs it redelivers all of them; a Seq that no consumer has is skipped. The first
// delivery is late from now on, but its ack still settles the message.
func (b *Broker) Redeliver(queue string, seqs ...uint64) {
	b.queue(queue).giveUp(func(m *Message) bool { return len(seqs) == 0 || slices.Contains(seqs, m.Seq) })
}

// Duplicate delivers messages once more, also if a consumer has them, or they wait or are
// acked. They are delivered next.
func (b *Broker) Duplicate(queue string, seqs ...uint64) {
	b.queue(queue).duplicate(seqs)
}

// Reorder shuffles the waiting messages with a function such as
// [math/rand/v2.Rand.Shuffle].
func (b *Broker) Reorder(queue string, shuffle func(n int, swap func(i, j int))) {
	q := b.queue(queue)
	q.mu.Lock()
	defer q.mu.Unlock()
	all := q.ready.all()
	shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
}

// RefuseAcks makes Port.Ack fail with err, until a call of RefuseAcks with nil. That call
// delivers the messages of the refused acks again. Before it they are delivered again only
// if their AckWait passes or their epoch ends.
func (b *Broker) RefuseAcks(queue string, err error) {
	q := b.queue(queue)
	if err == nil {
		q.refuse.Store(nil)
		q.giveUp(func(m *Message) bool { return m.refused })
		return
	}
	q.refuse.Store(&err)
}

// Delay makes every hand-over to a consumer take d longer; 0 ends the delay. A hand-over is
// one message, or a batch of at most [ConsumerConfig.Buffer].
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
