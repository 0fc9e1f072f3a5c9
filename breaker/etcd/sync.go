// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"time"

	"github.com/stormguard-mq/stormguard/internal/scope"
)

// entry is a key as etcd has it, or had it until it was deleted.
type entry struct {
	key     string
	value   []byte
	rev     int64 // revision of its latest change
	deleted bool
}

// reset takes in everything that is there at a revision, and the session that begins.
func (c *core) reset(now time.Duration, l layout, all []entry, rev int64, k link) {
	c.Lock()
	defer c.End()
	c.link, c.rev, c.asked = k, rev, never
	c.SetFull(false)
	clear(c.members)
	states := make(map[string]bool)
	probes := make(map[string]bool)
	lasts := make(map[string]bool)
	for _, sc := range c.All() {
		b := bookOf(sc)
		clear(b.votes)
		b.barrier, b.busy, b.retry, b.backoff = 0, false, 0, 0
	}
	for _, e := range all {
		switch kind, scope, _ := l.parse(e.key); kind {
		case keyState:
			states[scope] = true
		case keyProbe:
			probes[scope] = true
		case keyLast:
			lasts[scope] = true
		default:
		}
		c.takeLocked(now, l, e)
	}
	for _, sc := range c.All() {
		b := bookOf(sc)
		if !states[b.Name] && b.rev != 0 {
			b.enter(now, scope.State{}, 0, false)
		}
		if !probes[b.Name] {
			b.hand(now, nil)
		}
		if !lasts[b.Name] {
			b.last = nil
		}
		if !b.said() {
			c.Stir(sc)
		}
	}
	c.Step(now)
}

// apply takes in one answer of the watch, up to a revision.
func (c *core) apply(now time.Duration, l layout, changed []entry, rev int64) {
	c.Lock()
	defer c.End()
	for _, e := range changed {
		c.takeLocked(now, l, e)
	}
	c.rev, c.told = max(c.rev, rev), now
	c.Step(now)
}

// takeLocked takes in one key. A value that cannot be read counts as not being there, with two
// exceptions. The scope of such a state is left alone. Such a probe counts as taken.
func (c *core) takeLocked(now time.Duration, l layout, e entry) {
	kind, name, who := l.parse(e.key)
	var err error
	switch kind {
	case keyOther:
		return
	case keyRoster:
		var they settings
		if they, err = decodeSettings(e.value); err == nil && !e.deleted {
			c.link.late = 0
			if they.number > c.number {
				c.link.late = they.number
			}
		}
		c.link.settings = e.rev
		if e.deleted {
			c.link.settings = 0
		}
	case keyMember:
		delete(c.members, who)
		if !e.deleted {
			var incarnation uint64
			if incarnation, err = decodeMember(e.value); err == nil {
				c.members[who] = incarnation
			}
		}
	default:
		err = c.takeScopeLocked(now, kind, name, who, e)
	}
	if err != nil && !e.deleted {
		c.opaque++
	}
}

func (c *core) takeScopeLocked(now time.Duration, kind keyKind, name, who string, e entry) (err error) {
	if e.deleted && c.Get(name) == nil {
		return nil
	}
	sc := c.Obtain(now, name)
	if sc == nil {
		c.SetFull(true)
		return nil
	}
	b := bookOf(sc)
	switch kind {
	case keyState:
		if e.deleted {
			b.enter(now, scope.State{}, 0, false)
			return nil
		}
		var s scope.State
		s, err = decodeState(e.value)
		b.enter(now, s, e.rev, err != nil)
	case keyVote:
		delete(b.votes, who)
		if e.deleted {
			break
		}
		var v scope.Vote
		if v, err = decodeVote(e.value, name, who); err == nil {
			b.votes[who] = vote{v, e.rev}
		}
	case keyProbe:
		if e.deleted {
			b.hand(now, nil)
			break
		}
		p := slot{rev: e.rev}
		p.probe, err = decodeProbe(e.value) // somebody has the probe, even if the value cannot be read
		b.hand(now, &p)
	case keyLast:
		if e.deleted {
			b.last = nil
			break
		}
		if b.last != nil && b.last.rev == e.rev {
			return nil
		}
		h := heir{rev: e.rev, heard: now}
		h.Vote, err = decodeLast(e.value, name)
		b.last = &h
	default:
	}
	if e.deleted || len(b.votes) > 0 || !b.said() {
		c.Stir(sc)
	}
	return err
}

