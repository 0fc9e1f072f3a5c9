// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// ConsumerConfig has the broker's deadlines and bounds for one consumer. The zero value
// means no deadlines and no bounds.
type ConsumerConfig struct {
	// Prefetch is how many messages may be unacked; unset means no bound.
	Prefetch int

	// Buffer is how many messages the client keeps ahead of its reader. The default 0
	// hands each message over directly; a benchmark wants 256.
	Buffer int

	// AckWait is when the broker delivers an unacked message again that was not extended;
	// unset means never. The guard needs at least 300ms.
	AckWait time.Duration

	// HoldMax is how long a message may be unacked, extended or not; then its epoch ends.
	// Unset means no limit. The broker checks every HoldMax/4.
	HoldMax time.Duration

	// RevokeGrace is how long an epoch may go on after [Broker.Revoke]. Unset means 60s,
	// but then the guard does not know of it.
	RevokeGrace time.Duration

	// MaxDeliver is how often a message is delivered; unset means no bound. A message that
	// is still unacked then stays in [Broker.Pending].
	MaxDeliver int

	// NoCount hides the broker's count of deliveries from the guard, as with Kafka. It
	// cannot be combined with MaxDeliver.
	NoCount bool
}

const defaultGrace = 60 * time.Second

// Epoch is the time in which one consumer has a queue, until it is revoked, lost or closed.
type Epoch struct {
	q    *queue
	cfg  ConsumerConfig
	num  uint64
	ch   chan *Message
	port guard.Port[*Message]

	ctx    context.Context //nolint:containedctx // the epoch's lifetime
	cancel context.CancelCauseFunc
	stop   chan struct{} // closed when nothing more is delivered
	once   sync.Once     // closes stop
	gone   chan struct{} // closed when the pump has ended
	ended  atomic.Bool   // Close was called: a later port call is a bug
	handed atomic.Int64

	mu   sync.Mutex // lock order: mu, then queue.mu
	acks []*Message // acks that are not flushed yet

	// Guarded by queue.mu.
	out     Message // head of the list of unacked deliveries, with AckWait by deadline
	unacked int
	tags    uint64
	paused  bool // Port.Demand paused the delivery
	stopped bool // stop is closed
	dropped bool // the connection broke: messages in the buffer are lost
	fenced  bool
	expiry  *time.Timer // runs while a message is unacked, if AckWait is set
	armed   bool
	holds   *time.Timer // runs until the epoch is fenced, if HoldMax is set
	grace   *time.Timer
}

// Consume starts an epoch, with a goroutine that delivers ready messages. It waits while
// the broker is stopped. Its only error is ctx's; the end of ctx does not end the epoch.
// Call [Epoch.Close] afterwards.
//
// Several consumers of one queue compete for its messages.
func (b *Broker) Consume(ctx context.Context, queue string, cfg ConsumerConfig) (*Epoch, error) {
	num, err := b.await(ctx)
	if err != nil {
		return nil, err
	}
	q := b.queue(queue)
	e := &Epoch{
		q: q, cfg: cfg, num: num,
		ch:   make(chan *Message, cfg.Buffer),
		stop: make(chan struct{}), gone: make(chan struct{}),
	}
	e.port = port{e}
	e.out.next, e.out.prev = &e.out, &e.out
	e.ctx, e.cancel = context.WithCancelCause(context.Background())
	q.mu.Lock()
	q.epochs = append(q.epochs, e)
	if cfg.HoldMax > 0 {
		e.holds = time.AfterFunc(cfg.HoldMax/4, e.checkHolds)
	}
	q.mu.Unlock()
	go e.pump()
	return e, nil
}

// Messages returns the channel of deliveries. It is closed when the epoch ends.
func (e *Epoch) Messages() <-chan *Message { return e.ch }

// Port returns the port for the guard, which settles deliveries of this epoch. It keeps acks
// until Flush: an ack that the guard does not flush is lost.
func (e *Epoch) Port() guard.Port[*Message] { return e.port }

