// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/stormguard-mq/stormguard/internal/crdt/wire"
)

// MinRoom is a room in which every Delta makes progress, in bytes: no row, element or record
// is larger.
const MinRoom = 1024

// The first byte of a message: the type in the high half, the version of its
// layout in the low one.
const (
	formatGCounter = 0x11
	formatLWWSet   = 0x41
	formatOpLog    = 0x61
)

func appendReplica(b []byte, r Replica) []byte {
	return binary.AppendUvarint(wire.AppendText(b, r.Name), r.Incarnation)
}

// A reader parses a message. It allocates nothing: names are parts of the message, and code
// that stores a name clones it.
type reader struct {
	wire.Reader

	typ string
}

// read starts to read a message. A Delta without changes appends an empty message, which has
// no rows. Every other message has the format byte and at least one row.
func read(typ string, format byte, b []byte) *reader {
	r := &reader{Reader: wire.Read(b), typ: typ}
	if len(b) == 0 {
		return r
	}
	if got := r.Byte("format"); got != format {
		r.FailAt(0, "format", fmt.Sprintf("%#02x", got), fmt.Sprintf("%#02x", format))
	} else if len(b) == 1 {
		r.Fail("first row", "missing", "at least one after the format byte")
	}
	return r
}

// err returns the message's first fault, or nil.
func (r *reader) err() error {
	f := r.Fault()
	if f == nil {
		return nil
	}
	return &formatError{Type: r.typ, Field: f.Field, Value: f.Value, Want: f.Want, Offset: f.Offset}
}

// text reads a length and that many bytes, which stay part of the message.
func (r *reader) text(field string, low, high int) string {
	return alias(r.Bytes(field, int(r.Uint(field, uint64(low), uint64(high)))))
}

func (r *reader) replica(of string) Replica {
	if r.Fault() != nil {
		return Replica{}
	}
	v := Replica{Name: r.text("name", 1, maxName), Incarnation: r.Uint("incarnation", 0, math.MaxUint64)}
	r.within(of)
	return v
}

// within adds the name of a group of fields to the field of a fault.
func (r *reader) within(of string) {
	if f := r.Fault(); f != nil {
		f.Field = of + " " + f.Field
	}
}
