// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"slices"
	"strings"
	"time"

	"github.com/stormguard-mq/stormguard/limiter"
)

// Charter k+1 is chosen by single-decree Paxos among the roster of charter k: a
// decree is chosen when a majority of that roster has accepted it in one ballot.
// Promises and votes are volatile. What makes up for that is that of one name at
// most one life votes for one number:
//
// A life recovers at K when it has heard, since its start, from ceil(n/2) others of
// the n members of roster K that K is the newest they know, that they may vote for
// K+1 and have accepted nothing for it. Then it votes from K+2 on.
//
// Claim: no two lives of a name vote for one number m. Say life 2 recovered at K,
// so m >= K+2, and life 1 voted for m before it ended, so it knew that m-1 >= K+1 was
// chosen, and so was K+1, before life 2 began. A majority of roster K had accepted
// for K+1. It has floor(n/2)+1 members, at least floor(n/2) of them not of this name,
// and ceil(n/2) plus that is more than the n-1 others: life 2 has heard one of them. It was
// the same life that accepted, by the claim for K+1 < m, since it may vote for
// K+1; so it had accepted when it was heard, and did not say so. The claim for m =
// 2, where the lives that vote are founders, is an assumption.
//
// By the same argument life 1 had applied no charter above K, so life 2 may mint
// within what it knows: it is settled. A guest recovers in the same way, and asks to
// join afterwards; so whoever is in a new roster may vote there at once.
//
// Who may not vote for K+1 yet asks for K+2 to come: renewal, a charter that may
// change nothing. Less than a majority can be without memory at a time.
//
// Where a majority does not vote, nothing could be chosen for others to renew.
// So a new life that has heard, since its start, from all other members that K is
// the newest they know, of whom one at least votes for K+1, takes over what they
// remember: the highest ballot, and what was accepted in the highest. Then it votes
// for K+1. Members of whom an operator said that they do not run need not be heard.
//
// Claim: nobody counts what the life before it voted, or applied above K, so it may
// mint within K. A row is addressed to a life,
// so whoever was heard knows the new one, and has dropped the rows of the old; and
// it had not counted them before, or it would know K+1. The promises of the old life
// were to ballots whose proposers were heard: those that go on with theirs said so,
// and what the old life accepted, its proposer accepted first. Guests are not asked:
// that one of them learned of K+1, and that all members who did have started again or
// are dead, is outside of this, and the two differ loudly afterwards ([ErrCharter]).
//
// Who is the only member has nobody to ask. It goes by the newest charter that
// anybody it hears in its first second knows; a guest that knows a later one, and is
// not heard by then, is the extra term.
//
// Founders have nothing to remember. A life at charter 1 is one when, of the
// founding roster, it has met all, or a majority counting itself in the first
// second: each of the others says that it knows no later charter, that it is a
// founder or new, and that this is the first life of that name that it has met; and
// none that is heard says otherwise.
//
// The assumption: when a majority of a roster is without memory at once, that is new
// or starting again, one who remembers and all others are heard again, but for those
// of whom an operator says that they do not run; or nothing is decided, and nobody
// mints who has started again, until all start again or the fleet gets a new name.
// What such a majority had chosen and nobody else has heard is lost. If
// a majority of the founding roster has started again, and hears nobody who remembers
// for a second, it founds the fleet anew from its configuration: the extra term is its
// shares of charter 1, until it hears of a later one.
//
// Source: L. Lamport, The part-time parliament, ACM Trans. Comput. Syst. 16 (1998).

// foundAfter is how long a founder waits for those of the roster that it has not met,
// and for somebody who remembers.
const foundAfter = time.Second

// mayVote tells whether we vote for the next number.
func (c *Charters) mayVote() bool {
	return c.seat >= 0 && c.votes > 0 && c.votes <= c.known()+1 && !c.over
}

// votesAt tells whether f is a member that knows what we know, and votes for the
// next number.
func (c *Charters) votesAt(f *fellow) bool {
	return f != nil && f.seat >= 0 && f.row.known == c.known() && f.row.votes > 0 && f.row.votes <= c.known()+1
}

