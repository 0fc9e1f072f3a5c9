// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/internal/escrow"
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
	"github.com/stormguard-mq/stormguard/internal/gossip"
	"github.com/stormguard-mq/stormguard/internal/operator"
	"github.com/stormguard-mq/stormguard/limiter"
)

// errAlone means that there is no fleet: the process has no roster.
var errAlone = errors.New("fleet: alone")

const (
	askEvery  = 5 * time.Millisecond
	leaveFor  = 10 * time.Second // of Leave, if its context has no deadline
	settleFor = 2 * time.Second  // how long a request that was given up waits for its outcome
)

// asked is an operator's request, for the journal.
type asked struct {
	ticket uint64
	entry  fleetstate.Entry
}

// A Change is what an operator wants changed. What is unset stays as it is.
type Change struct {
	// Number is that of the configuration to change; 0 is the newest that the process knows.
	Number uint64 `json:"number,omitempty"`
	// Limit is that of each key that has no limit of its own.
	Limit *limiter.Limit `json:"limit,omitempty"`
	// Limits are those of single keys; nil takes one away, so that Limit holds.
	Limits map[string]*limiter.Limit `json:"limits,omitempty"`
	// Weights are those of members; 0 makes one that only borrows.
	Weights map[string]int `json:"weights,omitempty"`
	// Reset fills all buckets up, once: up to Burst more is admitted.
	Reset bool `json:"reset,omitempty"`
}

func (c Change) change() fleetstate.Change {
	out := fleetstate.Change{Limit: (*escrow.Limit)(c.Limit), Weights: c.Weights, Reset: c.Reset}
	for key, l := range c.Limits {
		if out.Limits == nil {
			out.Limits = map[string]*escrow.Limit{}
		}
		out.Limits[key] = (*escrow.Limit)(l)
	}
	return out
}

// Errors of changes.
var (
	// ErrConflict means that the configuration moved on: the number that was to be
	// changed is not the newest. Nothing was changed. The text tells the newest.
	ErrConflict = fleetstate.ErrConflict

	// ErrUnknown means that nobody can say any more whether a request was made.
	ErrUnknown = fleetstate.ErrUnknown
)

// Set changes limits, weights or fill of the configuration of a number, and returns the number
// of the one that it made. It is made upon that one, or never. Set returns when that is
// written; Status says who has not applied it. The errors are [ErrConfig] and
// [ErrConflict], and of a name that is no member, or of too much under way: too many requests
// of this process, or configurations that some member has not applied. Then nothing was asked
// for.
//
// When ctx or this process ends before, the change is not made any more: the error is ctx's,
// or [ErrClosed]. If a write is under way then, Set waits up to 2 s more for
// its outcome, and returns [ErrUnknown] if it cannot learn that; this process
// still sees to it that the write does not happen later.
func (p *Process) Set(ctx context.Context, change Change) (uint64, error) {
	if p.config == nil {
		return 0, errAlone
	}
	kind := fleetstate.EntryConfiguration
	if change.Reset {
		kind = fleetstate.EntryReset
	}
	asked := change.change()
	e := fleetstate.Entry{Kind: kind, Subject: p.self.Name, Text: signed(ctx, asked.String())}
	return p.ask(ctx, change.Number, e, func(number uint64) (uint64, error) {
		return p.config.Set(p.clock(), number, asked, p.asker(ctx))
	})
}

// Evict frees the share of a member that is gone for good, upon the configuration of a
// number, 0 for the newest; see Set. It is the operator's word that the process does not
// mint: one that runs behind a cut adds what its share mints until it hears of the
// eviction. Then it asks for its share again.
func (p *Process) Evict(ctx context.Context, number uint64, name string) (uint64, error) {
	if p.config == nil {
		return 0, errAlone
	}
	e := fleetstate.Entry{Kind: fleetstate.EntryEvicted, Subject: name, Text: signed(ctx, "")}
	return p.ask(ctx, number, e, func(number uint64) (uint64, error) {
		return p.config.Evict(p.clock(), number, name, p.asker(ctx))
	})
}

// asker is who asks, for the log of the configuration.
func (p *Process) asker(ctx context.Context) string {
	if who, ok := operator.From(ctx); ok {
		return who.String() + " at " + p.self.Name
	}
	return p.self.Name
}

