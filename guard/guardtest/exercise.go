// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// Features says how brokers, and the two shapes of an adapter, differ. Each field is a
// fact about the [Subject]; the zero value promises least. Rules that need a missing
// feature are skipped, and name it.
type Features struct {
	// RealTime says that the subject talks to another process. Rules then wait by polling,
	// for Deadline at most. Otherwise each rule runs in a testing/synctest bubble, where
	// hours cost nothing.
	RealTime bool

	// Deadline is how long a rule waits for an expected event; unset means 10min with
	// virtual time, 2m with RealTime.
	Deadline time.Duration

	// Passive says that a user's loop settles the messages. Rules about panics, Goexits
	// and timeouts are skipped, since that loop has to handle them.
	Passive bool

	// Order and Workers are the policy of all rules. With [guard.OrderKey] the subject
	// must have Keys.
	Order   guard.Order
	Workers int

	// Keys says that messages have keys. Rules also publish keys without it; the broker
	// may drop them.
	Keys bool

	// Headers says which header values survive the way through the broker.
	Headers HeaderKind

	// EmptyBody says that a message without a body can be published.
	EmptyBody bool

	// MaxBody is the size of the suite's largest body, in bytes; unset means 1 MiB. With
	// 4 KiB of headers it must also fit in the dead-letter queue.
	MaxBody int

	// AckWait says that the broker delivers an unextended message again after
	// [Setup.AckWait].
	AckWait bool

	// MaxDeliver says that the broker stops delivering a message after
	// [Setup.MaxDeliver] deliveries, and counts them. It needs a [Killer].
	MaxDeliver bool

	// OneDelivery says that [Backlog.Delivered] is exact: holds, pauses and retries never
	// deliver a message twice.
	OneDelivery bool

	// Prefix says that the broker keeps one position, as a log does. If a source ends with
	// an unsettled message, the broker delivers the handled messages behind it again.
	Prefix bool

	long bool // the long form of rules, as with STORMGUARD_FULL

	// Options returns further options of each rule's Guard, such as a fleet; nil means no
	// further options. It is called once for each Guard.
	Options func() []guard.Option

	// Dedup says that the dead-letter queue recognises twins by [dlq.Record.ID]. Without
	// Dedup, a lost confirmation may leave two records with one ID.
	Dedup bool
}

// HeaderKind says which values headers can have.
type HeaderKind uint8

// The kinds of header values.
const (
	HeaderText   HeaderKind = iota // text only, as in NATS
	HeaderBytes                    // bytes, text included, as in Kafka
	HeaderNative                   // the types that [dlq.Header] lists, kept, as in RabbitMQ
)

// Setup has the broker's settings for one rule. For a zero field the subject chooses a
// generous value, so that no deadline of the broker interferes.
type Setup struct {
	AckWait    time.Duration // only with Features.AckWait
	MaxDeliver int           // only with Features.MaxDeliver
}

// Subject is one empty queue at a broker and an adapter that consumes it. The factory of
// [Exercise] makes one for each rule. Its source must be the only source of its Guard.
//
// A rule calls Start and Stop in turn. The first call is Publish or Start, the last is
// Stop. The factory cleans up everything else with t.Cleanup.
type Subject interface {
	// Publish publishes the messages in this order, and returns once the broker has them.
	Publish(ctx context.Context, ms ...Publication) error

	// Start starts the adapter's consumer. It returns when the consumer consumes, or
	// before. An adapter that reconnects does so until Stop.
	Start(c Consumer) error

	// Stop stops the consumer as the adapter's users do. When Stop returns, the source has
	// ended and no goroutine is left, unless a handler hangs. Rules also call Stop after
	// the Guard is closed.
	Stop(ctx context.Context) error

	// DeadLetters returns all dead letters, oldest first.
	DeadLetters(ctx context.Context) ([]dlq.Record, error)

	// Backlog returns the broker's own counts. They may be late, since rules poll.
	Backlog(ctx context.Context) (Backlog, error)
}

// Publication is a message as a producer sends it.
type Publication struct {
	Key     string // "" for no key
	Body    []byte
	Headers []dlq.Header
}

