// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// handler is the work that both sides do for a message.
type handler func(context.Context, jetstream.Msg) error

// side is a way to consume.
type side interface {
	name() string
	how() string // in a line, for people
	// consume calls handle for one message after the other until ctx ends.
	consume(ctx context.Context, p *plumbing, handle handler) error
	// look says what the side does at this instant; it may be called at any
	// time during consume.
	look() look
}

// look is what the live view shows of a side, apart from the ledger's counts.
type look struct {
	guarded      bool
	breaker      string        // closed, open or half-open
	probe        time.Duration // until the next probe
	storm        bool
	draining     bool
	hold, window int
}

// trial is what a run leaves.
type trial struct {
	figures     Figures
	end         time.Duration
	calls       []float64 // per second, over the run
	successes   []float64
	deadLetters []float64
}

const (
	// curveSteps is the resolution of a trial's curves.
	curveSteps = 240
	// patience is how long after the last publish a run may take to settle
	// everything before it is measured as it is.
	patience = 45 * time.Second
	// frame is how often the view gets a sample.
	frame = 100 * time.Millisecond
)

// stage runs one side: publisher, outage, consumer. It returns when everything
// is settled.
//
// Goroutines: publisher, outage, consumer and view, all ended before it returns.
func stage(parent context.Context, cfg Config, b *broker, s side, v view) (t trial, err error) {
	p, err := b.lay(parent, strings.ToUpper(rand.Text()[:8]))
	if err != nil {
		return t, err
	}
	defer p.remove(parent)
	dep, err := newDependency(parent)
	if err != nil {
		return t, err
	}
	defer dep.down()
	to := &client{addr: dep.addr}
	defer to.close()

	ctx, cancel := context.WithCancelCause(parent)
	defer cancel(nil)
	ledger := &Ledger{}
	start := time.Now()
	clock := func() time.Duration { return time.Since(start) }
	handle := func(ctx context.Context, m jetstream.Msg) error {
		o, err := parseOrder(m.Data())
		if err != nil {
			return err
		}
		begin := clock()
		err = to.call(ctx, o.ID)
		ledger.Call(o.ID, begin, clock(), err == nil)
		return err
	}
	fail := func(err error) {
		if err != nil {
			cancel(err)
		}
	}

	consumed := make(chan struct{})
	consuming, stop := context.WithCancel(ctx)
	defer func() { stop(); <-consumed }()
	go func() {
		defer close(consumed)
		if err := s.consume(consuming, p, handle); err != nil {
			fail(fmt.Errorf("consume: %w", err))
		} else if consuming.Err() == nil {
			fail(errors.New("consume: it ended by itself"))
		}
	}()
	broken := make(chan struct{})
	defer func() { cancel(nil); <-broken }()
	go func() {
		defer close(broken)
		fail(outage(ctx, cfg, dep, clock, ledger))
	}()
	published := make(chan struct{})
	defer func() { cancel(nil); <-published }()
	go func() {
		defer close(published)
		fail(publish(ctx, p.publishJS, p.subject, cfg, clock, ledger))
	}()
	watched := make(chan struct{})
	watching, unwatch := context.WithCancel(ctx)
	defer func() { unwatch(); <-watched }()
	go func() {
		defer close(watched)
		watch(watching, cfg, s, p, clock, ledger, v)
	}()

	if err := settle(ctx, p, published, broken); err != nil {
		return t, err
	}
	end := clock()
	unwatch()
	<-watched
	stop()
	<-consumed
	if ctx.Err() != nil { // stopping failed
		return t, context.Cause(ctx)
	}
	graves, err := p.exhume(ctx, start)
	if err != nil {
		return t, fmt.Errorf("demo: read the DLQ stream: %w", err)
	}
	t.end = end
	t.figures = ledger.Figures(graves, max(10, cfg.Rate/10), end)
	t.calls, t.successes, t.deadLetters = ledger.curves(graves, curveSteps, end)
	return t, nil
}

// outage kills the dependency and brings it back, at the instants of cfg.
func outage(ctx context.Context, cfg Config, dep *dependency, clock func() time.Duration, ledger *Ledger) error {
	sleep := func(until time.Duration) error {
		timer := time.NewTimer(until - clock())
		defer timer.Stop()
		select {
		case <-timer.C:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err := sleep(cfg.WarmUp); err != nil {
		return err
	}
	ledger.Down(clock())
	dep.down()
	if err := sleep(cfg.WarmUp + cfg.Outage); err != nil {
		return err
	}
	err := dep.restart(ctx)
	ledger.Up(clock())
	return err
}

// settle waits until everything is published and the server knows of nothing
// unsettled. After patience it lets the run be measured as it is.
func settle(ctx context.Context, p *plumbing, published, broken <-chan struct{}) error {
	for _, done := range []<-chan struct{}{published, broken} {
		select {
		case <-done:
		case <-ctx.Done():
		}
	}
	give := time.NewTimer(patience)
	defer give.Stop()
	tick := time.NewTicker(frame)
	defer tick.Stop()
	for idle := 0; idle < 3; { // thrice in a row: a nak may be on its way
		select {
		case <-tick.C:
		case <-give.C:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		ok, err := p.idle(ctx)
		if err != nil {
			return fmt.Errorf("demo: consumer info: %w", err)
		}
		if idle++; !ok {
			idle = 0
		}
	}
	return nil
}

// watch shows a sample of the run every frame.
func watch(ctx context.Context, cfg Config, s side, p *plumbing, clock func() time.Duration, ledger *Ledger, v view) {
	buried := 0
	v.begin(s)
	defer v.end()
	tick := time.NewTicker(frame)
	defer tick.Stop()
	for i := 0; ; i++ {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if i%3 == 0 {
			if n, err := p.buried(ctx); err == nil {
				buried = n
			}
		}
		x := sample{at: clock(), look: s.look(), dead: buried}
		x.published, x.handled, x.failed = ledger.counts()
		x.phase = phaseAt(cfg, x.at)
		v.show(x)
	}
}

// phase is a part of a run.
type phase string

const (
	warmUp   phase = "warm-up"
	down     phase = "outage"
	recovery phase = "recovery"
)

func phaseAt(cfg Config, at time.Duration) phase {
	switch {
	case at < cfg.WarmUp:
		return warmUp
	case at < cfg.WarmUp+cfg.Outage:
		return down
	}
	return recovery
}
