// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/guard"
)

// outcome says how an epoch ended.
type outcome int

const (
	epochStopped  outcome = iota // ctx or the source ended, or there was an error
	epochReplaced                // the channel broke, or its prefetch changes: the next epoch begins at once, unless consumer.probing
	epochParked                  // a delivery was held too long: the next epoch waits until the source would admit a message
)

// epoch is one channel and one source. Consume's goroutine runs it. The source and the reader have
// goroutines of their own.
type epoch struct {
	c      *consumer
	src    *guard.Source[amqp091.Delivery]
	port   *port
	pace   *pace
	ran    chan struct{}         // closed when Run has returned
	in     chan amqp091.Delivery // input of Run; it has room for all deliveries that may be out, so the reader never waits
	age    *ages
	ch     *amqp091.Channel
	life   *channelEpoch
	closed <-chan *amqp091.Error
	cancel <-chan string
	read   chan struct{} // closed when the reader has ended
	quit   chan struct{} // closed when the reader must end
	tag    string        // the consumer's tag
	narrow bool          // the channel is for probes: no message has got through yet
	size   int           // the consumer's prefetch
	after  uint64        // the latest delivery tag before this consumer
	mixed  bool          // deliveries of an earlier consumer may be out
	budget int64         // Policy.WindowBytes
	heavy  chan struct{} // has an element when too many bytes are unsettled; capacity 1
	worn   atomic.Bool   // a message has used more deliveries than forward allows for probes
	done   progress
	limits guard.Limits // the source's limits, for the broker's version that was known when it was opened
}

const (
	// lookEvery is how often the epoch looks whether the source would admit a message.
	lookEvery = 100 * time.Millisecond
	// queueTries is how many tries in a row, on one connection, must miss the queue before
	// Consume returns [ErrQueueGone]: a broker that starts may not know the queue yet.
	queueTries = 3
	// returnPatience is how long awaitReturn waits at most.
	returnPatience = 2 * time.Second
	// shortLived is the duration below which a pause follows an epoch.
	shortLived = time.Second
	// witnesses is the prefetch of a channel that probes: the failing message, and the 64 messages
	// behind it that the guard may try.
	witnesses = 65
)

// epoch opens a source, runs it over a channel, and ends both.
func (c *consumer) epoch(ctx context.Context, parked bool) (outcome, error) {
	e := &epoch{
		c: c, port: newPort(c.o.queue, c.o), narrow: parked, ran: make(chan struct{}), quit: make(chan struct{}),
		in:  make(chan amqp091.Delivery, 2*c.full), // deliveries of an earlier consumer may be out, too
		age: newAges(c.o.timeout / 2), limits: c.o.limits(c.full, c.version),
		heavy: make(chan struct{}, 1),
	}
	defer e.port.end()
	limiter := c.o.limiter
	if parked {
		e.pace = &pace{inner: limiter, ramp: c.policy.Ramp.WithDefaults()}
		limiter = e.pace
	}
	if c.rejects != nil {
		e.port.rejects = c.rejects
		c.rejects.begin(e.port.mark)
	}
	policy := c.policy
	policy.Window = min(policy.Window, c.full)
	var err error
	e.src, err = guard.Open(c.g, guard.SourceConfig{
		Name: c.o.name, System: system, Destination: c.o.name,
		DeadLetters: c.o.letters, Policy: &policy, Limiter: limiter,
	}, e.limits, e.port, c.handle)
	if err != nil {
		return epochStopped, fmt.Errorf("amqp: consume %s: %w", c.o.name, err)
	}
	e.budget = e.src.State().Settings.WindowBytes
	// Handlers finish after ctx ends, so End stops the loop, and not ctx.
	go func() {
		defer close(e.ran)
		_ = e.src.Run(context.WithoutCancel(ctx), e.in)
	}()
	how, err := e.run(ctx)
	if c.probing = e.narrow; e.narrow {
		c.tired = c.tired || e.worn.Load()
	}
	if err == nil && how == epochReplaced && e.src.State().Ended {
		how = epochStopped
	}
	return e.finish(ctx, how, err)
}

