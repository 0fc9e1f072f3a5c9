// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/crdt/wire"
	"github.com/stormguard-mq/stormguard/limiter"
)

// What a section says to a peer is the sender's whole row, and a piece of a decree
// if the peer wants one:
//
//	section  = version fleet founding life known digest complete applied votes flags
//	           [weight] [promised] [accepted digest] [ballot] [digest] [want] [grant] [piece]
//	ballot   = round seat
//	want     = number digest offset             digest 0: the one that was chosen
//	piece    = number digest total offset bytes
//
// Numbers are unsigned varints, digests and fleet eight bytes, version one. The
// parts in brackets are there if their flag is, in the order of the flags. A decree
// is a charter and who it evicts:
//
//	decree   = number rate burst guests roster resets members limits evicted
//	members  = count { name flags [weight] }     by name
//	limits   = count { key rate burst }          by key
//	evicted  = count { name silent }             by name
//
// Rates are the eight bytes of their float, texts have their length before them.
const (
	charterVersion = 1

	flagFirst    = 1 << 0 // yours is the first life of your name that I met
	flagLeaving  = 1 << 1
	flagRenew    = 1 << 2 // I may not vote before the next charter
	flagFresh    = 1 << 3 // my proposal is of my own choice
	flagJoining  = 1 << 4
	flagPromised = 1 << 5
	flagAccepted = 1 << 6
	flagBallot   = 1 << 7
	flagProposed = 1 << 8
	flagWant     = 1 << 9
	flagGrant    = 1 << 10
	flagPiece    = 1 << 11
	flagChosen   = 1 << 12 // the piece is of a charter that was chosen
	flagDead     = 1 << 13 // an operator said of these seats that their processes do not run
	flagsKnown   = 1<<14 - 1

	maxDead = 8 // in one row

	maxBallot = binary.MaxVarintLen64 + 2
	maxWant   = 2*binary.MaxVarintLen64 + 8
	// maxRow is more than a row takes without a piece.
	maxRow = 1 + 8 + 8 + 10 + 10 + 8 + 3*10 + 2 + 3 + maxBallot + maxBallot + 8 + maxBallot + 8 + maxWant + 10 + 2*maxDead
	// leastPiece is the least room for a piece's bytes that is worth a piece.
	leastPiece = 64
	pieceFront = 4*binary.MaxVarintLen64 + 8
)

// A ballot is a round of one member: the seat is its index in the roster, plus one.
type ballot struct {
	round uint64
	seat  int
}

func (b ballot) less(o ballot) bool {
	return b.round < o.round || b.round == o.round && b.seat < o.seat
}

// A vote is what a ballot had a member accept.
type accepted struct {
	at     ballot
	digest uint64
}

// statement is a process's row, as it travels.
type statement struct {
	fleet, founding uint64
	life            uint64 // the receiver's
	known           uint64 // the highest charter
	digest          uint64
	complete        uint64
	applied         uint64
	votes           uint64 // from which number on it votes; 0 is not known yet
	flags           uint64
	weight          int // joining
	promised        ballot
	accepted        accepted
	ballot          ballot // its own
	proposed        uint64 // digest of its proposal
	want            want
	grant           time.Duration
	dead            [maxDead]int // seats, plus one; 0 is none more
	piece           piece
}

type want struct {
	number, digest uint64
	offset         int
}

type piece struct {
	number, digest uint64
	total, offset  int
	chosen         bool   // and not a proposal, as it may be in a packet of long ago
	data           []byte // of the packet
}

func appendBallot(b []byte, at ballot) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(b, at.round), uint64(at.seat))
}

