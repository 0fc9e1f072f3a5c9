// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/scope"
)

// core is what this process knows of etcd: what a [scope.Machine] stands on, without
// goroutine, timer or I/O. A session tells it what is there (reset, apply, contact) and
// asks it what to write (next, done).
//
// What it wants to be there, its own vote above all, is compared with what the
// watch says is there; a difference is a write. So it does not matter whether an
// answer was lost, or a lease with all that hung on it.
type core struct {
	*scope.Machine
	self   crdt.Replica
	keys   layout
	number uint64        // of our roster
	report func([]event) // called without the lock; must not be nil

	// The lock is the Machine's.
	events  []event       // to be reported
	work    chan struct{} // holds one: next may have something
	opaque  int           // values that cannot be read
	leaving bool          // Close was called
	passing bool          // the step is the writer's own

	// Of the session.
	link    link
	members map[string]uint64 // who has a lease, by name: incarnation
	rev     int64             // the watch has told all up to here
	asked   time.Duration     // the watch was asked for a sign of life; never if it has answered
	told    time.Duration     // the watch has told something, at its latest
}

// link is our state at etcd.
type link struct {
	up       bool          // a session is there, and what it is told is written
	ttl      time.Duration // of our lease
	renewed  time.Duration // it was asked for, at its latest renewal
	watched  time.Duration // the watch was asked for a sign of life, at its latest
	born     int64         // revision that created our member key
	settings int64         // revision of the roster
	late     uint64        // number of a roster later than ours, under which we decide and probe no more; 0 is none
}

// book is what etcd has about a scope, and what is to be written.
type book struct {
	*scope.Scope
	c     *core
	rev   int64 // of the state's key; 0 is none
	votes map[string]vote
	probe *slot
	last  *heir

	testify *scope.Vote   // what a next owner has to know, to be written
	asked   time.Duration // the lease of the probe that we take was renewed after this; never if none was
	result  result
	next    scope.State // after a failed probe

	busy    bool          // an operation is under way
	barrier int64         // the latest operation is known once rev is this
	retry   time.Duration // not before
	backoff time.Duration
}

func bookOf(sc *scope.Scope) *book { return sc.Book.(*book) } //nolint:forcetypeassert // there is no other

// vote is a row, and the revision that a decision compares.
type vote struct {
	scope.Vote
	rev int64
}

// slot is the probe of a scope.
type slot struct {
	probe
	rev int64
}

// heir is the last owner's word.
type heir struct {
	scope.Vote
	rev   int64
	heard time.Duration
}

// result is a probe that is over, and not written yet.
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

// substrate is what the Machine asks of etcd.
type substrate struct{ *core }

// Look is in touch while what is known is what is there, and a quorum has leases.
func (c substrate) Look(now time.Duration) bool {
	return c.freshLocked(now) && c.Heard(now) >= c.Need()
}

// Heard counts who has a lease.
func (c substrate) Heard(now time.Duration) (heard int) {
	fresh := c.freshLocked(now)
	for _, n := range c.Names() {
		if _, ok := c.members[n]; n == c.self.Name || ok && fresh {
			heard++
		}
	}
	return heard
}

// MayDecide is while no later roster is in force.
func (c substrate) MayDecide() bool { return c.Member() && c.link.late == 0 }

func (c substrate) Book(sc *scope.Scope) scope.Book {
	return &book{Scope: sc, c: c.core, votes: make(map[string]vote), asked: never}
}

// After wakes the writer, and reports.
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

// nudge has somebody ask next.
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

// freshLocked reports whether what is known is what is there: our lease cannot be
// over, and the watch has shown life after that time. A process that stood still
// finds itself stale, for its lease was renewed before.
func (c *core) freshLocked(now time.Duration) bool {
	return now < min(c.link.renewed, c.link.watched)+c.link.ttl
}

// status tells whether what is known is what is there, and the number of a roster
// later than ours, or 0.
func (c *core) status(now time.Duration) (fresh bool, late uint64) {
	c.Lock()
	defer c.Unlock()
	return c.freshLocked(now), c.link.late
}

// ours reports whether the probe is this process's.
func (b *book) ours() bool { return b.probe != nil && b.probe.holder == b.c.self }

// says is our vote as it should be in etcd; the zero Vote is none.
func (b *book) says() scope.Vote {
	w := b.Own
	if w.Phase == scope.PhaseOpen && b.Known.Open() { // it has become one of the round
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

// Vote is what etcd has: it is gone with the lease of its process.
func (b *book) Vote(_ time.Duration, name string) *scope.Vote {
	if w, ok := b.votes[name]; ok {
		return &w.Vote
	}
	return nil
}

// Write leaves the vote to the comparison of what is there with what should be. What is
// about no round of probes is also left for a next owner.
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

// bequeath leaves word for a next owner.
func (b *book) bequeath() {
	b.testify = &scope.Vote{
		Scope: b.Name, Node: b.c.self, Version: 1, Phase: b.Own.Phase, At: scope.Position{Gen: b.Known.Gen},
		BackoffLevel: b.Own.BackoffLevel, OpenFor: b.Own.OpenFor, Cause: b.Own.Cause,
	}
}

// Decide leaves it to next: a decision is a transaction.
func (b *book) Decide(time.Duration) {}

// Claim begins and ends without a vote. What a next owner has to know stays.
func (b *book) Claim(time.Duration, bool) { b.Own, b.result = scope.Vote{}, pending }

// Heir is known while what is known is what is there.
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

// Take leaves it to next: who has the key probes. Turns only spread the probes over the
// processes and spare etcd their races.
func (b *book) Take(time.Duration) {}

func (b *book) Settle(_ time.Duration, next scope.State) {
	if b.result, b.next = passed, next; next != b.Known {
		b.result = failed
	}
}

func (b *book) Stirs() bool {
	return b.testify != nil || b.result != pending || b.busy || len(b.votes) > 0 || b.ours() || !b.said()
}

// Forget keeps what etcd has, or it would be taken for something that is not there.
func (b *book) Forget(time.Duration, bool) bool {
	return b.rev == 0 && b.probe == nil && b.last == nil && !b.Stirs()
}

// enter takes in what the fleet decided. Revisions, not positions, say what is later.
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

// hand takes in who has the probe. When it is us, and the word is fresh, one goes out;
// what came late, after a lost answer, is given back.
func (b *book) hand(now time.Duration, p *slot) {
	b.probe = p
	if p == nil || p.holder != b.c.self {
		b.result = pending
		b.c.Revoke(now, b.Scope) // its lease is over: somebody else may probe
		return
	}
	b.c.Stir(b.Scope)
	if b.Probing() {
		return // the same again, from the list of a new session
	}
	asked := b.asked
	b.asked = never
	if b.Claimed && b.Held() && b.c.Connected() && b.Known.Open() && p.at == b.Known.Position &&
		asked != never && now-asked < b.c.Config().Turn/2 {
		b.c.Grant(now, b.Scope, asked)
	}
}