// settleLocked finds out whether this life may vote, and mint.
func (c *Charters) settleLocked(now time.Duration) {
	n, next := len(c.seats), c.known()+1
	if c.settled && c.votes > 0 && c.votes <= next {
		return
	}
	before, settled := c.votes, c.settled
	if c.known() == 1 && c.seat >= 0 && c.votes == 0 {
		agree, denied := 1, false // the seats that agree
		for _, f := range c.list {
			if f.row.known == 0 {
				continue
			}
			denied = denied || f.row.known > 1 || f.row.flags&flagFirst == 0
			if f.seat >= 0 && f.row.votes <= next {
				agree++
			}
		}
		if !denied && (agree == n && n > 1 || agree >= c.majority() && now-c.start >= foundAfter) {
			c.votes, c.settled = next, true
			c.tellAll()
			c.leaseLocked(now)
		}
		if !denied {
			return // a founder that were to recover from others would not vote
		}
	}
	if c.seat >= 0 && (c.votes == 0 || c.votes > next) {
		c.cloneLocked(now)
	}
	if n == 1 && c.seat == 0 && c.votes == 0 && now-c.start >= foundAfter {
		c.votes, c.settled = next, true
	}
	heard := 0
	for i := range c.seats {
		if f := c.seats[i].fellow; c.votesAt(f) && f.row.accepted.digest == 0 {
			heard++
		}
	}
	if heard >= (n+1)/2 {
		c.settled = true
		if c.votes == 0 {
			c.votes = next + 1
		}
	}
	if c.votes != before || c.settled != settled {
		c.joining = c.joining && !(c.settled && c.seat >= 0)
		c.tellAll()
		c.leaseLocked(now)
	}
}

// cloneLocked takes over what all the others remember.
func (c *Charters) cloneLocked(now time.Duration) {
	var from *fellow // that accepted in the highest ballot
	var high ballot
	var last accepted
	voters := 0
	for i := range c.seats {
		f := c.seats[i].fellow
		switch {
		case i == c.seat:
			continue
		case f == nil || f.row.known == 0 || now-f.heard >= nearby:
			if c.saidDead(i) {
				continue
			}
			return
		case f.row.known != c.known():
			return
		case c.votesAt(f):
			voters++
		}
		for _, at := range []ballot{f.row.promised, f.row.ballot} {
			if high.less(at) {
				high = at
			}
		}
		if a := f.row.accepted; a.digest != 0 && last.at.less(a.at) {
			from, last = f, a
		}
	}
	if voters == 0 {
		return
	}
	if last.digest != 0 {
		if c.proposals[last.digest] == nil {
			c.fetchLocked(now, from, want{number: c.known() + 1, digest: last.digest}, false)
			return
		}
		c.accepted, c.acceptedAt = last, now
	}
	c.promised, c.promisedAt, c.votes, c.settled = high, now, c.known()+1, true
	c.round = max(c.round, high.round)
}

// saidDead tells whether a voter says of a seat that an operator said that its
// process does not run.
func (c *Charters) saidDead(seat int) bool {
	for i := range c.seats {
		if f := c.seats[i].fellow; c.votesAt(f) && f.row.flags&flagDead != 0 && slices.Contains(f.row.dead[:], seat+1) {
			return true
		}
	}
	return false
}

// deadLocked lists the seats that an operator wants evicted of us, if there are any.
func (c *Charters) deadLocked(seats *[maxDead]int) bool {
	n := 0
	for i := range c.requests {
		if r := &c.requests[i]; r.evict != "" && n < maxDead && !c.returnedLocked(r) {
			if seat := seatOf(c.top().Roster.Members, r.evict); seat >= 0 {
				seats[n] = seat + 1
				n++
			}
		}
	}
	return n > 0
}

// voteLocked answers a ballot of f as a member.
func (c *Charters) voteLocked(now time.Duration, f *fellow) {
	at := f.row.ballot
	if !c.mayVote() || !c.votesAt(f) || at.seat != f.seat+1 || at.less(c.promised) {
		return
	}
	if c.promised != at {
		c.promised, c.promisedAt = at, now
		c.round = max(c.round, at.round)
		c.tell(f)
	}
	if f.row.flags&flagProposed == 0 || c.accepted.at == at {
		return
	}
	d := c.proposals[f.row.proposed]
	switch {
	case d == nil:
		c.fetchLocked(now, f, want{number: c.known() + 1, digest: f.row.proposed}, false)
	case f.row.flags&flagFresh != 0 && c.hearsLocked(now, d):
		// A proposal of its own choice may be refused; one that may have been chosen
		// may not, or nothing would ever be.
	default:
		c.acceptLocked(now, at, d.digest)
		c.tell(f)
	}
}

// hearsLocked tells whether somebody is heard that a decree evicts for silence.
func (c *Charters) hearsLocked(now time.Duration, d *decree) bool {
	return slices.ContainsFunc(d.evicted, func(e eviction) bool {
		f := c.fellows[e.name]
		return e.silent && (e.name == c.self.Name || f != nil && f.heard > 0 && now-f.heard < c.cfg.Silent/2)
	})
}

// acceptLocked votes for a decree. From here on nobody gets a grant for what it
// sends: the decree may evict it, and so may what is chosen after it.
func (c *Charters) acceptLocked(now time.Duration, at ballot, digest uint64) {
	if c.accepted.digest == 0 {
		for _, f := range c.list {
			f.frozen = f.sent
		}
	}
	c.promised, c.accepted, c.acceptedAt = at, accepted{at, digest}, now
}

