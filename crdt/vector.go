// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import (
	"encoding/binary"
	"maps"
	"math"
	"slices"
)

// A VectorClock says what of each replica's events was known when something
// happened, so that two things can be told to have happened one after the other
// or without knowledge of each other. A [Stamp] cannot tell that: it orders
// everything. It costs an entry per replica, so it is for the few places that
// need the answer.
//
// A nil VectorClock is the empty one, before all others; like any nil map it
// cannot be written to. A missing entry and one of 0 are the same. It is not
// safe for concurrent use while it is written to.
type VectorClock map[Replica]uint64

// Order is how two vector clocks compare.
type Order int

// What [VectorClock.Compare] says.
const (
	Equal      Order = iota
	Before           // the other knew all of this one, and more
	After            // this one knew all of the other, and more
	Concurrent       // neither knew all of the other
)

func (o Order) String() string {
	switch o {
	case Equal:
		return "equal"
	case Before:
		return "before"
	case After:
		return "after"
	case Concurrent:
		return "concurrent"
	}
	return "unknown"
}

// Tick counts an event of a replica. It fails with [ErrOverflow] after
// 1<<64 − 1, and with [ErrArgument] when the name cannot be sent.
func (v VectorClock) Tick(self Replica) error {
	if err := self.Validate(); err != nil {
		return err
	}
	if v[self] == math.MaxUint64 {
		return ErrOverflow
	}
	v[self]++
	return nil
}

// Merge adds what o knows.
func (v VectorClock) Merge(o VectorClock) {
	for r, n := range o {
		if n > v[r] {
			v[r] = n
		}
	}
}

// Compare says how v stands to o.
func (v VectorClock) Compare(o VectorClock) Order {
	more, less := v.exceeds(o), o.exceeds(v)
	switch {
	case more && less:
		return Concurrent
	case more:
		return After
	case less:
		return Before
	}
	return Equal
}

func (v VectorClock) exceeds(o VectorClock) bool {
	for r, n := range v {
		if n > o[r] {
			return true
		}
	}
	return false
}

// Append appends the clock's encoding, of which there is one: by replica, without
// the zeros. The empty clock is no bytes.
func (v VectorClock) Append(b []byte) []byte {
	first := true
	for _, r := range slices.SortedFunc(maps.Keys(v), Replica.Compare) {
		if v[r] == 0 {
			continue
		}
		if first {
			b, first = append(b, formatVector), false
		}
		b = binary.AppendUvarint(appendReplica(b, r), v[r])
	}
	return b
}

// ParseVectorClock reads what Append wrote. It fails with [ErrMalformed] on
// everything else, and keeps nothing of b.
func ParseVectorClock(b []byte) (VectorClock, error) {
	v := VectorClock{}
	var last Replica
	m := read("VectorClock", formatVector, b)
	for m.Len() > 0 {
		off := m.Offset()
		r, n := m.replica("replica"), m.Uint("count", 1, math.MaxUint64)
		if m.Fault() == nil && r.Compare(last) <= 0 { // no name is as low as the empty one
			m.FailAt(off, "replica", r.kept(), "one after "+last.String())
		}
		if m.Fault() != nil {
			return nil, m.err()
		}
		last = r.kept()
		v[last] = n
	}
	if m.Fault() != nil {
		return nil, m.err()
	}
	return v, nil
}
