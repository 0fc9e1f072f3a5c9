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
)

// trial is the measurement of a run.
type trial struct {
	figures Figures
	end     time.Duration

	// curves: events per second in curveSteps equal steps of the run
	calls       []float64
	successes   []float64
	deadLetters []float64
}

const (
	// curveSteps is the resolution of a trial's curves.
	curveSteps = 240
	// patience is how long a run may take after the last publish to settle all
	// messages. After patience it is measured as it is.
	patience = 45 * time.Second
	// joinTimeout is the time limit for a consumer to reach the broker.
	joinTimeout = 30 * time.Second
	// frame is the time between two samples of the view.
	frame = 100 * time.Millisecond
)

// stage runs one side: publisher, outage and consumer. It returns when all
// messages are settled, or after patience.
//
// Goroutines: publisher, outage, consumer and view; all end before stage returns.
func stage(parent context.Context, cfg Config, b broker, s side, v view) (t trial, err error) {
	p, err := b.lay(parent, strings.ToUpper(rand.Text()[:8]))
	if p != nil {
		defer p.remove(parent)
	}
	if err != nil {
		return t, fmt.Errorf("demo: %w", err)
	}
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
	var start time.Time // set before the first message is published
	clock := func() time.Duration { return time.Since(start) }
	handle := func(ctx context.Context, body []byte) error {
		o, err := parseOrder(body)
		if err != nil {
			return err
		}
		begin := clock()
		err = cfg.failure().of(to.call(ctx, o.ID))
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
	if err := join(ctx, p); err != nil {
		return t, err
	}
	start = time.Now()
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
		fail(publish(ctx, p, cfg, clock, ledger))
	}()
	watched := make(chan struct{})
	watching, unwatch := context.WithCancel(ctx)
	defer func() { unwatch(); <-watched }()
	go func() {
		defer close(watched)
		watch(watching, cfg, s, p, clock, ledger, v)
	}()

	settled, err := settle(ctx, p, ledger, published, broken)
	if err != nil {
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
	if settled { // else the figures show the unsettled messages
		if err := acked(ctx, p, stopTimeout); err != nil {
			return t, err
		}
	}
	graves, err := p.exhume(ctx, start)
	if err != nil {
		return t, fmt.Errorf("demo: read the DLQ: %w", err)
	}
	t.end = end
	t.figures = ledger.Figures(graves, max(10, cfg.Rate/10), end)
	t.calls, t.successes, t.deadLetters = ledger.curves(graves, curveSteps, end)
	return t, nil
}

// outage kills the dependency and brings it back, at the times of cfg.
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

// join waits until the broker knows the consumer: the first message must find it.
func join(ctx context.Context, p plumbing) error {
	give, cancel := context.WithTimeout(ctx, joinTimeout)
	defer cancel()
	ok, err := poll(give, 1, p.joined)
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		return fmt.Errorf("demo: look for the consumer: %w", err)
	case !ok:
		return fmt.Errorf("demo: the broker knew no consumer within %s", joinTimeout)
	}
	return nil
}

// settle waits until all messages are published, and ledger and broker have no
// unsettled message. It returns false after patience: then the run is measured as
// it is.
func settle(ctx context.Context, p plumbing, ledger *Ledger, published, broken <-chan struct{}) (bool, error) {
	for _, done := range []<-chan struct{}{published, broken} {
		select {
		case <-done:
		case <-ctx.Done():
		}
	}
	give, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	ok, err := poll(give, 3, func(ctx context.Context) (bool, error) { // 3 times in a row: a nak may be on its way
		if idle, err := p.idle(ctx); !idle || err != nil {
			return false, err
		}
		buried, err := p.buried(ctx)
		return ledger.unhandled() <= buried, err
	})
	if ctx.Err() != nil {
		return false, context.Cause(ctx)
	}
	if err != nil {
		return false, fmt.Errorf("demo: look for what is left: %w", err)
	}
	return ok, nil
}

// acked checks, after the consumer's end, that all handled messages are settled.
// Some brokers tell this only after the end. An unsettled message would be
// delivered again to the next consumer.
func acked(ctx context.Context, p plumbing, within time.Duration) error {
	give, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	ok, err := poll(give, 3, p.idle)
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		return fmt.Errorf("demo: look for what is left: %w", err)
	case !ok:
		return errors.New("demo: every message was handled, but the broker still has some that were never settled")
	}
	return nil
}

// poll calls ask every frame until it was true n times in a row. It returns false
// if ctx ends before.
func poll(ctx context.Context, n int, ask func(context.Context) (bool, error)) (bool, error) {
	tick := time.NewTicker(frame)
	defer tick.Stop()
	for row := 0; row < n; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return false, nil
		}
		ok, err := ask(ctx)
		if ctx.Err() != nil {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		if row++; !ok {
			row = 0
		}
	}
	return true, nil
}

// watch shows a sample of the run every frame.
func watch(ctx context.Context, cfg Config, s side, p plumbing, clock func() time.Duration, ledger *Ledger, v view) {
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
