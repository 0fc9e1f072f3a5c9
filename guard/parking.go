// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// A Parker is a [Port] that can park a message: write it away, such as to a retry topic,
// and hand it over again later, by [OpenParked]. The guard asks it where it would
// dead-letter a message whose attempts are used up. A parked message is acked, and is no
// success, no failure and no dead letter. It costs no attempt beside those it had, and
// its credit is the same as that of a dead letter.
//
// Order. The messages behind one in its lane wait until it is parked or dead-lettered,
// and are no witnesses before. From then on the order of the lane is the adapter's: its
// handler writes those that come later behind the parked one, and returns [Ignore].
//
// A Parker needs [SourceConfig.DeadLetters], for messages that it does not park. The guard
// calls Parks and Park where it writes the source's dead letters, one after the other. One
// call of Park may outlive [Source.End].
type Parker[M any] interface {
	// Parks tells from memory whether the message may be parked once more.
	Parks(m M) bool

	// Park returns nil when the message is written, as durably as a dead letter: see
	// [dlq.Writer]. Only then is it acked. r is what its dead letter would be; Park must
	// not keep it. The guard asks again after an error, and dead-letters the message if
	// that is a [dlq.ErrTooLarge]. [dlq.ErrPutOff] says that there is no room yet.
	Park(ctx context.Context, m M, r *dlq.Record) error

	// Parked is how many messages are parked now, and how many were written behind them
	// since, to keep their order. It is called when metrics are read, and answers from
	// memory.
	Parked() (now int, followed uint64)
}

// parent is the source that parked what another handles again.
type parent interface {
	successes() uint64
	shut() bool
	waitsToProbe() bool
}

// OpenParked opens the source that handles again what from has parked, under a name of
// its own. It has the configuration of from, and ends before from does or with it.
//
// What succeeds in from proves as much about messages that fail here, and earns them
// credits. Messages that were parked together fail together: that is no evidence against
// the dependency, so the source has no part in the breaker. It waits for that of from,
// unless from has no message of its own to probe with, or those say nothing, and so nothing
// but them could show that the dependency is back.
func OpenParked[M, P any](from *Source[M], name string, port Port[P], handler func(context.Context, P) error) (*Source[P], error) {
	g, cfg := from.g, from.cfg
	policy := g.cfg.Policy
	if cfg.Policy != nil {
		policy = *cfg.Policy
	}
	policy.NoBreaker = true
	cfg.Name, cfg.Policy = name, &policy
	return openSource(g, cfg, from.limits, port, func(ctx context.Context, m P) error {
		if from.waitsToProbe() {
			return Backoff(errProbesAlone, g.origin.Add(g.now()+parkedAgain))
		}
		return handler(ctx, m)
	}, from)
}

// parkedAgain is how soon a parked message that waits for a breaker asks again.
const parkedAgain = 500 * time.Millisecond

var (
	errProbesAlone = errors.New("guard: parked messages wait for the breaker of their source")
	errShut        = fmt.Errorf("%w: guard: nothing is parked while the breaker is not closed", dlq.ErrPutOff)
)

// shut tells whether the source's breaker is not closed.
func (s *Source[M]) shut() bool { return s.c.gate != nil && !s.c.gate.Closed() }

// waitsToProbe tells whether the source's breaker is not closed, and a probe may come that says
// something: the source has a message to call, or no probe is allowed. Probes that all follow
// a parked message, or find no room behind it, say nothing.
func (s *Source[M]) waitsToProbe() bool {
	if !s.shut() {
		return false
	}
	now := s.g.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.c.gate.Breaker.Snapshot(now)
	return b.Forced || b.Barred || b.Held || s.c.callable() && !s.c.saysNothing
}

// callable tells whether there is a message that a handler has, or may get before a letter is
// written or a credit comes.
func (c *machine[M]) callable() bool {
	return c.count[processing]+c.ready.len()+c.again.len()+c.parked[ReasonNone]+c.parked[ReasonStorm] > 0 ||
		c.order() == OrderNone && c.queued > 0
}

// park parks the message of a letter. parked is false if it is to be dead-lettered.
func (l letter[M]) park(ctx context.Context, r *dlq.Record) (parked bool, err error) {
	s := l.s
	of := cmp.Or(s.from, parent(s)) // whose breaker it is
	switch {
	case s.parker == nil || r.Permanent || !s.parker.Parks(l.it.m):
		return false, nil
	case r.Reason == dlq.ReasonAttempts && of.waitsToProbe():
		return true, errShut // it may fail for what the breaker is open for
	case r.Reason == dlq.ReasonAttempts: // with nothing else to probe with, the message behind it must come
	case r.Reason != dlq.ReasonPoisonHead && r.Reason != dlq.ReasonGuess:
		return false, nil
	}
	err = apart("port's Park", func() error { return s.parker.Park(ctx, l.it.m, r) })
	if errors.Is(err, dlq.ErrTooLarge) {
		return false, nil
	}
	return true, err
}
