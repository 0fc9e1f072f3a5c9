// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// An Option changes how one consumer is guarded.
type Option func(*options)

type options struct {
	name        string
	policy      *guard.Policy
	window      int
	letters     dlq.Writer
	limiter     guard.Limiter
	key         func(jetstream.Msg) string
	doubleAck   bool
	stopTimeout time.Duration
	log         *slog.Logger
	lagEvery    time.Duration // between two looks at the lag; a test's is shorter
}

// WithName names the source in states, metrics and logs, and is its breaker's
// scope. The default is "stream/consumer". Names are unique within a Guard, so
// several instances of one durable in one process need one each.
func WithName(name string) Option { return func(o *options) { o.name = name } }

// WithPolicy is how this source behaves; the default is the Guard's policy.
func WithPolicy(p guard.Policy) Option { return func(o *options) { o.policy = &p } }

// WithWindow overrides [guard.Policy.Window]: how many messages this process may
// hold unsettled. One pull of up to half as many may come on top; all are kept
// alive, and count in the consumer's MaxAckPending, which its instances share.
// At least 1, at most MaxAckPending. The default is the policy's, or 1024, or
// MaxAckPending if that is less.
func WithWindow(n int) Option { return func(o *options) { o.window = n } }

// WithDeadLetters is where dead letters go, usually a [*DLQ]. Without one
// nothing is dead-lettered: what would be waits.
func WithDeadLetters(w dlq.Writer) Option { return func(o *options) { o.letters = w } }

// WithLimiter paces admissions; limiter.Local makes a limit of this process alone.
func WithLimiter(l guard.Limiter) Option { return func(o *options) { o.limiter = l } }

// WithKey chooses the key whose messages keep their order under
// [guard.OrderKey]. The default is the subject. It is called once a message and
// must not block.
func WithKey(key func(jetstream.Msg) string) Option { return func(o *options) { o.key = key } }

// WithDoubleAck waits for the server's answer to each ack, up to 5s: an ack
// that is lost is then counted as a failure. It costs a round trip per message.
// The default is a plain ack, which a reconnect delays and a crash may lose;
// the message is then delivered again.
func WithDoubleAck() Option { return func(o *options) { o.doubleAck = true } }

// WithStopTimeout is how long a stop waits for handlers in flight and for dead
// letters being written. At least 1ms; the default is 30s. Giving back the rest takes
// 5s more at most, whatever the network does.
//
// A Drain of a wrapped consumer ends three quarters of it after its pull has, also if messages
// wait: their head may wait for a dead-letter writer, or for a credit. A line at WARN says so.
func WithStopTimeout(d time.Duration) Option { return func(o *options) { o.stopTimeout = d } }

// WithLogger logs changes of state, never messages. The default is the Guard's
// logger; a Mover has none and is silent, but for bodies that it cuts ([DLQ.Write]).
func WithLogger(log *slog.Logger) Option { return func(o *options) { o.log = log } }

const (
	defaultStopTimeout = 30 * time.Second
	ackTimeout         = 5 * time.Second // of a double ack
	lagEvery           = 10 * time.Second
)

// sourceOptions are those of a source of g.
func sourceOptions(g *guard.Guard, opts []Option) (options, error) {
	if g == nil {
		o, err := newOptions(slog.New(slog.DiscardHandler), opts)
		return o, errors.Join(errors.New("nats: the Guard must not be nil"), err)
	}
	o, err := newOptions(g.Logger(), opts)
	if d, ok := o.letters.(*DLQ); ok && d != nil && err == nil {
		d.cuts.inherit(o.log)
	}
	return o, err
}

func newOptions(log *slog.Logger, opts []Option) (options, error) {
	o := options{log: log, stopTimeout: defaultStopTimeout, lagEvery: lagEvery}
	for _, opt := range opts {
		opt(&o)
	}
	var errs []error
	if o.stopTimeout < time.Millisecond {
		errs = append(errs, fmt.Errorf("nats: WithStopTimeout: %s is not at least 1ms", o.stopTimeout))
	}
	if o.window < 0 {
		errs = append(errs, fmt.Errorf("nats: WithWindow: %d is not at least 1", o.window))
	}
	if o.log == nil {
		errs = append(errs, errors.New("nats: WithLogger: the logger must not be nil; leave the option out for the Guard's"))
	}
	return o, errors.Join(errs...)
}
