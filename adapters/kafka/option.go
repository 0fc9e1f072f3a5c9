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

// WithName puts a name before the names of the sources: "topic/partition" becomes
// "name/topic/partition". Names are unique within a Guard, so two groups that read one topic in
// one process need different names. Two handlers that share the topics of one group need
// different names, too, if they spill: otherwise each drains the spill of all these topics. The
// name is not part of the breakers' scopes: two groups with different dependencies need two
// Guards.
func WithName(name string) Option { return func(o *options) { o.name = name } }

// WithGroup sets the name of the consumer group, as dead letters have it. The default is the name
// in the session, or else the Guard's.
func WithGroup(group string) Option { return func(o *options) { o.group = group } }

// WithConfig passes the configuration that the consumer group was made with. Its deadlines bound
// the policy's timeouts. The default is the configuration in sarama's session. The option is
// required if the session is not sarama's own.
func WithConfig(config *sarama.Config) Option { return func(o *options) { o.config = config } }

// WithClient passes a client that is asked for the log's end and, with AutoCommit, for the
// committed offsets: every 10s, or every other AutoCommit.Interval if that is longer, off the
// path of the messages. If the spill has messages of a topic without a claim, it also asks for
// the group's topics, once in a session. The client's configuration replaces a missing
// [WithConfig]. The default is the group's own client, found in sarama's session. Without a
// client the lag is unknown.
func WithClient(client sarama.Client) Option { return func(o *options) { o.client = client } }

// WithPolicy sets the policy of these sources. The default is the Guard's policy.
func WithPolicy(p guard.Policy) Option { return func(o *options) { o.policy = &p } }

// WithDeadLetters sets the writer of dead letters, usually a [*DLQ]. Without a writer nothing is
// dead-lettered: such messages wait.
func WithDeadLetters(w dlq.Writer) Option { return func(o *options) { o.letters = w } }

// WithRetryTopics parks a message whose attempts are used up, instead of dead-lettering it. The
// message is written to the retry topic of its level, and waits there for the level's delay. Then
// the partition's present owner handles it again, up to Policy.Retry.Attempts times. After that
// it goes to the next level, and after the last level it is dead-lettered. Only [Wrap] supports
// this option. It needs [WithDeadLetters].
//
// With [guard.OrderKey] a key keeps its order: while one of its messages is parked, the later
// ones of its partition are not handled, but follow it. With [guard.OrderNone], and without a
// key, each message is parked by itself. [guard.OrderSource], the default, is refused: a parked
// message leaves the order of its partition.
//
// A parked message costs a credit, as a dead letter does. A message is dead-lettered and never
// parked if its failure is [guard.Permanent], or if an operator or the quarantine gives it up.
// While the breaker is not closed, a poison head or a guess is still parked. A message whose
// attempts are used up waits then. It is parked only if nothing else could show that the
// dependency is back.
func WithRetryTopics(t *RetryTopics) Option { return func(o *options) { o.retries = t } }

// WithLimiter sets a limiter that paces the admissions of all claims together.
func WithLimiter(l guard.Limiter) Option { return func(o *options) { o.limiter = l } }

// WithKey sets the function that chooses a message's key: under [guard.OrderKey] messages with
// the same key keep their order. A nil key means no key, and no order. The default is the
// message's own key. The function is called once for a message, with retry topics more often. It
// must not block.
func WithKey(key func(*sarama.ConsumerMessage) []byte) Option {
	return func(o *options) { o.key = key }
}

// WithSkipToNewest accepts Consumer.Offsets.Initial = OffsetNewest together with
// Consumer.Group.ResetInvalidOffsets, which are sarama's defaults. A group whose committed offset
// is gone then goes on at the end of the log and skips all messages before it. The offset is gone
// when retention was shorter than an outage, or when the topic was made again. Without this
// option Setup refuses these settings.
func WithSkipToNewest() Option { return func(o *options) { o.newest = true } }

// WithBatchMarks is for [WrapHandler] around a loop that handles several messages and marks only
// the last. As many messages may be out as the window has, up to 1024, unless Policy.Workers sets
// the number. A mark then also settles every message that was handed out before it, retries
// included, whatever their offsets.
//
// The loop must mark batches in the order in which they were handed out, and within
// Policy.Timeout: it needs a timer for a batch that does not fill. Without this option a mark
// settles its message alone, so workers that mark out of order lose nothing.
func WithBatchMarks() Option { return func(o *options) { o.batchMarks = true } }

// WithStopTimeout sets how long a stop waits for running handlers and for dead letters being
// written, but never longer than the rebalance timeout allows. At least 1ms; the default is 30s.
func WithStopTimeout(d time.Duration) Option { return func(o *options) { o.stopTimeout = d } }

// WithSetup sets a function that the Setup of [Wrap]'s handler calls before the claims of the
// session start: to seek by ResetOffset, or to prepare what the handler needs. Its error ends the
// session, and Consume returns it. [WrapHandler] calls its handler's own Setup and refuses this
// option.
func WithSetup(f func(sarama.ConsumerGroupSession) error) Option {
	return func(o *options) { o.setup = f }
}

// WithCleanup sets a function that the Cleanup of [Wrap]'s handler calls after the claims of the
// session have ended and before the last commit. Consume returns its error. The function is
// called in each session, also when the function of [WithSetup] has failed, but not when Setup
// itself refused the session before. [WrapHandler] calls its handler's own Cleanup and refuses
// this option.
func WithCleanup(f func(sarama.ConsumerGroupSession) error) Option {
	return func(o *options) { o.cleanup = f }
}

// WithLogger sets the logger, which gets changes of state, never messages. The default is the
// Guard's logger, see [guard.WithLogger].
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
