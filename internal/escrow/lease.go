// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"maps"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

const (
	// drift is how much faster or slower a clock may run, in millionths.
	drift = 500

	// lease is how long a borrower may spend borrowed tokens, by its own clock. It counts
	// from when the borrower sent the packet to which the lender last renewed the lease. So
	// the lease ends at the borrower before it ends at the lender, whatever the delay is, and
	// only the rates of clocks matter.
	lease = time.Second

	// writeOff counts from when the lender received that packet. After it the lender knows
	// that the borrower can no longer spend the loan.
	writeOff = lease + lease*2*drift/1_000_000 + 10*time.Millisecond

	// freshFor is how long a peer counts as fresh, from when we sent the newest packet that it
	// has heard: three keep-alives. With a single keep-alive, peers would flap.
	freshFor = 150 * time.Millisecond

	// deafAfter is how long an answer may take before nothing more is lent. With a third of
	// all packets lost, one answer in a thousand takes longer.
	deafAfter = 30 * time.Millisecond

	sweepEvery = 50 * time.Millisecond
	pruneEvery = time.Second
)

// fresh tells whether the peer has heard us recently, and we have heard that from it.
func (n *Node) fresh(p *peer) bool {
	return !p.gone && !p.detached && p.echo > 0 && n.now-p.echo < freshFor
}

// unheard is the time since p's latest packet, less p.rest.
func (n *Node) unheard(p *peer) time.Duration { return n.now - p.heard - p.rest }

// unanswered tells whether p was sent changes that no echo has answered.
func (p *peer) unanswered() bool { return p.echo < p.toldAt }

// lendable tells whether to lend to p. After a cut a peer is still fresh for a while, and
// tokens lent to it then are lost until their lease ends. So nothing more is lent to a peer
// that does not answer.
func (n *Node) lendable(p *peer) bool {
	return n.fresh(p) && (!p.unanswered() || n.now-p.toldAt < deafAfter)
}

// leased tells whether tokens borrowed from p may be spent.
func (n *Node) leased(p *peer) bool { return p.lease > 0 && n.now-p.lease < lease }

// expire gives back borrowed tokens whose lease has ended.
func (n *Node) expire(r *row) {
	if n.now < r.leaseCheckAt {
		return
	}
	r.leaseCheckAt = never
	for _, e := range r.entries {
		switch {
		case e == nil || e.held() == 0:
		case n.leased(e.peer):
			r.leaseCheckAt = min(r.leaseCheckAt, e.peer.lease+lease)
		default:
			e.giveBack(e.held())
		}
	}
}

// sweep ends expired leases, prunes idle entries, and parts from peers that left the roster.
func (n *Node) sweep() {
	prune := n.now >= n.pruneAt
	if prune {
		n.pruneAt = n.now + pruneEvery
	}
	for _, p := range n.slots {
		if p == nil {
			continue
		}
		if p.held.some() && !n.leased(p) {
			for e := range p.entries {
				if x := e.held(); x > 0 {
					e.giveBack(x)
					n.stir(e.row)
				}
			}
		}
		if p.lent.some() && n.now-p.renewedAt >= writeOff {
			n.writeOffLoans(p)
		}
		if prune {
			n.prune(p)
		}
		if !p.gone && !p.detached && p.leaving < n.now && n.now-p.leaving >= writeOff {
			n.part(p)
		}
	}
	for i := 0; i < len(n.ending); i++ {
		if p := n.ending[i]; n.now-p.renewedAt >= writeOff {
			n.writeOffLoans(p)
			n.forget(p)
			n.ending = append(n.ending[:i], n.ending[i+1:]...)
			i--
		}
	}
	n.sweepAt = never
	for _, p := range n.slots {
		if p != nil && (p.lent.some() || p.held.some() || !p.detached && (p.changes.First() != nil || p.leaving != never)) {
			n.sweepAt = n.now + sweepEvery
			break
		}
	}
}

// part ends loans and needs between this node and a peer that left the roster. Its entries
// stay: the same incarnation may come back, and without them used tokens of a loan would
// count as lent anew. A later incarnation, or [Node.Gone], ends them.
func (n *Node) part(p *peer) {
	p.detached = true
	for e := range p.entries {
		e.giveBack(e.held())
		e.need, e.itsNeed = 0, 0
		n.stir(e.row)
	}
}

