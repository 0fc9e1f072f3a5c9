// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// A peer is one incarnation of another node, with the loans and needs between it and this
// node over all keys.
type peer struct {
	node  *Node
	id    crdt.Replica
	slot  int   // index in row.entries
	share int64 // the peer's weight in the newest roster
	index int   // in the initial roster, -1 if it is not there
	gone  bool  // the incarnation is over; only loans to it are left

	leaving time.Duration // since when no roster admits its name; never while one does
	// detached says that the peer has been leaving for so long that all loans are over. Then
	// this node sends it nothing and refuses its packets until a roster has the peer again.
	detached bool
	pinned   int // keys for which it has loans whose lease is not renewed

	// changes lists each key once. The first change is the peer's own existence, so that two
	// incarnations that meet send to each other at once: a new incarnation mints nothing
	// before it has heard from all.
	changes crdt.Changes[*entry]
	acked   uint64        // mark of the latest change that the peer has acked
	toldAt  time.Duration // own clock: first send of changes that no echo has answered

	sent  time.Duration // peer's clock: when the newest merged packet was sent
	heard time.Duration // own clock: when the newest packet was merged
	rest  time.Duration // how much later than a keep-alive the peer's next packet may come
	echo  time.Duration // own clock: when the newest of our packets that it heard was sent
	floor time.Duration // peer's clock: packets up to here may name dropped entries

	// This node as lender to the peer.
	epoch     uint64        // of our loans; a write-off raises it
	lent      total         // not yet reported as used or returned, over all keys
	renewed   time.Duration // peer's clock: the stamp to which its lease was last renewed
	renewedAt time.Duration // own clock: when that stamp was received

	// This node as borrower from the peer.
	itsEpoch uint64        // of the peer's loans
	lease    time.Duration // own clock: the stamp to which our lease was last renewed
	held     total         // borrowed and not spent, over all keys

	configuration uint64 // number of the newest configuration in its latest packet
	named         int    // rows that exist only because the peer named them
}

// An entry holds the loans and needs between this node and a peer for one key, in both
// directions.
//
// A loan's counters only rise, and each has one writer: the lender writes out, the
// borrower used and ret. So packets may be lost, repeated and reordered. (out, used +
// ret) is the bounded counter of Balegas et al., Extending eventually consistent
// cloud databases for enforcing numeric invariants, 2015.
type entry struct {
	row  *row
	peer *peer

	lent     loan // to the peer; used and ret are copies of the peer's counters
	borrowed loan // from the peer; out is a copy of the peer's counter

	need    int64         // this node's need, as told to the peer
	needAt  time.Duration // when need was last told
	itsNeed int64         // the peer's need
	sent    time.Duration // peer's clock: the newest packet that named the key

	pinned bool // counted in peer.pinned
	dirty  bool // changed since the last touch
	change crdt.Change[*entry]
}

// A loan is a series of loans between two nodes, and out is their sum. A series can be
// closed when all its tokens were used or returned. The next series has a higher number.
type loan struct {
	series         uint64 // 0 is none
	out, used, ret int64
	last           time.Duration // when tokens were last lent, received or spent
}

func (l *loan) open() int64 { return l.out - l.used - l.ret }

func (e *entry) held() int64 { return e.borrowed.open() }

// touch makes e the newest change.
func (e *entry) touch() {
	e.dirty = false
	e.peer.node.changes++
	e.peer.changes.Touch(&e.change)
}

// entries yields all entries of p in the order of their changes, the latest last. The
// caller may drop the yielded entry.
func (p *peer) entries(yield func(*entry) bool) {
	for c := p.changes.First(); c != nil; {
		next := c.Next()
		if !yield(c.Of) {
			return
		}
		c = next
	}
}

// entry returns the entry between r and p, and makes it if there is none. A new entry is
// not sent until it is touched.
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

// with returns the entry between r and p, or nil.
func (r *row) with(p *peer) *entry {
	if p.slot < len(r.entries) {
		return r.entries[p.slot]
	}
	return nil
}

// blank tells whether e holds no loan and no need, and the peer has acked that.
func (e *entry) blank() bool {
	return e.lent.series == 0 && e.borrowed.series == 0 && e.need == 0 && e.itsNeed == 0 &&
		!e.dirty && e.change.Mark <= e.peer.acked
}

// drop forgets e. A packet no newer than e.sent could bring the entry back, so such
// packets are refused from now on.
func (e *entry) drop() {
	p := e.peer
	p.floor = max(p.floor, e.sent)
	p.changes.Remove(&e.change)
	e.row.entries[p.slot] = nil
}

// Bounds for keys that peers have named and this node does not use.
const (
	namedBy    = 8    // one peer: MaxKeys/namedBy keys
	namedByAll = 4    // all peers together: MaxKeys/namedByAll keys
	fewKeys    = 1024 // always allowed, within MaxKeys
)

// own counts the key no longer as named by a peer: this node uses it, or forgets it.
func (r *row) own() {
	if r.namedByPeer != nil {
		r.namedByPeer.named--
		r.namedByPeer.node.named--
		r.namedByPeer = nil
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
		// The peer is fresh. Its lease counts from here, however late it hears of the loan.
		e.peer.renewed, e.peer.renewedAt = e.peer.sent, e.peer.heard
	}
	r.level -= amount
	r.lent += amount
	r.sum.Lent = plus(r.sum.Lent, amount)
	e.peer.lent.add(amount)
	e.dirty = true
}

// accounted merges the borrower's counters of used and returned tokens.
func (e *entry) accounted(used, ret int64) {
	// The counters rise independently. Two packets, or two entries of one packet, must not
	// take more than the open amount together.
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
	if n := e.peer.node; e.row.overCap || n.fenced {
		n.trim(e.row)
		n.pin(e.row)
	}
	if e.lent.open() == 0 {
		e.pin(false)
	}
}

// pin adds e to peer.pinned, the keys whose lease is not renewed, or takes it out.
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

// received merges the lender's counter of lent tokens. It takes as many as the lender's
// allowance covers. The rest goes back, and the row's sums do not count it.
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
	e.row.leaseCheckAt = 0
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

// void forgets a series of loans that were borrowed, with its unspent tokens.
func (e *entry) void() {
	if x := e.held(); x > 0 {
		e.peer.held.add(-x)
		e.row.held -= x
		e.row.sum.Voided = plus(e.row.sum.Voided, x)
	}
	e.borrowed = loan{}
}
