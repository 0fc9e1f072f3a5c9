// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/guard"
)

// Deliveries is the passive shape: it stands between a channel that an existing program consumes
// from and the program's own loop.
//
//	in, err := ch.Consume(...)
//	in, err = guardamqp.Deliveries(ctx, g, ch, in) // the line that is new
//	for d := range in { ... }
//
// The program's call on a delivery is its outcome. Ack is success. [Fail] is failure with its
// error. Nack and Reject, with or without requeue, are failure without an error. Use Fail: without
// the error the guard notices an outage late, and logs one line at WARN. A delivery is settled
// once; a second call returns an error. Tags stay the broker's, but the program must not settle by
// Channel.Ack, which bypasses the guard.
//
// Nothing is nacked or rejected at the broker. The guard decides about the retry, the hold or the
// dead letter, and a message that is retried comes out again. If a program rejects to a dead-letter
// exchange on any error, the guard's attempts, budget and dead-letter writer replace that exchange.
//
// Acks are coalesced, up to 64 and for 5 ms, while there is something left to hand out. One frame
// acks all deliveries before the oldest unsettled one, as long as the channel has delivered nothing
// to other consumers. So an Ack without an error does not say that the broker has it; without a
// guard it does not, either.
//
// The result is closed when in is closed, when the channel or ctx ends, or when the Guard or the
// source has ended. Nothing is settled after that. Then the program does the same as without a
// guard: it consumes again, and calls Deliveries again. The program closes the channel, which puts
// unsettled messages back in their order.
//
// Before the result is closed, Deliveries waits until a quorum queue has taken in the last acks.
// For that it cancels the consumer, if nothing is unsettled. Otherwise it waits up to a second, or
// less if [WithPrefetch] is set, which shows when the acks are in. Meanwhile make no other call on
// the channel that waits for an answer, except Cancel.
//
// If in ends while the channel lives, as after Channel.Cancel, Deliveries still hands out the
// messages that it has. It stops as soon as the source is on hold, as in an outage, and after three
// quarters of [WithStopTimeout]. The last quarter is for the deliveries that are out. Messages that
// were not handed out stay unsettled, and go back to the queue in their order when the program
// closes the channel. One line at WARN says so.
//
// What it cannot do: it sees only these outcomes. There is no handler timeout, and panics are the
// program's. A delivery that is never settled stays out until the broker closes the channel at its
// consumer timeout. Deliveries cannot close the channel at half of the consumer timeout and consume
// again later. So in a longer hold the broker closes the channel, which counts as a delivery of all
// prefetched messages. [Consume] has none of these limits.
//
// One delivery is out at a time, in the order of the queue. A program that collects several before
// it settles them, or acks with multiple, needs [WithPolicy] with [guard.OrderNone] and their
// number as Workers. Then a retry comes after messages that were behind it, and multiple means all
// deliveries that were handed out until then. Without this policy such a program stands still; the
// guard logs it at the latest 20 s after Policy.Timeout.
//
// The program sets the prefetch, so the guard cannot bound the bytes of the deliveries. It logs
// when they take more than twice Policy.WindowBytes.
//
// The error names what is wrong with the options or the channel. Deliveries refuses a stream,
// because its acks remove nothing; it asks on another channel of the connection. It refuses
// automatic acks. It refuses the client's own recovery: after a recovery, an ack of an old delivery
// acks another message. An error here is clearer than a channel that closes later. If the client
// hides these settings, Deliveries still watches the tags. Call Channel.Qos before Channel.Consume:
// more deliveries than [WithPrefetch], or than any Qos allows, end the result.
//
// Beside the guard's goroutines, Deliveries starts three, which end with the result.
func Deliveries(ctx context.Context, g *guard.Guard, ch *amqp091.Channel, in <-chan amqp091.Delivery, opts ...Option) (<-chan amqp091.Delivery, error) {
	if ch != nil && recovers(ch) {
		return nil, unsuitable("the connection's Config.Recovery must be nil: after the client's recovery an ack of an old delivery acks another message; consume again when the deliveries end")
	}
	return guarded(ctx, g, ch, in, opts)
}