// Backlog has the counts of a queue at its broker; -1 means unknown.
type Backlog struct {
	Pending   int // unsettled messages: waiting and unacked
	Delivered int // deliveries since the subject was made
}

// Consumer has the parameters of [Subject.Start].
type Consumer struct {
	Guard *guard.Guard

	// Policy is the policy of the source. The Guard has the same policy, so an adapter
	// without such a setting may ignore it.
	Policy guard.Policy

	// Handler handles one message. In the function shape it returns its error to the
	// guard. In the passive shape the subject's loop settles the message by that error.
	Handler func(ctx context.Context, key string, body []byte) error

	// Writer wraps the adapter's own dead-letter writer.
	Writer func(dlq.Writer) dlq.Writer

	// Twice tells the subject's loop, in the passive shape, to settle each message twice.
	Twice bool
}

// A Killer is a [Subject] that can break the consumer's connection to its queue without
// warning: the broker delivers unacked messages again. The consumer comes back by itself,
// or Kill starts it again.
type Killer interface {
	Kill(ctx context.Context) error
}

// A Restarter is a [Subject] that can restart its broker without loss of messages.
type Restarter interface {
	Restart(ctx context.Context) error
}

// A Revoker is a [Subject] that can take the queue away from its consumer, as a rebalance
// does. The consumer settles finished messages, gives back the others, and then gets the
// queue again by itself. If the broker never takes a queue away, Revoke stops the consumer
// and starts it again with the same Guard.
type Revoker interface {
	Revoke(ctx context.Context) error
}

// A Refuser is a [Subject] that can make the port's acks fail with err, until RefuseAcks is
// called with nil. Then the broker delivers the messages of the failed acks again, or
// accepts a later ack for all of them. A port that coalesces acks returns the error from
// Flush.
type Refuser interface {
	RefuseAcks(err error)
}

// An Auditor is a [Subject] whose broker records the port's calls.
type Auditor interface {
	// Handed returns how many deliveries the adapter's reader got.
	Handed() int

	// Check reports calls that a port must never get: a second settlement of a delivery,
	// or a call after the source's end.
	Check() error
}

// Exercise runs the conformance suite of an adapter: one subtest for each rule that holds
// for every broker. It calls factory once for each rule. A skipped rule names the feature
// that it needs.
//
// During every rule, Exercise samples and checks the account of each source. At the end of
// a rule no message may be lost, out of order, or dead-lettered without need. One
// exception: at the end of an outage with errors of unknown class, one message may succeed
// before the messages in front of it.
//
// The rules for liveness run under the default policy and check times. With
// STORMGUARD_FULL set they also try longer bursts on a real broker.
//
// With virtual time the suite takes two or three seconds. On a real broker it takes two
// minutes, plus about fifty round trips for the setup.
func Exercise(t *testing.T, f Features, factory func(t testing.TB, s Setup) Subject) {
	for _, r := range rules {
		t.Run(r.name, func(t *testing.T) {
			if why := r.lacks(f); why != "" {
				t.Skip("needs Features." + why)
			}
			if f.RealTime {
				r.exercise(t, f, factory)
				return
			}
			synctest.Test(t, func(t *testing.T) { r.exercise(t, f, factory) })
		})
	}
}

// rule is one subtest.
type rule struct {
	name  string
	says  string // text of the rule, for failures
	needs func(Features) string
	setup func(*run) Setup
	run   func(*run)
}

func (r rule) lacks(f Features) string {
	if r.needs == nil {
		return ""
	}
	return r.needs(f)
}

func (r rule) exercise(t testing.TB, f Features, factory func(t testing.TB, s Setup) Subject) {
	t.Helper()
	x := newRun(t, f)
	x.rule = r
	var s Setup
	if r.setup != nil {
		s = r.setup(x)
	}
	x.setup = s
	x.subject = factory(t, s)
	if x.subject == nil {
		t.Skip("the factory made no subject")
	}
	defer x.leave()
	r.run(x)
	x.finish()
}
