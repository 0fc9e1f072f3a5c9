// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"encoding/binary"
	"fmt"
	"math"
	"time"
)

// A section sends a peer the whole row of the sender, and a piece of a document if the peer wants
// one:
//
//	section  = version fleet incarnation known digest complete applied loaded flags
//	           [weight] [frozen] [want] [grant] [piece]
//	frozen   = count { voter }                   in the newest roster
//	want     = number digest offset              digest 0: any document of the number
//	piece    = number digest total offset bytes
//
// Numbers are unsigned varints. Digests and fleet have eight bytes, version one, flags two. A part
// in brackets is present if its flag is set, in the order of the flags.
const (
	configuratorVersion = 1

	confSettled = 1 << 0 // the sender may mint
	confAble    = 1 << 1 // the sender reaches the register
	confLeaving = 1 << 2
	confUnlist  = 1 << 3 // the sender's incarnation is not listed
	confRenew   = 1 << 4 // the sender hears a process that it froze
	confJoining = 1 << 5
	confFrozen  = 1 << 6
	confWant    = 1 << 7
	confGrant   = 1 << 8
	confPiece   = 1 << 9
	confFlags   = 1<<10 - 1

	maxFrozen = 64 // in one row

	maxWant = 2*binary.MaxVarintLen64 + 8
	// leastPiece is the least room for which a piece is sent, in bytes.
	leastPiece = 64
	pieceFront = 4*binary.MaxVarintLen64 + 8

	// maxConfRow is more than a row without a piece takes.
	maxConfRow = 1 + 8 + 10 + 10 + 8 + 3*10 + 2 + 3 + 1 + 2*maxFrozen + maxWant + 10
)

// confRow is a process's row as it is sent.
type confRow struct {
	fleet       uint64
	incarnation uint64 // the receiver's incarnation
	known       uint64 // the newest number; 0 is none
	digest      uint64 // digest of the newest document
	complete    uint64
	applied     uint64
	loaded      uint64 // the number that an operator loaded
	flags       uint64
	weight      int   // the weight asked for, with confJoining
	frozen      []int // indexes of frozen members in the newest roster
	want        want
	grant       time.Duration
	piece       piece
}

// appendConfRow writes a row without the piece. The flag of the piece must be set if one follows.
func appendConfRow(b []byte, s *confRow) []byte {
	b = append(b, configuratorVersion)
	b = binary.BigEndian.AppendUint64(b, s.fleet)
	b = binary.AppendUvarint(b, s.incarnation)
	b = binary.AppendUvarint(b, s.known)
	b = binary.BigEndian.AppendUint64(b, s.digest)
	b = binary.AppendUvarint(b, s.complete)
	b = binary.AppendUvarint(b, s.applied)
	b = binary.AppendUvarint(b, s.loaded)
	b = binary.LittleEndian.AppendUint16(b, uint16(s.flags))
	if s.flags&confJoining != 0 {
		b = binary.AppendUvarint(b, uint64(s.weight))
	}
	if s.flags&confFrozen != 0 {
		b = binary.AppendUvarint(b, uint64(len(s.frozen)))
		for _, voter := range s.frozen {
			b = binary.AppendUvarint(b, uint64(voter))
		}
	}
	if s.flags&confWant != 0 {
		b = binary.AppendUvarint(b, s.want.number)
		b = binary.BigEndian.AppendUint64(b, s.want.digest)
		b = binary.AppendUvarint(b, uint64(s.want.offset))
	}
	if s.flags&confGrant != 0 {
		b = binary.AppendUvarint(b, uint64(s.grant))
	}
	return b
}

// readConfRow reads all of b into s, or returns why it cannot.
func readConfRow(b []byte, s *confRow) error {
	r := read(b)
	r.Uint("version", configuratorVersion, configuratorVersion)
	*s = confRow{
		fleet: r.digest("fleet"), incarnation: r.number("receiver"),
		known: r.Uint("number", 0, math.MaxUint64-1), digest: r.digest("digest"), frozen: s.frozen[:0],
	}
	s.complete = r.Uint("complete", 0, s.known)
	s.applied = r.Uint("applied", 0, s.known)
	s.loaded = r.Uint("loaded", 0, s.known)
	if f := r.Bytes("flags", 2); f != nil {
		s.flags = uint64(binary.LittleEndian.Uint16(f))
	}
	if s.flags&^confFlags != 0 {
		r.Fail("flags", s.flags, "known ones")
	}
	if s.flags&confJoining != 0 {
		s.weight = int(r.Uint("weight", 0, 1e6))
	}
	if s.flags&confFrozen != 0 {
		last := -1
		for n := r.Uint("frozen", 1, maxFrozen); n > 0 && r.Fault() == nil; n-- {
			last = int(r.Uint("frozen", uint64(last+1), maxMembers-1))
			s.frozen = append(s.frozen, last)
		}
	}
	if s.flags&confWant != 0 {
		s.want = want{r.number("want"), r.digest("want"), int(r.Uint("want", 0, maxDocument))}
	}
	if s.flags&confGrant != 0 {
		s.grant = time.Duration(r.Uint("grant", 0, math.MaxInt64))
	}
	if s.flags&confPiece != 0 {
		p := &s.piece
		p.number, p.digest = r.number("piece"), r.digest("piece")
		p.total, p.offset = int(r.Uint("piece", 0, maxDocument)), int(r.Uint("piece", 0, maxDocument))
		p.data = r.Bytes("piece", int(r.Uint("piece", 0, maxDocument)))
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

type want struct {
	number, digest uint64
	offset         int
}

type piece struct {
	number, digest uint64
	total, offset  int
	data           []byte // part of the received packet
}

func appendPiece(b []byte, p *piece) []byte {
	b = binary.AppendUvarint(b, p.number)
	b = binary.BigEndian.AppendUint64(b, p.digest)
	b = binary.AppendUvarint(b, uint64(p.total))
	b = binary.AppendUvarint(b, uint64(p.offset))
	b = binary.AppendUvarint(b, uint64(len(p.data)))
	return append(b, p.data...)
}
