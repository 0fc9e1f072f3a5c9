// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"errors"
	"fmt"
	"log/slog"
	"reflect"
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

// WithName names the source in states, metrics and logs, and is its breaker's
// scope. The default is the queue's name. Names are unique within a Guard, so
// several consumers of one queue in one process need one each.
func WithName(name string) Option { return func(o *options) { o.name = name } }

// WithQueue names the queue that the deliveries given to [Deliveries] come
// from, for states and dead letters, where the channel does not tell.
func WithQueue(name string) Option { return func(o *options) { o.queue = name } }

// WithPolicy is how this source behaves; the default is the Guard's policy. The
// window, if unset, is the prefetch. For [Deliveries] its Workers, if unset 1, is
// how many deliveries may be out at a time.
func WithPolicy(p guard.Policy) Option { return func(o *options) { o.policy = &p } }

// WithPrefetch is how many deliveries the broker leaves unsettled, from 1 to
// 65535; a larger window is cut to it. [Consume] sets it; for [Deliveries] it is what the program has set with
// Channel.Qos, and more deliveries than that are refused. The default is the
// policy's window, or 256.
//
// Each break of the channel counts as a delivery of all of them, handled or not:
// with a delivery limit of 20, the default of quorum queues from RabbitMQ 4.0
// on, a consumer that crashes at its first message 20 times has them all dropped
// or dead-lettered by the broker.
func WithPrefetch(n int) Option { return func(o *options) { o.prefetch = n } }

// WithConsumerTimeout is the broker's consumer_timeout, which the protocol does
// not tell: how long a delivery may be unsettled before the broker closes the
// channel. At half of it Consume closes the channel itself. At least 2s; the
// default is the x-consumer-timeout of [WithConsumeArgs], or else the broker's,
// 30m.
func WithConsumerTimeout(d time.Duration) Option { return func(o *options) { o.timeout = d } }

// WithDeliveryLimit is the queue's delivery limit: the broker gives a message that many
// deliveries and one more. After a failure at the last one the message's attempts count
// as used up, and when the channel closes then, [Consume] dead-letters it: the broker
// would drop it, or dead-letter it itself. Say here what the queue has, or messages die
// too early; of a queue without a limit, a number that is never reached. The default is
// 20 if the broker is RabbitMQ 4.0 or later, and none before; it has no effect on classic
// queues, which don't count. [Inspect] tells what the queue has. At least 1.
func WithDeliveryLimit(n int) Option { return func(o *options) { o.limit = n } }

// WithDeadLetters is where dead letters go, usually a [*DLQ]. Without it and
// without [WithDeadLetterExchange] nothing is dead-lettered: what would be waits.
func WithDeadLetters(w dlq.Writer) Option { return func(o *options) { o.letters = w } }

// WithDeadLetterExchange dead-letters natively: the delivery is rejected, and
// the broker publishes it to the queue's dead-letter exchange, which is named
// here so that its existence can be checked. That the queue has it as
// x-dead-letter-exchange the protocol does not tell, and without it the broker
// drops what is rejected: check with [Inspect]. The error, the attempts and the
// cause are not in such a dead letter; the broker's x-death is. Not for
// [Deliveries], and not together with [WithDeadLetters].
func WithDeadLetterExchange(name string) Option { return func(o *options) { o.native = name } }

// WithLimiter paces admissions.
func WithLimiter(l guard.Limiter) Option { return func(o *options) { o.limiter = l } }

// WithKey chooses the key whose messages keep their order under
// [guard.OrderKey]. The default is the routing key. It is called once a message
// and must not block.
func WithKey(key func(amqp091.Delivery) string) Option { return func(o *options) { o.key = key } }

// WithConsumeArgs are the arguments of basic.consume, such as
// x-consumer-timeout or x-priority.
func WithConsumeArgs(args amqp091.Table) Option { return func(o *options) { o.args = args } }

// WithStopTimeout is how long a stop waits for handlers in flight and for dead
// letters being written. At least 1ms; the default is 30s.
func WithStopTimeout(d time.Duration) Option { return func(o *options) { o.stopTimeout = d } }

// WithLogger logs changes of state, never messages. The default is the Guard's logger,
// see [guard.WithLogger]. A [*DLQ] that has none of its own logs there, too.
func WithLogger(log *slog.Logger) Option { return func(o *options) { o.log = log } }

const (
	defaultStopTimeout     = 30 * time.Second
	defaultPrefetch        = 256
	defaultConsumerTimeout = 30 * time.Minute
	minConsumerTimeout     = 2 * time.Second
	defaultDeliveryLimit   = 20 // of quorum queues, from 4.0 on
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

// whole is a number of an argument, of any size.
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

// limits are what the broker asks of a source with this prefetch.
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
