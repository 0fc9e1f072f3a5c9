// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package amqp

import (
	"context"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// A hold that lasts longer than the broker lets a delivery be unsettled is sat
// out without a channel:
//
//	held for half of the consumer timeout ── park ──▶ no channel
//	the source would admit a message ── awaitAdmission ──▶ a narrow epoch: prefetch 1, for the probes
//	nothing holds it, and a message got through ── widen ──▶ the whole prefetch, at a ramp

// park ends an epoch in which a delivery was unsettled for half of the consumer
// timeout. Where nothing holds the source its handlers are too slow for the
// prefetch, or its rate limit too low: then the next has half of it.
func (e *epoch) park() (outcome, error) {
	c, st := e.c, e.src.State()
	held := e.narrow // a prefetch of 1 is never too much
	for _, h := range st.Holds {
		switch h.Reason {
		case guard.ReasonBackpressure:
			held = held || h.Until > 0
		case guard.ReasonLimiter:
			held = held || st.Tally.Acked == 0 // it lets nothing through at all
		default:
			held = true
		}
	}
	c.o.log.Warn("closing the channel: a delivery was unsettled for half of the consumer timeout",
		"source", c.o.name, "held", held, "consumer_timeout", c.o.timeout, "prefetch", c.prefetch)
	if !held {
		c.prefetch = max(c.prefetch/2, c.policy.Workers, 1)
		return epochLost, nil
	}
	return epochParked, nil
}

// awaitAdmission waits until the source would admit a message: nothing holds it,
// or its breaker has room for a probe. false when ctx ends first.
func (e *epoch) awaitAdmission(ctx context.Context) bool {
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for !admits(e.src.State()) {
		select {
		case <-look.C:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// admits tells whether a source without messages would try one.
func admits(st guard.State) bool {
	for _, h := range st.Holds {
		switch h.Reason {
		case guard.ReasonOperator:
			return false
		case guard.ReasonBackpressure: // a handler asked for time
			if h.Until > 0 {
				return false
			}
		case guard.ReasonBreaker:
			// A closed one is held by a wider scope, which others' probes open.
			if h.Until > 0 || st.Breaker.State.String() == "closed" {
				return false
			}
		default:
		}
	}
	return true
}

// settled tells whether what held the source is over for a narrow epoch. The
// holds alone do not say so: the handler may ask for time again, or the dead-letter
// writer be down still, and that shows only when a message has got through.
//
// A failure is as good as an ack where the failed message holds up nobody, or can
// be dead-lettered: what that takes, witnesses and a breaker with something to
// count, needs more than one message.
func (e *epoch) settled() bool {
	st := e.src.State()
	ordered := st.Settings.Order == guard.OrderSource
	for _, h := range st.Holds {
		switch h.Reason {
		case guard.ReasonBreaker, guard.ReasonStorm, guard.ReasonOperator:
			return false
		case guard.ReasonDLQ:
			if ordered {
				return false
			}
		default:
		}
	}
	through := st.Tally.Acked + st.Tally.DeadLettered
	if !ordered || e.c.o.letters != nil && st.Budget >= 1 && st.Account.Settling == 0 {
		through += st.Tally.Failures
	}
	return through > 0
}

// widen replaces the consumer by one with the whole prefetch: a prefetch is
// the consumer's from its beginning.
//
// A delivery that is on its way when its consumer is cancelled goes to the tail
// of a quorum queue. So acks and rejects are kept back until the one delivery that
// may be out has come: then nothing else is on its way. When none comes there is
// nothing to be gained either, and the next look tries again.
func (e *epoch) widen(ctx context.Context) error {
	e.port.hold()
	defer e.port.release()
	for deadline := time.Now().Add(settleTime); e.port.tags.open() == 0; time.Sleep(settleTime / 50) {
		if time.Now().After(deadline) || ctx.Err() != nil {
			return nil
		}
	}
	if err := e.ch.Cancel(e.tag, false); err != nil {
		return err
	}
	select {
	case <-e.read:
	case <-ctx.Done():
		return nil
	}
	e.narrow = false
	e.pace.begin()
	return e.subscribe(e.c.prefetch)
}
