// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package mark encodes the marks that the stores of package once write: bytes with a checksum.
package mark

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
)

// State is the state of a key's effect.
type State uint8

// The states.
const (
	// Begun means that an effect has begun, and there was no record before.
	Begun State = iota + 1
	// BegunOver means the same as Begun, but there was a Done record before. Value is its value.
	BegunOver
	// Done means that the effect has happened.
	Done
	// Doubt and DoubtOver mean the same as Begun and BegunOver, but no process works on the effect
	// any more.
	Doubt
	DoubtOver
)

// Over tells whether the value is that of an earlier Done record.
func (s State) Over() bool { return s == BegunOver || s == DoubtOver }

// A Record is what a store keeps for a key.
type Record struct {
	State State
	At    int64  // when it was written, in ns since 1970
	Owner uint64 // the owner of a claim; 0 if only one process uses the store
	Note  string // describes the effect that began; at most 65,535 bytes
	Value []byte
}

// ErrDamaged means that a record is not as it was written.
var ErrDamaged = errors.New("damaged")

const (
	version = 1
	header  = 1 + 1 + 8 + 8 + 2
	trailer = 4
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Encode encodes a record. The checksum covers the key, too: under another key the record counts as
// damaged.
func Encode(key string, r Record) []byte {
	b := make([]byte, 0, header+len(r.Note)+len(r.Value)+trailer)
	b = append(b, version, byte(r.State))
	b = binary.BigEndian.AppendUint64(b, uint64(r.At))
	b = binary.BigEndian.AppendUint64(b, r.Owner)
	b = binary.BigEndian.AppendUint16(b, uint16(len(r.Note)))
	b = append(b, r.Note...)
	b = append(b, r.Value...)
	return binary.BigEndian.AppendUint32(b, checksum(key, b))
}

// Decode decodes a record; the error is [ErrDamaged]. The value is a copy.
func Decode(key string, b []byte) (Record, error) {
	if len(b) < header+trailer {
		return Record{}, fmt.Errorf("%w: %d bytes: it must be %d or more", ErrDamaged, len(b), header+trailer)
	}
	body, sum := b[:len(b)-trailer], binary.BigEndian.Uint32(b[len(b)-trailer:])
	if checksum(key, body) != sum {
		return Record{}, fmt.Errorf("%w: the checksum is wrong", ErrDamaged)
	}
	if body[0] != version {
		return Record{}, fmt.Errorf("%w: version %d: it must be %d", ErrDamaged, body[0], version)
	}
	r := Record{
		State: State(body[1]),
		At:    int64(binary.BigEndian.Uint64(body[2:])),
		Owner: binary.BigEndian.Uint64(body[10:]),
	}
	if r.State < Begun || r.State > DoubtOver {
		return Record{}, fmt.Errorf("%w: state %d: it must be %d to %d", ErrDamaged, r.State, Begun, DoubtOver)
	}
	note, rest := int(binary.BigEndian.Uint16(body[18:])), body[header:]
	if note > len(rest) {
		return Record{}, fmt.Errorf("%w: a note of %d bytes: it must be %d at most", ErrDamaged, note, len(rest))
	}
	r.Note = string(rest[:note])
	if note < len(rest) {
		r.Value = append(r.Value, rest[note:]...)
	}
	return r, nil
}

func checksum(key string, body []byte) uint32 {
	return crc32.Update(crc32.Checksum([]byte(key), castagnoli), castagnoli, body)
}
