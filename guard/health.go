// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"
)

// WithHealthCheck checks a dependency once in each period, from 10ms to 1h: 1s is a good
// value. The check runs on a goroutine of the Guard, one at a time. It must return when
// its context ends, which is after the period. Nil means that the dependency is well. An
// error, a panic or a check that does not return in time means that it is not.
//
// While the check fails, a failure of [ClassUnknown] counts as [ClassDependency]: its
// message is not dead-lettered, and no message behind it is tried. While the check passes,
// a message that keeps failing is poison. The first check that passes after a failed one
// ends the open periods of all breakers. So a recovery is noticed within a period and the
// time of a call.
//
// The check must do what the handlers do, as far as it can. A check that only tests
// whether a port is open passes while a database refuses every write: the messages of
// that outage then count as poison. The default is no check.
func WithHealthCheck(check func(context.Context) error, period time.Duration) Option {
	return func(g *Guard) { g.health = &health{check: check, period: period} }
}

// The shortest and the longest period of a health check.
const (
	minHealthPeriod = 10 * time.Millisecond
	maxHealthPeriod = time.Hour
)

// health is the health check of a Guard, and its results.
type health struct {
	check   func(context.Context) error
	period  time.Duration
	passed  atomic.Uint64 // checks that passed
	failing atomic.Bool   // the latest check failed
}

func (h *health) validate() error {
	var p problems
	if h.check == nil {
		p.addf("WithHealthCheck: the check must not be nil; leave the option out for none")
	}
	p.within("WithHealthCheck: period", h.period, minHealthPeriod, maxHealthPeriod)
	return errors.Join(p...)
}

// run calls the check until ctx ends. If a check does not return, run calls no other.
func (h *health) run(ctx context.Context, g *Guard) {
	ticker := time.NewTicker(h.period)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		asked, end := context.WithTimeout(ctx, h.period)
		answer := make(chan error, 1)
		g.running.Go(func() {
			answer <- apart("health check", func() error { return h.check(asked) })
		})
		var err error
		late := false
		select {
		case err = <-answer:
		case <-asked.Done():
			if ctx.Err() == nil {
				h.tell(g, asked.Err())
			}
			select {
			case err = <-answer:
				late = true // this answer is too old: the next check decides
			case <-ctx.Done():
			}
		}
		end()
		switch {
		case ctx.Err() != nil:
			return
		case !late:
			h.tell(g, err)
		}
	}
}

// tell takes the result of a check.
func (h *health) tell(g *Guard, err error) {
	if err != nil {
		if !h.failing.Swap(true) {
			g.log.Warn(lineCheck, "error", err)
		}
		return
	}
	h.passed.Add(1)
	if !h.failing.Swap(false) {
		return
	}
	g.ends.Info(lineCheckWell)
	g.scopes.Hasten(g.now())
	for _, s := range g.all() {
		s.hasten(g.now())
	}
}

// hasten wakes the messages that wait for their next probe.
func (s *Source[M]) hasten(now time.Duration) {
	s.mu.Lock()
	for _, it := range slices.Clone(s.c.due) {
		if it.reason == ReasonNone && it.probes > 0 {
			s.c.wake(it)
		}
	}
	s.unlock(now)
	s.nudge()
}

func (f *Func[M]) hasten(time.Duration) { f.nudge() }
