// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/guard"
)

// Consume guards a queue: it connects, and calls handle with a delivery when the guard admits it.
// If handle returns nil, Consume acks. After any other error the guard retries the message, and
// later dead-letters it. guard.Permanent, guard.Backoff and guard.Ignore say more. handle must not
// settle the delivery itself: its Ack, Nack and Reject return an error.
//
// Consume blocks until ctx ends. Then it stops in order: handlers in flight finish within
// [WithStopTimeout], acks are flushed, and the channel is closed. The close puts all other messages
// back in their order. Consume returns nil, or an error that names the work that could not be
// finished.
//
// Consume returns earlier with these errors:
//
//   - [ErrQueueGone]: the queue does not exist.
//   - [guard.ErrClosed]: the Guard or the source has ended.
//   - [ErrUnsuitable]: the queue is a stream, whose acks remove nothing. Before the first consumer
//     was started, also: the exchange of [WithDeadLetterExchange] does not exist.
//   - Before the first connection: user, password or vhost is wrong. A broker hangs up on a wrong
//     password, and so does a network that breaks: three times in a row count as a wrong password.
//   - Before the first consumer was started: the broker refuses something, such as a permission.
//
// It waits out and logs everything else: a restart of the broker, and later refusals.
//
// Each channel is an epoch: a delivery is settled only on its own channel. When the channel breaks,
// handlers are cancelled, and the broker delivers unacked messages again. Nothing is ever requeued
// by nack.
//
// Consume closes the channel in order when a delivery has been unsettled for half of
// [WithConsumerTimeout]. It opens another channel when the source would admit a message. The
// prefetch is then 65, or [WithPrefetch] if that is less, so that the guard can try messages behind
// a failing message. Once a message got through, the prefetch is the whole again, and the other
// messages drain at the policy's ramp. Messages that are out at a second close go behind messages
// that went back before. So in a hold longer than the consumer timeout, the broker decides the
// order. If the connection breaks before a message got through, the next channel has the small
// prefetch, too.
//
// If nothing holds the source when Consume closes the channel, its handlers or [WithLimiter] are
// too slow for the prefetch, and Consume halves the prefetch. The prefetch grows again when the
// source has become faster. Consume also closes the channel when the unsettled deliveries take more
// than twice Policy.WindowBytes. Then the next prefetch is the number of deliveries that fits into
// WindowBytes, at their mean size.
//
// Acks are coalesced: one frame acks all deliveries before the oldest unsettled one. A crash may
// repeat the deliveries whose acks were on their way, at most 64 of them with one worker. Before a
// lowered prefetch grows back, acks wait until all deliveries that are out are handled. The reason:
// with a single active consumer, the next consumer takes over there. The acks wait for a call until
// its timeout. They wait for a failed message as long as the longest delay between its attempts,
// but not until the message has a credit.
//
// Beside the goroutines of the guard and the client, Consume starts some for each channel, which end
// before it returns. Only a handler that ignores its cancelled context keeps its goroutine.
func Consume(ctx context.Context, g *guard.Guard, dialer Dialer, queue string, handle func(context.Context, amqp091.Delivery) error, opts ...Option) error {
	o, err := newOptions(g, opts)
	errs := []error{err, dialer.Validate()}
	if handle == nil {
		errs = append(errs, errors.New("amqp: Consume: the handler must not be nil"))
	}
	if queue == "" || len(queue) > maxShort {
		errs = append(errs, fmt.Errorf("amqp: Consume: the queue's name has %d bytes, not 1 to %d", len(queue), maxShort))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	o.queue = queue
	if o.name == "" {
		o.name = queue
	}
	c := &consumer{dialer: dialer, o: &o, g: g}
	if err := errors.Join(o.ownLetters(dialer), c.settings()); err != nil {
		return fmt.Errorf("amqp: consume %s: %w", o.name, err)
	}
	c.handle = func(ctx context.Context, d amqp091.Delivery) error {
		d.Acknowledger = notYours{}
		return handle(ctx, d)
	}
	if o.native != "" {
		c.rejects = &rejects{}
		o.letters = c.rejects
	}
	defer c.boundStop(ctx)() //nolint:revive // it begins here and ends with the function
	defer c.hangUp()
	if c.link, err = dialer.connect(ctx, true, o.name, o.log); err != nil {
		if ctx.Err() != nil {
			return nil // ctx ended before the first connection
		}
		return err
	}
	c.watch()
	p := pauses{longest: dialer.withDefaults().MaxPause}
	for parked := false; ; {
		began := time.Now()
		again, err := c.epoch(ctx, parked)
		switch {
		case err != nil:
			return err
		case again == epochStopped:
			return nil
		case again == epochParked || time.Since(began) >= shortLived:
			p.limit = 0
		case !p.wait(ctx):
			return nil
		}
		parked = again == epochParked || again == epochReplaced && c.probing
	}
}

// notYours is the Acknowledger of the deliveries that handlers get.
type notYours struct{}

var errNotYours = fmt.Errorf("%w: the guard settles what a handler returned", errSettled)

func (notYours) Ack(uint64, bool) error        { return errNotYours }
func (notYours) Nack(uint64, bool, bool) error { return errNotYours }
func (notYours) Reject(uint64, bool) error     { return errNotYours }

// consumer is the state that all epochs of a Consume share. Only Consume's goroutine changes
// its fields, except the last three.
type consumer struct {
	g        *guard.Guard
	dialer   Dialer
	o        *options
	policy   guard.Policy
	full     int  // the configured prefetch
	prefetch int  // the prefetch of the next channel: lower while handlers are slow or messages large
	tired    bool // a message has used half of its deliveries, so channels that probe take one message; see forward
	probing  bool // the latest epoch ended narrow: no message has got through since the hold began
	handle   func(context.Context, amqp091.Delivery) error
	rejects  *rejects
	link     *link
	version  [2]int
	missing  int      // how often in a row the queue was not there, on one connection
	consumed bool     // a consumer was started once, so that what the broker refuses now was allowed then
	refused  logPacer // paces the line that says why there is no consumer

	// These end a stop when the network does not answer. Any goroutine may use them.
	sock   atomic.Pointer[socket]
	stopAt atomic.Pointer[time.Time] // when handlers must be done; nil before a stop
	cut    atomic.Bool               // the connection was cut, because the broker did not answer
}

// boundStop cuts the connection when a stop takes stopGrace longer than its timeout: calls that
// wait for the network then return. Its goroutine ends with release.
func (c *consumer) boundStop(ctx context.Context) (release func()) {
	over := make(chan struct{})
	unhook := context.AfterFunc(ctx, func() {
		at := time.Now().Add(c.o.stopTimeout)
		c.stopAt.Store(&at)
		late := time.NewTimer(c.o.stopTimeout + stopGrace)
		defer late.Stop()
		select {
		case <-late.C:
			c.cutOff()
		case <-over:
		}
	})
	return func() {
		unhook()
		close(over)
	}
}

// cutOff closes the socket, without a close of AMQP.
func (c *consumer) cutOff() {
	c.cut.Store(true)
	if s := c.sock.Load(); s != nil {
		s.close()
	}
}

// settings derives the policy from the options. It refuses settings that the broker's deadlines
// make impossible, as far as the guard does not.
func (c *consumer) settings() error {
	c.policy = c.g.Config().Policy
	if c.o.policy != nil {
		c.policy = *c.o.policy
	}
	var err error
	c.full, err = c.o.window(&c.policy)
	c.prefetch = c.full
	if c.policy.Spill && c.o.native != "" {
		err = errors.Join(err, errors.New("amqp: Policy.Spill: not with WithDeadLetterExchange: a message that was acked cannot be rejected; use WithDeadLetters"))
	}
	return err
}

// window returns the prefetch. It sets the window and the longest retry delay, where unset.
func (o *options) window(p *guard.Policy) (prefetch int, err error) {
	prefetch = o.prefetch
	if prefetch == 0 {
		prefetch = p.Window
	}
	if prefetch == 0 {
		prefetch = defaultPrefetch
	}
	var errs []error
	if prefetch > 65535 {
		errs = append(errs, fmt.Errorf("amqp: Policy.Window: %d is more than the 65535 a prefetch can be; set WithPrefetch", prefetch))
	}
	if p.Window == 0 {
		p.Window = prefetch
	}
	return prefetch, errors.Join(append(errs, o.retryMax(p))...)
}

// retryMax sets the longest retry delay, if unset, and refuses one that is too long.
func (o *options) retryMax(p *guard.Policy) error {
	most := o.timeout / 4
	if p.Retry.Max > most {
		return fmt.Errorf("amqp: Policy.Retry.Max: %s is more than %s, a quarter of the consumer timeout (WithConsumerTimeout)", p.Retry.Max, most)
	}
	if p.Retry.Max == 0 {
		p.Retry.Max = max(min(10*time.Second, most), p.Retry.Base)
	}
	return nil
}

// hangUp closes the connection, if there is one.
func (c *consumer) hangUp() {
	if c.link != nil {
		c.link.close()
		c.link = nil
	}
}

// watch notes the broker's version, and logs when the broker blocks or unblocks the connection. Its
// goroutine ends with the connection.
func (c *consumer) watch() {
	c.version = c.link.version
	c.sock.Store(c.link.sock)
	c.cut.Store(false)
	l, log, name := c.link, c.o.log, c.o.name
	blocked := l.NotifyBlocked(make(chan amqp091.Blocking, 8))
	go func() {
		for b := range blocked {
			log.Warn("connection blocked by the broker", "source", name, "endpoint", l.endpoint, "blocked", b.Active, "reason", b.Reason)
		}
	}()
}

// connected returns an open connection, a new one if needed; nil when ctx ends.
func (c *consumer) connected(ctx context.Context) *link {
	if c.link != nil && !c.link.IsClosed() {
		return c.link
	}
	c.hangUp()
	l, err := c.dialer.connect(ctx, false, c.o.name, c.o.log)
	if err != nil {
		return nil
	}
	c.link, c.missing = l, 0
	c.watch()
	return l
}
