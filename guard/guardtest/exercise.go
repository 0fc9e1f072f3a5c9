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

// Features says where brokers, and the two shapes of an adapter, differ. Each
// field is a fact about the [Subject]; the zero value is the least of them, and
// what a field turns off is skipped by name.
type Features struct {
	// RealTime says that the subject talks to something outside the test's
	// process: rules wait by polling, up to Deadline. Otherwise each rule runs
	// in a testing/synctest bubble, and hours cost nothing.
	RealTime bool

	// Deadline is how long a rule waits for what must come; unset means 2m,
	// and with virtual time 10min.
	Deadline time.Duration

	// Passive is the shape where a user's loop settles: panics, Goexits and
	// timeouts are that loop's matter.
	Passive bool

	// Order and Workers are the policy that the rules run under. With
	// [guard.OrderKey] the subject must have Keys.
	Order   guard.Order
	Workers int

	// Keys says that messages have keys. A broker without them gets the rules'
	// keys all the same and may drop them.
	Keys bool

	// Headers is which header values survive the way through the broker.
	Headers HeaderKind

	// EmptyBody says that a message without a body can be published.
	EmptyBody bool

	// MaxBody is the giant message of the suite, in bytes; unset means 1 MiB.
	// It must fit the dead-letter queue too, with 4 KiB of headers.
	MaxBody int

	// AckWait says that the broker delivers an unextended message again after
	// [Setup.AckWait].
	AckWait bool

	// MaxDeliver says that the broker stops delivering a message after
	// [Setup.MaxDeliver] deliveries, and counts them. It needs a [Killer].
	MaxDeliver bool

	// OneDelivery says that [Backlog.Delivered] is exact: a message that is
	// held, paused or retried is never delivered twice.
	OneDelivery bool

	// Prefix says that the broker keeps one position, as a log does: what was
	// handled behind a message that was still unsettled when its source ended is
	// delivered again.
	Prefix bool

	long bool // the long form of rules, as with STORMGUARD_FULL

	// Options are further options of each rule's Guard, such as a fleet; nil means
	// none. It is called once for each Guard.
	Options func() []guard.Option

	// Dedup says that the dead-letter queue recognises twins by
	// [dlq.Record.ID]. Without it a lost confirmation may leave two records of
	// one ID.
	Dedup bool
}

// HeaderKind is which values headers can have.
type HeaderKind uint8

// The kinds.
const (
	HeaderText   HeaderKind = iota // text only, as NATS
	HeaderBytes                    // bytes, text among them, as Kafka
	HeaderNative                   // what [dlq.Header] lists, types kept, as RabbitMQ
)

// Setup is what one rule asks of its broker. A zero field is the subject's
// choice: generous, so that no deadline of the broker interferes.
type Setup struct {
	AckWait    time.Duration // only with Features.AckWait
	MaxDeliver int           // only with Features.MaxDeliver
}

// Subject is one empty queue at a broker and an adapter that consumes it: what
// the factory of [Exercise] makes for each rule. Its source must be the only one
// of its Guard.
//
// A rule calls Start and Stop in turn, starting with Publish or Start; the last
// call is Stop. What else the factory made it takes down itself, with t.Cleanup.
type Subject interface {
	// Publish returns once the broker has the messages, in this order.
	Publish(ctx context.Context, ms ...Publication) error

	// Start starts the adapter's consumer and returns, at the latest once it
	// consumes. An adapter that reconnects does so until Stop.
	Start(c Consumer) error

	// Stop stops the consumer the adapter's way: when it returns, its source
	// has ended and no goroutine is left, unless a handler hangs. It is also
	// called when the Guard is closed already.
	Stop(ctx context.Context) error

	// DeadLetters reads back all dead letters, oldest first.
	DeadLetters(ctx context.Context) ([]dlq.Record, error)

	// Backlog is the broker's own view. It need not be current: rules poll.
	Backlog(ctx context.Context) (Backlog, error)
}

// Publication is a message as a producer sends it.
type Publication struct {
	Key     string // "" is none
	Body    []byte
	Headers []dlq.Header
}

// Backlog is a queue as its broker sees it; -1 is unknown.
type Backlog struct {
	Pending   int // not settled: waiting and unacked
	Delivered int // deliveries since the subject was made
}

// Consumer is what an adapter is to be started with.
type Consumer struct {
	Guard *guard.Guard

	// Policy is the source's; an adapter without such a setting may rely on
	// the Guard having the same.
	Policy guard.Policy

	// Handler handles one message: it returns to the guard in the function
	// shape; in the passive shape the subject's loop settles as it says.
	Handler func(ctx context.Context, key string, body []byte) error

	// Writer wraps the adapter's own dead-letter writer.
	Writer func(dlq.Writer) dlq.Writer

	// Twice asks the subject's loop, in the passive shape, to settle each
	// message twice.
	Twice bool
}

// A Killer is a [Subject] that can break the consumer's hold on its queue
// without a word: whatever is unacked is delivered again. The consumer comes
// back by itself, or Kill starts it anew.
type Killer interface {
	Kill(ctx context.Context) error
}

// A Restarter is a [Subject] that can restart its broker, without loss.
type Restarter interface {
	Restart(ctx context.Context) error
}

// A Revoker is a [Subject] that can take the queue away from its consumer, as a
// rebalance does: the consumer settles what it has finished and gives back the rest,
// and then has the queue again by itself. Where a broker takes nothing away, the
// consumer is stopped and started anew, with the same Guard.
type Revoker interface {
	Revoke(ctx context.Context) error
}

// A Refuser is a [Subject] that can make the port's acks fail with an error, until it is
// called with nil. The broker then delivers the messages again whose acks failed, or
// takes a later ack for all of them. A port that coalesces acks says so when it flushes.
type Refuser interface {
	RefuseAcks(err error)
}

// An Auditor is a [Subject] whose broker keeps books about the port's calls.
type Auditor interface {
	// Handed is how many deliveries the adapter's reader was handed.
	Handed() int

	// Check reports what no port may be asked to do: a second settlement of
	// one delivery, a call after the source's end.
	Check() error
}

// Exercise is the conformance suite of an adapter: one subtest for each rule
// that holds for every broker. It calls factory once for each rule. The skipped
// ones say which feature they lack.
//
// Throughout every rule the account of each source is sampled and checked; at
// its end nothing may be lost, out of order, or dead-lettered without need. At the
// end of an outage whose errors are of unknown class one message may succeed before
// those in front of it.
//
// The rules for liveness run under the default policy and check times. With
// STORMGUARD_FULL set they try longer bursts on a real broker, too.
//
// With virtual time the suite takes two or three seconds; on a real broker about as
// long as fifty round trips to set it up, and two minutes.
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
	says  string // the rule, for a failure's text
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
