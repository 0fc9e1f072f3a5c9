// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import "time"

const (
	// minPace and maxPace bound row.pace, a tenth of the time in which the burst is refilled.
	// An entry changes at most once per pace: lending more often moves tiny amounts.
	minPace = 2 * time.Millisecond
	maxPace = 50 * time.Millisecond

	// restate is the shortest time between two changes of a need. Needs that follow every
	// fluctuation are most of the traffic of a saturated fleet.
	restate = 20 * time.Millisecond

	// retell is how long a node waits for a loan before it sends a need again: perhaps the
	// peer had no room for the key.
	retell = time.Second

	// controlLoop is about how long a token takes from being lent to being lendable again:
	// two flushes and two delays.
	controlLoop = 12 * time.Millisecond

	// counted is the fraction of fresh peers that are expected to have a surplus.
	counted = 0.6

	// spare is how many times its forecast a borrower may hold.
	spare = 2 * 1.2

	// crumb is the smallest amount that is worth a packet.
	crumb = micro / 1000
)

// plan returns how many micro-tokens to keep for the forecast demand, and how many to ask
// for ahead. A sure forecast keeps little more than it expects, and asks for all of that.
// An unsure one keeps more and asks for less. A node that mints nothing asks for all that
// it keeps, see stepSpread.
func (r *row) plan() (keep, ahead int64) {
	if r.yielding {
		return 0, 0
	}
	window := max(minWindow, r.pace)
	mean := r.forecast.mean * r.ahead / window.Seconds()
	a := r.forecast.alpha()
	return int64((2 - a) * mean), int64(a * mean)
}

// step runs at the row's pace: it measures the demand, returns borrowed tokens that it does
// not need, states its needs, and lends surplus tokens.
func (n *Node) step(r *row) {
	r.update(n.now, n.mintAt)
	quiet := r.forecast.asked == 0
	window := max(minWindow, r.pace)
	r.forecast.observe(n.now, window, r.full*window.Seconds())
	if n.now >= r.wantUntil {
		r.want = 0
	}
	if r.overCap {
		n.trim(r)
		n.pin(r)
	}
	r.yielding = n.yields(r)
	if keep, _ := r.plan(); r.pooled > keep && !n.single {
		r.reclaim() // tokens in the pool cannot be lent, and keep the row from being forgotten
	}
	switch {
	case n.single:
	case r.owner == "":
		n.stepSpread(r, quiet)
	case r.here:
		n.stepOwner(r)
	default:
		n.stepAway(r)
	}
	r.lost, r.last = 0, n.now
	for _, e := range r.entries {
		if e != nil && e.dirty && !e.peer.gone {
			e.touch()
		}
	}
	n.rest(r)
	n.ripen(r)
}

// ripen adds a row whose waiters may be served to n.ripe.
func (n *Node) ripen(r *row) {
	if r.waiting > 0 && !r.ripe && r.spendable() > 0 {
		r.ripe = true
		n.ripe = append(n.ripe, r)
	}
}

// rest schedules the row's next step, or forgets the row.
func (n *Node) rest(r *row) {
	if n.single {
		next := never
		if r.waiting > 0 && r.spendable() == 0 { // such as while a fence is up
			next = after(n.now, max(r.until(min(r.head, r.cap)), r.pace, time.Millisecond))
		}
		n.schedule(r, next)
		return
	}
	f := &r.forecast
	next := n.now + r.pace
	if f.mean == 0 && f.asked == 0 && r.waiting == 0 && r.want == 0 && r.held == 0 && !r.needing && !r.stated {
		if n.idle(r) {
			n.evict(r)
			return
		}
		next = never
		if wait := r.until(r.cap); wait > 0 && wait < never-n.now && r.lent == 0 {
			next = n.now + wait
		}
		if len(r.lenders) > 0 && next == never {
			next = n.now + max(r.fill, r.pace) // to forget the row once all allowances are full
		}
		if again := n.settled(r); next == never && n.now < again {
			next = again
		}
	} else if r.drawing {
		next = min(next, n.now+min(r.until(r.granted+micro), r.pace))
	}
	n.schedule(r, next)
}

// settled is the time from which on a new row would be full: minting since the last change
// of shares then fills a whole burst.
func (n *Node) settled(r *row) time.Duration {
	if n.steady == 0 {
		return 0
	}
	return n.steady + r.fill + r.fill/1000
}

// idle tells whether the row may be forgotten: a new row would be the same.
func (n *Node) idle(r *row) bool {
	if r.level < r.cap || r.lent > 0 || r.held > 0 || r.waiting > 0 || r.want > 0 || r.pooled > 0 {
		return false
	}
	if n.now < n.settled(r) {
		return false
	}
	for _, e := range r.entries {
		if e != nil {
			return false
		}
	}
	return r.paid(n.now)
}

func (n *Node) evict(r *row) {
	n.unqueue(r)
	r.own()
	delete(n.rows, r.name)
	if r.handle != nil {
		r.handle.row, r.handle = nil, nil
	}
}