// appendStatement writes all but the piece, whose flag is set with it.
func appendStatement(b []byte, s *statement) []byte {
	b = append(b, charterVersion)
	b = binary.BigEndian.AppendUint64(b, s.fleet)
	b = binary.BigEndian.AppendUint64(b, s.founding)
	b = binary.AppendUvarint(b, s.life)
	b = binary.AppendUvarint(b, s.known)
	b = binary.BigEndian.AppendUint64(b, s.digest)
	b = binary.AppendUvarint(b, s.complete)
	b = binary.AppendUvarint(b, s.applied)
	b = binary.AppendUvarint(b, s.votes)
	b = binary.LittleEndian.AppendUint16(b, uint16(s.flags))
	if s.flags&flagJoining != 0 {
		b = binary.AppendUvarint(b, uint64(s.weight))
	}
	if s.flags&flagPromised != 0 {
		b = appendBallot(b, s.promised)
	}
	if s.flags&flagAccepted != 0 {
		b = appendBallot(b, s.accepted.at)
		b = binary.BigEndian.AppendUint64(b, s.accepted.digest)
	}
	if s.flags&flagBallot != 0 {
		b = appendBallot(b, s.ballot)
	}
	if s.flags&flagProposed != 0 {
		b = binary.BigEndian.AppendUint64(b, s.proposed)
	}
	if s.flags&flagWant != 0 {
		b = binary.AppendUvarint(b, s.want.number)
		b = binary.BigEndian.AppendUint64(b, s.want.digest)
		b = binary.AppendUvarint(b, uint64(s.want.offset))
	}
	if s.flags&flagGrant != 0 {
		b = binary.AppendUvarint(b, uint64(s.grant))
	}
	if s.flags&flagDead != 0 {
		for _, seat := range s.dead {
			b = binary.AppendUvarint(b, uint64(seat))
		}
	}
	return b
}

func appendPiece(b []byte, p *piece) []byte {
	b = binary.AppendUvarint(b, p.number)
	b = binary.BigEndian.AppendUint64(b, p.digest)
	b = binary.AppendUvarint(b, uint64(p.total))
	b = binary.AppendUvarint(b, uint64(p.offset))
	b = binary.AppendUvarint(b, uint64(len(p.data)))
	return append(b, p.data...)
}

func (r *reader) ballot(field string) ballot {
	return ballot{r.Uint(field, 1, math.MaxUint64), int(r.Uint(field, 1, maxMembers))}
}

// readStatement reads all of b into s, or says what is wrong with it.
func readStatement(b []byte, s *statement) error {
	r := read(b)
	r.Uint("version", charterVersion, charterVersion)
	*s = statement{
		fleet: r.digest("fleet"), founding: r.digest("founding"), life: r.number("receiver"),
		known: r.Uint("charter", 0, math.MaxUint64-1), digest: r.digest("digest"),
	}
	s.complete = r.Uint("complete", 0, s.known)
	s.applied = r.Uint("applied", 0, s.known)
	s.votes = r.number("votes")
	if f := r.Bytes("flags", 2); f != nil {
		s.flags = uint64(binary.LittleEndian.Uint16(f))
	}
	if s.known == 0 || s.complete == 0 || s.flags&^flagsKnown != 0 || s.flags&flagProposed != 0 && s.flags&flagBallot == 0 || s.flags&flagChosen != 0 && s.flags&flagPiece == 0 {
		r.Fail("flags", s.flags, "known ones that go together, of a charter")
	}
	if s.flags&flagJoining != 0 {
		s.weight = int(r.Uint("weight", 0, 1e6))
	}
	if s.flags&flagPromised != 0 {
		s.promised = r.ballot("promise")
	}
	if s.flags&flagAccepted != 0 {
		s.accepted = accepted{r.ballot("accepted"), r.digest("accepted")}
	}
	if s.flags&flagBallot != 0 {
		s.ballot = r.ballot("ballot")
	}
	if s.flags&flagProposed != 0 {
		s.proposed = r.digest("proposal")
	}
	if s.flags&flagWant != 0 {
		s.want = want{r.number("want"), r.digest("want"), int(r.Uint("want", 0, maxDecree))}
	}
	if s.flags&flagGrant != 0 {
		s.grant = time.Duration(r.Uint("grant", 0, math.MaxInt64))
	}
	if s.flags&flagDead != 0 {
		for i := range s.dead {
			s.dead[i] = int(r.Uint("dead", 0, maxMembers))
		}
		if s.dead[0] == 0 {
			r.Fail("dead", 0, "a seat, plus one")
		}
	}
	if s.flags&flagPiece != 0 {
		p := &s.piece
		p.number, p.digest = r.number("piece"), r.digest("piece")
		p.total, p.offset = int(r.Uint("piece", 0, maxDecree)), int(r.Uint("piece", 0, maxDecree))
		p.data = r.Bytes("piece", int(r.Uint("piece", 0, maxDecree)))
		p.chosen = s.flags&flagChosen != 0
		if len(p.data) == 0 || p.offset+len(p.data) > p.total {
			r.Fail("piece", fmt.Sprintf("%d bytes at %d of %d", len(p.data), p.offset, p.total), "a part")
		}
	}
	r.End()
	if r.Fault() != nil {
		return fmt.Errorf("%w: %w", ErrMalformed, r.Fault())
	}
	return nil
}