// down ends a session: nothing is written until the next one. News that was told holds for as long
// as our lease cannot be over; with over it holds no longer.
func (c *core) down(now time.Duration, over bool) {
	c.Lock()
	defer c.End()
	c.link.up = false
	if over {
		c.link = link{}
	}
	c.asked = never
	for _, sc := range c.All() {
		bookOf(sc).busy = false
	}
	c.Step(now)
}

// part says that this process ends, and that no watch will tell it anything more. Pending
// operations are tried at once.
func (c *core) part() {
	c.Lock()
	defer c.Unlock()
	c.leaving = true
	for _, sc := range c.All() {
		bookOf(sc).barrier, bookOf(sc).retry = 0, 0
	}
}

// renewed says that our lease was renewed. The renewal was asked for at asked.
func (c *core) renewed(now, asked time.Duration) {
	c.Lock()
	defer c.End()
	c.link.renewed = max(c.link.renewed, asked)
	c.Step(now)
}

// ask says that the watch is being asked for a sign of life.
func (c *core) ask(now time.Duration) {
	c.Lock()
	defer c.Unlock()
	if c.asked == never {
		c.asked = now
	}
}

// answer says that the watch has given a sign of life. It counts for the oldest question, since
// answers do not say which question they are for.
func (c *core) answer(now time.Duration) {
	c.Lock()
	defer c.End()
	if c.asked != never {
		c.link.watched = max(c.link.watched, c.asked)
		c.asked = never
	}
	c.Step(now)
}

// silent reports whether the watch has left a question unanswered, and told nothing, for longer
// than our lease lasts. A watch that is behind answers when it has told everything.
func (c *core) silent(now time.Duration) bool {
	c.Lock()
	defer c.Unlock()
	return c.asked != never && now-max(c.asked, c.told) > c.link.ttl
}

// pass makes time pass where no driver does.
func (c *core) pass(now time.Duration) {
	c.Lock()
	defer c.End()
	c.passing = true
	c.Step(now)
}

// opKind says what an operation writes.
type opKind uint8

const (
	opTestify opKind = iota + 1 // the vote for the next owner
	opVote                      // our vote
	opDecide                    // the decision that follows from the votes
	opTake                      // the probe: we take it
	opPass                      // our probe passed: our vote, and the probe is free
	opFail                      // our probe failed: the next round, our vote, and the probe is free
	opDrop                      // the probe is free
)

// op is a transaction: the revisions that it must find, and what it then writes.
type op struct {
	kind  opKind
	scope string
	word  *scope.Vote // for opTestify
	finds []find
	puts  []put
}

// find is the revision that a key must have: that of its latest change, that of its creation, or
// any; 0 is none.
type find struct {
	key string
	rev int64
	as  findKind
}

type findKind uint8

const (
	asChanged findKind = iota
	asCreated
	asThere
)

// put is a key's new value; nil deletes it.
type put struct {
	key   string
	value []byte
	under leaseKind
}

// leaseKind is one of the leases that a process has.
type leaseKind uint8

const (
	forGood     leaseKind = iota
	memberLease           // our place in the fleet, and our votes
	keepLease             // the vote for the next owner
	probeLease            // the probe
)

// next returns the operation to write now, which is under way until done. If there is none it
// returns nil, and for how long at most there will be none.
func (c *core) next(now time.Duration) (o *op, wait time.Duration) {
	c.Lock()
	defer c.Unlock()
	wait = c.link.ttl/4 + 100*time.Millisecond
	if !c.link.up || !c.freshLocked(now) {
		return nil, wait
	}
	for _, sc := range c.Stirring() {
		b := bookOf(sc)
		if b.busy || c.rev < b.barrier {
			continue
		}
		if now < b.retry {
			wait = min(wait, b.retry-now)
			continue
		}
		if o := b.plan(); o != nil {
			// A process whose lease is over writes nothing: its member key is gone.
			o.scope, o.finds = b.Name, append(o.finds, find{c.keys.member(c.self.Name), c.link.born, asCreated})
			b.busy = true
			return o, 0
		}
	}
	if len(c.Stirring()) > 0 {
		wait = min(wait, 100*time.Millisecond)
	}
	return nil, wait
}

