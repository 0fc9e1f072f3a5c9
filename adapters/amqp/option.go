// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// An Option changes how one queue is guarded.
type Option func(*options)

type options struct {
	name        string
	queue       string
	policy      *guard.Policy
	prefetch    int
	timeout     time.Duration
	limit       int
	letters     dlq.Writer
	native      string
	limiter     guard.Limiter
	key         func(amqp091.Delivery) string
	args        amqp091.Table
	stopTimeout time.Duration
	log         *slog.Logger
}

// WithName sets the name of the source in states, metrics and logs. The name is also the scope of
// its breaker. The default is the name of the queue. Names are unique within a Guard: several
// consumers of one queue in one process need different names.
func WithName(name string) Option { return func(o *options) { o.name = name } }

// WithQueue sets the name of the queue from which the deliveries given to [Deliveries] come. States
// and dead letters have this name. Set it if the channel does not tell its queue, as with several
// consumers on one channel.
func WithQueue(name string) Option { return func(o *options) { o.queue = name } }

// WithPolicy sets the policy of this source. The default is the Guard's policy. If Policy.Window is
// unset, it is the prefetch; for [Deliveries] without [WithPrefetch] the guard's default. For
// [Deliveries], Policy.Workers is how many deliveries may be out at a time; unset means 1.
func WithPolicy(p guard.Policy) Option { return func(o *options) { o.policy = &p } }

// WithPrefetch is how many deliveries the broker leaves unsettled, from 1 to 65535; 0 is the
// default. [Consume] sets it at the broker, and cuts a larger window to it. Its default is the
// policy's window, or 256. For [Deliveries] it must be the number that the program has set with
// Channel.Qos; if unset, the prefetch is not known. Deliveries refuses a larger window, and ends
// the result at more unsettled deliveries.
//
// Each break of the channel counts as a delivery of all prefetched messages, handled or not. Quorum
// queues of RabbitMQ 4.0 and later have a delivery limit of 20 by default. If a consumer there
// crashes 21 times at its first message, the broker drops or dead-letters all of them.
func WithPrefetch(n int) Option { return func(o *options) { o.prefetch = n } }

// WithConsumerTimeout is the broker's consumer_timeout, which a client cannot read: how long a
// delivery may be unsettled before the broker closes the channel. [Consume] closes the channel
// itself after half of it. At least 2s. The default is the x-consumer-timeout of [WithConsumeArgs];
// if that is unset, it is 30m, as at the broker.
func WithConsumerTimeout(d time.Duration) Option { return func(o *options) { o.timeout = d } }

// WithDeliveryLimit is the delivery limit of the queue. The broker delivers a message once more
// often than the limit. If a message fails at its last delivery, its attempts count as used up. If
// the channel closes then, [Consume] dead-letters the message, because the broker would drop it or
// dead-letter it.
//
// Give the limit that the queue has: [Inspect] reads it. With a lower number, messages are
// dead-lettered too early. For a queue without a limit, give a number that is never reached. At
// least 1. The default is 20 if the broker is RabbitMQ 4.0 or later, and no limit before. It has no
// effect on classic queues, which do not count deliveries.
func WithDeliveryLimit(n int) Option { return func(o *options) { o.limit = n } }

// WithDeadLetters sets the writer of dead letters, usually a [*DLQ]. Without it and without
// [WithDeadLetterExchange] nothing is dead-lettered: such messages wait.
func WithDeadLetters(w dlq.Writer) Option { return func(o *options) { o.letters = w } }

// WithDeadLetterExchange lets the broker write dead letters: the adapter rejects the delivery, and
// the broker publishes it to the queue's dead-letter exchange. name is that exchange; [Consume]
// checks that it exists. AMQP does not tell whether it is the queue's x-dead-letter-exchange. If
// the queue has none, the broker drops rejected messages: check with [Inspect]. Such a dead letter
// has the broker's x-death, but not the error, the attempts or the cause. [Deliveries] refuses this
// option. It cannot be set together with [WithDeadLetters].
func WithDeadLetterExchange(name string) Option { return func(o *options) { o.native = name } }

// WithLimiter limits the rate of admissions. The default is no limit.
func WithLimiter(l guard.Limiter) Option { return func(o *options) { o.limiter = l } }

// WithKey sets the function that returns the key of a message. Under [guard.OrderKey], messages of
// one key keep their order. The default key is the routing key. key is called once for each
// message, and must not block.
func WithKey(key func(amqp091.Delivery) string) Option { return func(o *options) { o.key = key } }

