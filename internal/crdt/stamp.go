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

// A Stamp is a reading of a hybrid logical clock. Stamps order events that have no other
// order. Between replicas they are not exact times.
type Stamp struct {
	Physical uint64 // milliseconds since 1970
	Logical  uint64 // orders stamps with the same Physical
}

// Compare orders stamps: -1, 0 or +1.
func (s Stamp) Compare(o Stamp) int {
	return cmp.Or(cmp.Compare(s.Physical, o.Physical), cmp.Compare(s.Logical, o.Logical))
}

// Time returns the physical part as a wall time in UTC, without the logical part. A physical
// part that is too large becomes the latest possible time.
func (s Stamp) Time() time.Time { return time.UnixMilli(int64(min(s.Physical, math.MaxInt64))).UTC() }

func (s Stamp) String() string { return fmt.Sprintf("%d.%d", s.Physical, s.Logical) }

// next returns the earliest stamp after s. The logical part overflows into the physical one.
// The last possible stamp, which no clock reaches, stays as it is.
func (s Stamp) next() Stamp {
	switch {
	case s.Logical < math.MaxUint64:
		s.Logical++
	case s.Physical < math.MaxUint64:
		s.Physical, s.Logical = s.Physical+1, 0
	}
	return s
}

// After returns s if it is later than o, and otherwise the earliest stamp after o.
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
