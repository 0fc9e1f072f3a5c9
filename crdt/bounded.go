// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
)

// A Bounded is a stock that replicas use without asking each other and that
// never falls below zero: each uses only what it holds. It is the bounded
// counter of Balegas et al., "Extending Eventually Consistent Cloud Databases
// for Enforcing Numeric Invariants" (SRDS 2015), with loans in place of gifts:
// a lender sees what became of what it lent.
//
//	lender   Mint ─▶ Level ─▶ Take
//	                 │   ▲
//	            Lend ▼   │ returned, once heard
//	borrower        Loan ─▶ TakeLoan
//
// All counts only grow, and each has one writer: what i lent to j is written by
// i, what j used and returned of it by j. So packets may be lost, repeated and
// overtake each other. A lender's outstanding = lent − used − returned errs
// only upwards, and is never negative.
//
// Amounts are int64 in a unit of the caller's, such as millionths of a token.
// There is a row for each replica and each pair that ever lent, for good: a
// stock that outlives many processes is better made anew now and then. It is
// not safe for concurrent use. The zero value is not usable; see [NewBounded].
type Bounded struct {
	self         Replica
	rows         *table[pair, loan]
	level        int64
	minted, used sum
}

// A pair's row is written by its first replica. What it mints it lends to
// itself, so its own level and its loans have one kind of row.
type pair struct{ of, with Replica }

type loan struct {
	lent     int64 // by of to with
	used     int64 // by of, from what with lent
	returned int64 // by of, to with
}

// NewBounded makes a stock in which self holds nothing. It fails with
// [ErrArgument] when the name is empty or too long.
func NewBounded(self Replica) (*Bounded, error) {
	if err := self.Validate(); err != nil {
		return nil, err
	}
	return &Bounded{self: self, rows: newTable[pair, loan]()}, nil
}

// Mint makes n more, which self holds. It fails with [ErrOverflow] when all it
// ever minted exceeds an int64, and with [ErrArgument] when n is negative.
func (c *Bounded) Mint(n int64) error {
	return c.change(c.self, n, math.MaxInt64, func(l *loan) *int64 { return &l.lent })
}

// Take uses n of what self minted and still holds. It fails with [ErrShort]
// when that is less; loans are not touched.
func (c *Bounded) Take(n int64) error {
	return c.change(c.self, n, c.level, func(l *loan) *int64 { return &l.used })
}

// Lend moves n from self's level to a loan. The borrower can use it once it has
// heard of it. It fails with [ErrShort] when self holds less: what is borrowed
// is not lent on.
func (c *Bounded) Lend(to Replica, n int64) error {
	if err := to.Validate(); err != nil {
		return err
	}
	if to == c.self {
		return argument("borrower", to, "another replica")
	}
	return c.change(to, n, c.level, func(l *loan) *int64 { return &l.lent })
}

// TakeLoan uses n of what a lender lent. It fails with [ErrShort] when less is
// left of it.
func (c *Bounded) TakeLoan(lender Replica, n int64) error {
	if lender == c.self {
		return argument("lender", lender, "another replica")
	}
	return c.change(lender, n, c.Loan(lender), func(l *loan) *int64 { return &l.used })
}

// Return gives n of a loan back. The lender holds it again once it has heard of
// it. It fails with [ErrShort] when less is left of the loan.
func (c *Bounded) Return(lender Replica, n int64) error {
	if lender == c.self {
		return argument("lender", lender, "another replica")
	}
	return c.change(lender, n, c.Loan(lender), func(l *loan) *int64 { return &l.returned })
}

func (c *Bounded) change(with Replica, n, left int64, side func(*loan) *int64) error {
	row := c.rows.get(pair{c.self, with})
	count := side(&row)
	switch {
	case n < 0:
		return argument("amount", n, "at least 0")
	case n > left:
		return fmt.Errorf("%w: %d asked for, %d left", ErrShort, n, left)
	case n > math.MaxInt64-*count:
		return ErrOverflow
	case n == 0:
		return nil
	}
	*count += n
	c.join(pair{c.self, with}, row)
	return nil
}

// Level is what self holds of its own: minted, less what it used and lent, plus
// what it heard was returned.
func (c *Bounded) Level() int64 { return c.level }

// Loan is what self can still use or return of what a lender lent.
func (c *Bounded) Loan(lender Replica) int64 {
	mine := c.rows.get(pair{c.self, lender})
	return c.rows.get(pair{lender, c.self}).lent - mine.used - mine.returned
}