// Context returns a context that ends when the epoch is revoked eagerly, lost or closed.
func (e *Epoch) Context() context.Context { return e.ctx }

// Number returns the epoch's number in its Broker, from 1.
func (e *Epoch) Number() uint64 { return e.num }

// Handed returns how many deliveries a reader has taken from Messages, by the broker's own
// count. A guard should have received as many.
func (e *Epoch) Handed() int { return int(e.handed.Load()) - len(e.ch) }

// Limits returns the deadlines and bounds of the configuration.
func (e *Epoch) Limits() guard.Limits {
	return guard.Limits{
		AckWait: e.cfg.AckWait, HoldMax: e.cfg.HoldMax, RevokeGrace: e.cfg.RevokeGrace,
		MaxUnacked: e.cfg.Prefetch, MaxDeliver: e.cfg.MaxDeliver, EndsWithInput: true,
	}
}

// Close leaves the queue. The broker delivers unacked messages to others, and counts later
// calls of the port in [Counts.AfterEnd]. Close waits for the epoch's goroutine. Call it
// after [guard.Source.End]; a second call does nothing.
func (e *Epoch) Close() {
	e.ended.Store(true)
	e.fence()
	e.halt()
	e.cancel(context.Canceled)
	<-e.gone
}

func (e *Epoch) revoke(eager bool) {
	e.q.mu.Lock()
	if e.grace == nil && !e.fenced {
		grace := e.cfg.RevokeGrace
		if grace <= 0 {
			grace = defaultGrace
		}
		e.grace = time.AfterFunc(grace, func() { e.lose(errRevoked) })
	}
	e.q.mu.Unlock()
	if eager {
		e.cancel(errRevoked)
	}
	e.halt()
}

func (e *Epoch) lose(cause error) {
	e.q.mu.Lock()
	e.dropped = true
	e.q.mu.Unlock()
	e.fence()
	e.cancel(cause)
	e.halt()
}

// halt makes the pump end.
func (e *Epoch) halt() {
	e.once.Do(func() {
		close(e.stop)
		e.q.mu.Lock()
		e.stopped = true
		e.q.mu.Unlock()
		e.q.wake.Broadcast()
	})
}

// fence ends the epoch at the broker.
func (e *Epoch) fence() {
	q := e.q
	q.mu.Lock()
	defer q.mu.Unlock()
	if e.fenced {
		return
	}
	e.fenced, e.stopped = true, true
	if i := slices.Index(q.epochs, e); i >= 0 {
		q.epochs = slices.Delete(q.epochs, i, i+1)
	}
	for _, t := range []*time.Timer{e.expiry, e.holds, e.grace} {
		if t != nil {
			t.Stop()
		}
	}
	var back []*stored
	for m := e.out.next; m != &e.out; {
		next := m.next
		q.counts.Lost++
		m.rec.counts.Lost++
		e.dropLocked(m)
		back = append(back, m.rec)
		m = next
	}
	q.requeueLocked(back, e.cfg.MaxDeliver)
}

// dropLocked takes a delivery off the epoch's list.
func (e *Epoch) dropLocked(m *Message) {
	m.prev.next, m.next.prev = m.next, m.prev
	m.prev, m.next, m.out = nil, nil, false
	e.unacked--
	if e.cfg.Prefetch > 0 && e.unacked == e.cfg.Prefetch-1 {
		e.q.wake.Broadcast()
	}
}

func (e *Epoch) appendLocked(m *Message) {
	last := e.out.prev
	m.prev, m.next, m.out = last, &e.out, true
	last.next, e.out.prev = m, m
	e.unacked++
}

// pump delivers messages. The epoch owns its goroutine; Close waits for it.
func (e *Epoch) pump() {
	defer close(e.gone)
	defer e.hangUp()
	batch := make([]*Message, min(max(e.cfg.Buffer, 1), 64))
	for {
		n, delay := e.take(batch)
		if n == 0 {
			return
		}
		if delay > 0 {
			late := time.NewTimer(delay)
			select {
			case <-late.C:
			case <-e.stop:
				late.Stop()
			}
		}
		for _, m := range batch[:n] {
			select {
			case e.ch <- m:
				e.handed.Add(1)
				continue
			default:
			}
			select {
			case e.ch <- m:
				e.handed.Add(1)
			case <-e.stop:
				return // the rest of the batch is unacked: the end of the epoch gives it back
			}
		}
	}
}

