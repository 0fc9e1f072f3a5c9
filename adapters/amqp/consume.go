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

// Consume guards a queue: it connects, and handle gets the deliveries when the
// guard says so. nil acks; any other error retries, and later dead-letters;
// guard.Permanent, guard.Backoff and guard.Ignore say more. handle must not
// settle the delivery itself: its Ack, Nack and Reject return an error.
//
// It blocks until ctx ends and then stops in order: handlers in flight finish
// within [WithStopTimeout], acks are flushed, and the channel is closed, which
// puts everything else back in its order. Then it returns nil, or an error that
// names what could not be finished. It returns [ErrQueueGone] when the queue
// does not exist, [guard.ErrClosed] when the Guard or the source has ended, before
// the first connection what is wrong with user, password or vhost, and before it
// has ever consumed what the broker refuses, such as a permission. Everything else
// it waits out and logs: a broker that restarts, and what is refused later. On a
// wrong password a broker hangs up, and so does a network that breaks: three times in
// a row count as a wrong password.
//
// Each channel is an epoch: a delivery is never settled on another channel than
// its own. When the channel breaks, handlers are cancelled, and what was not
// acked is delivered again. The channel is closed in order when a delivery has
// been unsettled for half of [WithConsumerTimeout], and opened again when the
// source would admit a message. The prefetch is 65 then (or [WithPrefetch], if that
// is less), so that the guard can try messages behind one that fails. It is the
// whole again once a message got through; the rest drains at the policy's ramp.
// Nothing is ever requeued by nack.
// Messages that are out while the channel is closed a second time go behind
// those that went back before: the order of a hold that lasts longer than the
// consumer timeout is the broker's. Where nothing holds the source, its handlers
// are too slow for the prefetch, or [WithLimiter] is, and it is halved. It grows
// again when the source has become faster. The channel is also closed when the
// unsettled deliveries take more than twice Policy.WindowBytes: the next prefetch
// is what fits into WindowBytes at their mean size.
//
// A stream is an [ErrUnsuitable]: its acks remove nothing.
//
// Acks are coalesced, and one frame acks all that is settled without a gap: a
// crash may repeat the deliveries whose acks were on their way, at most 64 of
// them with one worker. Before a lowered prefetch grows back, acks wait until all that is
// out is handled: with a single active consumer the next one takes over there. They wait for a
// call until its timeout, and for a failed message as long as the longest delay between its
// attempts, not until it has a credit.
//
// Beside the guard's goroutines and the client's it starts three, which end
// before it returns; only a handler that ignores its cancelled context for ever
// keeps its own.
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
	if err := c.settings(); err != nil {
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
			return nil // it ended before it began
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
		parked = again == epochParked
	}
}

// notYours is the Acknowledger of what a handler gets.
type notYours struct{}

var errNotYours = fmt.Errorf("%w: the guard settles what a handler returned", errSettled)

func (notYours) Ack(uint64, bool) error        { return errNotYours }
func (notYours) Nack(uint64, bool, bool) error { return errNotYours }
func (notYours) Reject(uint64, bool) error     { return errNotYours }

// consumer is what lives through all epochs of a Consume. Its goroutine alone
// touches the fields.
type consumer struct {
	g        *guard.Guard
	dialer   Dialer
	o        *options
	policy   guard.Policy
	full     int  // the prefetch that was configured
	prefetch int  // the prefetch of the next channel: lower while handlers are slow or messages large
	tired    bool // the broker's count leaves no room for many deliveries that only probe; see forward
	handle   func(context.Context, amqp091.Delivery) error
	rejects  *rejects
	link     *link
	version  [2]int
	missing  int    // how often the queue was not there
	consumed bool   // it did once, so that whatever is refused was allowed then
	refused  sparse // of the line that says why there is no consumer

	// For the end of a stop that the network holds up; of any goroutine.
	sock   atomic.Pointer[socket]
	stopAt atomic.Pointer[time.Time] // when handlers must be done; nil before a stop
	cut    atomic.Bool               // the connection was cut, since the broker did not answer
}

// boundStop cuts the connection when a stop takes stopGrace longer than its timeout:
// whatever waits for the network then returns. The goroutine ends with release.
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

// cutOff cuts the connection without a word.
func (c *consumer) cutOff() {
	c.cut.Store(true)
	if s := c.sock.Load(); s != nil {
		s.close()
	}
}

// settings derives the policy from the options, and refuses what the broker's
// deadlines make impossible, as far as the guard does not.
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

// window settles prefetch and window.
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

// retryMax settles the longest retry delay.
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

// watch takes note of the broker's version, and says in the log when the broker
// blocks the connection. The goroutine ends with the connection.
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

// connected is an open connection, made anew if need be; nil when ctx ends.
func (c *consumer) connected(ctx context.Context) *link {
	if c.link != nil && !c.link.IsClosed() {
		return c.link
	}
	c.hangUp()
	l, err := c.dialer.connect(ctx, false, c.o.name, c.o.log)
	if err != nil {
		return nil
	}
	c.link = l
	c.watch()
	return l
}
