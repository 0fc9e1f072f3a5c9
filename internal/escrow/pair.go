// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// A peer is one incarnation of another node, and what lies between it and this one over
// all keys.
type peer struct {
	node  *Node
	id    crdt.Replica
	slot  int   // index in the rows' entries
	share int64 // its weight in the roster
	index int   // in the roster, -1 if it is not there
	gone  bool  // its incarnation is over; only its loans are left

	leaving time.Duration // since when no roster has its name; never if one has
	parted  bool          // for so long that all loans are over: nothing is said or heard until a roster has it again
	pinned  int           // keys of which it has loans and whose lease is not renewed

	// What changed, each key once. The first change is the peer's own existence, so
	// that two incarnations that meet write to each other at once: a new incarnation mints nothing
	// before it has heard from all.
	changes crdt.Changes[*entry]
	acked   uint64
	toldAt  time.Duration // own clock: when changes were first sent of which no echo has come

	sent  time.Duration // its clock: the newest packet merged
	heard time.Duration // own clock: when that was
	rest  time.Duration // how much later than a keep-alive its next packet may come
	echo  time.Duration // own clock: the newest of our packets that it had heard
	floor time.Duration // its clock: what is not newer may speak of what was forgotten

	// As lender to it.
	epoch     uint64
	lent      total
	renewed   time.Duration // its clock: the stamp that its lease was last renewed to
	renewedAt time.Duration // own clock: when that stamp was received

	// As borrower from it.
	itsEpoch uint64
	lease    time.Duration // own clock: the stamp that our lease was last renewed to
	held     total

	configuration uint64 // the newest that it knows, by its latest packet
	named         int    // rows that are there because it named them
}

// An entry is what lies between this node and a peer for one key: what either
// has lent to the other, and what either needs.
//
// A loan's counters only rise, and each has one writer: out the lender; used and
// ret the borrower. So packets may be lost, repeated and overtaken. (out, used +
// ret) is the bounded counter of Balegas et al., Extending eventually consistent
// cloud databases for enforcing numeric invariants, 2015.
type entry struct {
	row  *row
	peer *peer

	lent     loan // to the peer; its used and ret are what was heard
	borrowed loan // from the peer; its out is what was heard

	need    int64         // what the peer was told
	needAt  time.Duration // when
	itsNeed int64
	sent    time.Duration // its clock: the newest packet that spoke of this

	pinned bool // counted in the peer's
	dirty  bool // differs from what the last change said
	change crdt.Change[*entry]
}

// A loan is a series of loans: out is the sum of all. A series is closed when all
// of it is accounted for; its number, which rises, tells it from the next one.
type loan struct {
	series         uint64 // 0 is none
	out, used, ret int64
	last           time.Duration // when something was lent, or used
}

func (l *loan) open() int64 { return l.out - l.used - l.ret }

func (e *entry) held() int64 { return e.borrowed.open() }

// touch makes e the newest change.
func (e *entry) touch() {
	e.dirty = false
	e.peer.node.changes++
	e.peer.changes.Touch(&e.change)
}

// entries yields what lies between the node and p, that of the latest change last.
// The one that is yielded may be dropped.
func (p *peer) entries(yield func(*entry) bool) {
	for c := p.changes.First(); c != nil; {
		next := c.Next()
		if !yield(c.Of) {
			return
		}
		c = next
	}
}

// entry is the one between r and p, made if need be. There is nothing to tell of
// it until it is touched.
func (r *row) entry(p *peer) *entry {
	if e := r.with(p); e != nil {
		return e
	}
	for len(r.entries) <= p.slot {
		r.entries = append(r.entries, nil)
	}
	e := &entry{row: r, peer: p, needAt: -never}
	e.change.Of = e
	p.changes.List(&e.change)
	r.entries[p.slot] = e
	p.node.watch()
	return e
}

// with is the entry between r and p, or nil.
func (r *row) with(p *peer) *entry {
	if p.slot < len(r.entries) {
		return r.entries[p.slot]
	}
	return nil
}

// blank tells whether nothing would be lost with e, and the peer knows.
func (e *entry) blank() bool {
	return e.lent.series == 0 && e.borrowed.series == 0 && e.need == 0 && e.itsNeed == 0 &&
		!e.dirty && e.change.Mark <= e.peer.acked
}