// watch schedules a sweep.
func (n *Node) watch() { n.sweepAt = min(n.sweepAt, n.now+sweepEvery) }

// writeOffLoans writes off all loans to p, and begins a new epoch. p voids the old loans when it
// hears of the epoch; their lease has ended before.
func (n *Node) writeOffLoans(p *peer) {
	p.epoch++
	for e := range p.entries {
		if e.lent.series != 0 {
			r := e.row
			r.mint(n.now, n.mintAt)
			x := e.lent.open()
			e.release(x)
			r.sum.Written = plus(r.sum.Written, x)
			e.lent = loan{}
			e.dirty = true
			e.pin(false)
			n.pin(r)
			n.stir(r)
		}
	}
}

// prune closes idle series of loans, and forgets blank entries.
func (n *Node) prune(p *peer) {
	for e := range p.entries {
		if e.lent.series != 0 && e.lent.open() == 0 && n.now-e.lent.last > idle {
			e.lent = loan{}
			e.dirty = true
			n.stir(e.row)
		}
		if e.blank() {
			n.stir(e.row)
			e.drop()
		}
	}
}

// idle is how long a series of loans without open tokens is kept.
const idle = 2 * time.Second

// peer returns the state of an incarnation, and makes it if there is none. It is nil if the
// incarnation is over, or may not take part.
func (n *Node) peer(id crdt.Replica) *peer {
	p := n.peers[id.Name]
	if p != nil && p.id.Incarnation == id.Incarnation {
		return p
	}
	if id.Name == n.self.Name || !n.admits(id.Name) || p != nil && p.id.Incarnation > id.Incarnation {
		return nil
	}
	if b, ok := n.ended[id.Name]; ok && b.incarnation >= id.Incarnation {
		return nil
	}
	if p != nil {
		n.endPeer(p)
	}
	slot := 0
	for slot < len(n.slots) && n.slots[slot] != nil {
		slot++
	}
	if slot == len(n.slots) {
		n.slots = append(n.slots, nil)
	}
	p = &peer{node: n, id: id, slot: slot, leaving: never, index: n.cfg.Roster.index(id.Name)}
	p.changes.Skip()
	p.share = n.newest().weights[id.Name]
	n.slots[slot], n.peers[id.Name] = p, p
	return p
}

// Gone says that a peer's incarnation is over for good. Tokens borrowed from it are void.
// Tokens lent to it stay out until their lease has ended.
func (n *Node) Gone(now time.Duration, id crdt.Replica) {
	n.advance(now)
	if p := n.peers[id.Name]; p != nil && p.id.Incarnation <= id.Incarnation {
		n.endPeer(p)
	}
	if b := n.ended[id.Name]; b.incarnation < id.Incarnation {
		n.ended[id.Name] = endedIncarnation{id.Incarnation, n.now}
	}
}

// Rejoin says that this process continues under a higher incarnation. For its peers that is
// a restart: they void the loans of the lower incarnation, in both directions. So borrowed
// tokens are void here too, and lent tokens stay out until their lease has ended.
func (n *Node) Rejoin(now time.Duration, self crdt.Replica) {
	n.advance(now)
	n.self = self
	for _, name := range slices.Sorted(maps.Keys(n.peers)) {
		before, was := n.ended[name]
		n.endPeer(n.peers[name])
		if delete(n.ended, name); was {
			n.ended[name] = before
		}
	}
	n.membershipVersion++ // the marks for all peers change
}

func (n *Node) endPeer(p *peer) {
	for name, b := range n.ended { // few: incarnations that ended within ten minutes
		if n.now-b.at > 10*time.Minute {
			delete(n.ended, name)
		}
	}
	n.ended[p.id.Name] = endedIncarnation{p.id.Incarnation, n.now}
	delete(n.peers, p.id.Name)
	p.gone = true
	for e := range p.entries {
		e.void()
		e.need, e.itsNeed = 0, 0
		n.stir(e.row)
	}
	if !p.lent.some() {
		n.forget(p)
		return
	}
	n.ending = append(n.ending, p)
	n.watch()
}

// forget drops all that is left of p.
func (n *Node) forget(p *peer) {
	for e := range p.entries {
		p.changes.Remove(&e.change)
		e.row.entries[p.slot] = nil
		n.stir(e.row)
	}
	n.slots[p.slot] = nil
}