// hangUp closes the channel. If the connection is lost, it first drops the messages in it.
func (e *Epoch) hangUp() {
	e.q.mu.Lock()
	dropped := e.dropped
	e.q.mu.Unlock()
	for dropped {
		select {
		case <-e.ch:
			e.handed.Add(-1)
		default:
			dropped = false
		}
	}
	close(e.ch)
}

// take waits for messages and marks them as delivered. It returns 0 when the epoch is over.
func (e *Epoch) take(batch []*Message) (n int, delay time.Duration) {
	q := e.q
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		for n < len(batch) && len(q.ready.all()) > 0 && e.roomLocked() {
			if r := q.ready.pop(); !r.rec.done || r.forced {
				batch[n] = e.deliverLocked(r.rec)
				n++
			}
		}
		if n > 0 || e.stopped {
			return n, q.delay
		}
		q.wake.Wait()
	}
}

func (e *Epoch) roomLocked() bool {
	return !e.stopped && !e.paused && (e.cfg.Prefetch == 0 || e.unacked < e.cfg.Prefetch)
}

func (e *Epoch) deliverLocked(r *stored) *Message {
	m := &r.Message
	if r.counts.Delivered > 0 {
		m = &Message{Key: r.Key, Body: r.Body, Headers: r.Headers, Seq: r.Seq, Published: r.Published, rec: r}
	}
	r.counts.Delivered++
	e.q.counts.Delivered++
	e.tags++
	m.Deliveries, m.Epoch, m.Tag, m.epoch = int(r.counts.Delivered), e.num, e.tags, e
	if e.cfg.HoldMax > 0 {
		m.since = time.Now()
	}
	if e.cfg.AckWait > 0 {
		m.deadline = time.Now().Add(e.cfg.AckWait)
		if !e.armed {
			e.armLocked(e.cfg.AckWait)
		}
	}
	e.appendLocked(m)
	return m
}

func (e *Epoch) armLocked(d time.Duration) {
	e.armed = true
	if e.expiry == nil {
		e.expiry = time.AfterFunc(d, e.expire)
		return
	}
	e.expiry.Reset(d)
}

// expire gives up deliveries that were neither acked nor extended in time.
func (e *Epoch) expire() {
	q := e.q
	q.mu.Lock()
	defer q.mu.Unlock()
	e.armed = false
	if e.fenced {
		return
	}
	now := time.Now()
	var back []*stored
	for m := e.out.next; m != &e.out && !m.deadline.After(now); m = e.out.next {
		q.counts.Expired++
		m.rec.counts.Expired++
		e.dropLocked(m)
		back = append(back, m.rec)
	}
	q.requeueLocked(back, e.cfg.MaxDeliver)
	if m := e.out.next; m != &e.out {
		e.armLocked(m.deadline.Sub(now))
	}
}

// checkHolds ends the epoch if a message was unacked for HoldMax.
func (e *Epoch) checkHolds() {
	q := e.q
	q.mu.Lock()
	now, over := time.Now(), false
	for m := e.out.next; m != &e.out; m = m.next {
		over = over || now.Sub(m.since) >= e.cfg.HoldMax
	}
	if !over && !e.fenced {
		e.holds.Reset(e.cfg.HoldMax / 4)
	}
	q.mu.Unlock()
	if over {
		e.lose(errLost)
	}
}

// port is an Epoch as the guard sees it.
type port struct{ e *Epoch }

// begin counts a call that comes after Close.
func (p port) begin() {
	if p.e.ended.Load() {
		p.e.q.mu.Lock()
		p.e.q.counts.AfterEnd++
		p.e.q.mu.Unlock()
	}
}

