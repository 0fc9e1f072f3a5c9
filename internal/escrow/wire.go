// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/crdt/wire"
)

// A packet holds the loans and needs between the sender and the receiver. Integers are
// varints unless a size is given:
//
//	version  byte: 2 if the sender's newest configuration is not number 1, or if its
//	         Config.Provisional is set; else 1
//	config   4 bytes, the fingerprint of the fleet and the initial configuration
//	newest   only with version 2: number of the sender's newest configuration, and its 4-byte digest
//	incarnation     4 bytes, the low half of the receiver's incarnation
//	epoch    of the sender's loans to the receiver
//	renewed  microseconds of the receiver's clock to which its lease is renewed; 0 is none
//	entries, to the end, each
//	  key    length and bytes
//	  parts  byte: the sum of the numbers of the parts that follow
//	  1      sender's loan: series, out
//	  2      receiver's loan: series, used, ret
//	  4      sender's need
//
// A missing part means a closed series, or a need of zero.
const (
	version  = 1
	numbered = 2

	hasLoan     = 1
	hasBorrowed = 2
	hasNeed     = 4

	maxHeader = 1 + 4 + 4 + 4 + 3*binary.MaxVarintLen64
	maxValue  = 1 << 62
)

// Mark returns the number of the latest change that concerns the peer.
func (n *Node) Mark(to crdt.Replica) uint64 {
	if p := n.peers[to.Name]; p != nil && p.id.Incarnation == to.Incarnation {
		if p.detached {
			return p.acked
		}
		return p.changes.Mark()
	}
	if !n.admits(to.Name) || to.Name == n.self.Name {
		return 0
	}
	return 1 // the first change is that the peer exists
}

// Counted returns a number that rises whenever the mark for any peer does; see
// gossip.Counter.
func (n *Node) Counted() uint64 { return n.changes + n.membershipVersion }

// Keeps tells whether there is a loan or a need between this node and the peer, or was one
// within the last seconds. Then both need keep-alives at full pace, to renew leases and to
// notice at once when they do not hear each other; see gossip.Keeper.
func (n *Node) Keeps(to crdt.Replica) bool {
	p := n.peers[to.Name]
	return p != nil && p.id.Incarnation == to.Incarnation && p.changes.First() != nil
}

// Delta appends the entries that changed for a peer after since, oldest change first; see
// gossip.Section. Without changes it appends only a header of some 12 bytes. The header
// shows the peer that this node is alive, and renews the lease of its loans.
func (n *Node) Delta(now time.Duration, b []byte, to crdt.Replica, since uint64, room int) (_ []byte, upto uint64) {
	n.advance(now)
	p := n.peer(to)
	if p == nil || p.detached {
		return b, since
	}
	if room < maxHeader {
		return b, since
	}
	p.acked = max(p.acked, min(since, p.changes.Mark()))
	start := len(b)
	if t := n.newest(); t.Number == 1 && !n.cfg.Provisional {
		b = append(b, version)
		b = binary.LittleEndian.AppendUint32(b, n.config)
	} else {
		b = append(b, numbered)
		b = binary.LittleEndian.AppendUint32(b, n.config)
		b = binary.AppendUvarint(b, t.Number)
		b = binary.LittleEndian.AppendUint32(b, t.code)
	}
	b = binary.LittleEndian.AppendUint32(b, uint32(to.Incarnation))
	b = binary.AppendUvarint(b, p.epoch)
	// A lease that is due to be written off is not renewed, even if no sweep has done that
	// yet: the process may have been paused, and the peer may have dropped the loans.
	if p.lent.some() && p.pinned == 0 && !n.fenced && n.now-p.renewedAt < writeOff && n.fresh(p) {
		p.renewed, p.renewedAt = p.sent, p.heard
	}
	renewed := time.Duration(0)
	if p.lent.some() {
		renewed = p.renewed
	}
	b = binary.AppendUvarint(b, uint64(renewed/time.Microsecond))

	c := p.changes.After(since)
	if c == nil {
		return b, p.changes.Mark()
	}
	if !p.unanswered() {
		p.toldAt = n.now
	}
	upto = max(since, 1)
	for ; c != nil; c = c.Next() {
		whole := len(b)
		b = c.Of.append(b)
		if len(b)-start > room {
			return b[:whole], upto
		}
		upto = c.Mark
	}
	return b, p.changes.Mark()
}

func (e *entry) append(b []byte) []byte {
	b = wire.AppendText(b, e.row.name)
	parts := len(b)
	b = append(b, 0)
	if l := &e.lent; l.series != 0 {
		b[parts] |= hasLoan
		b = binary.AppendUvarint(b, l.series)
		b = binary.AppendUvarint(b, uint64(l.out))
	}
	if l := &e.borrowed; l.series != 0 {
		b[parts] |= hasBorrowed
		b = binary.AppendUvarint(b, l.series)
		b = binary.AppendUvarint(b, uint64(l.used))
		b = binary.AppendUvarint(b, uint64(l.ret))
	}
	if e.need > 0 {
		b[parts] |= hasNeed
		b = binary.AppendUvarint(b, uint64(e.need))
	}
	return b
}

