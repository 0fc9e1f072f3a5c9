// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package mark is how the stores of package once write a mark: as bytes with a checksum.
package mark

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
)

// State is what a record says about its key.
type State uint8

// The states.
const (
	// Begun: an effect has begun, and there was no record before.
	Begun State = iota + 1
	// BegunOver: as Begun; Value is that of the Done record before.
	BegunOver
	// Done: the effect has happened.
	Done
	// Doubt and DoubtOver: as Begun and BegunOver, and no process is about it any more.
	Doubt
	DoubtOver
)

// Over tells whether the value is that of a Done record before.
func (s State) Over() bool { return s == BegunOver || s == DoubtOver }

// A Record is what a store keeps of a key.
type Record struct {
	State State
	At    int64  // ns since 1970, when it was written
	Owner uint64 // of a claim; 0 where a store has one process
	Note  string // what began, 65,535 bytes at most
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

// Encode writes a record. The checksum covers the key, too: a record under another key
// is damaged.
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

// Decode reads a record, or says [ErrDamaged]. The value is a copy.
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
