// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"time"
)

// A Stamp is a reading of a hybrid logical clock. Stamps order what has no
// other order; between replicas they say nothing exact about time.
type Stamp struct {
	Physical uint64 // milliseconds since 1970
	Logical  uint64 // tells apart what happened within one Physical
}

// Compare orders stamps: -1, 0 or +1.
func (s Stamp) Compare(o Stamp) int {
	return cmp.Or(cmp.Compare(s.Physical, o.Physical), cmp.Compare(s.Logical, o.Logical))
}

// Time is the physical part as a wall time in UTC, without the logical one. A
// part that no time.Time in milliseconds can hold counts as the last that can.
func (s Stamp) Time() time.Time { return time.UnixMilli(int64(min(s.Physical, math.MaxInt64))).UTC() }

func (s Stamp) String() string { return fmt.Sprintf("%d.%d", s.Physical, s.Logical) }

// next is the earliest stamp after s. The logical part carries over into the
// physical one; at the end of both, which no clock reaches, it stays.
func (s Stamp) next() Stamp {
	switch {
	case s.Logical < math.MaxUint64:
		s.Logical++
	case s.Physical < math.MaxUint64:
		s.Physical, s.Logical = s.Physical+1, 0
	}
	return s
}

// After is s, or the earliest stamp after o if s is not later than that.
func (s Stamp) After(o Stamp) Stamp {
	if s.Compare(o) > 0 {
		return s
	}
	return o.next()
}

func appendStamp(b []byte, s Stamp) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(b, s.Physical), s.Logical)
}

func (r *reader) stamp(of string) Stamp {
	if r.Fault() != nil {
		return Stamp{}
	}
	v := Stamp{Physical: r.Uint("physical", 0, math.MaxUint64), Logical: r.Uint("logical", 0, math.MaxUint64)}
	r.within(of)
	return v
}