// A reader parses a packet.
type reader struct{ wire.Reader }

// bad tells whether anything read so far was malformed.
func (r *reader) bad() bool { return r.Fault() != nil }

func (r *reader) value(field string) int64 { return int64(r.Uint(field, 0, maxValue-1)) }

// positive reads a value that is never 0: its writer leaves out a 0.
func (r *reader) positive(field string) int64 { return int64(r.Uint(field, 1, maxValue-1)) }

func (r *reader) key() []byte { return r.Bytes("key", int(r.Uint("key", 1, MaxKey))) }

// A said is one entry of a packet.
type said struct {
	key            []byte
	parts          byte
	loan           int64 // series of the sender's loan; 0 is none
	out            int64
	borrowed       int64 // series of the receiver's loan; 0 is none
	used, returned int64
	need           int64
}

func (r *reader) said() (s said) {
	s.key = r.key()
	s.parts = byte(r.Uint("parts", 0, hasLoan|hasBorrowed|hasNeed))
	if s.parts&hasLoan != 0 {
		s.loan, s.out = r.positive("loan"), r.value("loan")
	}
	if s.parts&hasBorrowed != 0 {
		s.borrowed, s.used, s.returned = r.positive("borrowed"), r.value("used"), r.value("returned")
	}
	if s.parts&hasNeed != 0 {
		s.need = r.positive("need")
	}
	return s
}

// Refused counts refused packets by their error, and refused parts of merged packets.
type Refused struct {
	Malformed, Mismatch, Stale, TooManyKeys uint64

	// Loans counts loans that their lender cannot have given, see [Stats.Broke]. The node
	// refuses these loans, but merges the rest of the packet.
	Loans uint64

	// Needs counts needs of keys for which there is no room here. The node refuses these
	// needs, but merges the rest of the packet.
	Needs uint64
}

// Merge merges a packet that a peer's Delta wrote; see gossip.Section. On an error nothing
// of b is merged. But any packet shows that its sender is not silent, see [TakeOver].
func (n *Node) Merge(c crdt.Contact, b []byte) error {
	err := n.mergeAll(c, b)
	switch {
	case err == nil:
	case errors.Is(err, errMalformed):
		n.refused.Malformed++
	case errors.Is(err, errMismatch):
		n.refused.Mismatch++
	case errors.Is(err, errStale):
		n.refused.Stale++
	case errors.Is(err, ErrTooManyKeys):
		n.refused.TooManyKeys++
	}
	return err
}

func (n *Node) mergeAll(c crdt.Contact, b []byte) error {
	n.advance(c.Now)
	n.came(c)
	r := reader{wire.Read(b)}
	v := r.Byte("version")
	if v != version && v != numbered {
		return fmt.Errorf("%w: version %d from %v, want %d or %d", errMalformed, v, c.From, version, numbered)
	}
	if r.Uint32("config") != n.config && !r.bad() {
		if n.cfg.Provisional {
			return fmt.Errorf("%w: Strategy or OnSilence of %v", ErrSettings, c.From)
		}
		return fmt.Errorf("%w: initial configuration of %v", ErrSettings, c.From)
	}
	configuration := uint64(1)
	if v == numbered {
		configuration = uint64(r.value("configuration"))
		if err := n.agrees(c.From, configuration, r.Uint32("configuration")); err != nil && !r.bad() {
			return err
		}
	}
	incarnation := r.Uint32("incarnation")
	epoch := uint64(r.value("epoch"))
	renewed := time.Duration(r.value("renewed")) * time.Microsecond
	if r.bad() || renewed > n.now || renewed < 0 || c.Echo > n.now {
		return fmt.Errorf("%w: header from %v", errMalformed, c.From)
	}
	if incarnation != uint32(n.self.Incarnation) {
		return fmt.Errorf("%w: %v means another incarnation", errStale, c.From)
	}
	if c.From.Name == "" || c.From.Name == n.self.Name {
		return fmt.Errorf("%w: from %v", errMalformed, c.From)
	}
	p := n.peers[c.From.Name]
	switch {
	case !n.admits(c.From.Name) && (p == nil || p.leaving == never || p.detached || p.id.Incarnation < c.From.Incarnation):
		return fmt.Errorf("%w: %v is not in the roster", errMismatch, c.From)
	case p == nil:
		if b, ok := n.ended[c.From.Name]; ok && b.incarnation >= c.From.Incarnation {
			return fmt.Errorf("%w: %v is over", errStale, c.From)
		}
	case p.id.Incarnation > c.From.Incarnation:
		return fmt.Errorf("%w: %v has begun a later incarnation", errStale, c.From)
	case p.id.Incarnation < c.From.Incarnation:
		p = nil
	case c.Sent <= p.floor:
		return fmt.Errorf("%w: of %v from %v", errStale, c.Sent, c.From)
	}
	if err := n.check(r, p, c.From); err != nil {
		return err
	}

	if p == nil {
		p = n.peer(c.From)
	}
	n.memberVoided(p.index) // a peer that writes to this incarnation has ended the earlier one
	if c.Sent > p.sent {
		p.sent, p.heard, p.rest, p.configuration = c.Sent, n.now, c.Rest, configuration
	}
	was := n.fresh(p)
	p.echo = max(p.echo, c.Echo)
	if !was && n.fresh(p) {
		for e := range p.entries {
			if e.itsNeed > 0 {
				n.stir(e.row) // the row may rest
			}
		}
	}
	if epoch > p.itsEpoch {
		p.itsEpoch = epoch
		for e := range p.entries {
			e.void()
		}
		p.lease = 0
	}
	if epoch == p.itsEpoch {
		p.lease = max(p.lease, renewed)
	}
	for i := 0; r.Len() > 0; i++ {
		s := r.said()
		n.merge(p, n.read[i], &s, c.Sent, epoch)
	}
	return nil
}

