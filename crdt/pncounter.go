// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import (
	"encoding/binary"
	"iter"
	"math/bits"
)

// A PNCounter is a count that goes up and down: two counts that only grow per
// replica, one of what was added and one of what was taken, each merged by the
// greater. Nothing stops it from falling below zero; [Bounded] is the one that
// never does.
//
// A row stays for every life that ever counted, as in a [GCounter]. It is not
// safe for concurrent use. The zero value is not usable; see [NewPNCounter].
type PNCounter struct {
	self         Replica
	rows         *table[Replica, upDown]
	added, taken sum
}

type upDown struct{ up, down uint64 }

// NewPNCounter makes the counter that self changes. It fails with
// [ErrArgument] when the name is empty or too long.
func NewPNCounter(self Replica) (*PNCounter, error) {
	if err := self.Validate(); err != nil {
		return nil, err
	}
	return &PNCounter{self: self, rows: newTable[Replica, upDown]()}, nil
}

// Add counts n up, or down when it is negative. It fails with [ErrOverflow] when
// all that this replica ever added, or ever took, exceeds 64 bits.
func (c *PNCounter) Add(n int64) error {
	row := c.rows.get(c.self)
	side := &row.up
	by := uint64(n)
	if n < 0 {
		side, by = &row.down, -by
	}
	count, carry := bits.Add64(*side, by, 0)
	if carry != 0 {
		return ErrOverflow
	}
	*side = count
	if n != 0 {
		c.join(c.self, row)
	}
	return nil
}

// Value is what was added less what was taken, over all rows. It fails with
// [ErrOverflow] when that is no int64; the rows are right then too.
func (c *PNCounter) Value() (int64, error) {
	lo, borrow := bits.Sub64(c.added.lo, c.taken.lo, 0)
	hi := c.added.hi - c.taken.hi - borrow
	if v := int64(lo); hi == uint64(v>>63) { // the high half only repeats the sign
		return v, nil
	}
	return 0, ErrOverflow
}

// Of is what one replica has added and taken, as far as it was heard.
func (c *PNCounter) Of(r Replica) (added, taken uint64) {
	row := c.rows.get(r)
	return row.up, row.down
}

// All yields the replicas that have a row, that of the latest change last.
func (c *PNCounter) All() iter.Seq[Replica] {
	return func(yield func(Replica) bool) {
		for r := range c.rows.all() {
			if !yield(r) {
				return
			}
		}
	}
}

// Mark is the number of the latest change here. See the package comment.
func (c *PNCounter) Mark() uint64 { return c.rows.changes.Mark() }

// Delta appends the rows that changed after since, as [GCounter.Delta] does.
func (c *PNCounter) Delta(b []byte, since uint64, room int) (_ []byte, upto uint64) {
	return c.rows.delta(b, formatPNCounter, since, room, func(b []byte, r Replica, row upDown) []byte {
		b = binary.AppendUvarint(appendReplica(b, r), row.up)
		return binary.AppendUvarint(b, row.down)
	})
}

// Merge takes in what a Delta appended. It fails with [ErrMalformed], and then
// nothing was changed. It keeps nothing of b.
func (c *PNCounter) Merge(b []byte) error {
	if err := eachUpDown(b, func(Replica, upDown) {}); err != nil {
		return err
	}
	return eachUpDown(b, c.join)
}

func eachUpDown(b []byte, row func(Replica, upDown)) error {
	m := read("PNCounter", formatPNCounter, b)
	for m.Len() > 0 {
		r := m.replica("replica")
		off := m.Offset()
		v := upDown{up: m.Uint("added", 0, 1<<64-1), down: m.Uint("taken", 0, 1<<64-1)}
		if v == (upDown{}) {
			m.FailAt(off, "row", "0 added and 0 taken", "at least one above 0")
		}
		if m.Fault() == nil {
			row(r, v)
		}
	}
	return m.err()
}

func (c *PNCounter) join(r Replica, v upDown) {
	old := c.rows.get(r)
	v.up, v.down = max(v.up, old.up), max(v.down, old.down)
	if v == old {
		return
	}
	if old == (upDown{}) {
		r = r.kept()
	}
	c.added.add(v.up - old.up)
	c.taken.add(v.down - old.down)
	c.rows.put(r, v)
}

// Forget drops the row of a life that is over, with what [GCounter.Forget] says.
func (c *PNCounter) Forget(r Replica) {
	row := c.rows.get(r)
	c.added.sub(row.up)
	c.taken.sub(row.down)
	c.rows.drop(r)
}
