// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"bytes"
	"fmt"
	"time"

	"github.com/stormguard-mq/stormguard/crdt"
	"github.com/stormguard-mq/stormguard/limiter"
)

// Mark is the number of the latest change that concerns a peer. Mark, Delta,
// Merge and Gone are what a gossip session asks of a section.
func (c *Charters) Mark(to crdt.Replica) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.markLocked(to)
}

func (c *Charters) markLocked(to crdt.Replica) uint64 {
	if f := c.fellows[to.Name]; f != nil && f.id == to {
		return max(c.shared, f.told)
	}
	return c.shared
}

// Counted rises whenever the mark for any peer does; see gossip.Counter.
func (c *Charters) Counted() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.seq
}

// Keeps tells whether a peer must be heard all the time: while a charter is under way,
// since much of that travels with keep-alives, but not for ever if it waits for one who is
// gone; and where leases depend on it. See gossip.Keeper.
func (c *Charters) Keeps(to crdt.Replica) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cfg.OnSilence == limiter.Majority && seatOf(c.top().Roster.Members, to.Name) >= 0 {
		return true
	}
	return (c.activeLocked() || !c.settled) && c.ticked-c.toldAt < underWay
}

// underWay is for how long after the latest change that is to be told.
const underWay = 10 * time.Second

// Delta appends this process's row, and a piece of the decree that the peer wants.
// A room of 512 bytes always makes progress; with less than the row takes it
// appends nothing. With nothing new it appends the row, which renews grants.
func (c *Charters) Delta(now time.Duration, b []byte, to crdt.Replica, since uint64, room int) (_ []byte, upto uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if room < maxRow || to == c.self {
		return b, since
	}
	c.meetLocked(to)
	f := c.fellows[to.Name]
	if f != nil && f.id != to {
		f = nil
	}
	mark, end := c.markLocked(to), len(b)+room
	s := &c.row
	*s = statement{
		fleet: c.fleet, founding: c.founding, life: to.Incarnation,
		known: c.known(), digest: c.top().digest, complete: c.complete(), applied: c.own, votes: c.votes,
		weight: c.weight, promised: c.promised, accepted: c.accepted, ballot: c.bid.at,
	}
	set := func(flag uint64, on bool) {
		if on {
			s.flags |= flag
		}
	}
	set(flagFirst, c.first[to.Name] == to.Incarnation)
	set(flagLeaving, c.leaving)
	set(flagJoining, c.joining && c.seat < 0)
	set(flagRenew, c.seat >= 0 && !c.over && (c.votes > c.known()+1 || c.votes == 0 && c.known() > 1))
	set(flagPromised, c.promised.round > 0)
	set(flagAccepted, c.accepted.digest != 0)
	set(flagBallot, c.bid.at.round > 0)
	set(flagDead, c.deadLocked(&s.dead))
	if c.bid.decree != nil {
		s.proposed = c.bid.decree.digest
		set(flagProposed, true)
		set(flagFresh, c.bid.fresh)
	}
	if f != nil {
		if c.pull.from == f {
			s.want = c.pull.want
			set(flagWant, true)
		}
		s.grant = c.grantTo(f)
		set(flagGrant, s.grant > 0)
	}
	row := len(b)
	b = appendStatement(b, s)
	if f != nil && f.row.flags&flagWant != 0 && f.told > since {
		if s.piece = c.pieceLocked(f.row.want, end-len(b)-pieceFront); s.piece.data != nil {
			set(flagPiece, true)
			set(flagChosen, s.piece.chosen)
			b = appendPiece(appendStatement(b[:row], s), &s.piece)
		}
	}
	return b, max(since, mark)
}

// pieceLocked is what is wanted, as far as there is room.
func (c *Charters) pieceLocked(w want, room int) piece {
	d, chosen := c.proposals[w.digest], false
	for _, l := range c.chain {
		if l.Number == w.number && (w.digest == 0 || w.digest == l.digest) {
			d, chosen = l.decree, true
		}
	}
	if d == nil || d.Number != w.number || w.offset >= len(d.bytes) || room < leastPiece {
		return piece{}
	}
	data := d.bytes[w.offset:]
	return piece{w.number, d.digest, len(d.bytes), w.offset, chosen, data[:min(len(data), room)]}
}

