// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package wire parses messages from other processes. Package crdt, its gossip and the
// sections in it share this code. A message is a sequence of fields without names or types:
// unsigned varints, integers of fixed size in little-endian order, bytes, and texts with
// their length in front.
package wire

import (
	"encoding/binary"
	"fmt"
)

// AppendText appends a text for [Reader.Text].
func AppendText[T ~string](b []byte, s T) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// A Reader reads a message from its beginning. After the first fault it returns only zeros,
// and no bytes are left. So a caller need only check for faults before it uses a value, and a
// loop over the rest of the message ends.
//
// It allocates nothing while there is no fault, except the copies that Text returns. It never
// allocates by a length in the message that has no bytes behind it. The zero value reads an
// empty message. A copy reads independently: use one to look ahead. It is not safe for
// concurrent use.
type Reader struct {
	b     []byte
	size  int
	fault *FieldError
}

// A FieldError is a fault of a message.
type FieldError struct {
	Field  string // the field that was read
	Value  any    // the value found
	Want   string // the allowed values
	Offset int    // bytes before the field
}

func (e *FieldError) Error() string {
	return fmt.Sprintf("%s at byte %d is %v, want %s", e.Field, e.Offset, e.Value, e.Want)
}

// Read returns a Reader of b, which must not change while it is read.
func Read(b []byte) Reader { return Reader{b: b, size: len(b)} }

// Len returns how many bytes are left.
func (r *Reader) Len() int { return len(r.b) }

// Offset returns how many bytes were read; after a fault it is the length of the message.
func (r *Reader) Offset() int { return r.size - len(r.b) }

// Rest returns the bytes that are left. They stay part of the message.
func (r *Reader) Rest() []byte { return r.b }

// Fault returns the first fault, or nil.
func (r *Reader) Fault() *FieldError { return r.fault }

// Fail notes that the format does not allow a field's value. Only the first fault counts.
func (r *Reader) Fail(field string, value any, want string) {
	r.FailAt(r.Offset(), field, value, want)
}

// FailAt is Fail for a field that was read before.
func (r *Reader) FailAt(offset int, field string, value any, want string) {
	if r.fault == nil {
		r.fault = &FieldError{Field: field, Value: value, Want: want, Offset: offset}
	}
	r.b = nil
}

// End notes a fault if bytes are left.
func (r *Reader) End() {
	if len(r.b) > 0 {
		r.Fail("end", fmt.Sprintf("%d bytes", len(r.b)), "nothing")
	}
}

// Uint reads a varint from low to high. Only its shortest form is allowed, so that a number
// has a single encoding.
func (r *Reader) Uint(field string, low, high uint64) uint64 {
	if len(r.b) > 0 && r.b[0] < 0x80 {
		if v := uint64(r.b[0]); v >= low && v <= high {
			r.b = r.b[1:]
			return v
		}
	}
	v, n := binary.Uvarint(r.b)
	switch {
	case n == 0:
		r.Fail(field, "cut off", "a varint")
	case n < 0:
		r.Fail(field, "more than 64 bits", "a varint of at most 64 bits")
	case n > 1 && r.b[n-1] == 0:
		r.Fail(field, fmt.Sprintf("%d in %d bytes", v, n), "the shortest varint")
	case v < low || v > high:
		want := fmt.Sprintf("%d to %d", low, high)
		if low == high {
			want = fmt.Sprint(low)
		}
		r.Fail(field, v, want)
	default:
		r.b = r.b[n:]
		return v
	}
	return 0
}

// Bytes reads n bytes, which stay part of the message; nil if there are fewer.
func (r *Reader) Bytes(field string, n int) []byte {
	if n < 0 || n > len(r.b) {
		r.Fail(field, fmt.Sprintf("%d bytes", len(r.b)), fmt.Sprintf("%d bytes", n))
		return nil
	}
	v := r.b[:n:n]
	r.b = r.b[n:]
	return v
}

// Text reads a length from low to high, and returns a copy of that many bytes.
func (r *Reader) Text(field string, low, high int) string {
	return string(r.Bytes(field, int(r.Uint(field, uint64(low), uint64(high)))))
}

// Byte reads one byte.
func (r *Reader) Byte(field string) byte {
	if v := r.Bytes(field, 1); v != nil {
		return v[0]
	}
	return 0
}

// Bool reads a byte that is 0 or 1.
func (r *Reader) Bool(field string) bool { return r.Uint(field, 0, 1) == 1 }

// Uint16 reads two bytes.
func (r *Reader) Uint16(field string) uint16 {
	if v := r.Bytes(field, 2); v != nil {
		return binary.LittleEndian.Uint16(v)
	}
	return 0
}

// Uint32 reads four bytes.
func (r *Reader) Uint32(field string) uint32 {
	if v := r.Bytes(field, 4); v != nil {
		return binary.LittleEndian.Uint32(v)
	}
	return 0
}

// Uint64 reads eight bytes.
func (r *Reader) Uint64(field string) uint64 {
	if v := r.Bytes(field, 8); v != nil {
		return binary.LittleEndian.Uint64(v)
	}
	return 0
}
