// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/scope"
)

// core is what this process knows of etcd, without goroutine, timer or I/O. A [scope.Machine]
// stands on it. A session tells it what is there (reset, apply, renewed, answer) and asks it what
// to write (next, done).
//
// The core compares what should be in etcd, its own vote above all, with what the watch has told. A
// difference is a write. So it does not matter whether an answer was lost, or a lease with all its
// keys.
type core struct {
	*scope.Machine
	self   crdt.Replica
	keys   layout
	number uint64        // number of our roster
	report func([]event) // called without the lock; must not be nil

	// The lock is the Machine's.
	events  []event       // events to be reported
	work    chan struct{} // capacity 1; a token says that next may have something
	opaque  int           // number of values that could not be read
	leaving bool          // Close was called
	passing bool          // the present step is the writer's own

	// The present session.
	link    link
	members map[string]uint64 // by name: the incarnation that has a lease
	rev     int64             // the watch has told everything up to this revision
	asked   time.Duration     // since when the watch owes a sign of life; never if it has answered
	told    time.Duration     // when the watch last told something
}

// link is our state at etcd.
type link struct {
	up       bool          // there is a session, and operations are written
	ttl      time.Duration // time to live of our lease
	renewed  time.Duration // when the latest renewal of our lease was asked for
	watched  time.Duration // when the latest sign of life that came from the watch was asked for
	born     int64         // revision that created our member key
	settings int64         // revision of the roster
	late     uint64        // number of a later roster, under which we neither decide nor probe; 0 is none
}

// book is what etcd has about a scope, and what must be written.
type book struct {
	*scope.Scope
	c     *core
	rev   int64 // revision of the state's key; 0 is none
	votes map[string]vote
	probe *slot
	last  *heir

	testify *scope.Vote   // the vote for the next owner, still to be written
	asked   time.Duration // the lease of the probe that we take was renewed after this; never if none was
	result  result
	next    scope.State // the state after a failed probe

	busy    bool          // an operation is under way
	barrier int64         // the latest operation is known once core.rev reaches this
	retry   time.Duration // no operation before this
	backoff time.Duration
}

func bookOf(sc *scope.Scope) *book { return sc.Book.(*book) } //nolint:forcetypeassert // there is no other

// vote is a vote in etcd, and the revision that a decision compares.
type vote struct {
	scope.Vote
	rev int64
}

// slot is the probe of a scope.
type slot struct {
	probe
	rev int64
}

// heir is the last owner's vote.
type heir struct {
	scope.Vote
	rev   int64
	heard time.Duration
}

// result is the outcome of a probe that is over but not written yet.
type result uint8

const (
	pending result = iota
	passed
	failed
)

const never = scope.Never

func newCore(cfg Config, self crdt.Replica, now time.Duration) *core {
	c := &core{
		self: self, keys: newLayout(cfg.Prefix), number: cfg.Roster.Number, report: func([]event) {},
		members: make(map[string]uint64), asked: never, work: make(chan struct{}, 1),
	}
	c.Machine = scope.New(now, cfg.Fleet, self.Name, cfg.Roster.Names, substrate{c})
	return c
}

// substrate is the Machine's view of etcd.
type substrate struct{ *core }

// Look reports whether the core is fresh, and a quorum has leases.
func (c substrate) Look(now time.Duration) bool {
	return c.freshLocked(now) && c.Heard(now) >= c.Need()
}

// Heard counts the processes of the roster that have a lease, if the core is fresh. It always counts
// this process, if the roster names it.
func (c substrate) Heard(now time.Duration) (heard int) {
	fresh := c.freshLocked(now)
	for _, n := range c.Names() {
		if _, ok := c.members[n]; n == c.self.Name || ok && fresh {
			heard++
		}
	}
	return heard
}

// MayDecide reports whether the roster names us and no later roster is in force.
func (c substrate) MayDecide() bool { return c.Member() && c.link.late == 0 }

func (c substrate) Book(sc *scope.Scope) scope.Book {
	return &book{Scope: sc, c: c.core, votes: make(map[string]vote), asked: never}
}

// After wakes the writer, and reports events.
func (c substrate) After() func() {
	if len(c.Stirring()) > 0 && !c.passing {
		c.nudge()
	}
	c.passing = false
	events := c.events
	if c.events = nil; len(events) == 0 {
		return nil
	}
	return func() { c.report(events) }
}

// nudge has a writer call next.
func (c *core) nudge() {
	select {
	case c.work <- struct{}{}:
	default:
	}
}

// event is a change of state, to be logged.
type event struct {
	scope string
	state scope.State
}

// freshLocked reports whether the core is fresh, which means that it knows what etcd has: our lease
// cannot be over, and the watch has shown life within the time of a lease. A process that stood
// still finds itself stale, since its lease was renewed before.
func (c *core) freshLocked(now time.Duration) bool {
	return now < min(c.link.renewed, c.link.watched)+c.link.ttl
}

// status reports whether the core is fresh. late is the number of a roster later than ours, or 0.
func (c *core) status(now time.Duration) (fresh bool, late uint64) {
	c.Lock()
	defer c.Unlock()
	return c.freshLocked(now), c.link.late
}

