// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"encoding/binary"
	"errors"
	"math"
	"net/netip"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt/wire"
)

// magic is the first byte of every packet. Its low four bits are the version, which rises when
// older programs cannot read a packet.
const (
	magic       = 0xC1
	magicMask   = 0xF0
	maxSections = 16
	maxRest     = 1 << 32 // milliseconds
)

const (
	flagElicits = 1 << iota // carries changes: the receiver owes an acknowledgement
	flagRefusal             // the receiver's incarnation is over; the body is the incarnation that took its name
	flagWall                // the packet has a wall-clock stamp
	flagLeave               // the sender leaves: its incarnation is over
	flagAsks                // the sender wants keep-alives at their full pace
	flagRests               // the packet says how long the sender may be quiet now
	flagsKnown  = 1<<iota - 1
)

// Ids of the session's own blocks, below blockReserved. sectionID never returns one of them.
const (
	blockIntro    = 1
	blockLeft     = 2
	blockReserved = 16
)

const blockHeader = 6 // id, length

// refusal is the part of an acknowledgement that names the packets that a section did not take in:
// bit i stands for packet ack-i.
type refusal struct {
	id   uint32
	bits uint64
}

// header is the beginning of every packet. A packet has at most 1,400 bytes. Integers are
// little-endian. v is an unsigned varint in its shortest form. Times are nanoseconds.
//
//	1    magic and version
//	1    flags
//	4    cluster: FNV-1a of its name
//	1+n  from: name, 1 to 64 bytes
//	8    from: incarnation
//	8    to: incarnation; 0 is any process there (a hello: no sequence number, an introduction only)
//	4    to: FNV-1a of its name
//	v    sequence number, from 1, for each pair of incarnations
//	v    ack: highest number taken in; 0 is none
//	v    with an ack: bitmap, inverted; bit i stands for packet ack-i
//	v    sent: own monotonic clock
//	v    echo: the latest sent that was heard from the peer; 0 is none
//	v    with an echo: how long the echo was held
//	8    with its flag, four times a second: wall clock
//	v    with its flag: rest, in milliseconds
//	1    number of refusals, each 4 bytes section and 8 bytes bitmap
//
// Blocks follow: 4 bytes section (FNV-1a of its name), 2 bytes length, content. An introduction is
// zone and region (1+n each), a count, and addresses of others that are heard (family 4 or 6, IP,
// port). The body of a packet with flagRefusal is the incarnation that took the name.
type header struct {
	flags   byte
	cluster uint32
	from    []byte // name; aliases the packet
	fromInc uint64
	toInc   uint64 // 0: any process at that address
	toName  uint32 // hash
	seq     uint64 // 0 if and only if toInc is 0
	ack     uint64 // highest sequence number merged; 0 is none
	bits    uint64 // bit i: packet ack-i was merged
	sent    time.Duration
	echo    time.Duration
	held    time.Duration // how long the sender held echo
	wall    int64
	rest    time.Duration // how much later than a keep-alive the sender's next packet may come; whole ms

	refusals  [maxSections]refusal
	nrefusals int
}

var (
	errMalformed = errors.New("gossip: malformed packet")
	errMagic     = errors.New("gossip: not a packet of this version")
)

// sectionID is FNV-1a of the name, moved away from the session's own ids.
func sectionID(name string) uint32 {
	h := hash32(name)
	if h < blockReserved {
		h += 1 << 31
	}
	return h
}

func hash32[T string | []byte](s T) uint32 {
	h := uint32(2166136261)
	for i := range len(s) {
		h = (h ^ uint32(s[i])) * 16777619
	}
	return h
}

func (h *header) append(b []byte, from string) []byte {
	le := binary.LittleEndian
	b = append(b, magic, h.flags)
	b = le.AppendUint32(b, h.cluster)
	b = append(b, byte(len(from)))
	b = append(b, from...)
	b = le.AppendUint64(b, h.fromInc)
	b = le.AppendUint64(b, h.toInc)
	b = le.AppendUint32(b, h.toName)
	b = binary.AppendUvarint(b, h.seq)
	b = binary.AppendUvarint(b, h.ack)
	if h.ack != 0 {
		b = binary.AppendUvarint(b, ^h.bits) // without loss this is one byte
	}
	b = binary.AppendUvarint(b, uint64(h.sent))
	b = binary.AppendUvarint(b, uint64(h.echo))
	if h.echo != 0 {
		b = binary.AppendUvarint(b, uint64(h.held))
	}
	if h.flags&flagWall != 0 {
		b = le.AppendUint64(b, uint64(h.wall))
	}
	if h.flags&flagRests != 0 {
		b = binary.AppendUvarint(b, uint64(h.rest/time.Millisecond))
	}
	b = append(b, byte(h.nrefusals))
	for _, r := range h.refusals[:h.nrefusals] {
		b = le.AppendUint32(b, r.id)
		b = le.AppendUint64(b, r.bits)
	}
	return b
}

