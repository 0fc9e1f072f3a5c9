// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/adapters/nats"
	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// guarded consumes through the guard, with its defaults.
type guarded struct {
	literal bool
	running *atomic.Pointer[guard.Guard] // while consume runs
}

func newGuarded(literal bool) guarded {
	return guarded{literal: literal, running: new(atomic.Pointer[guard.Guard])}
}

func (guarded) name() string { return "guarded" }
func (guarded) how() string  { return "nats.Consume(ctx, g, consumer, handle)" }

// policy scales the storm thresholds down, so that an outage of seconds can be
// a storm. All else is the default.
func (s guarded) policy() guard.Policy {
	if s.literal {
		return guard.Policy{}
	}
	return guard.Policy{Storm: dlq.StormConfig{Age: 3 * time.Second, Window: 10 * time.Second, ClearFor: 2 * time.Second}}
}

func (s guarded) consume(ctx context.Context, p *plumbing, handle handler) (err error) {
	letters, err := nats.NewDLQ(ctx, p.consumerJS, nats.DLQConfig{Stream: p.dlqStream, Subject: p.dlqSubject})
	if err != nil {
		return err
	}
	g, err := guard.New(guard.Config{Group: "demo", Policy: s.policy()})
	if err != nil {
		return err
	}
	s.running.Store(g)
	defer func() {
		s.running.Store(nil)
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		_, closeErr := g.Close(end)
		err = errors.Join(err, closeErr)
	}()
	return nats.Consume(ctx, g, p.consumer, func(ctx context.Context, m jetstream.Msg) error { return handle(ctx, m) },
		nats.WithDeadLetters(letters), nats.WithStopTimeout(5*time.Second))
}

func (s guarded) look() look {
	l := look{guarded: true, breaker: breaker.Closed.String()}
	g := s.running.Load()
	if g == nil {
		return l
	}
	for _, source := range g.Sources() {
		st := source.State()
		l.breaker, l.storm = st.Breaker.State.String(), st.Storm.Active
		// Part of the window is the feed's: full is where intake stops.
		l.hold = st.Account.Unsettled()
		l.window = l.hold + st.Room
		for _, h := range st.Holds {
			switch h.Reason {
			case guard.ReasonBreaker:
				l.probe = h.Until
			case guard.ReasonBackpressure:
				l.draining = l.draining || st.Breaker.State == breaker.Closed && h.Until > 0
			default:
			}
		}
	}
	return l
}
