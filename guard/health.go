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

// WithHealthCheck asks a dependency each period whether it is well: 1s is a good
// period. The check runs on a goroutine of the Guard, one at a time, and must heed its
// context, which ends after the period. Nil means that the dependency is well; an
// error, a panic or a check that does not return in time that it is not.
//
// While the dependency is not well, a failure of unknown class is the dependency's: its
// message is not dead-lettered, and no other message is tried behind it. While it is
// well, a message that goes on failing is poison. The first check that passes after one
// that failed ends the open periods of all breakers, so that a recovery is noticed
// within a period and the time of a call.
//
// The check must do what the handlers do, as far as it can: one that only asks whether
// a port is open calls a database well that refuses every write, and the messages of
// that outage poison. The default is no check.
func WithHealthCheck(check func(context.Context) error, period time.Duration) Option {
	return func(g *Guard) { g.health = &health{check: check, period: period} }
}

// The periods that a health check may have.
const (
	minHealthPeriod = 10 * time.Millisecond
	maxHealthPeriod = time.Hour
)

// health is what the check of a Guard says.
type health struct {
	check   func(context.Context) error
	period  time.Duration
	passed  atomic.Uint64 // checks that passed
	failing atomic.Bool   // the last one failed
}

func (h *health) validate() error {
	var p problems
	if h.check == nil {
		p.addf("WithHealthCheck: the check must not be nil; leave the option out for none")
	}
	p.within("WithHealthCheck: period", h.period, minHealthPeriod, maxHealthPeriod)
	return errors.Join(p...)
}

// run asks the check until ctx ends. A check that does not return is not asked again.
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
				late = true // an answer from before: the next check tells
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

// tell takes the answer of a check.
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

// hasten wakes what waits for its next probe.
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
