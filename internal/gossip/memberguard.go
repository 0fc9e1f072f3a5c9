// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"encoding/binary"
	"errors"
	"math"
	"time"
)

// memberlist reserves memory by the lengths in a message, unpacks compressed messages, and starts a
// goroutine for each indirect probe. So it only gets messages that memberlist would send here:
// compression, encryption, labels and user messages are off.

// The types of memberlist's messages.
const (
	memberPing         = 0
	memberIndirectPing = 1
	memberAck          = 2
	memberSuspect      = 3
	memberAlive        = 4
	memberDead         = 5
	memberPushPull     = 6
	memberCompound     = 7
	memberNack         = 11
	memberCRC          = 12
	memberErr          = 13
)

const (
	memberText  = 1024 // most bytes of a text in a message; metadata has at most 204
	memberDepth = 3    // most levels of nested lists and maps
	memberNode  = 1024 // most bytes of one node of a push and pull, as it travels
)

var (
	errMember = errors.New("gossip: malformed membership message")
	errShort  = errors.New("gossip: more is to come")
)

// vetPacket reports whether a packet may be handed to memberlist, and how many indirect probes are
// in it.
func vetPacket(b []byte) (probes int, ok bool) {
	if len(b) > checksum && b[0] == memberCRC {
		b = b[checksum:]
	}
	if len(b) < 2 {
		return 0, false
	}
	if b[0] != memberCompound {
		return vetMessage(b)
	}
	n := int(b[1])
	sizes := b[2:]
	if len(sizes) < 2*n {
		return 0, false
	}
	parts := sizes[2*n:]
	for i := range n {
		size := int(binary.BigEndian.Uint16(sizes[2*i:]))
		if size > len(parts) {
			return 0, false
		}
		p, ok := vetMessage(parts[:size])
		if !ok {
			return 0, false
		}
		probes += p
		parts = parts[size:]
	}
	return probes, true
}

// vetMessage looks at one message of a packet.
func vetMessage(b []byte) (probes int, ok bool) {
	if len(b) == 0 {
		return 0, false
	}
	switch b[0] {
	case memberIndirectPing:
		probes = 1
	case memberPing, memberAck, memberSuspect, memberAlive, memberDead, memberNack:
	default:
		return 0, false
	}
	_, err := skipObject(b[1:], memberDepth)
	return probes, err == nil
}

// vetted says how far the message at the front of a stream was checked.
type vetted struct {
	size int    // bytes of whole objects that were checked
	left uint64 // objects that are still to come
}

// vet checks the bytes of a stream's message that have come. The error is nil when all of it is
// there, errShort while more is to come, errMember if it never may be let through. most bounds its
// nodes.
func (v *vetted) vet(b []byte, most int) error {
	if v.size == 0 {
		if len(b) == 0 {
			return errShort
		}
		n, err := skipObject(b[1:], memberDepth)
		if err != nil {
			return err
		}
		switch b[0] {
		case memberPing, memberAck, memberErr:
		case memberPushPull:
			nodes, user, ok := pushPullHeader(b[1 : 1+n])
			if !ok || nodes > uint64(most) || user != 0 {
				return errMember
			}
			v.left = nodes
		default:
			return errMember
		}
		v.size = 1 + n
	}
	for ; v.left > 0; v.left-- {
		n, err := skipObject(b[v.size:], memberDepth)
		switch {
		case n > memberNode, errors.Is(err, errShort) && len(b)-v.size > memberNode:
			return errMember
		case err != nil:
			return err
		}
		v.size += n
	}
	return nil
}