// A decree is what is decided for a number: a charter, and whose share is free
// though they may not have applied it.
type decree struct {
	limiter.Charter
	evicted []eviction // by name
	bytes   []byte
	digest  uint64
}

type eviction struct {
	name   string
	silent bool // not by an operator
}

// silent tells whether somebody is evicted for silence.
func (d *decree) silent() bool {
	return slices.ContainsFunc(d.evicted, func(e eviction) bool { return e.silent })
}

// newDecree encodes a charter that is normal.
func newDecree(c limiter.Charter, evicted []eviction) *decree {
	b := binary.AppendUvarint(nil, c.Number)
	b = appendLimit(b, c.Limit)
	b = appendBool(b, c.Roster.Guests)
	b = binary.AppendUvarint(b, c.Roster.Number)
	b = binary.AppendUvarint(b, c.Resets)
	b = binary.AppendUvarint(b, uint64(len(c.Roster.Members)))
	for _, m := range c.Roster.Members {
		b = wire.AppendText(b, m.Name)
		b = binary.AppendUvarint(b, uint64(m.Weighs()))
	}
	b = binary.AppendUvarint(b, uint64(len(c.Limits)))
	keys := make([]string, 0, len(c.Limits))
	for k := range c.Limits {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	for _, k := range keys {
		b = appendLimit(wire.AppendText(b, k), c.Limits[k])
	}
	b = binary.AppendUvarint(b, uint64(len(evicted)))
	for _, e := range evicted {
		b = appendBool(wire.AppendText(b, e.name), e.silent)
	}
	return &decree{c, evicted, b, digestOf(b)}
}

func digestOf(b []byte) uint64 { return max(1, hashEnd(hashString(hashInit, string(b)))) }

func appendLimit(b []byte, l limiter.Limit) []byte {
	b = binary.BigEndian.AppendUint64(b, math.Float64bits(l.Rate))
	return binary.AppendUvarint(b, uint64(l.Burst))
}

func appendBool(b []byte, v bool) []byte {
	if v {
		return append(b, 1)
	}
	return append(b, 0)
}

func (r *reader) limit(what string) limiter.Limit {
	return limiter.Limit{Rate: math.Float64frombits(r.digest(what)), Burst: int(r.Uint(what, 0, math.MaxInt32))}
}

// readDecree reads what newDecree wrote: one charter has one encoding, so that
// digests tell charters apart.
func readDecree(b []byte) (*decree, error) {
	r := read(b)
	c := limiter.Charter{Number: r.number("number"), Limit: r.limit("limit")}
	c.Roster.Guests = r.Bool("guests")
	c.Roster.Number = r.number("roster")
	c.Resets = r.number("resets")
	for n := r.Uint("members", 0, maxMembers); n > 0 && r.Fault() == nil; n-- {
		m := limiter.Member{Name: r.Text("member", 1, maxName), Weight: int(r.Uint("weight", 0, 1e6))}
		m.NoShare = m.Weight == 0
		if k := len(c.Roster.Members); k > 0 && c.Roster.Members[k-1].Name >= m.Name {
			r.Fail("member", m.Name, "one after "+c.Roster.Members[k-1].Name)
		}
		c.Roster.Members = append(c.Roster.Members, m)
	}
	last := ""
	for n := r.Uint("limits", 0, maxLimits); n > 0 && r.Fault() == nil; n-- {
		k := r.Text("key", 1, limiter.MaxKey)
		if k <= last {
			r.Fail("key", k, "one after "+last)
		}
		if c.Limits == nil {
			c.Limits = map[string]limiter.Limit{}
		}
		c.Limits[k], last = r.limit("limit"), k
	}
	var out []eviction
	for n := r.Uint("evicted", 0, maxMembers); n > 0 && r.Fault() == nil; n-- {
		e := eviction{name: r.Text("evicted", 1, maxName), silent: r.Bool("evicted")}
		if k := len(out); k > 0 && out[k-1].name >= e.name || seatOf(c.Roster.Members, e.name) >= 0 {
			r.Fail("evicted", e.name, "one after the last, that is no member")
		}
		out = append(out, e)
	}
	r.End()
	if r.Fault() != nil {
		return nil, fmt.Errorf("%w: decree: %w", ErrMalformed, r.Fault())
	}
	d := newDecree(c, out)
	if !slices.Equal(d.bytes, b) {
		return nil, fmt.Errorf("%w: decree: not as it is written", ErrMalformed)
	}
	if err := checkCharter(c); err != nil {
		return nil, fmt.Errorf("%w: decree: %w", ErrMalformed, err)
	}
	return d, nil
}
