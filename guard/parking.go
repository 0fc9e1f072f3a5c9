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

// A Parker is a [Port] that can park a message: it writes the message away, such as to a retry
// topic, and hands it over again later, to a source opened by [OpenParked]. When the attempts of
// a message are used up, the guard asks the Parker before it dead-letters the message. A parked
// message is acked. It is no success, no failure and no dead letter. To park a message costs the
// same credit as a dead letter, and no attempt.
//
// Order. The messages behind a failing message in its lane wait until it is parked or
// dead-lettered. Until then they are no witnesses. After that the adapter keeps the order of the
// lane: its handler writes later messages behind the parked one, and returns [Ignore].
//
// A Parker needs [SourceConfig.DeadLetters], for messages that it does not park. The guard calls
// Parks and Park where it writes the source's dead letters, one after the other. One call of Park
// may outlive [Source.End].
type Parker[M any] interface {
	// Parks tells from memory whether the message may be parked once more.
	Parks(m M) bool

	// Park parks the message. It returns nil when the message is written as durably as a dead
	// letter: see [dlq.Writer]. Only then the guard acks the message. r is the dead letter that
	// the message would become; Park must not keep r. After an error the guard calls Park again,
	// but after [dlq.ErrTooLarge] it dead-letters the message. [dlq.ErrPutOff] says that there is
	// no room yet.
	Park(ctx context.Context, m M, r *dlq.Record) error

	// Parked is how many messages are parked now, and how many were written behind parked
	// messages so far, to keep the order. It is called when metrics are read, and must answer
	// from memory.
	Parked() (now int, followed uint64)
}

// parent is a source whose parked messages another source handles again.
type parent interface {
	successes() uint64
	shut() bool
	waitsToProbe() bool
}

// OpenParked opens the source that handles the messages again that from has parked. The new
// source has a name of its own and the configuration of from. It ends before from or with it.
//
// A success in from is also a proof of life for messages that fail here, and earns them credits.
// Messages that were parked together fail together. That is no evidence against the dependency,
// so the new source has no breaker. While the breaker of from is not closed, the new source
// waits. But while probes are allowed, it does not wait if from has no message to probe with, or
// if the latest probe of from proved nothing: then only parked messages can show that the
// dependency is back.
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

// parkedAgain is how long a parked message waits for a breaker before it asks again.
const parkedAgain = 500 * time.Millisecond

var (
	errProbesAlone = errors.New("guard: parked messages wait for the breaker of their source")
	errShut        = fmt.Errorf("%w: guard: nothing is parked while the breaker is not closed", dlq.ErrPutOff)
)

// shut tells whether the source's breaker is not closed.
func (s *Source[M]) shut() bool { return s.c.gate != nil && !s.c.gate.Closed() }

// waitsToProbe tells whether parked messages have to wait for the source's breaker. They wait if
// the breaker is not closed, and either no probe is allowed, or the source has a message to probe
// with that may prove something. A probe that follows a parked message, or finds no room behind
// it, proves nothing.
func (s *Source[M]) waitsToProbe() bool {
	if !s.shut() {
		return false
	}
	now := s.g.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.c.gate.Breaker.Snapshot(now)
	return b.Forced || b.Barred || b.Held || s.c.callable() && !s.c.probeProvedNothing
}

// callable tells whether a handler has a message, or may get one before a letter is written or a
// credit comes.
func (c *machine[M]) callable() bool {
	return c.count[processing]+c.ready.len()+c.again.len()+c.retryWaits[ReasonNone]+c.retryWaits[ReasonStorm] > 0 ||
		c.order() == OrderNone && c.queued > 0
}

// park parks the message of a letter. parked is false if it is to be dead-lettered.
func (l letter[M]) park(ctx context.Context, r *dlq.Record) (parked bool, err error) {
	s := l.s
	of := cmp.Or(s.from, parent(s)) // the source that has the breaker
	switch {
	case s.parker == nil || r.Permanent || !s.parker.Parks(l.it.m):
		return false, nil
	case r.Reason == dlq.ReasonAttempts && of.waitsToProbe():
		return true, errShut // the message may fail for the reason that the breaker is open for
	case r.Reason == dlq.ReasonAttempts: // breaker closed, or only the message behind it can be the next probe
	case r.Reason != dlq.ReasonPoisonHead && r.Reason != dlq.ReasonGuess:
		return false, nil
	}
	err = apart("port's Park", func() error { return s.parker.Park(ctx, l.it.m, r) })
	if errors.Is(err, dlq.ErrTooLarge) {
		return false, nil
	}
	return true, err
}
