// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import (
	"encoding/binary"
	"fmt"
)

// MinRoom is the room in which every Delta makes progress: no row, element or
// record is larger.
const MinRoom = 1024

// The first byte of a message: the type in the high half, the version of its
// layout in the low one.
const (
	formatGCounter  = 0x11
	formatPNCounter = 0x21
	formatBounded   = 0x31
	formatLWWSet    = 0x41
	formatVector    = 0x51
	formatOpLog     = 0x61
)

func appendReplica(b []byte, r Replica) []byte {
	b = binary.AppendUvarint(b, uint64(len(r.Name)))
	b = append(b, r.Name...)
	return binary.AppendUvarint(b, r.Incarnation)
}

// A reader takes a message apart. After the first error everything it reads is
// zero, and more says that nothing is left. It allocates nothing: names are
// parts of the message, and who stores one clones it.
type reader struct {
	typ string
	of  string // what the fields being read belong to
	b   []byte
	off int
	err error
}

// read starts on a message. An empty one is what a Delta without news appends,
// and has no rows; any other has the format byte and at least one.
func read(typ string, format byte, b []byte) *reader {
	r := &reader{typ: typ, b: b}
	if len(b) == 0 {
		return r
	}
	r.off = 1
	switch {
	case b[0] != format:
		r.off = 0
		r.fail("format", fmt.Sprintf("%#02x", b[0]), fmt.Sprintf("%#02x", format))
	case len(b) == 1:
		r.fail("first row", "missing", "at least one after the format byte")
	}
	return r
}

func (r *reader) more() bool { return r.err == nil && r.off < len(r.b) }

func (r *reader) fail(field string, value any, want string) {
	r.failAt(r.off, field, value, want)
}

func (r *reader) failAt(off int, field string, value any, want string) {
	if r.err == nil {
		if r.of != "" {
			field = r.of + " " + field
		}
		r.err = &FormatError{Type: r.typ, Field: field, Value: value, Want: want, Offset: off}
	}
}

// uint reads a varint of at most max, in its shortest form: there is one way to
// write a number.
func (r *reader) uint(field string, low, high uint64) uint64 {
	if r.err != nil {
		return 0
	}
	v, n := binary.Uvarint(r.b[r.off:])
	switch {
	case n == 0:
		r.fail(field, "cut off", "a varint")
	case n < 0:
		r.fail(field, "more than 64 bits", "a varint of at most 64 bits")
	case n > 1 && r.b[r.off+n-1] == 0:
		r.fail(field, fmt.Sprintf("%d in %d bytes", v, n), "the shortest varint")
	case v < low || v > high:
		r.fail(field, v, fmt.Sprintf("%d to %d", low, high))
	default:
		r.off += n
		return v
	}
	return 0
}

// bytes reads n bytes, which stay part of the message.
func (r *reader) bytes(field string, n int) []byte {
	if r.err != nil {
		return nil
	}
	if left := len(r.b) - r.off; n > left {
		r.fail(field, fmt.Sprintf("%d bytes", left), fmt.Sprintf("%d bytes", n))
		return nil
	}
	b := r.b[r.off : r.off+n : r.off+n]
	r.off += n
	return b
}

// text reads a length and as many bytes, which stay part of the message.
func (r *reader) text(field string, low, high int) string {
	n := r.uint(field, uint64(low), uint64(high))
	return alias(r.bytes(field, int(n)))
}

func (r *reader) replica(of string) Replica {
	r.of = of
	v := Replica{Name: r.text("name", 1, MaxName), Incarnation: r.uint("incarnation", 0, 1<<64-1)}
	r.of = ""
	return v
}
