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
	lagEvery    time.Duration // time between two requests for the lag; shorter in tests
}

// WithName sets the name of the source in states, metrics and logs, which is also the
// scope of its breaker. The default is "stream/consumer". Names are unique within a Guard,
// so several instances of one durable in one process need different names.
func WithName(name string) Option { return func(o *options) { o.name = name } }

// WithPolicy sets the policy of this source; the default is the Guard's policy.
func WithPolicy(p guard.Policy) Option { return func(o *options) { o.policy = &p } }

// WithWindow overrides [guard.Policy.Window]: how many unsettled messages this process may
// have. At least 1, at most MaxAckPending. The default is the policy's window, or 1024, or
// MaxAckPending if that is less. With [Consume] half of it is for messages on their way, so the
// console shows about half.
//
// One pull of up to half a window may come in addition. All these messages are kept alive,
// and count in the consumer's MaxAckPending, which its instances share.
func WithWindow(n int) Option { return func(o *options) { o.window = n } }

// WithDeadLetters sets the writer of dead letters, usually a [*DLQ]. Without a writer
// nothing is dead-lettered: the messages wait.
func WithDeadLetters(w dlq.Writer) Option { return func(o *options) { o.letters = w } }

// WithLimiter sets a limiter that paces admissions. limiter.Local makes a limit for this process
// alone.
func WithLimiter(l guard.Limiter) Option { return func(o *options) { o.limiter = l } }

// WithKey sets the function that returns a message's key: under [guard.OrderKey] the
// messages of a key keep their order. The default key is the subject. The function is
// called once for each message and must not block.
func WithKey(key func(jetstream.Msg) string) Option { return func(o *options) { o.key = key } }

// WithDoubleAck waits for the server's answer to each ack, up to 5s, and counts a lost ack
// as a failure. It costs a round trip per message. The default is a plain ack: a reconnect
// delays it, and a crash may lose it, so that the message is delivered again.
func WithDoubleAck() Option { return func(o *options) { o.doubleAck = true } }

// WithStopTimeout sets how long a stop waits for running handlers and for writes of dead
// letters. At least 1ms; the default is 30s. Giving back the other messages takes at most
// 5s more, whatever the network does.
//
// A Drain of a wrapped consumer waits for three quarters of that time, counted from the end
// of its pull or from the latest message after that. It then ends although messages wait,
// since their head may wait for a dead-letter writer or for a credit. A line at WARN says
// so.
func WithStopTimeout(d time.Duration) Option { return func(o *options) { o.stopTimeout = d } }

// WithLogger sets the logger for changes of state; messages are never logged. The default
// is the Guard's logger. A Mover has no default and is silent, except when it cuts a body
// ([DLQ.Write]).
func WithLogger(log *slog.Logger) Option { return func(o *options) { o.log = log } }

const (
	defaultStopTimeout = 30 * time.Second
	ackTimeout         = 5 * time.Second // for the answer to a double ack
	lagEvery           = 10 * time.Second
)

// sourceOptions returns the options of a source of g.
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