// countLocked finds out whether a majority has accepted one decree in one ballot.
func (c *Charters) countLocked(now time.Duration, a accepted) {
	if a.digest == 0 {
		return
	}
	n := 0
	if c.accepted == a && c.mayVote() {
		n++
	}
	var from *fellow
	for i := range c.seats {
		if f := c.seats[i].fellow; c.votesAt(f) && f.row.accepted == a {
			n++
			from = f
		}
	}
	if n < c.majority() {
		return
	}
	if d := c.proposals[a.digest]; d != nil {
		c.learnLocked(now, d, nil)
	} else if from != nil {
		c.fetchLocked(now, from, want{number: c.known() + 1, digest: a.digest}, false)
	}
}

// proposeLocked begins a ballot when something is requested and it is our turn.
func (c *Charters) proposeLocked(now time.Duration) {
	if !c.mayVote() || c.broken != nil {
		return
	}
	if c.bid.at != (ballot{}) {
		c.bidLocked(now)
		if c.bid.at != (ballot{}) && now-c.bid.since >= c.cfg.Patience {
			c.yieldLocked(now)
		}
		return
	}
	c.giveUpLocked()
	urgent := len(c.requests) > 0
	shared := c.accepted.digest != 0 || c.requestedLocked(now)
	switch {
	case !urgent && !shared:
		c.wanted = never
		return
	case c.wanted == never:
		c.wanted, c.rank = now, c.rankLocked(now)
	}
	if now < c.retryAt || c.promised.round > 0 && now-c.promisedAt < c.cfg.Patience {
		return // somebody else's ballot is under way
	}
	if !urgent && now < c.wanted+c.cfg.Gather+time.Duration(c.rank)*c.cfg.Patience {
		return
	}
	if d, _ := c.draftLocked(now); d == nil && c.accepted.digest == 0 {
		return
	}
	c.round++
	c.bid = bid{at: ballot{c.round, c.seat + 1}, since: now}
	c.promised, c.promisedAt = c.bid.at, now
	c.tellAll()
	c.bidLocked(now)
}

// rankLocked is how many members that are there come before us.
func (c *Charters) rankLocked(now time.Duration) int {
	score := func(name string) uint64 {
		return hashEnd(hashString(hashNumber(c.fleet, c.known()), name))
	}
	own, rank := score(c.self.Name), 0
	for i := range c.seats {
		if f := c.seats[i].fellow; c.votesAt(f) && now-f.heard < nearby && score(f.id.Name) < own {
			rank++
		}
	}
	return rank
}

// yieldLocked gives a ballot up for a while.
func (c *Charters) yieldLocked(now time.Duration) {
	if c.bid.decree != nil && c.bid.fresh && c.bid.decree.silent() {
		c.calm = now + 4*c.cfg.Patience // others may hear whom we do not
	}
	c.bid = bid{}
	span := c.cfg.Patience << min(c.fails, 3)
	c.fails++
	c.retryAt = now + span/4 + time.Duration(c.rand.Int64N(int64(span)))
	c.tellAll()
}

// bidLocked takes our ballot as far as it goes.
func (c *Charters) bidLocked(now time.Duration) {
	b := &c.bid
	if b.at == (ballot{}) {
		return
	}
	if c.promised != b.at {
		c.yieldLocked(now)
		return
	}
	if b.decree == nil {
		n, best := 1, c.accepted
		var from *fellow
		for i := range c.seats {
			if f := c.seats[i].fellow; c.votesAt(f) && f.row.promised == b.at {
				n++
				if best.at.less(f.row.accepted.at) {
					best, from = f.row.accepted, f
				}
			}
		}
		if n < c.majority() {
			return
		}
		if best.digest != 0 {
			if b.decree = c.proposals[best.digest]; b.decree == nil {
				c.fetchLocked(now, from, want{number: c.known() + 1, digest: best.digest}, false)
				return
			}
		} else {
			d, made := c.draftLocked(now)
			if d == nil {
				c.bid = bid{} // the requests are gone
				c.tellAll()
				return
			}
			b.decree, b.fresh = d, true
			for i := range c.requests {
				if r := &c.requests[i]; slices.Contains(made, r.ticket) {
					r.in = append(r.in, d.digest)
				}
			}
		}
		c.proposals[b.decree.digest] = b.decree
		b.since = now
		c.acceptLocked(now, b.at, b.decree.digest)
		c.tellAll()
	}
	c.countLocked(now, accepted{b.at, b.decree.digest})
}

