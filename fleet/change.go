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

// errAlone means that the process has no roster, so there is no fleet.
var errAlone = errors.New("fleet: alone")

const (
	askEvery  = 5 * time.Millisecond
	leaveFor  = 10 * time.Second // limit of Leave if its context has no deadline
	settleFor = 2 * time.Second  // how long a cancelled request waits for its outcome
)

// asked is an operator's request that is to be written to the journal once it is made.
type asked struct {
	ticket uint64
	entry  fleetstate.Entry
}

// A Change has an operator's changes. Unset fields change nothing.
type Change struct {
	// Number is the configuration to change; 0 is the newest that the process knows.
	Number uint64 `json:"number,omitempty"`
	// Limit is the new limit of each key that has no limit of its own.
	Limit *limiter.Limit `json:"limit,omitempty"`
	// Limits are new limits of single keys. nil removes a key's own limit, so that Limit counts.
	Limits map[string]*limiter.Limit `json:"limits,omitempty"`
	// Weights are new weights of members. A member with weight 0 only borrows.
	Weights map[string]int `json:"weights,omitempty"`
	// Reset fills all buckets once. The fleet may then admit up to Burst more.
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
	// ErrConflict means that the configuration to change is no longer the newest. Nothing was
	// changed. The text has the newest number.
	ErrConflict = fleetstate.ErrConflict

	// ErrUnknown means that the outcome of a request can no longer be known.
	ErrUnknown = fleetstate.ErrUnknown
)

// Set changes limits or weights, or fills the buckets. It returns the number of the new
// configuration once that is written; Status lists the members that have not applied it. Set needs
// a register: a static configuration is changed by [Process.Load].
//
// The change is made to the configuration with the number change.Number, or never. If that is no
// longer the newest, the error is [ErrConflict]. Other errors are [ErrConfig], a name that is no
// member, and too much under way: too many requests of this process, or too many configurations
// that a member has not applied. After any of these errors nothing was changed.
//
// If ctx or this process ends first, the change is not made: the error is that of ctx, or
// [ErrClosed]. If a write is under way when ctx ends, Set waits up to 2 s for its outcome. If Set
// does not learn the outcome, it returns [ErrUnknown] as well. As long as this process runs, it sees
// to it that the write does not happen later.
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

// Evict frees the share of a member that is gone for good. number is the configuration to change, 0
// for the newest. Errors and waiting are those of [Process.Set].
//
// The operator vouches that the process does not mint. A process that still runs, but is cut off,
// adds its share to the limit until it hears of the eviction. Then it asks for its share again.
func (p *Process) Evict(ctx context.Context, number uint64, name string) (uint64, error) {
	if p.config == nil {
		return 0, errAlone
	}
	e := fleetstate.Entry{Kind: fleetstate.EntryEvicted, Subject: name, Text: signed(ctx, "")}
	return p.ask(ctx, number, e, func(number uint64) (uint64, error) {
		return p.config.Evict(p.clock(), number, name, p.asker(ctx))
	})
}

// asker names the operator or program that asks, for the configuration's log.
func (p *Process) asker(ctx context.Context) string {
	if who, ok := operator.From(ctx); ok {
		return who.String() + " at " + p.self.Name
	}
	return p.self.Name
}

// ask makes a request and waits for its outcome.
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

// writeDown writes the requests that were made to the journal.
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

// Load takes new limits and a new roster, in a static configuration, while the process runs. Of
// limits only Limit, Limits and Roster count.
//
// Raise number by one with each change. If a number was skipped, a process uses nothing until the
// configuration is complete. Loading the same again changes nothing.
//
// The error is [ErrConfig] also with a register, and if limits and roster take more than 65,536
// bytes. It is another error if a different configuration has this number, or without a roster.
// After an error nothing has changed.
func (p *Process) Load(number uint64, limits Limits) error {
	if p.config == nil {
		return errAlone
	}
	defer p.poke()
	return p.config.Load(p.clock(), number, limits.config().Configuration())
}

// maxText is how many bytes of a text the journal keeps.
const maxText = 128

// signed appends the operator who asked, if any, to a text of the journal.
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

// until polls ask until it is done, or until ctx, the node or the process ends.
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

// Join asks for a share of the given weight, and waits until this process has it. If it is a member
// already, Join returns at once. Until then the process is a learner: it borrows the tokens that
// others can spare. While the register is away, Join waits until ctx ends. A process that
// Config.Limits names need not call Join.
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

// Leave gives the share to the others, tells them that this incarnation is over, and closes the
// process. It takes until ctx ends at most, or 10 s if ctx has no deadline. If the share was not
// handed over by then, the error says so. The share is then stranded until the name is back or
// evicted.
//
// Close the guards that use its limits first: after Leave these limits deny everything. Before a
// restart under the same name call Close, not Leave: that keeps the share.
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
		return nil // it is no member, or the last one: no process waits for its share
	case err != nil:
		return err
	}
	return p.until(ctx, func() (bool, error) { return p.config.Left(p.clock()) })
}
