// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import (
	"encoding/binary"
	"iter"
	"math/bits"
)

// A GCounter is a count that only grows: each replica adds to its own row, and
// the count is the sum of the rows. Rows merge by the greater count.
//
// It keeps a row for every incarnation that ever counted: some 40 bytes and the name; see
// [GCounter.Forget]. It is not safe for concurrent use. The zero value is not usable; see
// [NewGCounter].
type GCounter struct {
	self Replica
	rows *table[Replica, uint64]
	sum  sum
}

// NewGCounter makes a counter to which self adds. It returns an error if the name of self is
// empty or too long.
func NewGCounter(self Replica) (*GCounter, error) {
	if err := self.Validate(); err != nil {
		return nil, err
	}
	return &GCounter{self: self, rows: newTable[Replica, uint64]()}, nil
}

// Add counts n more. It returns an error if this replica's own row would overflow.
func (c *GCounter) Add(n uint64) error {
	old := c.rows.get(c.self)
	count, carry := bits.Add64(old, n, 0)
	if carry != 0 {
		return errOverflow
	}
	if n != 0 {
		c.join(c.self, count)
	}
	return nil
}

// Value returns the sum of all rows. It returns an error if the sum is above 1<<64 − 1; the
// rows are right even then. It does not walk the rows.
func (c *GCounter) Value() (uint64, error) {
	if c.sum.hi != 0 {
		return 0, errOverflow
	}
	return c.sum.lo, nil
}

// Of returns the count of one replica, as far as it was heard.
func (c *GCounter) Of(r Replica) uint64 { return c.rows.get(r) }

// All yields the rows in the order of their changes, the latest last.
func (c *GCounter) All() iter.Seq2[Replica, uint64] { return c.rows.all() }

// Mark returns the number of the latest change here. See the package comment.
func (c *GCounter) Mark() uint64 { return c.rows.changes.Mark() }

// Delta appends the rows that changed after since, oldest change first, in at most room
// bytes. upto is the mark up to which the result is complete. Without changes it appends
// nothing. Delta(nil, 0, [math.MaxInt]) is the whole state.
func (c *GCounter) Delta(b []byte, since uint64, room int) (_ []byte, upto uint64) {
	return c.rows.delta(b, formatGCounter, since, room, func(b []byte, r Replica, n uint64) []byte {
		return binary.AppendUvarint(appendReplica(b, r), n)
	})
}

// Merge merges a message of a Delta. The error is [ErrMalformed]; then nothing has changed. It
// keeps nothing of b.
func (c *GCounter) Merge(b []byte) error {
	if err := eachCount(b, func(Replica, uint64) {}); err != nil {
		return err
	}
	return eachCount(b, c.join)
}

// Join merges one replica's count: it is Merge of one row, for a section that sends rows in
// its own layout. It returns an error if the name is empty or too long. It keeps nothing of
// the name's memory.
func (c *GCounter) Join(r Replica, n uint64) error {
	if err := r.Validate(); err != nil {
		return err
	}
	c.join(r, n)
	return nil
}

func eachCount(b []byte, row func(Replica, uint64)) error {
	m := read("GCounter", formatGCounter, b)
	for m.Len() > 0 {
		r, n := m.replica("replica"), m.Uint("count", 1, 1<<64-1)
		if m.Fault() == nil {
			row(r, n)
		}
	}
	return m.err()
}

func (c *GCounter) join(r Replica, n uint64) {
	old := c.rows.get(r)
	if n <= old {
		return
	}
	if old == 0 {
		r = r.kept()
	}
	c.sum.add(n - old)
	c.rows.put(r, n)
}

// Forget drops the row of an incarnation that is over, and its count from Value. Peers are
// not told, and a packet that still has the row brings it back. So call it at every replica,
// and only for counts that are no longer needed. Keeping a row costs only memory, since only
// changes are sent.
func (c *GCounter) Forget(r Replica) {
	c.sum.sub(c.rows.get(r))
	c.rows.drop(r)
}

// sum adds up to 1<<64 counts of 64 bits without a wrap.
type sum struct{ hi, lo uint64 }

func (s *sum) add(n uint64) {
	var carry uint64
	s.lo, carry = bits.Add64(s.lo, n, 0)
	s.hi += carry
}

func (s *sum) sub(n uint64) {
	var borrow uint64
	s.lo, borrow = bits.Sub64(s.lo, n, 0)
	s.hi -= borrow
}