// pushPullHeader reads {Nodes, UserStateLen, Join} from a whole object.
func pushPullHeader(b []byte) (nodes, user uint64, ok bool) {
	if b[0]&0xF0 != 0x80 {
		return 0, 0, false
	}
	pairs := int(b[0] & 0x0F)
	b = b[1:]
	for range pairs {
		n, _ := skipObject(b, 0)
		if n == 0 {
			return 0, 0, false
		}
		name := string(textOf(b[:n]))
		b = b[n:]
		if n, _ = skipObject(b, memberDepth); n == 0 {
			return 0, 0, false
		}
		value, isUint := uintOf(b[:n])
		b = b[n:]
		switch name {
		case "Nodes":
			nodes = value
		case "UserStateLen":
			user = value
		case "Join":
			isUint = true
		default: // also a name in another form, which memberlist would accept
			return 0, 0, false
		}
		if !isUint {
			return 0, 0, false
		}
	}
	return nodes, user, true
}

// textOf returns the text of a whole object, or nil if it is not a text.
func textOf(b []byte) []byte {
	switch c := b[0]; {
	case c&0xE0 == 0xA0:
		return b[1:]
	case c == 0xC4 || c == 0xD9:
		return b[2:]
	}
	return nil
}

func uintOf(b []byte) (v uint64, ok bool) {
	c := b[0]
	if c < 0x80 {
		return uint64(c), true
	}
	if c < 0xCC || c > 0xD3 {
		return 0, false
	}
	for _, x := range b[1:] {
		v = v<<8 | uint64(x)
	}
	if c >= 0xD0 && b[1] >= 0x80 { // negative
		return math.MaxUint64, true
	}
	return v, true
}

// skipObject returns the size of the MessagePack object at the front of b.
func skipObject(b []byte, depth int) (size int, err error) {
	if len(b) == 0 {
		return 0, errShort
	}
	head, content, items := 1, uint64(0), uint64(0)
	number := func(width int) uint64 {
		head += width
		var v uint64
		if len(b) >= head {
			for _, x := range b[1:head] {
				v = v<<8 | uint64(x)
			}
		}
		return v
	}
	switch c := b[0]; {
	case c < 0x80, c >= 0xE0, c == 0xC0, c == 0xC2, c == 0xC3:
	case c&0xF0 == 0x80: // map
		items = 2 * uint64(c&0x0F)
	case c&0xF0 == 0x90: // list
		items = uint64(c & 0x0F)
	case c&0xE0 == 0xA0: // text
		content = uint64(c & 0x1F)
	case c >= 0xC4 && c <= 0xC6: // bytes
		content = number(1 << (c - 0xC4))
	case c == 0xCA:
		content = 4
	case c == 0xCB:
		content = 8
	case c >= 0xCC && c <= 0xCF:
		content = 1 << (c - 0xCC)
	case c >= 0xD0 && c <= 0xD3:
		content = 1 << (c - 0xD0)
	case c >= 0xD9 && c <= 0xDB: // text
		content = number(1 << (c - 0xD9))
	case c == 0xDC || c == 0xDD: // list
		items = number(2 << (c - 0xDC))
	case c == 0xDE || c == 0xDF: // map
		items = 2 * number(2<<(c-0xDE))
	default:
		return 0, errMember // an extension; none is used
	}
	switch {
	case len(b) < head:
		return 0, errShort
	case content > memberText || items > memberText || items > 0 && depth == 0:
		return 0, errMember
	case uint64(len(b)-head) < content:
		return 0, errShort
	}
	size = head + int(content)
	for range items {
		n, err := skipObject(b[size:], depth-1)
		if err != nil {
			return 0, err
		}
		size += n
	}
	return size, nil
}

// A quota lets at most a given number through in each second.
type quota struct {
	second time.Time
	used   int
}

func (q *quota) take(now time.Time, n, most int) bool {
	if now.Sub(q.second) >= time.Second {
		q.second, q.used = now, 0
	}
	if q.used+n > most {
		return false
	}
	q.used += n
	return true
}

// Limits of membership in a second. In a fleet of any size, a node sends and gets about 30 packets
// a second. It is asked to probe for others when a node falls silent.
const (
	memberPackets = 4000
	memberProbes  = 200
)