// WithConsumeArgs are the arguments of basic.consume, such as
// x-consumer-timeout or x-priority.
func WithConsumeArgs(args amqp091.Table) Option { return func(o *options) { o.args = args } }

// WithStopTimeout is how long a stop waits for handlers in flight and for dead
// letters being written. At least 1ms; the default is 30s.
func WithStopTimeout(d time.Duration) Option { return func(o *options) { o.stopTimeout = d } }

// WithLogger sets the logger. It gets changes of state, never messages. The default is the Guard's
// logger, see [guard.WithLogger]. A [*DLQ] without a logger of its own uses it, too.
func WithLogger(log *slog.Logger) Option { return func(o *options) { o.log = log } }

const (
	defaultStopTimeout     = 30 * time.Second
	defaultPrefetch        = 256
	defaultConsumerTimeout = 30 * time.Minute
	minConsumerTimeout     = 2 * time.Second
	defaultDeliveryLimit   = 20 // of quorum queues, from RabbitMQ 4.0 on
)

func newOptions(g *guard.Guard, opts []Option) (options, error) {
	o := options{log: slog.New(slog.DiscardHandler), stopTimeout: defaultStopTimeout}
	var errs []error
	add := func(format string, args ...any) { errs = append(errs, fmt.Errorf("amqp: "+format, args...)) }
	if g == nil {
		add("the Guard must not be nil")
	} else {
		o.log = g.Logger()
	}
	for _, opt := range opts {
		opt(&o)
	}
	if o.stopTimeout < time.Millisecond {
		add("WithStopTimeout: %s is not at least 1ms", o.stopTimeout)
	}
	if o.prefetch < 0 || o.prefetch > 65535 {
		add("WithPrefetch: %d is not within 1 and 65535", o.prefetch)
	}
	if o.limit < 0 {
		add("WithDeliveryLimit: %d is not at least 1", o.limit)
	}
	if ms, ok := whole(o.args["x-consumer-timeout"]); ok {
		asked := time.Duration(ms) * time.Millisecond
		if o.timeout == 0 {
			o.timeout = asked
		}
		if o.timeout > asked {
			add("WithConsumerTimeout: %s is more than the %s asked for by WithConsumeArgs", o.timeout, asked)
		}
	}
	if o.timeout == 0 {
		o.timeout = defaultConsumerTimeout
	}
	if o.timeout < minConsumerTimeout {
		add("WithConsumerTimeout: %s is not at least %s", o.timeout, minConsumerTimeout)
	}
	if o.native != "" && o.letters != nil {
		add("WithDeadLetterExchange: not together with WithDeadLetters; choose one")
	}
	if err := o.args.Validate(); err != nil {
		add("WithConsumeArgs: %w", err)
	}
	for name := range o.args {
		if strings.HasPrefix(name, "x-stream-") {
			add("WithConsumeArgs: %s: streams are not guarded; consume from a quorum queue", name)
		}
	}
	if d, ok := o.letters.(*DLQ); ok && d != nil && o.log != nil {
		d.inherit(o.log)
	}
	if o.log == nil {
		add("WithLogger: the logger must not be nil; leave the option out for the Guard's")
	}
	return o, errors.Join(errs...)
}

// whole returns an argument as a number, whatever its integer type.
func whole(v any) (int64, bool) {
	switch n := reflect.ValueOf(v); {
	case n.CanInt():
		return n.Int(), true
	case n.CanUint():
		return int64(n.Uint()), true
	default:
		return 0, false
	}
}

// ownLetters refuses dead letters that would come back to the queue that they come from. A queue
// of that name at other endpoints, or in another vhost, is another queue.
func (o *options) ownLetters(from Dialer) error {
	if d, ok := o.letters.(*DLQ); ok && d != nil && d.cfg.Queue == o.queue &&
		slices.Equal(d.dialer.URLs, from.URLs) && d.dialer.Config.Vhost == from.Config.Vhost {
		return fmt.Errorf("amqp: WithDeadLetters: dead letters of %q would go to %q itself", o.queue, o.queue)
	}
	return nil
}

// limits are the broker's deadlines and bounds for a source with this prefetch.
func (o *options) limits(prefetch int, version [2]int) guard.Limits {
	l := guard.Limits{MaxUnacked: prefetch, HoldMax: o.timeout / 2, EndsWithInput: true}
	switch {
	case o.limit > 0:
		l.MaxDeliver = o.limit + 1
	case version[0] >= 4:
		l.MaxDeliver = defaultDeliveryLimit + 1
	}
	return l
}