// pendingLocked is how many charters wait to be applied.
func (c *Charters) pendingLocked() int { return len(c.chain) - 1 }

// joins, leaves and renews tell what f asks for.
func (c *Charters) joins(now time.Duration, f *fellow) bool {
	return f.row.flags&flagJoining != 0 && f.seat < 0 && now-f.heard < nearby && f.row.applied > 0 &&
		f.row.known == c.known() && f.row.votes > 0 && f.row.votes <= c.known()+2 && c.gone[f.id.Name].number == 0
}

func (c *Charters) leaves(f *fellow) bool { return f.row.flags&flagLeaving != 0 && f.seat >= 0 }

func (c *Charters) renews(now time.Duration, f *fellow) bool {
	return f.row.flags&flagRenew != 0 && f.seat >= 0 && now-f.heard < nearby && f.row.known == c.known()
}

// silentLocked tells whether the member of a seat is to be evicted for silence.
func (c *Charters) silentLocked(now time.Duration, s *seat) bool {
	if c.cfg.OnSilence != limiter.Majority || now < c.calm || s.name == c.self.Name {
		return false
	}
	since := max(s.since, c.start)
	if s.fellow != nil {
		since = max(since, s.heard)
	}
	return now-since >= c.cfg.Silent
}

// requestedLocked tells whether anybody asks for the next charter.
func (c *Charters) requestedLocked(now time.Duration) bool {
	if c.leaving && c.seat >= 0 {
		return true
	}
	for _, f := range c.list {
		if c.joins(now, f) || c.leaves(f) || c.renews(now, f) {
			return true
		}
	}
	for i := range c.seats {
		if c.silentLocked(now, &c.seats[i]) {
			return true
		}
	}
	return false
}

// draftLocked is the next charter as we would have it, or nil if nobody asks for
// one or it would be none, and the tickets of our own requests that are in it.
func (c *Charters) draftLocked(now time.Duration) (d *decree, made []uint64) {
	pending := c.pendingLocked()
	if pending >= maxPending {
		return nil, nil
	}
	to := c.top().Charter
	to.Number++
	asked, moved := false, false
	var evicted []eviction
	members := slices.Clone(to.Roster.Members)
	mint := 0
	for _, m := range members {
		if m.Weighs() > 0 {
			mint++
		}
	}
	remove := func(name string) bool {
		i := seatOf(members, name)
		if i < 0 || len(members) == 1 || members[i].Weighs() > 0 && mint == 1 {
			return false
		}
		if members[i].Weighs() > 0 {
			mint--
		}
		members = slices.Delete(members, i, i+1)
		asked, moved = true, true
		return true
	}
	for _, r := range c.requests {
		if lacks := c.lacksLocked(r.evict); r.evict != "" && !c.returnedLocked(&r) && (remove(r.evict) || lacks) {
			asked = true
			evicted = append(evicted, eviction{name: r.evict})
			made = append(made, r.ticket)
		}
	}
	for i := range c.seats {
		if s := &c.seats[i]; c.silentLocked(now, s) && remove(s.name) {
			evicted = append(evicted, eviction{s.name, true})
		}
	}
	slices.SortFunc(evicted, func(a, b eviction) int { return strings.Compare(a.name, b.name) })
	if pending < fewPending {
		if c.leaving {
			remove(c.self.Name)
		}
		for _, f := range c.list {
			switch {
			case c.leaves(f):
				remove(f.id.Name)
			case c.joins(now, f) && len(members) < maxMembers && seatOf(c.top().Roster.Members, f.id.Name) < 0:
				m := limiter.Member{Name: f.id.Name, Weight: f.row.weight, NoShare: f.row.weight == 0}
				i, _ := slices.BinarySearchFunc(members, m, byName)
				members = slices.Insert(members, i, m)
				asked, moved = true, true
			case c.renews(now, f):
				asked = true
			}
		}
	}
	to.Roster.Members = members
	if pending < fewPending {
		changed, weights := c.changeLocked(&to)
		made = append(made, changed...)
		asked, moved = asked || len(changed) > 0, moved || weights
	}
	if moved {
		to.Roster.Number = to.Number
	}
	if !asked || checkCharter(to) != nil {
		return nil, nil
	}
	return newDecree(to, evicted), made
}

// changeLocked makes what operators ask of us to change, and returns the tickets of
// what could be made, and whether weights are among it.
func (c *Charters) changeLocked(to *limiter.Charter) (made []uint64, weights bool) {
	for _, r := range c.requests {
		if r.change == nil {
			continue
		}
		if changed, err := r.change.apply(*to, r.resets); err == nil {
			weights = weights || len(r.change.Weights) > 0
			*to = changed
			made = append(made, r.ticket)
		}
	}
	return made, weights
}
