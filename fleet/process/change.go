// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package process

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/crdt/gossip"
	"github.com/stormguard-mq/stormguard/fleet"
	"github.com/stormguard-mq/stormguard/limiter"
)

// ErrAlone means that there is no fleet: the process has no roster.
var ErrAlone = errors.New("process: alone")

const (
	askEvery  = 5 * time.Millisecond
	leaveFor  = 10 * time.Second // of Leave, if its context has no deadline
	settleFor = 2 * time.Second  // how long a request that was given up waits for its outcome
)

// asked is an operator's request, for the journal.
type asked struct {
	ticket uint64
	entry  fleet.Entry
}

// Set changes limits, weights or fill of the configuration of a number, and returns the number
// of the one that it made; see [fleet.Configurator.Set]. Number 0 is the newest that this
// process knows. It returns when that is written; Status says who has not applied it.
//
// When ctx or this process ends before, the change is not made any more: the error is ctx's,
// or [gossip.ErrClosed], and [fleet.ErrEnded]. Where a write is under way then, Set waits up to 2 s more for what
// became of it, and returns [fleet.ErrUnknown] if it cannot learn that; this process
// still sees to it that the write does not happen later.
func (p *Process) Set(ctx context.Context, number uint64, change fleet.Change) (uint64, error) {
	if p.config == nil {
		return 0, ErrAlone
	}
	kind := fleet.EntryConfiguration
	if change.Reset {
		kind = fleet.EntryReset
	}
	e := fleet.Entry{Kind: kind, Subject: p.self.Name, Text: signed(ctx, change.String())}
	return p.ask(ctx, number, e, func(number uint64) (uint64, error) {
		return p.config.Set(p.clock(), number, change, p.asker(ctx))
	})
}

// Evict frees the share of a member that is gone for good, upon the configuration of a number:
// see [fleet.Configurator.Evict] for what the operator asserts by it, and Set for the
// rest. One that runs asks for its share again.
func (p *Process) Evict(ctx context.Context, number uint64, name string) (uint64, error) {
	if p.config == nil {
		return 0, ErrAlone
	}
	e := fleet.Entry{Kind: fleet.EntryEvicted, Subject: name, Text: signed(ctx, "")}
	return p.ask(ctx, number, e, func(number uint64) (uint64, error) {
		return p.config.Evict(p.clock(), number, name, p.asker(ctx))
	})
}

// asker is who asks, for the log of the configuration.
func (p *Process) asker(ctx context.Context) string {
	if who, ok := askedBy(ctx); ok {
		return who.String() + " at " + p.self.Name
	}
	return p.self.Name
}

// ask has a request made, and waits for its outcome.
func (p *Process) ask(ctx context.Context, number uint64, e fleet.Entry, wish func(number uint64) (uint64, error)) (uint64, error) {
	select {
	case <-p.node.Done():
		return 0, p.node.Err()
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
		err = fmt.Errorf("%w: the register has not answered", fleet.ErrUnknown)
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

// Load takes in the operator's limits and roster of a number, in a static
// configuration, while the process runs; see [fleet.Configurator.Load].
func (p *Process) Load(number uint64, configuration limiter.Configuration) error {
	if p.config == nil {
		return ErrAlone
	}
	defer p.poke()
	return p.config.Load(p.clock(), number, configuration)
}

// maxText is what the journal keeps of a text, in bytes.
const maxText = 128

// signed ends a text of the journal with the operator who asked, if one did.
func signed(ctx context.Context, text string) string {
	who, ok := askedBy(ctx)
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
			return p.node.Err()
		case <-p.ctx.Done():
			return gossip.ErrClosed
		}
	}
}

// Join asks for a share of the given weight, and waits until this process has one:
// at once if it is a member already. Until then it borrows, as a guest, what others
// can spare. While the register is away it waits until ctx ends. A process that
// Config.Limits names need not call it.
func (p *Process) Join(ctx context.Context, weight int) error {
	if p.config == nil {
		return ErrAlone
	}
	member := func() bool {
		s := p.config.Status(p.clock())
		return s.Member && s.Settled && !s.Leaving
	}
	if err := p.config.Join(p.clock(), weight); err != nil && !(errors.Is(err, fleet.ErrMember) && member()) {
		return err
	}
	return p.until(ctx, func() (bool, error) { return member(), nil })
}

// Leave gives the share to the others, tells everybody that this life is over, and
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
	p.write(fleet.Entry{Kind: fleet.EntryLeft, Subject: p.self.Name})
	return errors.Join(p.giveUp(ctx, time.Until(until)*9/10), p.node.Leave(ctx))
}

// giveUp leaves the roster.
func (p *Process) giveUp(ctx context.Context, within time.Duration) error {
	now := p.clock()
	switch err := p.config.Leave(now, now+within); {
	case errors.Is(err, fleet.ErrMember):
		return nil // no member, or the last: nobody waits for its share
	case err != nil:
		return err
	}
	return p.until(ctx, func() (bool, error) { return p.config.Left(p.clock()) })
}