// evictSome forgets idle rows before a key is added, at a node that is alone, where steps do
// not. It looks at two rows for each new one. Without room it looks at all rows, once a
// second.
func (n *Node) evictSome() {
	look, rested := 2, idleRow
	if len(n.rows) >= n.cfg.MaxKeys && n.now >= n.pruneAt {
		n.pruneAt = n.now + pruneEvery
		look, rested = len(n.rows), 0
	}
	for _, r := range n.rows {
		if look--; look < 0 {
			return
		}
		if n.now-r.mintedAt < rested {
			continue
		}
		r.update(n.now, n.mintAt)
		r.reclaim()
		if n.idle(r) {
			n.evict(r)
		}
	}
}

// idleRow is how long evictSome keeps an unused row while there is room.
const idleRow = 10 * time.Second

func (n *Node) stepSpread(r *row, quiet bool) {
	keep, ahead := r.plan()
	if r.cap == 0 && len(n.terms) == 1 {
		ahead = keep // nothing is minted here: tokens not borrowed ahead of a call are denied
	}
	owed := r.owed()
	most := int64(spare*float64(keep)) + owed
	if len(n.terms) > 1 && (quiet || r.spendable() < micro) {
		// A node whose share shrinks keeps within a configuration only once its loans are back.
		// So return loans early. Less than one token serves no call, whatever the demand is.
		most = owed
	}
	n.returnSpare(r, most)

	short := owed + r.lost + ahead - r.held - r.level + r.pooled
	if r.yielding {
		short = 0
	}
	if short > crumb || r.stated {
		n.need(r, min(short, r.burst))
	}

	total := n.needs(r)
	surplus := min(r.level-r.pooled, r.level-r.pooled-keep-owed) // the sum of waiters may overflow
	if total == 0 || surplus < crumb {
		return
	}
	if n.stuck(r) {
		e := n.nearest(r)
		e.lend(min(e.itsNeed, surplus))
		return
	}
	for _, e := range r.entries {
		if e == nil || e.itsNeed == 0 || !n.lendable(e.peer) {
			continue
		}
		if x := min(e.itsNeed, part(surplus, e.itsNeed, total)); x >= crumb {
			e.lend(x)
		}
	}
}

// needs returns the sum of the needs of lendable peers. A peer with a need that may not have
// heard us recently is sent a change until it answers: idle nodes exchange only keep-alives,
// and some of those get lost.
func (n *Node) needs(r *row) (total int64) {
	r.needing = false
	for _, e := range r.entries {
		if e == nil || e.itsNeed == 0 {
			continue
		}
		r.needing = r.needing || n.unheard(e.peer) < lease
		switch {
		case n.lendable(e.peer):
			total += e.itsNeed
		case !e.peer.unanswered() && n.now-e.peer.heard < freshFor:
			e.dirty = true
		}
	}
	return total
}

// returnSpare returns borrowed tokens beyond most, to each lender its part. It does not
// return amounts below a crumb, with two exceptions. If most is 0 they go back, or the key
// would never be forgotten. While a configuration is not complete they go back too, since a
// lender that leaves waits for them.
func (n *Node) returnSpare(r *row, most int64) {
	excess, held := r.held-most, r.held
	if excess <= 0 || excess < crumb && most > 0 && len(n.terms) == 1 {
		return
	}
	for _, e := range r.entries {
		if e != nil && e.held() > 0 {
			e.giveBack(part(e.held(), excess, held))
		}
	}
}

// need divides the missing amount over the peers that mint, by their shares, and states the
// parts. Not all of them will have a surplus, so the parts add up to more. A peer that was
// heard but is not fresh gets a need as well: idle nodes exchange only keep-alives, and the
// peer's answer makes it fresh.
func (n *Node) need(r *row, short int64) {
	shares := int64(0)
	for _, p := range n.slots {
		if p != nil && (n.fresh(p) || p.rest > 0 && !p.gone && !p.detached && n.unheard(p) < lease) {
			shares += p.share
		}
	}
	r.stated = false
	for _, p := range n.slots {
		if p == nil || p.share == 0 || p.gone {
			continue
		}
		need := int64(0)
		if short > crumb && n.unheard(p) < lease {
			need = min(int64(float64(short)/counted*float64(p.share)/float64(max(shares, p.share))), short)
		}
		if need < crumb {
			need = 0
		}
		e := r.with(p)
		if e == nil {
			if need == 0 {
				continue
			}
			e = r.entry(p)
		}
		n.state(e, need)
		r.stated = r.stated || e.need > 0
	}
}

// state sets the need that the peer is sent: at once if there was none, or if it grew
// fourfold. Other changes wait for restate; in a spread limit the need must also have doubled
// or fallen to a quarter. Without a loan the same need is sent again after retell.
func (n *Node) state(e *entry, need int64) {
	switch {
	case need > 0 && e.borrowed.series == 0 && n.now-e.needAt >= retell:
	case need == e.need:
		return
	case e.need == 0:
	case n.now-e.needAt < restate && need < 4*e.need:
		return
	case e.row.owner == "" && need < 2*e.need && need > e.need/4:
		return
	}
	e.need, e.needAt, e.dirty = need, n.now, true
}