// drop forgets e. A packet that is not newer than the last that spoke of it could
// bring it back, and is refused from now on.
func (e *entry) drop() {
	p := e.peer
	p.floor = max(p.floor, e.sent)
	p.changes.Remove(&e.change)
	e.row.entries[p.slot] = nil
}

// The keys that are known because peers named them, and that nobody uses here, are at
// most these parts of Config.MaxKeys: of one peer, and of all. A few are always let in.
const (
	namedBy    = 8
	namedByAll = 4
	fewKeys    = 1024
)

// own says that the key is used here, or is forgotten.
func (r *row) own() {
	if r.by != nil {
		r.by.named--
		r.by.node.named--
		r.by = nil
	}
}

// lend moves tokens from the level into a loan.
func (e *entry) lend(amount int64) {
	r, n := e.row, e.peer.node
	if e.lent.series == 0 {
		n.series++
		e.lent = loan{series: n.series}
	}
	e.lent.out += amount
	e.lent.last = n.now
	if !e.peer.lent.some() {
		// The peer is fresh. Its lease counts from here, whenever it hears of it.
		e.peer.renewed, e.peer.renewedAt = e.peer.sent, e.peer.heard
	}
	r.level -= amount
	r.lent += amount
	r.sum.Lent = plus(r.sum.Lent, amount)
	e.peer.lent.add(amount)
	e.dirty = true
}

// accounted takes in what the borrower says it has used and returned.
func (e *entry) accounted(used, ret int64) {
	// Each counter rises by itself: together they may not exceed what is open, whatever
	// two packets, or two entries of one, say.
	u := min(max(0, used-e.lent.used), e.lent.open())
	b := min(max(0, ret-e.lent.ret), e.lent.open()-u)
	if u+b == 0 {
		return
	}
	if u > 0 {
		e.row.spentAt = e.peer.node.now
	}
	e.lent.used += u
	e.lent.ret += b
	e.release(u + b)
	e.row.level += b
	e.row.sum.Back = plus(e.row.sum.Back, b)
	if n := e.peer.node; e.row.over || n.fenced {
		n.trim(e.row)
		n.pin(e.row)
	}
	if e.lent.open() == 0 {
		e.pin(false)
	}
}

// pin counts e among those whose lease is not renewed, or not any more.
func (e *entry) pin(on bool) {
	switch {
	case on == e.pinned:
	case on:
		e.peer.pinned++
	default:
		e.peer.pinned--
	}
	e.pinned = on
}

// release frees a part of the cap that a loan occupied.
func (e *entry) release(amount int64) {
	e.row.lent -= amount
	e.peer.lent.add(-amount)
}

// received takes in what the lender has lent, as far as it can have it. The rest goes
// back, unseen by the row's sums.
func (e *entry) received(series uint64, out int64) {
	if series != e.borrowed.series {
		e.void()
		e.borrowed = loan{series: series}
	}
	x := out - e.borrowed.out
	if x <= 0 {
		return
	}
	e.borrowed.out = out
	e.borrowed.last = e.peer.node.now
	if taken := e.grant(x); taken < x {
		e.borrowed.ret += x - taken
		e.dirty = true
		if x = taken; x == 0 {
			return
		}
	}
	e.peer.held.add(x)
	e.row.held += x
	e.row.sum.Got = plus(e.row.sum.Got, x)
	e.row.sooner = 0
	if e.row.owner != "" {
		e.need = max(0, e.need-x)
	}
}

// giveBack returns tokens to their lender.
func (e *entry) giveBack(amount int64) {
	e.borrowed.ret += amount
	e.giveUp(amount)
	e.peer.held.add(-amount)
	e.row.held -= amount
	e.row.sum.Returned = plus(e.row.sum.Returned, amount)
	e.dirty = true
}

// void forgets a series of loans, spent or not.
func (e *entry) void() {
	if x := e.held(); x > 0 {
		e.peer.held.add(-x)
		e.row.held -= x
		e.row.sum.Voided = plus(e.row.sum.Voided, x)
	}
	e.borrowed = loan{}
}
