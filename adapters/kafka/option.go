// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// An Option changes how the claims of one handler are guarded.
type Option func(*options)

type options struct {
	name        string
	group       string
	config      *sarama.Config
	client      sarama.Client
	policy      *guard.Policy
	letters     dlq.Writer
	limiter     guard.Limiter
	retries     *RetryTopics
	key         func(*sarama.ConsumerMessage) []byte
	newest      bool
	batchMarks  bool
	stopTimeout time.Duration
	lookEvery   time.Duration
	log         *slog.Logger
	setup       func(sarama.ConsumerGroupSession) error
	cleanup     func(sarama.ConsumerGroupSession) error
}

// WithName is put before the names of the sources, "topic/partition", as
// "name/topic/partition": names are unique within a Guard, so two groups that
// read one topic in one process need one each. So do two handlers between which a
// program divides the topics of one group, if they spill: each drains what the spill has
// of any of these topics. The name is no part of the breakers' scopes: two groups whose
// dependencies differ belong into two Guards.
func WithName(name string) Option { return func(o *options) { o.name = name } }

// WithGroup is the consumer group, as dead letters name it. The default is that
// of the session, or the Guard's.
func WithGroup(group string) Option { return func(o *options) { o.group = group } }

// WithConfig is the configuration that the consumer group was made with: its
// deadlines bound what the policy may ask for. The default is the one found in
// sarama's session; it is needed where the session is somebody else's.
func WithConfig(config *sarama.Config) Option { return func(o *options) { o.config = config } }

// WithClient is a client for the log's end and, with AutoCommit, for what is
// committed, each asked every 10s, or every other AutoCommit.Interval if that is
// longer, off the way of the messages; its configuration stands in for
// [WithConfig]. It also tells the group's topics, once in a session, if the spill has
// messages of a topic without a claim. The default is the group's own, found in sarama's
// session. Without any, the lag is unknown.
func WithClient(client sarama.Client) Option { return func(o *options) { o.client = client } }

// WithPolicy is how these sources behave; the default is the Guard's policy.
func WithPolicy(p guard.Policy) Option { return func(o *options) { o.policy = &p } }

// WithDeadLetters is where dead letters go, usually a [*DLQ]. Without one
// nothing is dead-lettered: what would be waits.
func WithDeadLetters(w dlq.Writer) Option { return func(o *options) { o.letters = w } }

// WithRetryTopics parks what would be dead-lettered because its attempts are used
// up: it is written to the retry topic of its level, waits there for the level's
// delay, and is handled again, by whoever has its partition then, as often as
// Policy.Retry.Attempts says; then it goes to the next level, and after the last it
// is dead-lettered. Only [Wrap] does that, and needs [WithDeadLetters].
//
// With [guard.OrderKey] a key keeps its order: while one of its messages is parked,
// the later ones of its partition are not handled, but follow it. With
// [guard.OrderNone], and for messages without a key, each is parked by itself.
// [guard.OrderSource], the default, is refused: a parked message leaves its
// partition's order.
//
// Parking costs a credit as a dead letter does. What is [guard.Permanent], and what
// dies while a breaker is not closed, is dead-lettered and not parked.
func WithRetryTopics(t *RetryTopics) Option { return func(o *options) { o.retries = t } }

// WithLimiter paces admissions of all claims together.
func WithLimiter(l guard.Limiter) Option { return func(o *options) { o.limiter = l } }

// WithKey chooses the key whose messages keep their order under
// [guard.OrderKey]; nil is no key, and no order. The default is the message's
// own. It is called once a message and must not block.
func WithKey(key func(*sarama.ConsumerMessage) []byte) Option {
	return func(o *options) { o.key = key }
}

// WithSkipToNewest accepts Consumer.Offsets.Initial = OffsetNewest together with
// Consumer.Group.ResetInvalidOffsets, which are sarama's defaults: a group whose
// committed offset is gone (retention was shorter than an outage, a topic was
// made anew) then goes on at the end of the log and never sees what is left.
// Without this option that is refused.
func WithSkipToNewest() Option { return func(o *options) { o.newest = true } }

// WithBatchMarks is for [WrapHandler] around a loop that handles several
// messages and marks only the last: as many may be out as the window has, up to 1024,
// unless Policy.Workers says how many. A mark then settles every message that was
// handed out before it, too, a retry among them whatever its offset. Batches must
// be marked in the order in which they were handed out, and within Policy.Timeout: a
// timer of the loop marks a batch that does not fill. Without it a mark settles
// its message alone, so that workers which mark out of order lose nothing.
func WithBatchMarks() Option { return func(o *options) { o.batchMarks = true } }

// WithStopTimeout is how long a stop waits for handlers in flight and for dead
// letters being written; never longer than the rebalance timeout allows. At
// least 1ms; the default is 30s.
func WithStopTimeout(d time.Duration) Option { return func(o *options) { o.stopTimeout = d } }

// WithSetup is called by the Setup of [Wrap]'s handler, before the claims of the session
// start: to seek by ResetOffset, or to prepare what the handler needs. Its error ends the
// session, and Consume returns it. [WrapHandler] calls its handler's own Setup and
// refuses this option.
func WithSetup(f func(sarama.ConsumerGroupSession) error) Option {
	return func(o *options) { o.setup = f }
}

// WithCleanup is called by the Cleanup of [Wrap]'s handler, after the claims of the session
// have ended and before the last commit. Consume returns its error. sarama calls it for
// each session, also when Setup has failed. [WrapHandler] calls its handler's own Cleanup
// and refuses this option.
func WithCleanup(f func(sarama.ConsumerGroupSession) error) Option {
	return func(o *options) { o.cleanup = f }
}

// WithLogger logs changes of state, never messages. The default is the Guard's logger,
// see [guard.WithLogger].
func WithLogger(log *slog.Logger) Option { return func(o *options) { o.log = log } }

const (
	defaultStopTimeout = 30 * time.Second
	defaultLookEvery   = 10 * time.Second
)

func newOptions(g *guard.Guard, opts []Option) (options, error) {
	o := options{log: slog.New(slog.DiscardHandler), stopTimeout: defaultStopTimeout, lookEvery: defaultLookEvery}
	if g != nil {
		o.log = g.Logger()
	}
	for _, opt := range opts {
		opt(&o)
	}
	var errs []error
	if o.stopTimeout < time.Millisecond {
		errs = append(errs, fmt.Errorf("kafka: WithStopTimeout: %s is not at least 1ms", o.stopTimeout))
	}
	if o.log == nil {
		errs = append(errs, errors.New("kafka: WithLogger: the logger must not be nil; leave the option out for the Guard's"))
		o.log = slog.New(slog.DiscardHandler)
	}
	return o, errors.Join(errs...)
}
