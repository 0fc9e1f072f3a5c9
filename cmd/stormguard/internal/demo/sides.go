// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/console"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// side is a way to consume: unguarded or guarded.
type side interface {
	name() string
	how() string // one line for people
	// consume calls handle for one message after the other until ctx ends.
	consume(ctx context.Context, p plumbing, handle handler) error
	// look returns the state of the side now. Any goroutine may call it at any time
	// during consume.
	look() look
}

// look is the state of a side for the live view, apart from the ledger's counts.
type look struct {
	guarded      bool
	breaker      string        // closed, open or half-open
	probe        time.Duration // until the next probe
	storm        bool
	draining     bool
	hold, window int // unsettled messages, and the most that the guard takes
}

// unguarded consumes as most programs do.
type unguarded struct{ on platform }

func (unguarded) name() string  { return "unguarded" }
func (s unguarded) how() string { return s.on.unguarded }
func (unguarded) look() look    { return look{} }

func (unguarded) consume(ctx context.Context, p plumbing, handle handler) error {
	return p.unguarded(ctx, handle)
}

// guarded consumes through the guard, with its defaults.
type guarded struct {
	on      platform
	literal bool
	console string                       // listen address of the console; empty: none
	running *atomic.Pointer[guard.Guard] // nil unless consume runs
}

func newGuarded(on platform, literal bool, console string) guarded {
	return guarded{on: on, literal: literal, console: console, running: new(atomic.Pointer[guard.Guard])}
}

func (guarded) name() string  { return "guarded" }
func (s guarded) how() string { return s.on.guarded }

// policy scales the storm thresholds down, unless literal is set, so that an
// outage of seconds can be a storm. All other settings are defaults.
func (s guarded) policy() guard.Policy {
	if s.literal {
		return guard.Policy{}
	}
	return guard.Policy{Storm: dlq.StormConfig{Age: 3 * time.Second, Window: 10 * time.Second, ClearFor: 2 * time.Second}}
}

func (s guarded) consume(ctx context.Context, p plumbing, handle handler) (err error) {
	g, err := guard.New(guard.Config{Group: "demo", Policy: s.policy()}, guard.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		return err
	}
	s.running.Store(g)
	defer func() {
		s.running.Store(nil)
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		_, closeErr := g.Close(end)
		err = errors.Join(err, closeErr)
	}()
	stop, err := s.serve(g)
	if err != nil {
		return err
	}
	defer stop()
	return p.guarded(ctx, g, func(ctx context.Context, body []byte) error {
		done := guard.Calls(ctx, "dependency") // for the console's topology
		err := handle(ctx, body)
		done(err)
		return err
	})
}

// serve serves the console of the guard, if it has an address, until stop is
// called.
func (s guarded) serve(g *guard.Guard) (stop func(), err error) {
	if s.console == "" {
		return func() {}, nil
	}
	c, err := console.New(console.Config{Process: "demo"}, g)
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", s.console) //nolint:noctx // it opens at once or not
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("--console %q: %w", s.console, err)
	}
	server := &http.Server{Handler: c, ReadHeaderTimeout: time.Second}
	served := make(chan struct{})
	go func() { defer close(served); _ = server.Serve(l) }()
	return func() { c.Close(); _ = server.Close(); <-served }, nil
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
		// The feed has a part of the window. So the largest hold is smaller than the
		// window: intake stops there.
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