// ours reports whether this process has the probe.
func (b *book) ours() bool { return b.probe != nil && b.probe.holder == b.c.self }

// says returns our vote as it should be in etcd; the zero Vote means none.
func (b *book) says() scope.Vote {
	w := b.Own
	if w.Phase == scope.PhaseOpen && b.Known.Open() { // the vote to open has become a vote of the round
		w = scope.Vote{Phase: scope.PhaseWaiting, At: b.Known.Position, Wants: w.Wants}
	}
	switch {
	case w.At.Gen != b.Known.Gen,
		w.Phase == scope.PhaseClosed, w.Phase == scope.PhaseInherited,
		w.Phase == scope.PhaseWaiting && !w.Wants && w.Failed == 0:
		return scope.Vote{}
	}
	w.Scope, w.Node, w.Version = b.Name, b.c.self, 1
	return w
}

// said reports whether etcd has our vote as it should be.
func (b *book) said() bool { return b.votes[b.c.self.Name].Vote == b.says() }

// Vote returns the vote that etcd has. A vote is gone with the lease of its process.
func (b *book) Vote(_ time.Duration, name string) *scope.Vote {
	if w, ok := b.votes[name]; ok {
		return &w.Vote
	}
	return nil
}

// Write leaves our vote to the comparison of what is there with what should be. A vote that is
// about no round of probes is also left for the next owner.
func (b *book) Write(_, _ time.Duration, _ bool) {
	switch b.Own.Phase {
	case scope.PhaseOpen, scope.PhaseInherited:
		b.bequeath()
	case scope.PhaseClosed:
		if l := b.last; b.testify != nil || l != nil && (l.Node == b.c.self || !l.Vote.Troubled(b.Known.Gen)) {
			b.bequeath()
		}
	default:
	}
}

// bequeath leaves a vote for the next owner.
func (b *book) bequeath() {
	b.testify = &scope.Vote{
		Scope: b.Name, Node: b.c.self, Version: 1, Phase: b.Own.Phase, At: scope.Position{Gen: b.Known.Gen},
		BackoffLevel: b.Own.BackoffLevel, OpenFor: b.Own.OpenFor, Cause: b.Own.Cause,
	}
}

// Decide leaves the decision to next, since it is a transaction.
func (b *book) Decide(time.Duration) {}

// Claim begins and ends a term without a vote. The vote for the next owner stays.
func (b *book) Claim(time.Duration, bool) { b.Own, b.result = scope.Vote{}, pending }

// Heir returns the last owner's vote, if the core is fresh.
func (b *book) Heir(now time.Duration) (h scope.Heir, told scope.Told) {
	switch l := b.last; {
	case !b.c.freshLocked(now):
		return h, scope.Untold
	case l != nil:
		_, sharing := b.votes[l.Node.Name]
		h = scope.Heir{Vote: &l.Vote, Opened: l.heard, StillThere: sharing && l.Node != b.c.self}
	}
	return h, scope.ToldAll
}

func (b *book) Out(time.Duration) bool { return b.probe != nil }

// Take leaves the probe to next: the process that has the key probes. Turns only spread the probes
// over the processes, and spare etcd their races.
func (b *book) Take(time.Duration) {}

func (b *book) Settle(_ time.Duration, next scope.State) {
	if b.result, b.next = passed, next; next != b.Known {
		b.result = failed
	}
}

func (b *book) Stirs() bool {
	return b.testify != nil || b.result != pending || b.busy || len(b.votes) > 0 || b.ours() || !b.said()
}

// Forget drops nothing that etcd has; otherwise that would count as not being there.
func (b *book) Forget(time.Duration, bool) bool {
	return b.rev == 0 && b.probe == nil && b.last == nil && !b.Stirs()
}

// enter takes in a decision of the fleet. The later decision is the one with the later revision,
// not position.
func (b *book) enter(now time.Duration, s scope.State, rev int64, blind bool) {
	b.rev = rev
	if blind {
		s = b.Known
	}
	b.c.SetBlind(b.Scope, blind)
	if s == b.Known {
		return
	}
	b.result = pending
	if b.Claimed {
		b.c.events = append(b.c.events, event{scope: b.Name, state: s})
	}
	b.c.Enter(now, b.Scope, s, now)
}

// hand takes in which process has the probe. If it is us, and the news is fresh, our probe goes
// out. If the news came late, after a lost answer, the probe is given back.
func (b *book) hand(now time.Duration, p *slot) {
	b.probe = p
	if p == nil || p.holder != b.c.self {
		b.result = pending
		b.c.Revoke(now, b.Scope) // its lease is over: another may probe
		return
	}
	b.c.Stir(b.Scope)
	if b.Probing() {
		return // the same news again, from the list of a new session
	}
	asked := b.asked
	b.asked = never
	if b.Claimed && b.Held() && b.c.Connected() && b.Known.Open() && p.at == b.Known.Position &&
		asked != never && now-asked < b.c.Config().Turn/2 {
		b.c.Grant(now, b.Scope, asked)
	}
}