// run opens a channel and watches it until the epoch must end.
func (e *epoch) run(ctx context.Context) (outcome, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go e.watchSource(ctx, cancel)
	if e.narrow && !e.awaitAdmission(ctx) || !e.awaitDisk(ctx) {
		return epochStopped, nil
	}
	link := e.c.connected(ctx)
	switch {
	case link == nil, ctx.Err() != nil: // a channel now would cost each of its messages a delivery
		return epochStopped, nil
	case e.c.o.limits(e.c.full, link.version) == e.limits:
	case e.narrow: // the broker's version has changed: it was upgraded, or this is another node
		return epochParked, nil
	default:
		return epochReplaced, nil
	}
	if err := link.within(ctx, answerTimeout, func() error { return e.consume(link) }); err != nil {
		return e.notConsuming(ctx, err)
	}
	look := time.NewTicker(max(time.Millisecond, min(e.c.o.timeout/64, time.Second)))
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return epochStopped, nil
		case err := <-e.closed:
			return e.lost(err)
		case <-e.read:
			return e.ended()
		case <-e.heavy:
			if how, ok := e.lighten(); ok {
				return how, nil
			}
		case now := <-look.C:
			oldest, high := e.port.tags.oldest()
			if e.age.over(now, oldest, high) {
				return e.park()
			}
			if e.mixed && (oldest == 0 || oldest > e.after) {
				e.mixed = false
				e.port.tags.fill(e.size)
			}
			if to := e.wanted(now); to > 0 {
				if err := link.within(ctx, answerTimeout, func() error { return e.widen(ctx, to) }); err != nil {
					return epochReplaced, nil // the channel broke
				}
			}
		}
	}
}

// watchSource ends the context of run when the source has ended elsewhere. It returns when ctx
// ends.
func (e *epoch) watchSource(ctx context.Context, end context.CancelCauseFunc) {
	select {
	case <-e.src.Ended(): // a handler that hangs keeps Run from returning
	case <-e.ran:
	case <-ctx.Done():
	}
	end(guard.ErrClosed)
}

// consume opens a channel and starts a consumer.
func (e *epoch) consume(l *link) error {
	ch, err := l.Channel()
	if err != nil {
		return err
	}
	e.ch = ch
	e.life, e.closed = newChannelEpoch(ch)
	e.cancel = ch.NotifyCancel(make(chan string, 2))
	e.port.life.Store(e.life)
	if name := e.c.o.native; name != "" {
		if err := ch.ExchangeDeclarePassive(name, "", true, false, false, false, nil); err != nil {
			if isCode(err, amqp091.NotFound) {
				if missing := missingQueue(l, e.c.o.queue); missing != nil {
					return missing
				}
				return unsuitable("WithDeadLetterExchange: there is no exchange %q, so what is rejected would be dropped: rabbitmqadmin declare exchange name=%s type=direct, and bind a queue to it", name, name)
			}
			return err
		}
	}
	n := e.c.prefetch
	switch {
	case e.narrow && (e.c.tired || e.limits.MaxDeliver == 2): // else the next close may use up the deliveries of all prefetched messages
		n = 1
	case e.narrow:
		n = min(n, witnesses)
	}
	return e.subscribe(n)
}

// subscribe starts a consumer with this prefetch, and its reader.
func (e *epoch) subscribe(prefetch int) error {
	if err := e.ch.Qos(prefetch, 0, false); err != nil {
		return err
	}
	e.size, e.mixed = prefetch, e.port.tags.open() > 0
	_, e.after = e.port.tags.oldest()
	if e.mixed {
		e.port.tags.fill(0) // deliveries of two consumers are out: nobody can tell when this prefetch is full
	} else {
		e.port.tags.fill(prefetch)
	}
	e.tag = consumerTag()
	out, err := e.ch.Consume(e.c.o.queue, e.tag, false, false, false, false, noStream(e.c.o.args))
	if err != nil {
		return streamRefusal(e.c.o.queue, err)
	}
	e.c.missing, e.c.consumed, e.c.refused = 0, true, logPacer{}
	e.done = progress{}
	e.read = make(chan struct{})
	go e.forward(out, e.read, e.limits.MaxDeliver/2)
	return nil
}

