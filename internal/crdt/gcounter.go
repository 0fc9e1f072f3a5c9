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
// A row stays for every incarnation that ever counted, some 40 bytes and its name; see
// [GCounter.Forget]. It is not safe for concurrent use. The zero value is not
// usable; see [NewGCounter].
type GCounter struct {
	self Replica
	rows *table[Replica, uint64]
	sum  sum
}

// NewGCounter makes the counter that self adds to. It fails with an error
// when the name is empty or too long.
func NewGCounter(self Replica) (*GCounter, error) {
	if err := self.Validate(); err != nil {
		return nil, err
	}
	return &GCounter{self: self, rows: newTable[Replica, uint64]()}, nil
}

// Add counts n more. It fails with an error when this replica's own row
// cannot hold them.
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

// Value is the sum of all rows. It fails with an error when that is above
// 1<<64 − 1; the rows are right then too. It costs no walk.
func (c *GCounter) Value() (uint64, error) {
	if c.sum.hi != 0 {
		return 0, errOverflow
	}
	return c.sum.lo, nil
}

// Of is what one replica has counted, as far as it was heard.
func (c *GCounter) Of(r Replica) uint64 { return c.rows.get(r) }

// All yields the rows, that of the latest change last.
func (c *GCounter) All() iter.Seq2[Replica, uint64] { return c.rows.all() }

// Mark is the number of the latest change here. See the package comment.
func (c *GCounter) Mark() uint64 { return c.rows.changes.Mark() }

// Delta appends the rows that changed after since, oldest change first, in at
// most room bytes, and says up to which mark that is complete. Without news it
// appends nothing. Delta(nil, 0, [math.MaxInt]) is the whole state.
func (c *GCounter) Delta(b []byte, since uint64, room int) (_ []byte, upto uint64) {
	return c.rows.delta(b, formatGCounter, since, room, func(b []byte, r Replica, n uint64) []byte {
		return binary.AppendUvarint(appendReplica(b, r), n)
	})
}

// Merge takes in what a Delta appended. It fails with [ErrMalformed], and then
// nothing was changed. It keeps nothing of b.
func (c *GCounter) Merge(b []byte) error {
	if err := eachCount(b, func(Replica, uint64) {}); err != nil {
		return err
	}
	return eachCount(b, c.join)
}

// Join takes in what one replica has counted: Merge of one row, for a section that
// ships rows in a layout of its own. It fails with an error for a name that
// cannot be one, and keeps nothing of it.
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

// Forget drops the row of an incarnation that is over, and its count from Value. Peers
// do not hear of it, and a packet that still has the row brings it back: call
// it at every replica, and only for counts that nobody needs any more. A row
// that is kept costs memory and nothing else, since only changes are sent.
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
