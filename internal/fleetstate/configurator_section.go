// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"bytes"
	"fmt"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/escrow"
)

// Mark returns the number of the latest change that concerns a peer. A gossip session calls Mark,
// Delta, Merge and Gone of each section.
func (c *Configurator) Mark(to crdt.Replica) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.markLocked(to)
}

func (c *Configurator) markLocked(to crdt.Replica) uint64 {
	if f := c.peers[to.Name]; f != nil && f.id == to {
		return max(c.shared, f.told)
	}
	return c.shared
}

// Counted returns a number that rises whenever the mark for any peer does; see gossip.Counter.
func (c *Configurator) Counted() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.seq
}

// Keeps tells whether a peer must be heard all the time; see gossip.Keeper. It must be if leases
// depend on it. All peers must be while a change is under way, because keep-alives carry much of a
// change. That ends underWay after the latest news: a change may wait for a dead process forever.
func (c *Configurator) Keeps(to crdt.Replica) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.cfg.OnSilence == escrow.Majority && c.doc != nil && memberIndex(c.doc.newest().Roster.Members, to.Name) >= 0:
		return true
	case c.activeLocked() || !c.settled || c.leaving:
		return c.ticked-c.toldAt < underWay
	}
	return c.ticked-c.doneAt < nearby // keep-alives also tell that a change is complete
}

// underWay is how long after the latest news a change is looked at often, and its peers must be
// heard.
const underWay = 10 * time.Second

// Delta appends this process's row, and a piece of the document that the peer wants. A room of 512
// bytes always makes progress. With less room than the row takes it appends nothing. Without news
// it appends the row, which renews grants.
func (c *Configurator) Delta(now time.Duration, b []byte, to crdt.Replica, since uint64, room int) (_ []byte, upto uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if room < maxConfRow || to == c.self {
		return b, since
	}
	f := c.peers[to.Name]
	if f != nil && f.id != to {
		f = nil
	}
	mark, end := c.markLocked(to), len(b)+room
	s := &c.row
	*s = confRow{
		fleet: c.fleet, incarnation: to.Incarnation, known: c.known(), digest: c.digest,
		complete: c.complete(), applied: c.own, loaded: min(c.loaded, c.known()), weight: c.weight, frozen: s.frozen[:0],
	}
	set := func(flag uint64, on bool) {
		if on {
			s.flags |= flag
		}
	}
	set(confSettled, c.settled)
	set(confAble, c.ableLocked())
	set(confLeaving, c.leaving)
	set(confUnlist, c.unlisted())
	set(confRenew, c.thawsLocked(now))
	set(confJoining, c.joining && c.selfIndex < 0)
	for i := range c.voters {
		if c.frozen[c.voters[i].name] {
			s.frozen = append(s.frozen, i)
		}
	}
	set(confFrozen, len(s.frozen) > 0)
	if f != nil {
		if c.pull.from == f {
			s.want = c.pull.want
			set(confWant, true)
		}
		s.grant = c.grantTo(f)
		set(confGrant, s.grant > 0)
	}
	row := len(b)
	b = appendConfRow(b, s)
	if f != nil && f.row.flags&confWant != 0 && f.told > since {
		if s.piece = c.pieceLocked(f.row.want, end-len(b)-pieceFront); s.piece.data != nil {
			set(confPiece, true)
			b = appendPiece(appendConfRow(b[:row], s), &s.piece)
		}
	}
	return b, max(since, mark)
}

// pieceLocked returns the wanted piece, as far as there is room.
func (c *Configurator) pieceLocked(w want, room int) piece {
	if c.doc == nil || w.number != c.known() || room < leastPiece {
		return piece{}
	}
	digest := digestOf(c.doc.bytes)
	if w.digest != digest {
		w.offset = 0 // the fetch began with another document
	}
	if w.offset >= len(c.doc.bytes) {
		return piece{}
	}
	data := c.doc.bytes[w.offset:]
	return piece{number: w.number, digest: digest, total: len(c.doc.bytes), offset: w.offset, data: data[:min(len(data), room)]}
}

