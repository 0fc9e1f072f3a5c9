// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"time"

	"github.com/stormguard-mq/stormguard/fleet"
)

// entry is a key as etcd has it, or had it until it was deleted.
type entry struct {
	key     string
	value   []byte
	rev     int64 // of its latest change
	deleted bool
}

// reset takes in all that is there at a revision, and a session that begins.
func (c *core) reset(now time.Duration, l layout, all []entry, rev int64, k link) {
	c.mu.Lock()
	defer c.unlock(false)
	c.link, c.rev, c.full, c.asked = k, rev, false, never
	clear(c.members)
	states := make(map[string]bool)
	probes := make(map[string]bool)
	lasts := make(map[string]bool)
	for _, sc := range c.scopes {
		clear(sc.votes)
		sc.barrier, sc.busy, sc.retry, sc.backoff = 0, false, 0, 0
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
	for name, sc := range c.scopes {
		if !states[name] && sc.rev != 0 {
			c.setStateLocked(now, sc, fleet.State{}, 0, false)
		}
		if !probes[name] {
			c.setProbeLocked(now, sc, nil)
		}
		if !lasts[name] {
			sc.last = nil
		}
		if !c.saidLocked(sc) {
			c.stirLocked(sc)
		}
	}
	c.stepLocked(now)
}

// apply takes in what one answer of the watch tells, up to a revision.
func (c *core) apply(now time.Duration, l layout, changed []entry, rev int64) {
	c.mu.Lock()
	defer c.unlock(false)
	for _, e := range changed {
		c.takeLocked(now, l, e)
	}
	c.rev = max(c.rev, rev)
	c.stepLocked(now)
}

// takeLocked takes in one key. A value that cannot be read is as if it were not
// there, but for a state's: that scope is left alone.
func (c *core) takeLocked(now time.Duration, l layout, e entry) {
	kind, name, who := l.parse(e.key)
	var err error
	switch kind {
	case keyOther:
		return
	case keyRoster:
		var they charter
		if they, err = decodeCharter(e.value); err == nil && !e.deleted {
			c.link.late = 0
			if they.number > c.roster.Number {
				c.link.late = they.number
			}
		}
		c.link.charter = e.rev
		if e.deleted {
			c.link.charter = 0
		}
	case keyMember:
		delete(c.members, who)
		if !e.deleted {
			var life uint64
			if life, err = decodeMember(e.value); err == nil {
				c.members[who] = life
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
	if e.deleted && c.scopes[name] == nil {
		return nil
	}
	sc := c.scopeLocked(name)
	if sc == nil {
		c.full = true
		return nil
	}
	switch kind {
	case keyState:
		if e.deleted {
			c.setStateLocked(now, sc, fleet.State{}, 0, false)
			return nil
		}
		var s fleet.State
		s, err = decodeState(e.value)
		c.setStateLocked(now, sc, s, e.rev, err != nil)
	case keyVote:
		delete(sc.votes, who)
		if e.deleted {
			break
		}
		var v fleet.Vote
		if v, err = decodeVote(e.value, name, who); err == nil {
			sc.votes[who] = vote{v, e.rev}
		}
	case keyProbe:
		if e.deleted {
			c.setProbeLocked(now, sc, nil)
			break
		}
		p := slot{rev: e.rev}
		p.probe, err = decodeProbe(e.value) // somebody has it, whoever that is
		c.setProbeLocked(now, sc, &p)
	case keyLast:
		if e.deleted {
			sc.last = nil
			break
		}
		if sc.last != nil && sc.last.rev == e.rev {
			return nil
		}
		h := heir{rev: e.rev, heard: now}
		h.Vote, err = decodeLast(e.value, name)
		sc.last = &h
	default:
	}
	if e.deleted || len(sc.votes) > 0 || !c.saidLocked(sc) {
		c.stirLocked(sc)
	}
	return err
}

// down ends a session: nothing is written until the next. What was told holds for as
// long as our lease cannot be over, or no longer if it is.
func (c *core) down(now time.Duration, over bool) {
	c.mu.Lock()
	defer c.unlock(false)
	c.link.up = false
	if over {
		c.link = link{}
	}
	c.asked = never
	for _, sc := range c.scopes {
		sc.busy = false
	}
	c.stepLocked(now)
}

// part says that this process ends, and that no watch will tell it any more: what is
// still to be written is tried at once.
func (c *core) part() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.parting = true
	for _, sc := range c.scopes {
		sc.barrier, sc.retry = 0, 0
	}
}

// renewed says that our lease was renewed, which was asked for at asked.
func (c *core) renewed(now, asked time.Duration) {
	c.mu.Lock()
	defer c.unlock(false)
	c.link.renewed = max(c.link.renewed, asked)
	c.stepLocked(now)
}

// ask says that the watch is being asked for a sign of life.
func (c *core) ask(now time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.asked == never {
		c.asked = now
	}
}

// answer says that the watch has given a sign of life: to the oldest question, for
// it is not told apart which.
func (c *core) answer(now time.Duration) {
	c.mu.Lock()
	defer c.unlock(false)
	if c.asked != never {
		c.link.watched = max(c.link.watched, c.asked)
		c.asked = never
	}
	c.stepLocked(now)
}

// pass makes time pass, where no driver does.
func (c *core) pass(now time.Duration) {
	c.mu.Lock()
	c.stepLocked(now)
	events, wake := c.events, c.wake
	c.events = nil
	if len(c.actions) == 0 {
		wake = nil
	}
	c.mu.Unlock()
	if len(events) > 0 {
		c.report(events)
	}
	if wake != nil {
		wake()
	}
}

// opKind is what is to be written.
type opKind uint8

const (
	opTestify opKind = iota + 1 // what a next owner has to know
	opVote                      // our vote
	opDecide                    // what the votes decide
	opTake                      // the probe
	opPass                      // it passed: our vote, and the probe is free
	opFail                      // it failed: the next round, our vote, and the probe is free
	opDrop                      // it is free
)

// op is a transaction: what it writes, and the revisions that it must find.
type op struct {
	kind    opKind
	scope   string
	born    int64
	charter int64
	state   int64
	slot    int64
	last    int64
	counted map[string]int64 // votes of others and ours

	vote  fleet.Vote // the zero Vote deletes
	next  fleet.State
	probe probe
}

// next is what is to be written now, and is under way until done; or nil, and for
// how long at most there will be nothing.
func (c *core) next(now time.Duration) (o *op, wait time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	wait = c.link.ttl/4 + 100*time.Millisecond
	if !c.link.up || !c.freshLocked(now) {
		return nil, wait
	}
	for _, sc := range c.active {
		if sc.busy || c.rev < sc.barrier {
			continue
		}
		if now < sc.retry {
			wait = min(wait, sc.retry-now)
			continue
		}
		if o := c.planLocked(sc); o != nil {
			o.scope, o.born, o.charter, o.state = sc.name, c.link.born, c.link.charter, sc.rev
			if sc.probe != nil {
				o.slot = sc.probe.rev
			}
			if sc.last != nil {
				o.last = sc.last.rev
			}
			sc.busy = true
			return o, 0
		}
	}
	if len(c.active) > 0 {
		wait = min(wait, 100*time.Millisecond)
	}
	return nil, wait
}

// planLocked is what is to be written about a scope. What a next owner has to know
// is last: where all trip at once, all write that one key, and a vote is to wait for
// none of them. Of a scope that is given up it is first, for what is written after it
// may not be written any more.
func (c *core) planLocked(sc *scope) *op {
	var last *op
	if sc.testify != nil {
		last = &op{kind: opTestify, vote: *sc.testify}
	}
	if sc.blind || last != nil && (c.parting || !sc.claimed) {
		return last
	}
	if o := c.planVoteLocked(sc); o != nil {
		return o
	}
	return last
}

func (c *core) planVoteLocked(sc *scope) *op {
	says := sc.says()
	switch {
	case c.ours(sc) && sc.mode != probing:
		switch {
		case sc.result == passed && sc.probe.at == sc.known.Position:
			return &op{kind: opPass, vote: c.sign(sc, says)}
		case sc.result == failed && sc.probe.at == sc.known.Position && c.link.late == 0:
			mixed := false
			for _, n := range c.roster.Names {
				v, ok := sc.votes[n]
				mixed = mixed || ok && n != c.self.Name && v.At == sc.known.Position && v.Passes > 0
			}
			if own := sc.votes[c.self.Name]; own.At == sc.known.Position && own.Passes > 0 {
				mixed = true
			}
			return &op{kind: opFail, vote: c.sign(sc, says), next: c.cfg.After(sc.known, mixed, sc.cause)}
		}
		return &op{kind: opDrop}
	case !c.saidLocked(sc):
		return &op{kind: opVote, vote: c.sign(sc, says)}
	}
	if o := c.decideLocked(sc); o != nil {
		return o
	}
	if sc.mine && sc.mode == held && sc.probe == nil {
		return &op{kind: opTake, probe: probe{c.self, sc.known.Position}}
	}
	return nil
}

func (c *core) sign(sc *scope, v fleet.Vote) fleet.Vote {
	if v != (fleet.Vote{}) {
		v.Scope, v.Node, v.Version = sc.name, c.self, 1
	}
	return v
}

// decideLocked counts, where a quorum is there. The transaction finds the very
// votes that were counted, or is void.
func (c *core) decideLocked(sc *scope) *op {
	if !c.connected || !c.decidesLocked() || len(sc.votes) < c.need {
		return nil
	}
	var votes []fleet.Vote
	counted := make(map[string]int64)
	for _, n := range c.roster.Names {
		v, ok := sc.votes[n]
		if !ok {
			continue
		}
		if v.At == sc.known.Position || v.Phase == fleet.PhaseOpen && v.At.Gen == sc.known.Gen && !sc.known.Open() {
			votes = append(votes, v.Vote)
			counted[n] = v.rev
		}
	}
	next := fleet.Decide(c.cfg, c.roster, sc.known, votes)
	if next == sc.known {
		return nil
	}
	return &op{kind: opDecide, next: next, counted: counted}
}

// take says when the lease of the probe that o takes was renewed, or asked for.
func (c *core) take(o *op, asked time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if sc := c.scopes[o.scope]; sc != nil {
		sc.trial.asked = asked
	}
}

// Back-off after a transaction that found something else than it expected: the
// watch is about to tell what. Up to half of it differs by process.
const (
	backoffFrom = 10 * time.Millisecond
	backoffTo   = time.Second
)

// done says what became of o: written at a revision, or void, or unknown.
func (c *core) done(now time.Duration, o *op, written bool, rev int64) {
	c.mu.Lock()
	defer c.unlock(false)
	sc := c.scopes[o.scope]
	if sc == nil {
		return
	}
	sc.busy = false
	if o.kind == opTestify && sc.testify != nil && *sc.testify == o.vote && (written || !sc.claimed) {
		sc.testify = nil
	}
	if written {
		sc.barrier, sc.backoff, sc.retry = rev, 0, 0
		return
	}
	sc.backoff = min(max(2*sc.backoff, backoffFrom), backoffTo)
	sc.retry = now + sc.backoff - time.Duration(c.round(sc).Share(c.self.Name)*float64(sc.backoff/2))
}