// parse reads the header at the front of b and returns the rest, which is the
// body. It allocates nothing.
func (h *header) parse(b []byte) ([]byte, error) {
	if len(b) == 0 || b[0]&magicMask != magic&magicMask {
		return nil, errMalformed
	}
	if b[0] != magic {
		return nil, errMagic
	}
	r := read(b[1:])
	h.flags = r.Byte("flags")
	h.cluster = r.Uint32("cluster")
	h.from = r.short("sender")
	h.fromInc = r.Uint64("sender's incarnation")
	h.toInc = r.Uint64("receiver's incarnation")
	h.toName = r.Uint32("receiver")
	h.seq = r.Uint("number", 0, math.MaxUint64)
	h.ack = r.Uint("acknowledged", 0, math.MaxUint64)
	h.bits = 0
	if h.ack != 0 {
		h.bits = ^r.Uint("bits", 0, math.MaxUint64)
	}
	h.sent = r.instant("sent")
	h.echo = r.instant("echo")
	h.held = 0
	if h.echo != 0 {
		h.held = r.instant("held")
	}
	h.wall = 0
	if h.flags&flagWall != 0 {
		h.wall = int64(r.Uint64("wall"))
	}
	h.rest = 0
	if h.flags&flagRests != 0 {
		h.rest = time.Duration(r.Uint("rest", 1, maxRest)) * time.Millisecond
	}
	h.nrefusals = int(r.Byte("refusals"))
	if h.nrefusals > maxSections {
		return nil, errMalformed
	}
	for i := range h.nrefusals {
		h.refusals[i] = refusal{id: r.Uint32("refusal"), bits: r.Uint64("refusal")}
	}
	switch {
	case r.Fault() != nil,
		h.flags&^flagsKnown != 0,
		len(h.from) < 1 || len(h.from) > maxName,
		h.fromInc == 0,
		(h.seq == 0) != (h.toInc == 0),
		h.ack != 0 && h.bits&1 == 0,               // packet ack itself was merged
		h.ack < 64 && h.bits>>h.ack != 0,          // no packet before the first was merged
		h.toInc == 0 && h.ack|uint64(h.echo) != 0: // a sender that has heard nobody acknowledges and echoes nothing
		return nil, errMalformed
	}
	return r.Rest(), nil
}

// refused returns the packets that the peer's section did not take in, as a bitmap like bits.
func (h *header) refused(id uint32) uint64 {
	for _, r := range h.refusals[:h.nrefusals] {
		if r.id == id {
			return r.bits
		}
	}
	return 0
}

// nextBlock splits the first block off a body that is not empty.
func nextBlock(b []byte) (id uint32, block, rest []byte, err error) {
	r := read(b)
	id = r.Uint32("block")
	block = r.Bytes("block", int(r.Uint16("block")))
	if r.Fault() != nil {
		return 0, nil, nil, errMalformed
	}
	return id, block, r.Rest(), nil
}

// openBlock begins a block that closeBlock ends.
func openBlock(b []byte, id uint32) []byte {
	b = binary.LittleEndian.AppendUint32(b, id)
	return append(b, 0, 0)
}

// closeBlock ends the block whose content begins at start.
func closeBlock(b []byte, start int) []byte {
	binary.LittleEndian.PutUint16(b[start-2:], uint16(len(b)-start))
	return b
}

func appendString(b []byte, s string) []byte {
	b = append(b, byte(len(s)))
	return append(b, s...)
}

// appendAddr appends 7 bytes for IPv4 and 19 for IPv6. The zone of an IPv6 address means nothing on
// other hosts and is left out.
func appendAddr(b []byte, a netip.AddrPort) []byte {
	if ip := a.Addr().Unmap(); ip.Is4() {
		v4 := ip.As4()
		b = append(append(b, 4), v4[:]...)
	} else {
		v6 := ip.As16()
		b = append(append(b, 6), v6[:]...)
	}
	return binary.LittleEndian.AppendUint16(b, a.Port())
}

// reader reads fields that only a session has.
type reader struct{ wire.Reader }

func read(b []byte) reader { return reader{wire.Read(b)} }

// short reads one byte of length, and that many bytes.
func (r *reader) short(field string) []byte { return r.Bytes(field, int(r.Byte(field))) }

// instant reads a time on a monotonic clock. It is at most half of the largest Duration, so that
// the sum of two does not overflow.
func (r *reader) instant(field string) time.Duration {
	return time.Duration(r.Uint(field, 0, math.MaxInt64/2))
}

func (r *reader) addr() netip.AddrPort {
	var ip netip.Addr
	switch v := r.Byte("address"); v {
	case 4:
		if b := r.Bytes("address", 4); b != nil {
			ip = netip.AddrFrom4([4]byte(b))
		}
	case 6:
		if b := r.Bytes("address", 16); b != nil {
			ip = netip.AddrFrom16([16]byte(b))
		}
	default:
		r.Fail("address", v, "4 or 6")
	}
	port := r.Uint16("port")
	if r.Fault() != nil {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(ip, port)
}