// ask has a request made, and waits for its outcome.
func (p *Process) ask(ctx context.Context, number uint64, e fleetstate.Entry, wish func(number uint64) (uint64, error)) (uint64, error) {
	select {
	case <-p.node.Done():
		return 0, p.inFleet()
	default:
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	if number == 0 {
		err := p.until(ctx, func() (bool, error) {
			number, _ = p.config.Number()
			return number > 0, nil
		})
		if err != nil {
			return 0, err
		}
	}
	ticket, err := wish(number)
	if err != nil {
		return 0, err
	}
	p.mu.Lock()
	p.asked = append(p.asked, asked{ticket, e})
	p.mu.Unlock()
	var made uint64
	settled := false
	outcome := func() (_ bool, err error) {
		if made, settled, err = p.config.Outcome(ticket); settled {
			p.writeDown()
		}
		return settled, err
	}
	err = p.until(ctx, outcome)
	if settled {
		return made, err
	}
	p.config.Cancel(p.clock(), ticket)
	late, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleFor)
	defer cancel()
	why := err
	switch err = p.until(late, outcome); {
	case !settled:
		err = fmt.Errorf("%w: the register has not answered", fleetstate.ErrUnknown)
	case err == nil:
		return made, nil
	}
	return 0, errors.Join(why, err)
}

// writeDown has the journal tell of requests that were made.
func (p *Process) writeDown() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked = slices.DeleteFunc(p.asked, func(a asked) bool {
		number, done, err := p.config.Outcome(a.ticket)
		if done && err == nil {
			a.entry.Number = number
			p.write(a.entry)
		}
		return done
	})
}

// Load takes in the operator's limits and roster of a number, in a static configuration,
// while the process runs: Limit, Limits and Roster count, the rest stays. Raise the number
// by one with each change: of a number that leaves others out a process uses nothing until
// it is complete. The same again changes nothing. The errors are [ErrConfig], also for limits
// and a roster of more than 65,536 bytes, and of another configuration that is known by that
// number; then nothing was taken in.
func (p *Process) Load(number uint64, limits Limits) error {
	if p.config == nil {
		return errAlone
	}
	defer p.poke()
	return p.config.Load(p.clock(), number, limits.config().Configuration())
}

// maxText is what the journal keeps of a text, in bytes.
const maxText = 128

// signed ends a text of the journal with the operator who asked, if one did.
func signed(ctx context.Context, text string) string {
	who, ok := operator.From(ctx)
	if !ok {
		return text
	}
	by := "by " + who.String()
	if text == "" {
		return by
	}
	by = ", " + by
	return text[:min(len(text), max(maxText-len(by), 0))] + by
}

// until asks, again and again, whether the configuration has come to something.
func (p *Process) until(ctx context.Context, ask func() (done bool, err error)) error {
	p.poke()
	tick := time.NewTicker(askEvery)
	defer tick.Stop()
	for {
		if done, err := ask(); done {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		case <-p.node.Done():
			return p.inFleet()
		case <-p.ctx.Done():
			return gossip.ErrClosed
		}
	}
}

// Join asks for a share of the given weight, and waits until this process has one:
// at once if it is a member already. Until then it borrows, as a learner, what others
// can spare. While the register is away it waits until ctx ends. A process that
// Config.Limits names need not call it.
func (p *Process) Join(ctx context.Context, weight int) error {
	if p.config == nil {
		return errAlone
	}
	member := func() bool {
		s := p.config.Status(p.clock())
		return s.Member && s.Settled && !s.Leaving
	}
	if err := p.config.Join(p.clock(), weight); err != nil && !(errors.Is(err, fleetstate.ErrMember) && member()) {
		return err
	}
	return p.until(ctx, func() (bool, error) { return member(), nil })
}

// Leave gives the share to the others, tells everybody that this incarnation is over, and
// closes the process. It takes until ctx ends at most, 10 s if ctx has no deadline;
// a share that is not handed over by then is stranded until the name is back or is
// evicted, and the error says so. A member that is to come back under its name, as in
// a restart, is closed without Leave: that keeps its share for it. Close the guards
// that use its limits first: after Leave these deny everything.
func (p *Process) Leave(ctx context.Context) error {
	defer p.Close()
	if p.node == nil {
		return nil
	}
	until, ok := ctx.Deadline()
	if !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, leaveFor)
		defer cancel()
		until, _ = ctx.Deadline()
	}
	p.write(fleetstate.Entry{Kind: fleetstate.EntryLeft, Subject: p.self.Name})
	return errors.Join(p.giveUp(ctx, time.Until(until)*9/10), p.node.Leave(ctx))
}

// giveUp leaves the roster.
func (p *Process) giveUp(ctx context.Context, within time.Duration) error {
	now := p.clock()
	switch err := p.config.Leave(now, now+within); {
	case errors.Is(err, fleetstate.ErrMember):
		return nil // no member, or the last: nobody waits for its share
	case err != nil:
		return err
	}
	return p.until(ctx, func() (bool, error) { return p.config.Left(p.clock()) })
}
