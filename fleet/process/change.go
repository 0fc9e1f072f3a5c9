// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package process

import (
	"context"
	"errors"
	"time"

	"github.com/stormguard-mq/stormguard/crdt/gossip"
	"github.com/stormguard-mq/stormguard/fleet"
)

var (
	// ErrAlone means that there is no fleet: the process has no roster.
	ErrAlone = errors.New("process: alone")

	// ErrMoot means that what was asked for cannot be done any more: the member is
	// gone, or has started again.
	ErrMoot = errors.New("process: the request is moot")
)

const (
	askEvery = 5 * time.Millisecond
	leaveFor = 10 * time.Second // of Leave, if its context has no deadline
)

// Propose asks for a change of the charter, waits until it is chosen, and returns
// its number; see [fleet.Charters.Propose]. When ctx ends first it may be chosen
// still. Status says who has not applied it.
func (p *Process) Propose(ctx context.Context, change fleet.Change) (number uint64, err error) {
	if p.charters == nil {
		return 0, ErrAlone
	}
	ticket, err := p.charters.Propose(p.clock(), change)
	if err != nil {
		return 0, err
	}
	if number, err = p.outcome(ctx, ticket); err == nil {
		kind := fleet.EntryCharter
		if change.Reset {
			kind = fleet.EntryReset
		}
		p.write(fleet.Entry{Kind: kind, Number: number, Subject: p.self.Name, Text: signed(ctx, change.String())})
	}
	return number, err
}

// Evict frees the share of a member that is gone for good, and ends its life for
// the gossip; see [fleet.Charters.Evict] for what the operator asserts by it.
func (p *Process) Evict(ctx context.Context, name string) (number uint64, err error) {
	if p.charters == nil {
		return 0, ErrAlone
	}
	life := p.lifeOf(name)
	ticket, err := p.charters.Evict(p.clock(), name)
	if err != nil {
		return 0, err
	}
	if number, err = p.outcome(ctx, ticket); err == nil {
		if p.lifeOf(name) == life { // a later one may join
			p.node.Evict(name)
		}
		p.write(fleet.Entry{Kind: fleet.EntryEvicted, Number: number, Subject: name, Text: signed(ctx, "")})
	}
	return number, err
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

// lifeOf is the life of a name that the gossip knows, 0 if it knows none.
func (p *Process) lifeOf(name string) uint64 {
	for _, peer := range p.node.Peers() {
		if peer.Name == name {
			return peer.Incarnation
		}
	}
	return 0
}

// outcome waits until what a ticket stands for is chosen.
func (p *Process) outcome(ctx context.Context, ticket uint64) (number uint64, err error) {
	err = p.until(ctx, func() (done bool, _ error) {
		number, done = p.charters.Outcome(ticket)
		return done, nil
	})
	if err == nil && number == 0 {
		err = ErrMoot
	}
	return number, err
}

// until asks, again and again, whether the charters have come to something.
func (p *Process) until(ctx context.Context, ask func() (done bool, err error)) error {
	p.node.Kick()
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
// can spare. Without a majority of the roster it waits until ctx ends. A founder need
// not call it: one that is not in the roster any more, since it left or was evicted,
// asks for its founding weight by itself when it starts again.
func (p *Process) Join(ctx context.Context, weight int) error {
	if p.charters == nil {
		return ErrAlone
	}
	member := func() bool {
		s := p.charters.Status(p.clock())
		return s.Member && s.Settled && !s.Leaving
	}
	if err := p.charters.Join(p.clock(), weight); err != nil && !(errors.Is(err, fleet.ErrMember) && member()) {
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
	switch err := p.charters.Leave(now, now+within); {
	case errors.Is(err, fleet.ErrMember):
		return nil // no member, or the last: nobody waits for its share
	case err != nil:
		return err
	}
	return p.until(ctx, func() (bool, error) { return p.charters.Left(p.clock()) })
}