// Merge takes in the output of a peer's Delta. It is commutative and idempotent. The errors are
// [ErrMalformed], [ErrFleet], [ErrDiffers] and [ErrSelf], and then nothing was taken in. Status
// counts [ErrFleet] as Foreign and [ErrDiffers] as Differing.
func (c *Configurator) Merge(contact crdt.Contact, b []byte) error {
	if contact.From == c.self {
		return ErrSelf
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	s := &c.row
	if err := readConfRow(b, s); err != nil {
		return err
	}
	if s.fleet != c.fleet {
		c.foreign++
		return fmt.Errorf("%w: name, OnSilence, Lease or use of a register of %v", ErrFleet, contact.From)
	}
	if contact.From.Name == c.self.Name || s.incarnation != c.self.Incarnation {
		return nil // from another incarnation of this name, or for one
	}
	f := c.peerLocked(contact.From)
	if f == nil {
		return nil // from an earlier incarnation
	}
	now := contact.Now
	if s.known > 0 && s.known == c.known() && s.digest != c.digest {
		f.heard = max(f.heard, now+contact.Rest)
		if s.flags&confSettled != 0 || s.digest < c.digest {
			c.conflict = f
		} else if c.conflict == f {
			c.conflict = nil
		}
		c.differing++
		c.differs = &DiffersError{Number: s.known, Peer: contact.From, Ours: c.digest, Theirs: s.digest}
		return c.differs
	}
	if c.conflict == f {
		c.conflict = nil
	}
	f.heard = max(f.heard, now)
	if contact.Sent > f.sent || !f.met { // else the packet was repeated or overtaken
		f.heard = now + contact.Rest // before that no packet need come
		c.rowInLocked(now, contact.Sent, f, s)
	}
	if s.flags&confPiece != 0 {
		c.pieceInLocked(now, f, &s.piece)
	}
	c.settleLocked(now)
	return nil
}

// rowInLocked takes in a row of f that is newer than the known one.
func (c *Configurator) rowInLocked(now, sent time.Duration, f *confPeer, s *confRow) {
	wanted, frozen := f.row.want, f.row.frozen
	f.sent, f.row, f.met = sent, *s, true
	f.row.piece = piece{}
	f.row.frozen = append(frozen[:0], s.frozen...)
	if s.flags&confWant != 0 && s.want != wanted {
		c.tell(f)
	}
	c.knew[f.id.Name] = max(c.knew[f.id.Name], s.known)
	if !c.cfg.Static || s.flags&confSettled != 0 {
		if top := min(s.complete, c.known()); len(c.chain) > 0 && top > c.complete() {
			c.completeToLocked(now, top)
		}
	}
	if c.noteApplied(f) {
		c.completeLocked(now)
	}
	c.readLocked(now, f)
}

// noteApplied notes the newest configuration that f says it has applied, and tells whether that is
// news. It counts for the name, in any incarnation. It does not count above the newest number that
// we know. Otherwise a report of an ended incarnation could count for a configuration that its
// successor does not know: we told the successor that there is none.
func (c *Configurator) noteApplied(f *confPeer) bool {
	applied := min(f.row.applied, c.known())
	if applied <= c.applied[f.id.Name] {
		return false
	}
	c.applied[f.id.Name] = applied
	return true
}

// peerLocked returns the peer of an incarnation, and makes it if needed; nil if a later incarnation
// is known.
func (c *Configurator) peerLocked(id crdt.Replica) *confPeer {
	f := c.peers[id.Name]
	switch {
	case f != nil && f.id.Incarnation == id.Incarnation:
		return f
	case f != nil && f.id.Incarnation > id.Incarnation:
		return nil
	case f != nil:
		c.dropLocked(f)
	}
	f = &confPeer{id: id, rosterIndex: -1}
	if c.doc != nil {
		f.rosterIndex = memberIndex(c.doc.newest().Roster.Members, id.Name)
	}
	if f.rosterIndex >= 0 && f.rosterIndex < len(c.voters) {
		c.voters[f.rosterIndex].confPeer = f
	}
	c.peers[id.Name] = f
	c.list = append(c.list, f)
	return f
}

func (c *Configurator) dropLocked(f *confPeer) {
	if f.rosterIndex >= 0 && f.rosterIndex < len(c.voters) && c.voters[f.rosterIndex].confPeer == f {
		c.voters[f.rosterIndex].confPeer = nil
	}
	if c.pull.from == f {
		c.pull = confPull{}
	}
	if c.conflict == f {
		c.conflict = nil
	}
	delete(c.peers, f.id.Name)
	c.list = slices.DeleteFunc(c.list, func(o *confPeer) bool { return o == f })
}

// readLocked does what the row of f asks for.
func (c *Configurator) readLocked(now time.Duration, f *confPeer) {
	switch {
	case f.row.known > c.known() && (c.cfg.Static || c.away != nil || !c.read):
		c.fetchLocked(now, f)
	case f.row.known > c.known():
		if c.behind == never {
			c.behind = now // usually the register brings it
		}
	case c.olderLocked(f):
		c.fetchLocked(now, f)
	case f.row.known == c.known() && f.met:
		c.takeGrant(now, f)
	}
}

// fetchLocked asks f for its document, unless a newer one is being fetched.
func (c *Configurator) fetchLocked(now time.Duration, f *confPeer) {
	p := &c.pull
	if p.from != nil && p.number >= f.row.known {
		return
	}
	old := p.from
	*p = confPull{want: want{number: f.row.known}, from: f, at: now}
	if old != f {
		c.tell(old)
	}
	c.tell(f)
}

// refetchLocked asks another peer when a document does not come.
func (c *Configurator) refetchLocked(now time.Duration) {
	switch {
	case c.pull.from != nil && now-c.pull.at < pullTimeout:
		return
	case c.pull.from == nil && (c.behind == never || now-c.behind < pullTimeout):
		return
	}
	slow := c.pull.from
	c.pull = confPull{}
	c.tell(slow)
	var next *confPeer
	for k, f := range c.list {
		if f.row.known <= c.known() && !c.olderLocked(f) || now-f.heard >= nearby || f == slow && next != nil {
			continue
		}
		if next == nil || next == slow || c.rand.IntN(k+1) == 0 {
			next = f
		}
	}
	if next == nil {
		c.behind = never // no peer that is heard has it
		return
	}
	c.fetchLocked(now, next)
}

// pieceInLocked takes in a piece of the document that is being fetched.
func (c *Configurator) pieceInLocked(now time.Duration, f *confPeer, in *piece) {
	p := &c.pull
	if p.from != f || in.number != p.number || p.digest != 0 && in.digest != p.digest && in.offset != 0 {
		return
	}
	if in.digest != p.digest {
		p.buf, p.offset = p.buf[:0], 0 // the peer has another document by now
	}
	if in.offset != p.offset {
		return
	}
	p.digest, p.at = in.digest, now
	p.buf = append(p.buf, in.data...)
	p.offset = len(p.buf)
	if p.offset < in.total {
		c.tell(f)
		return
	}
	b, number := bytes.Clone(p.buf), p.number
	*p = confPull{}
	c.tell(f)
	d, err := readDocument(b)
	if err != nil || d.number() != number || d.fleet != c.cfg.Fleet {
		if err != nil {
			c.refused = err
		}
		return
	}
	if c.cfg.Static {
		c.mergeStaticLocked(now, d, f)
	} else {
		c.learnLocked(now, d, f)
	}
}

// Gone says that a peer's incarnation has ended for good. What it applied stays applied.
func (c *Configurator) Gone(_ time.Duration, peer crdt.Replica) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f := c.peers[peer.Name]; f != nil && f.id.Incarnation <= peer.Incarnation {
		c.dropLocked(f)
	}
}