// agrees returns an error if a peer's configuration contradicts ours: a different one with
// the same number. A number below 2 is malformed unless Config.Provisional is set.
func (n *Node) agrees(from crdt.Replica, number uint64, code uint32) error {
	if number < 2 && !n.cfg.Provisional {
		return fmt.Errorf("%w: configuration %d from %v", errMalformed, number, from)
	}
	for _, t := range n.terms {
		if t.Number == number && number > 0 && t.code != code {
			return fmt.Errorf("%w: configuration %d of %v is another", errMismatch, number, from)
		}
	}
	return nil
}

// check reads all entries before any is merged. If one is wrong it refuses the whole packet.
func (n *Node) check(r reader, p *peer, from crdt.Replica) error {
	n.read = n.read[:0]
	loans := 0 // loans of unknown keys
	for r.Len() > 0 {
		s := r.said()
		if r.bad() {
			return fmt.Errorf("%w: entry %d from %v", errMalformed, len(n.read), from)
		}
		row := n.rows[string(s.key)]
		n.read = append(n.read, row)
		if row == nil {
			if s.parts&hasLoan != 0 {
				loans++
			}
			continue
		}
		if p == nil {
			continue
		}
		if e := row.with(p); e != nil && uint64(s.borrowed) == e.lent.series && s.borrowed != 0 && s.used+s.returned > e.lent.out {
			return fmt.Errorf("%w: %v has used and returned %d of %d lent", errMalformed, from, s.used+s.returned, e.lent.out)
		}
	}
	if r.bad() {
		return fmt.Errorf("%w: from %v", errMalformed, from)
	}
	named := 0
	if p != nil {
		named = p.named
	}
	most := n.mostNamed()
	if all := max(n.cfg.MaxKeys/namedByAll, most); loans > 0 && (len(n.rows)+loans > n.cfg.MaxKeys+most || named+loans > 2*most || n.named+loans > 2*all) {
		return fmt.Errorf("%w: %v lends for %d new ones", ErrTooManyKeys, from, loans)
	}
	return nil
}

// mostNamed is how many keys one peer may name that this node does not use. Keys that peers
// name must not fill the room for keys that this node uses.
func (n *Node) mostNamed() int {
	return max(n.cfg.MaxKeys/namedBy, min(n.cfg.MaxKeys, fewKeys))
}

// namedRow returns a row for a key that only a peer has named, or nil if there is no room.
// A loan gets a row even without room, up to twice the room (see check): it answers a need
// of this node, and fills its lender's cap until it comes back.
func (n *Node) namedRow(p *peer, s *said) *row {
	most := n.mostNamed()
	full := len(n.rows) >= n.cfg.MaxKeys || p.named >= most || n.named >= max(n.cfg.MaxKeys/namedByAll, most)
	if full && s.parts&hasLoan == 0 {
		n.refused.Needs++
		return nil
	}
	r := n.rows[string(s.key)] // the packet may name the key twice
	if r == nil {
		r = n.addRow(string(s.key))
	}
	if r != nil {
		r.own()
		r.namedByPeer = p
		p.named++
		n.named++
	}
	return r
}

// merge merges one entry of a packet.
func (n *Node) merge(p *peer, r *row, s *said, sent time.Duration, epoch uint64) {
	if r == nil {
		if s.parts&(hasLoan|hasNeed) == 0 {
			return
		}
		if r = n.namedRow(p, s); r == nil {
			return
		}
	}
	e := r.with(p)
	if e == nil {
		if s.parts&(hasLoan|hasNeed) == 0 {
			return
		}
		e = r.entry(p)
	}
	r.mint(n.now, n.mintAt) // before loans come back: until now they filled the cap
	newer := sent > e.sent
	if series := uint64(s.loan); epoch == p.itsEpoch {
		switch {
		case series == 0 && newer:
			e.void()
		case series == 0:
		case series == e.borrowed.series, series > e.borrowed.series && newer:
			e.received(series, s.out)
			n.ripen(r)
		}
	}
	if s.borrowed != 0 && uint64(s.borrowed) == e.lent.series {
		e.accounted(s.used, s.returned)
	}
	if newer {
		e.sent = sent
		e.itsNeed = min(s.need, r.burst)
	}
	n.stir(r)
}