// meetLocked remembers the first life of each name that is met.
func (c *Charters) meetLocked(r crdt.Replica) {
	if _, ok := c.first[r.Name]; !ok && len(c.first) < maxLives {
		c.first[r.Name] = r.Incarnation
	}
}

// Merge takes in what a peer's Delta appended. It is commutative and idempotent.
// The errors are [ErrMalformed], [ErrFleet], [ErrCharter] and [ErrSelf], and then
// nothing was taken in; Status counts them.
func (c *Charters) Merge(contact crdt.Contact, b []byte) error {
	if contact.From == c.self {
		return ErrSelf
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	s := &c.row
	if err := readStatement(b, s); err != nil {
		return err
	}
	if s.fleet != c.fleet {
		c.foreign++
		return fmt.Errorf("%w: of %v", ErrFleet, contact.From)
	}
	if s.founding != c.founding {
		return c.differsLocked(1, contact.From, c.founding, s.founding)
	}
	for _, l := range c.chain {
		if l.Number == s.known && l.digest != s.digest {
			return c.differsLocked(s.known, contact.From, l.digest, s.digest)
		}
	}
	if contact.From.Name == c.self.Name || s.life != c.self.Incarnation {
		return nil // another life of one of us, or for one
	}
	c.meetLocked(contact.From)
	f := c.fellowLocked(contact.From)
	if f == nil {
		return nil // of an earlier life
	}
	now := contact.Now
	f.heard = max(f.heard, now)
	if contact.Sent > f.sent || f.row.known == 0 { // else repeated or overtaken: the row that came says it all
		f.heard = now + contact.Rest // until then nothing need come
		c.rowInLocked(now, contact.Sent, f, s)
	}
	if s.flags&flagPiece != 0 {
		c.pieceInLocked(now, f, &s.piece)
	}
	c.settleLocked(now)
	return nil
}

// rowInLocked takes in a row of f that is newer than what is known of it.
func (c *Charters) rowInLocked(now, sent time.Duration, f *fellow, s *statement) {
	wanted := f.row.want
	f.sent, f.row = sent, *s
	f.row.piece = piece{}
	if s.flags&flagWant != 0 && s.want != wanted {
		c.tell(f)
	}
	if top := min(s.complete, c.known()); top > c.complete() {
		before := c.complete()
		for c.complete() < top {
			c.chain = c.chain[1:]
		}
		c.completedLocked(now, before, false)
	}
	if c.takeWord(f) {
		c.completeLocked(now)
	}
	c.readLocked(now, f)
}

// takeWord notes what f says that it has applied, as far as we know the charters, and
// tells whether that is news. It counts for the name, whichever life said it; so what
// a life that is over said of a charter that we did not know then must not count: its
// successor may have heard from us that there is none.
func (c *Charters) takeWord(f *fellow) bool {
	applied := min(f.row.applied, c.known())
	if applied <= c.applied[f.id.Name] {
		return false
	}
	c.applied[f.id.Name] = applied
	return true
}

func (c *Charters) differsLocked(number uint64, peer crdt.Replica, ours, theirs uint64) error {
	c.differing++
	c.differs = &CharterError{Number: number, Peer: peer, Ours: ours, Theirs: theirs}
	return c.differs
}

// fellowLocked is the life's, opened if need be; nil if a later one is known.
func (c *Charters) fellowLocked(id crdt.Replica) *fellow {
	f := c.fellows[id.Name]
	switch {
	case f != nil && f.id.Incarnation == id.Incarnation:
		return f
	case f != nil && f.id.Incarnation > id.Incarnation:
		return nil
	case f != nil:
		c.dropLocked(f)
	}
	f = &fellow{id: id, seat: seatOf(c.top().Roster.Members, id.Name)}
	if f.seat >= 0 {
		c.seats[f.seat].fellow = f
	}
	c.fellows[id.Name] = f
	c.list = append(c.list, f)
	return f
}

func (c *Charters) dropLocked(f *fellow) {
	if f.seat >= 0 {
		c.seats[f.seat].fellow = nil
	}
	if c.pull.from == f {
		c.pull = pull{}
	}
	delete(c.fellows, f.id.Name)
	for i := range c.list {
		if c.list[i] == f {
			c.list = append(c.list[:i:i], c.list[i+1:]...)
			break
		}
	}
}

// readLocked does what a row of f asks for.
func (c *Charters) readLocked(now time.Duration, f *fellow) {
	switch {
	case f.row.known > c.known():
		if d := c.proposals[f.row.digest]; d != nil && d.Number == f.row.known && d.Number == c.known()+1 {
			c.learnLocked(now, d, f)
			return
		}
		c.fetchLocked(now, f, want{number: max(c.known()+1, f.row.complete)}, true)
	case f.row.known == c.known():
		c.takeGrant(now, f)
		if f.seat < 0 {
			return
		}
		c.round = max(c.round, f.row.promised.round, f.row.ballot.round)
		if f.row.flags&flagBallot != 0 {
			c.voteLocked(now, f)
		}
		number := c.known()
		c.countLocked(now, f.row.accepted)
		if c.known() == number {
			c.bidLocked(now)
		}
	}
}

// fetchLocked asks f for a decree, unless one is being fetched that matters more.
func (c *Charters) fetchLocked(now time.Duration, f *fellow, w want, chosen bool) {
	p := &c.pull
	if p.from != nil && (p.chosen && (!chosen || p.number >= w.number) || p.number == w.number && p.digest == w.digest) {
		return
	}
	old := p.from
	*p = pull{want: w, chosen: chosen, from: f, at: now}
	if old != f {
		c.tell(old)
	}
	c.tell(f)
}

// refetchLocked turns to another one when a decree does not come.
func (c *Charters) refetchLocked(now time.Duration) {
	if c.pull.from == nil || now-c.pull.at < pullTimeout {
		return
	}
	slow, chosen := c.pull.from, c.pull.chosen
	c.pull = pull{}
	c.tell(slow)
	if !chosen {
		return // whoever proposes it will be heard again
	}
	var next *fellow
	for k, f := range c.list {
		if f.row.known <= c.known() || now-f.heard >= nearby || f == slow && next != nil {
			continue
		}
		if next == nil || next == slow || c.rand.IntN(k+1) == 0 {
			next = f
		}
	}
	if next != nil {
		c.readLocked(now, next)
	}
}

// pieceInLocked takes in a piece of what is being fetched.
func (c *Charters) pieceInLocked(now time.Duration, f *fellow, in *piece) {
	p := &c.pull
	if p.from != f || in.number != p.number || p.digest != 0 && in.digest != p.digest || in.offset != p.offset || p.chosen && !in.chosen {
		return
	}
	p.digest, p.at = in.digest, now
	p.buf = append(p.buf, in.data...)
	p.offset = len(p.buf)
	if p.offset < in.total {
		c.tell(f)
		return
	}
	b, number, chosen := bytes.Clone(p.buf), p.number, p.chosen
	*p = pull{}
	c.tell(f)
	d, err := readDecree(b)
	if err != nil || d.digest != in.digest || d.Number != number {
		return // it was pieced together from two; it is fetched again
	}
	if chosen {
		if number == c.known()+1 || number <= f.row.complete {
			c.learnLocked(now, d, f)
		}
	} else if number == c.known()+1 {
		c.keepLocked(d)
		c.readLocked(now, f)
	}
}

// keepLocked keeps a proposal for the next number. Of those that nobody needs any
// more one makes room.
func (c *Charters) keepLocked(d *decree) {
	const most = 16
	if len(c.proposals) >= most {
		for digest := range c.proposals {
			if digest != c.accepted.digest && (c.bid.decree == nil || digest != c.bid.decree.digest) {
				delete(c.proposals, digest)
			}
		}
	}
	c.proposals[d.digest] = d
}

// Gone says that a peer's life is over for good. What it applied stays applied.
func (c *Charters) Gone(_ time.Duration, peer crdt.Replica) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f := c.fellows[peer.Name]; f != nil && f.id.Incarnation <= peer.Incarnation {
		c.dropLocked(f)
	}
}