// missingQueue returns the broker's error if the queue is not there. It uses a channel of its own.
func missingQueue(l *link, queue string) error {
	ch, err := l.Channel()
	if err != nil {
		return nil // not known
	}
	defer func() { _ = ch.Close() }() // after NotFound it is closed already
	if _, err = ch.QueueDeclarePassive(queue, true, false, false, false, nil); isCode(err, amqp091.NotFound) {
		return err
	}
	return nil
}

// forward hands deliveries to the source. The reader's goroutine runs it. It returns when the
// consumer or the channel ends, or when a tag came twice. The channel e.in always has room, so that
// the age of a delivery counts from its arrival. If few is not 0, and a message had more deliveries
// than few, later channels that probe take one message.
func (e *epoch) forward(out <-chan amqp091.Delivery, done chan<- struct{}, few int) {
	defer close(done)
	for d := range out {
		bytes, ok := e.port.tags.add(d.DeliveryTag, size(&d))
		if !ok {
			e.life.over.Store(true)
			e.c.o.log.Error("a delivery tag came twice: its channel is abandoned", "source", e.c.o.name)
			return
		}
		if bytes > 2*e.budget {
			select {
			case e.heavy <- struct{}{}:
			default:
			}
		}
		if few > 0 && deliveries(d.Headers) > few {
			e.worn.Store(true)
		}
		if e.lastOf(&d) {
			e.port.rememberLast(d)
		}
		select {
		case e.in <- d:
		case <-e.quit:
			return
		}
	}
}

// lost logs that the channel broke.
func (e *epoch) lost(err *amqp091.Error) (outcome, error) {
	e.c.o.log.Warn("channel lost", "source", e.c.o.name, "error", err)
	return epochReplaced, nil
}

// notConsuming decides whether to try again after a channel or consumer could not be opened.
func (e *epoch) notConsuming(ctx context.Context, err error) (outcome, error) {
	c := e.c
	gone := isCode(err, amqp091.NotFound) && strings.Contains(err.Error(), "no queue") // if only the node of the queue is down, the broker uses other words
	if !gone {
		c.missing = 0
	}
	switch {
	case ctx.Err() != nil:
		return epochStopped, nil //nolint:nilerr // told to end
	case gone:
		if c.missing++; c.missing >= queueTries {
			return epochStopped, fmt.Errorf("%w: %s: %w", ErrQueueGone, c.o.queue, err)
		}
	case errors.Is(err, errStream):
		return epochStopped, err
	case c.consumed: // permissions, policies and exchanges may come back, as when definitions are imported
	case errors.Is(err, ErrUnsuitable):
		return epochStopped, err
	case isCode(err, amqp091.AccessRefused) && strings.Contains(err.Error(), "exclusive"): // another consumer has the queue exclusively
	case strings.Contains(err.Error(), backendFailed):
	case isCode(err, amqp091.AccessRefused), isCode(err, amqp091.PreconditionFailed), isCode(err, amqp091.NotAllowed), isCode(err, amqp091.NotImplemented):
		return epochStopped, fmt.Errorf("amqp: consume %s: %w", c.o.queue, err)
	}
	if c.refused.due(time.Now()) {
		c.o.log.Warn("not consuming", "source", c.o.name, "error", err)
	}
	p := pauses{longest: time.Second, limit: time.Second}
	if !p.wait(ctx) {
		return epochStopped, nil
	}
	return epochReplaced, nil
}

// ended logs why the reader has ended: the channel broke, a tag came twice, or the broker cancelled
// the consumer. A broker cancels when the queue is deleted or its leader moves, and from 4.3 on
// when a delivery was unsettled for too long.
func (e *epoch) ended() (outcome, error) {
	select {
	case err := <-e.closed:
		return e.lost(err)
	case tag, ok := <-e.cancel:
		if ok {
			e.c.o.log.Warn("consumer cancelled by the broker", "source", e.c.o.name, "consumer", tag)
		}
	default:
	}
	return epochReplaced, nil
}

// isCode tells whether the broker answered with this code.
func isCode(err error, code int) bool {
	e, ok := errors.AsType[*amqp091.Error](err)
	return ok && e.Code == code
}

// consumerTag is unique among all consumers of a queue.
func consumerTag() string { return fmt.Sprintf("stormguard-%016x", rand.Uint64()) }