// Outstanding is what self lent to a borrower and has not heard to be used or
// returned. It counts against self until then.
func (c *Bounded) Outstanding(borrower Replica) int64 {
	theirs := c.rows.get(pair{borrower, c.self})
	return c.rows.get(pair{c.self, borrower}).lent - theirs.used - theirs.returned
}

// Value is what is left in the whole fleet, as far as this replica heard: a view
// to look at, which nobody can use. While it knows of a use and not yet of what
// was minted for it, it says 0 rather than less. It fails with [ErrOverflow] when
// more is left than an int64 holds.
func (c *Bounded) Value() (int64, error) {
	lo, borrow := bits.Sub64(c.minted.lo, c.used.lo, 0)
	hi, under := bits.Sub64(c.minted.hi, c.used.hi, borrow)
	switch {
	case under != 0:
		return 0, nil
	case hi != 0 || lo > math.MaxInt64:
		return 0, ErrOverflow
	}
	return int64(lo), nil
}

// Mark is the number of the latest change here. See the package comment.
func (c *Bounded) Mark() uint64 { return c.rows.changes.Mark() }

// Delta appends the rows that changed after since, as [GCounter.Delta] does.
func (c *Bounded) Delta(b []byte, since uint64, room int) (_ []byte, upto uint64) {
	return c.rows.delta(b, formatBounded, since, room, func(b []byte, p pair, l loan) []byte {
		b = appendReplica(appendReplica(b, p.of), p.with)
		b = binary.AppendUvarint(b, uint64(l.lent))
		b = binary.AppendUvarint(b, uint64(l.used))
		return binary.AppendUvarint(b, uint64(l.returned))
	})
}

// Merge takes in what a Delta appended. It fails with [ErrMalformed], or with
// [ErrTwin] when a row says that self did what it did not: more than it did in
// its own, or more used and returned than it lent in a borrower's. Then nothing
// was changed. It keeps nothing of b.
func (c *Bounded) Merge(b []byte) error {
	var news map[Replica]loan // borrowers' rows as they will be
	err := eachLoan(b, func(p pair, l loan) error {
		switch {
		case p.of == c.self:
			if own := c.rows.get(p); own.max(l) != own {
				return fmt.Errorf("%w: %v with %v is %+v, and %+v at the peer", ErrTwin, p.of, p.with, own, l)
			}
		case p.with == c.self:
			old, ok := news[p.of]
			if !ok {
				old = c.rows.get(p)
			}
			if l = old.max(l); l == old {
				return nil
			}
			lent := c.rows.get(pair{c.self, p.of}).lent
			if uint64(l.used)+uint64(l.returned) > uint64(lent) {
				return fmt.Errorf("%w: %v used %d and returned %d of %d lent", ErrTwin, p.of, l.used, l.returned, lent)
			}
			if news == nil {
				news = make(map[Replica]loan)
			}
			news[p.of] = l
		}
		return nil
	})
	if err != nil {
		return err
	}
	return eachLoan(b, func(p pair, l loan) error {
		c.join(p, l)
		return nil
	})
}

func eachLoan(b []byte, row func(pair, loan) error) error {
	m := read("Bounded", formatBounded, b)
	for m.Len() > 0 {
		p := pair{m.replica("writer"), m.replica("other")}
		off := m.Offset()
		l := loan{
			lent:     int64(m.Uint("lent", 0, math.MaxInt64)),
			used:     int64(m.Uint("used", 0, math.MaxInt64)),
			returned: int64(m.Uint("returned", 0, math.MaxInt64)),
		}
		if l == (loan{}) {
			m.FailAt(off, "row", "all 0", "at least one count above 0")
		}
		if m.Fault() != nil {
			break
		}
		if err := row(p, l); err != nil {
			return err
		}
	}
	return m.err()
}

func (l loan) max(o loan) loan {
	return loan{max(l.lent, o.lent), max(l.used, o.used), max(l.returned, o.returned)}
}

func (c *Bounded) join(p pair, l loan) {
	old := c.rows.get(p)
	if l = old.max(l); l == old {
		return
	}
	if old == (loan{}) {
		p.of, p.with = p.of.kept(), p.with.kept()
	}
	own := p.of == p.with
	if own {
		c.minted.add(uint64(l.lent - old.lent))
	}
	c.used.add(uint64(l.used - old.used))
	switch {
	case p.of == c.self && own:
		c.level += l.lent - old.lent - (l.used - old.used)
	case p.of == c.self:
		c.level -= l.lent - old.lent
	case p.with == c.self:
		c.level += l.returned - old.returned
	}
	c.rows.put(p, l)
}