// Lane is the FNV-1a hash of the key: the same in every run.
func (p port) Lane(m *Message) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(m.Key) {
		h = (h ^ uint64(m.Key[i])) * 1099511628211
	}
	return h
}

func (p port) Size(m *Message) int { return len(m.Key) + len(m.Body) }

func (p port) Meta(m *Message) guard.Meta {
	p.begin()
	meta := guard.Meta{
		Body: m.Body, Headers: m.Headers, Timestamp: m.Published, Lag: p.Lag(),
		Origin: dlq.Origin{System: "guardtest", Source: p.e.q.name, Sequence: m.Seq},
	}
	if m.Key != "" {
		meta.Key = []byte(m.Key)
	}
	if !p.e.cfg.NoCount {
		meta.Deliveries = m.Deliveries
	}
	return meta
}

// Lag makes the port a [guard.Lagger].
func (p port) Lag() int64 {
	p.e.q.mu.Lock()
	defer p.e.q.mu.Unlock()
	return int64(len(p.e.q.ready.all()))
}

func (p port) Ack(m *Message) error {
	p.begin()
	e, q := p.e, p.e.q
	e.mu.Lock()
	defer e.mu.Unlock()
	if m.settled || m.epoch != e {
		q.mu.Lock()
		q.counts.DoubleAcks++
		m.rec.counts.DoubleAcks++
		q.mu.Unlock()
		return nil
	}
	m.settled = true
	refuse := q.refuse.Load()
	if refuse == nil {
		e.acks = append(e.acks, m)
		return nil
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.counts.RefusedAcks++
	m.rec.counts.RefusedAcks++
	m.refused = true
	return *refuse
}

func (p port) Flush() error {
	p.begin()
	e, q := p.e, p.e.q
	e.mu.Lock()
	defer e.mu.Unlock()
	q.mu.Lock()
	defer q.mu.Unlock()
	q.counts.Flushes++
	for i, m := range e.acks {
		e.ackLocked(m)
		e.acks[i] = nil
	}
	e.acks = e.acks[:0]
	return nil
}

// ackLocked settles a delivery; queue.mu is held.
func (e *Epoch) ackLocked(m *Message) {
	q := e.q
	late := !m.out
	if late {
		q.counts.LateAcks++
		m.rec.counts.LateAcks++
	} else {
		e.dropLocked(m)
	}
	if e.fenced {
		return
	}
	if !q.finishLocked(m.rec) && !late {
		q.counts.RepeatAcks++
		m.rec.counts.RepeatAcks++
	}
}

func (p port) Extend(ms []*Message) {
	p.begin()
	e, q := p.e, p.e.q
	q.mu.Lock()
	defer q.mu.Unlock()
	q.counts.Extends += uint64(len(ms))
	deadline := time.Now().Add(e.cfg.AckWait)
	for _, m := range ms {
		m.rec.counts.Extends++
		if m.out && m.epoch == e {
			e.dropLocked(m)
			m.deadline = deadline
			e.appendLocked(m)
		}
	}
}

func (p port) Return(ms []*Message, _ guard.Reason) error {
	p.begin()
	e, q := p.e, p.e.q
	e.mu.Lock()
	defer e.mu.Unlock()
	q.mu.Lock()
	defer q.mu.Unlock()
	var back []*stored
	for _, m := range ms {
		if m.settled {
			q.counts.DoubleAcks++
			m.rec.counts.DoubleAcks++
			continue
		}
		m.settled = true
		q.counts.Returned++
		m.rec.counts.Returned++
		if m.out {
			e.dropLocked(m)
			back = append(back, m.rec)
		}
	}
	q.requeueLocked(back, e.cfg.MaxDeliver)
	return nil
}

// Demand pauses and resumes delivery.
func (p port) Demand(n int) {
	p.begin()
	p.e.q.mu.Lock()
	p.e.paused = n <= 0
	p.e.q.mu.Unlock()
	p.e.q.wake.Broadcast()
}
