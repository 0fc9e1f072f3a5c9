// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"net/netip"
	"slices"
	"time"
)

// How often an address is tried where no peer is heard: first fast, six times in the first second.
// Then two processes that lose a third of all packets meet within it. After that every 1 to 5 s.
// When nobody was heard there for an hour, ten times more rarely, unless the address is a seed.
const (
	quickTries = 8
	quickWait  = 25 * time.Millisecond  // doubles with each try
	hintWait   = 500 * time.Millisecond // least time between tries, however many hints come
	tryWait    = time.Second
	trySpread  = 4 * time.Second
	tryCold    = time.Hour
)

// address is where a process is or was.
type address struct {
	addr    netip.AddrPort
	seed    bool          // never forgotten
	own     bool          // packets of this process came from there
	dropped bool          // not in the book any more
	peer    *peer         // the peer that was last heard there
	heardAt time.Duration // when the peer was last heard there, or when the address was learned
	tries   int
	triedAt time.Duration
	next    time.Duration
}

// quiet reports that there is nobody to look for at the address: it is our own, or its peer is not
// lost.
func (a *address) quiet() bool {
	return a.own || a.peer != nil && a.peer.addr == a.addr && !a.peer.lost
}

// book has the address of every seed and of every process ever heard. Addresses where no peer is
// heard are tried without end, which heals a split.
type book struct {
	list   []*address // in the order in which they were learned
	byAddr map[netip.AddrPort]*address
	limit  int
	next   time.Duration // no try is due before this
}

// learn returns the entry of an address, new or known, or nil if the book is
// full of addresses that must be kept.
func (b *book) learn(now time.Duration, addr netip.AddrPort) *address {
	if a := b.byAddr[addr]; a != nil {
		return a
	}
	if len(b.list) >= b.limit {
		oldest := -1
		for i, a := range b.list {
			if !a.seed && !a.quiet() && (oldest < 0 || a.heardAt < b.list[oldest].heardAt) {
				oldest = i
			}
		}
		if oldest < 0 {
			return nil
		}
		delete(b.byAddr, b.list[oldest].addr)
		b.list[oldest].dropped = true
		b.list = slices.Delete(b.list, oldest, oldest+1)
	}
	a := &address{addr: addr, heardAt: now, next: now}
	b.list = append(b.list, a)
	b.byAddr[addr] = a
	b.next = min(b.next, now)
	return a
}

// forget drops the addresses where p was, except seeds.
func (b *book) forget(p *peer) {
	b.list = slices.DeleteFunc(b.list, func(a *address) bool {
		drop := a.peer == p && !a.seed
		if drop {
			delete(b.byAddr, a.addr)
			a.dropped = true
		}
		return drop
	})
}

// seek begins to look for the process that was at an address.
func (b *book) seek(a *address, at time.Duration) {
	a.tries, a.next = quickTries, at
	b.next = min(b.next, at)
}

// hint brings a try forward: somebody may be there again.
func (b *book) hint(now time.Duration, a *address) {
	if !a.quiet() {
		a.next = min(a.next, max(now, a.triedAt+hintWait))
		b.next = min(b.next, a.next)
	}
}

// hintAll brings all tries forward: a lost peer is back, so a split may be over.
func (b *book) hintAll(now time.Duration) {
	for _, a := range b.list {
		b.hint(now, a)
	}
}

// tried plans the next try.
func (b *book) tried(now time.Duration, a *address, rand func() float64) {
	wait := quickWait << a.tries
	if a.tries >= quickTries {
		wait = tryWait + time.Duration(rand()*float64(trySpread))
		if now-a.heardAt > tryCold && !a.seed {
			wait *= 10
		}
	} else {
		a.tries++
	}
	a.triedAt, a.next = now, now+wait
}