// guarded is Deliveries without the look at the connection's recovery.
func guarded(ctx context.Context, g *guard.Guard, ch *amqp091.Channel, in <-chan amqp091.Delivery, opts []Option) (<-chan amqp091.Delivery, error) {
	o, err := newOptions(g, opts)
	errs := []error{err}
	if ch == nil || in == nil {
		errs = append(errs, errors.New("amqp: Deliveries: the channel and the deliveries must not be nil"))
	}
	if o.native != "" {
		errs = append(errs, errors.New("amqp: WithDeadLetterExchange: not for Deliveries; use WithDeadLetters"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	queue, tag, autoAck, seen := consumerOf(ch)
	if autoAck {
		return nil, unsuitable("the consumer of %s acks automatically, so nothing can be held: Channel.Consume with autoAck false", queue)
	}
	if o.queue == "" {
		o.queue = queue
	}
	if o.name == "" {
		o.name = o.queue
	}
	if o.name == "" || o.queue == "" {
		return nil, fmt.Errorf("amqp: Deliveries: the channel does not tell its queue (one consumer on it: %t): WithQueue names it", seen)
	}
	policy := g.Config().Policy
	if o.policy != nil {
		policy = *o.policy
	}
	limits := o.limits(o.prefetch, versionOf(ch))
	if o.prefetch > 0 {
		_, err = o.window(&policy)
	} else {
		err = o.retryMax(&policy)
	}
	if err != nil {
		return nil, fmt.Errorf("amqp: deliveries of %s: %w", o.name, err)
	}
	if err := checkNoStream(ctx, ch, o.queue); err != nil {
		return nil, err
	}
	d := &passiveSession{
		o: &o, in: in, out: make(chan amqp091.Delivery), quit: make(chan struct{}), dried: make(chan struct{}), read: make(chan struct{}),
		port: newPassivePort(&o), handed: make(map[uint64]*attempt), most: o.prefetch, age: newAges(o.timeout / 2), tag: tag,
	}
	if d.most == 0 {
		d.most = maxQos
	}
	l, closed := newChannelEpoch(ch)
	d.port.life.Store(l)
	d.closed = closed
	d.src, err = guard.Open(g, guard.SourceConfig{
		Name: o.name, System: system, Destination: o.name, DeadLetters: o.letters, Policy: &policy, Limiter: o.limiter,
	}, limits, d.port, nil)
	if err != nil {
		return nil, fmt.Errorf("amqp: deliveries of %s: %w", o.name, err)
	}
	go d.intake()
	handing := make(chan struct{})
	go func() {
		defer close(handing)
		d.handOut()
	}()
	go func() {
		defer close(d.out)
		d.watch(ctx)
		<-handing
	}()
	return d.out, nil
}

// maxQos is the largest prefetch that AMQP can set.
const maxQos = 65535

// passiveSession is one passive epoch. Three goroutines: one reads the deliveries, one
// hands them out, and one watches over both and ends the source.
//
// mu is taken alone: nothing is called under it.
type passiveSession struct {
	o      *options
	src    *guard.Source[*taken]
	port   *passivePort
	in     <-chan amqp091.Delivery
	out    chan amqp091.Delivery
	closed <-chan *amqp091.Error
	quit   chan struct{} // closed when the source is to end
	dried  chan struct{} // closed when in has ended
	read   chan struct{} // closed when all deliveries of in are in the source, or when reading must stop
	most   int           // how many deliveries may be unsettled
	age    *ages         // used by watch's goroutine alone
	tag    string        // the consumer's tag; "" if it is not known
	dry    atomic.Bool   // in has ended, so the consumer is cancelled
	said   sync.Once     // logs once that the program's failures have no error

	fault error // why intake stopped reading; written by intake, read by others after read is closed

	mu     sync.Mutex
	handed map[uint64]*attempt
}

// taken is a delivery that was offered to the source.
type taken struct {
	amqp091.Delivery
	acked error                     // result of the ack; used by the goroutine that settles
	at    atomic.Pointer[time.Time] // when the program took this attempt; nil before
}

// intake reads every delivery at once, so that its tag is known, and offers it to the source. It
// must not wait for room there. So it keeps deliveries that the source refuses, and offers them
// again when the source has named room.
func (d *passiveSession) intake() {
	defer close(d.read)
	var stash []*taken
	for in := d.in; ; {
		for len(stash) > 0 {
			if err := d.src.Offer(stash[0]); err != nil {
				if !errors.Is(err, guard.ErrFull) {
					return // the source has ended
				}
				break
			}
			stash[0] = nil
			stash = stash[1:]
		}
		if in == nil && len(stash) == 0 {
			return
		}
		select {
		case m, ok := <-in:
			if !ok {
				d.dry.Store(true)
				close(d.dried)
				in = nil
				continue
			}
			if err := d.check(&m); err != nil {
				d.fault = err
				return
			}
			stash = append(stash, &taken{Delivery: m, acked: errChannelGone})
		case <-d.port.room:
		case <-d.quit:
			return
		}
	}
}

// check notes a delivery's tag. It refuses a tag that came before, and a delivery beyond the
// prefetch.
func (d *passiveSession) check(m *amqp091.Delivery) error {
	if _, ok := d.port.tags.add(m.DeliveryTag, size(m)); !ok {
		d.port.life.Load().over.Store(true)
		return unsuitable("delivery tag %d came again: the client has recovered the channel; set Config.Recovery to nil", m.DeliveryTag)
	}
	if n := d.port.tags.open(); n > d.most {
		return unsuitable("more than %d deliveries are unsettled: call Channel.Qos before Channel.Consume, and tell it by WithPrefetch", d.most)
	}
	return nil
}

// handOut gives the program the messages that may be handled.
func (d *passiveSession) handOut() {
	turn := uint64(0)
	for it := range d.src.Ready() {
		turn++
		it.Msg.at.Store(nil)
		a := &attempt{session: d, of: it.Msg, token: it.Token, turn: turn}
		m := it.Msg.Delivery
		m.Acknowledger = a
		d.mu.Lock()
		d.handed[m.DeliveryTag] = a
		d.port.hands.Store(int32(len(d.handed)))
		d.mu.Unlock()
		select {
		case d.out <- m:
			now := time.Now()
			it.Msg.at.Store(&now)
			d.mu.Lock()
			a.given = true
			d.mu.Unlock()
		case <-d.quit:
			_ = a.settle(guard.Backoff(errNotTaken, time.Now())) // no attempt was made
		}
	}
}

var errNotTaken = errors.New("amqp: not taken")

// settledPoll is how often watch looks whether a cancelled consumer's last delivery is settled.
const settledPoll = 20 * time.Millisecond

// watch waits until the epoch must end, and ends the source.
func (d *passiveSession) watch(ctx context.Context) {
	look := time.NewTicker(settledPoll)
	look.Stop() // it starts when in has ended
	defer look.Stop()
	warn := time.NewTicker(min(max(time.Millisecond, d.o.timeout/64), time.Second))
	defer warn.Stop()
	why, gone := guard.ReasonShutdown, false
	dried, read := d.dried, d.read
	var cancelled stopping
	w := warnings{session: d, budget: d.src.State().Settings.WindowBytes}
loop:
	for {
		select {
		case <-ctx.Done():
			break loop
		case err := <-d.closed:
			gone = true
			if err != nil && ctx.Err() == nil { // nil: the program closed the channel, which is its shutdown
				d.o.log.Warn("channel lost", "source", d.o.name, "error", err)
				why = guard.ReasonLost
			}
			break loop
		case <-d.src.Ended():
			break loop
		case <-read:
			if d.fault != nil {
				d.o.log.Error("the deliveries are not read any more", "source", d.o.name, "error", d.fault)
				gone, why = true, guard.ReasonLost
				break loop
			}
			read = nil
		case <-dried: // the consumer was cancelled, or the channel ends
			dried, cancelled.until = nil, time.Now().Add(d.o.stopTimeout)
			look.Reset(settledPoll)
		case now := <-warn.C:
			w.look(now)
		case now := <-look.C:
			if d.port.life.Load().ended() {
				continue // d.closed says why
			}
			if read == nil && d.src.Account().Unsettled() == 0 || cancelled.over(now, d) {
				break loop
			}
		}
	}
	close(d.quit)
	if cancelled.until.IsZero() {
		cancelled.until = time.Now().Add(d.o.stopTimeout)
	}
	latest := cancelled.until.Add(stopGrace)
	grace, cancel := context.WithDeadline(context.WithoutCancel(ctx), cancelled.until)
	defer cancel()
	if gone {
		d.port.life.Load().over.Store(true)
		cancel() // deliveries that the program still has cannot be settled
	}
	report := d.src.End(grace, why)
	<-d.read
	d.leave(min(stopGrace, time.Until(latest)))
	d.port.life.Load().over.Store(true)
	if n := len(report.Left); n > 0 {
		d.o.log.Warn("messages left behind", "source", d.o.name, "messages", n, "state", report.Left[0].State, "why", report.Left[0].Why)
	}
	if n := d.port.tags.open(); n > 0 && cancelled.why != "" && !gone {
		d.o.log.Warn("the consumer was cancelled and messages were held: they go back to the queue when the channel closes",
			"source", d.o.name, "messages", n, "acked", report.Account.Acked, "why", cancelled.why)
	}
}

// stopping is the stop of a program that has cancelled its consumer: messages are still handed out
// while they make progress, within the stop timeout. Only watch uses it.
type stopping struct {
	until time.Time // end of the stop timeout; zero before in has ended
	why   string    // why messages were not handed out in time; "" if none wait
}

// over tells whether to stop handing out. Either the source is on hold, which may last as long as
// an outage. Or only the last quarter of the time is left, which is for the deliveries that are
// out.
func (s *stopping) over(now time.Time, d *passiveSession) bool {
	for _, h := range d.src.State().Holds {
		switch h.Reason {
		case guard.ReasonBreaker, guard.ReasonStorm, guard.ReasonOperator:
			s.why = "the source is on hold: " + h.Reason.String()
			return true
		default: // this hold ends by itself, mostly soon
		}
	}
	if s.until.Sub(now) < d.o.stopTimeout/4 {
		s.why = fmt.Sprintf("they were not all handled within %s (WithStopTimeout)", d.o.stopTimeout)
		return true
	}
	return false
}

// leave waits until the broker has taken in the last acks, for limit at most: the program is about
// to close the channel.
func (d *passiveSession) leave(limit time.Duration) {
	p, l := d.port, d.port.life.Load()
	p.end()
	if l.ended() {
		return
	}
	stop := make(chan struct{})
	var reader sync.WaitGroup
	reader.Go(func() {
		for {
			select {
			case m, ok := <-d.in:
				if !ok {
					d.dry.Store(true)
					return
				}
				if _, ok := p.tags.add(m.DeliveryTag, size(&m)); !ok {
					l.over.Store(true)
					return
				}
			case <-stop:
				return
			}
		}
	})
	known := make(chan bool, 1)
	go func() { known <- p.flush() == nil && p.awaitAcks(d.consumer) }() // ends with the channel if the network or the broker does not answer
	patience := time.NewTimer(limit)
	defer patience.Stop()
	sure := false
	select {
	case sure = <-known:
	case <-patience.C:
	}
	close(stop)
	reader.Wait()
	if !sure {
		d.o.log.Info(notTakenIn, "source", d.o.name)
	}
}

// warnings logs, once each, what a person should change. Only watch uses it.
type warnings struct {
	session    *passiveSession
	budget     int64 // Policy.WindowBytes
	old, large bool  // the warning was logged
}

func (w *warnings) look(now time.Time) {
	d := w.session
	oldest, high := d.port.tags.oldest()
	if d.age.over(now, oldest, high) && !w.old {
		w.old = true
		d.o.log.Warn("a delivery was unsettled for half of the consumer timeout; at its end the broker closes the channel",
			"source", d.o.name, "consumer_timeout", d.o.timeout)
	}
	if n, bytes := d.port.tags.weight(); n > 1 && bytes > 2*w.budget && !w.large {
		w.large = true
		d.o.log.Warn("the unsettled deliveries take more than twice Policy.WindowBytes: lower the prefetch by Channel.Qos",
			"source", d.o.name, "messages", n, "bytes", bytes, "window_bytes", w.budget, "prefetch", max(1, w.budget*int64(n)/bytes))
	}
}

const notTakenIn = "the queue may not have taken in the last acks; their messages come again then"

// consumer returns the tag of the consumer, or "" once it is cancelled: another consumer may have
// that tag then.
func (d *passiveSession) consumer() string {
	if d.dry.Load() {
		return ""
	}
	return d.tag
}

// passivePort is the passive shape's port. Other consumers may be on the
// channel: see [tags].
type passivePort struct {
	meta
	acker
	hands atomic.Int32  // deliveries that the program has, or that wait until the program takes them
	room  chan struct{} // has an element when there may be room; capacity 1
}

func newPassivePort(o *options) *passivePort {
	p := &passivePort{meta: newMeta(o.queue, o), room: make(chan struct{}, 1)}
	p.tags.mixed = true
	p.tags.fill(o.prefetch)
	p.begin(passiveDelay)
	return p
}

var _ guard.Taker[*taken] = (*passivePort)(nil)

func (p *passivePort) Lane(m *taken) uint64     { return p.lane(&m.Delivery) }
func (p *passivePort) Size(m *taken) int        { return size(&m.Delivery) }
func (p *passivePort) Meta(m *taken) guard.Meta { return p.describe(&m.Delivery) }

// TakenAt implements [guard.Taker].
func (p *passivePort) TakenAt(m *taken) time.Time {
	if at := m.at.Load(); at != nil {
		return *at
	}
	return time.Time{}
}

func (p *passivePort) Ack(m *taken) error {
	m.acked = p.ack(m.DeliveryTag)
	return m.acked
}

func (p *passivePort) ack(n uint64) error {
	if p.life.Load().ended() {
		return errChannelGone
	}
	ok, due, rest := p.tags.settle(n, tagSettled)
	switch {
	case !ok:
		return errSettled
	case pressing(due, rest-int(p.hands.Load())):
		return p.flush()
	}
	p.wait(due)
	return nil
}

// pressing tells whether acks must be sent at once: because there are many, or because the program
// might run out of deliveries. It might when due acks occupy as much of the prefetch as the
// deliveries that are left for it to take.
func pressing(due, left int) bool { return due >= ackMost || due >= left }

// Flush does nothing. The guard calls it after every outcome, but Ack knows when acks must be sent,
// and leave sends the rest.
func (p *passivePort) Flush() error { return nil }

func (p *passivePort) Extend([]*taken)                     {}
func (p *passivePort) Return([]*taken, guard.Reason) error { return nil } // see port.Return

func (p *passivePort) Demand(n int) {
	if n == 0 {
		return
	}
	select {
	case p.room <- struct{}{}:
	default:
	}
}