// plan returns the operation to write about a scope. The vote for the next owner is last: where all
// trip at once, all write that one key, and no other vote is to wait for that. For a scope that is
// given up it is first, since later operations may not be written any more.
func (b *book) plan() *op {
	var last *op
	if b.testify != nil {
		key, rev := b.c.keys.last(b.Name), int64(0)
		if b.last != nil {
			rev = b.last.rev
		}
		last = &op{kind: opTestify, word: b.testify, finds: []find{{key: key, rev: rev}}, puts: []put{{key, encodeLast(*b.testify), keepLease}}}
	}
	if b.Blind || last != nil && (b.c.leaving || !b.Claimed) {
		return last
	}
	if o := b.planVote(); o != nil {
		return o
	}
	return last
}

func (b *book) planVote() *op {
	keys := b.c.keys
	roster, state := find{key: keys.roster(), rev: b.c.link.settings}, find{key: keys.state(b.Name), rev: b.rev}
	slot := find{key: keys.probe(b.Name)}
	if b.probe != nil {
		slot.rev = b.probe.rev
	}
	vote, free := put{key: keys.vote(b.Name, b.c.self.Name), under: memberLease}, put{key: slot.key}
	if w := b.says(); w.Version != 0 {
		vote.value = encodeVote(w)
	}
	switch {
	case b.ours() && !b.Probing():
		switch {
		case b.result == passed && b.probe.at == b.Known.Position:
			return &op{kind: opPass, finds: []find{state, slot}, puts: []put{vote, free}}
		case b.result == failed && b.probe.at == b.Known.Position && b.c.link.late == 0:
			return &op{kind: opFail, finds: []find{roster, state, slot}, puts: []put{vote, {key: state.key, value: encodeState(b.next)}, free}}
		}
		return &op{kind: opDrop, finds: []find{slot}, puts: []put{free}}
	case !b.said():
		o := &op{kind: opVote, puts: []put{vote}}
		if vote.value == nil { // a deletion of nothing would be no change, and the watch silent
			o.finds = []find{{key: vote.key, as: asThere}}
		}
		return o
	}
	if next, counted := b.count(); next != b.Known {
		return &op{kind: opDecide, finds: append(counted, roster, state), puts: []put{{key: state.key, value: encodeState(next)}}}
	}
	if b.Mine && b.Held() && b.result == pending && b.probe == nil {
		return &op{kind: opTake, finds: []find{roster, state, slot}, puts: []put{{slot.key, probe{b.c.self, b.Known.Position}.encode(), probeLease}}}
	}
	return nil
}

// count returns what the votes decide, and finds for these votes: the transaction finds the very
// votes that were counted, or is void.
func (b *book) count() (next scope.State, counted []find) {
	c := b.c
	if !c.Connected() || !(substrate{c}).MayDecide() || len(b.votes) < c.Need() {
		return b.Known, nil
	}
	next = scope.Decide(c.Config(), c.Names(), b.Known, func(name string) *scope.Vote {
		v, ok := b.votes[name]
		if !ok || v.At != b.Known.Position && (b.Known.Open() || v.Phase != scope.PhaseOpen) {
			return nil
		}
		counted = append(counted, find{key: c.keys.vote(b.Name, name), rev: v.rev})
		return &v.Vote
	})
	return next, counted
}

// take notes when the lease of the probe that o takes was asked for, or its renewal.
func (c *core) take(o *op, asked time.Duration) {
	c.Lock()
	defer c.Unlock()
	if sc := c.Get(o.scope); sc != nil {
		bookOf(sc).asked = asked
	}
}

// Back-off after a transaction that did not find what it expected: the watch will soon tell the
// difference. Up to half of the back-off differs by process.
const (
	backoffFrom = 10 * time.Millisecond
	backoffTo   = time.Second
)

// done notes the outcome of o: written at a revision, or void, or unknown.
func (c *core) done(now time.Duration, o *op, written bool, rev int64) {
	c.Lock()
	defer c.End()
	sc := c.Get(o.scope)
	if sc == nil {
		return
	}
	b := bookOf(sc)
	b.busy = false
	if o.kind == opTestify && b.testify == o.word && (written || !b.Claimed) {
		b.testify = nil
	}
	if written {
		b.barrier, b.backoff, b.retry = rev, 0, 0
		return
	}
	b.backoff = min(max(2*b.backoff, backoffFrom), backoffTo)
	b.retry = now + b.backoff - time.Duration(c.Share(sc)*float64(b.backoff/2))
}
