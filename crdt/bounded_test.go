// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import (
	"encoding/binary"
	"errors"
	"math"
	"testing"

	"pgregory.net/rapid"
)

func actBounded(t *rapid.T, s state, self Replica, peers []Replica, _ *model) {
	c := s.(*Bounded)
	peer := rapid.SampledFrom(peers).Draw(t, "peer")
	n := rapid.Int64Range(-1, 10).Draw(t, "n")
	level, loan := c.Level(), c.Loan(peer)
	var err error
	var left int64
	var wrong bool // an argument
	switch rapid.IntRange(0, 4).Draw(t, "act") {
	case 0:
		err, left = c.Mint(n), math.MaxInt64
	case 1:
		err, left = c.Take(n), level
	case 2:
		err, left, wrong = c.Lend(peer, n), level, peer == self
	case 3:
		err, left, wrong = c.TakeLoan(peer, n), loan, peer == self
	case 4:
		err, left, wrong = c.Return(peer, n), loan, peer == self
	}
	var want error
	switch {
	case wrong || n < 0:
		want = ErrArgument
	case n > left:
		want = ErrShort
	}
	if !errors.Is(err, want) {
		t.Fatalf("%d asked for with %d left: %v, want %v", n, left, err, want)
	}
}

// Nobody is ever below zero, and all there is adds up.
func checkBounded(t *rapid.T, w *world) {
	var held, left int64
	for i, s := range w.at {
		c := s.(*Bounded)
		own := c.rows.get(pair{names[i], names[i]})
		left += own.lent - own.used
		if c.Level() < 0 {
			t.Fatalf("%v holds %d", names[i], c.Level())
		}
		held += c.Level()
		for j, peer := range names {
			if i == j {
				continue
			}
			if c.Loan(peer) < 0 || c.Outstanding(peer) < 0 {
				t.Fatalf("%v with %v: loan %d, outstanding %d", names[i], peer, c.Loan(peer), c.Outstanding(peer))
			}
			// What j really used of the loan, of which i may not have heard.
			used := w.at[j].(*Bounded).rows.get(pair{peer, names[i]}).used
			heard := c.rows.get(pair{peer, names[i]}).used
			if used < heard {
				t.Fatalf("%v heard that %v used %d of %d", names[i], peer, heard, used)
			}
			left -= used
			held += c.Outstanding(peer) - (used - heard)
		}
	}
	if held != left {
		t.Fatalf("%d are held or lent, %d are left of what was minted", held, left)
	}
	for _, s := range w.at {
		if v, err := s.(*Bounded).Value(); err != nil || v < 0 {
			t.Fatalf("Value is %d, %v", v, err)
		}
	}
}

var lender, borrower = Replica{"lender", 1}, Replica{"borrower", 1}

func bounded(t *testing.T, self Replica, mint int64) *Bounded {
	t.Helper()
	c, err := NewBounded(self)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Mint(mint); err != nil {
		t.Fatal(err)
	}
	return c
}

func row(of, with Replica, lent, used, returned uint64) []byte {
	b := appendReplica(appendReplica([]byte{formatBounded}, of), with)
	for _, n := range []uint64{lent, used, returned} {
		b = binary.AppendUvarint(b, n)
	}
	return b
}

// A borrower that says it did more than it was lent, and a peer that says self
// did what it did not, are refused with the whole message.
func TestBoundedRefusesTwins(t *testing.T) {
	make := func() *Bounded {
		c := bounded(t, lender, 100)
		if err := c.Lend(borrower, 10); err != nil {
			t.Fatal(err)
		}
		return c
	}
	other := row(Replica{"x", 1}, Replica{"x", 1}, 5, 0, 0)
	for name, tc := range map[string]struct {
		b  []byte
		ok bool
	}{
		"as much as was lent":             {row(borrower, lender, 0, 4, 6), true},
		"one more than was lent":          {row(borrower, lender, 0, 4, 7), false},
		"sum beyond 63 bits":              {row(borrower, lender, 0, math.MaxInt64, math.MaxInt64), false},
		"nothing was lent to this one":    {row(Replica{"z", 1}, lender, 0, 0, 1), false},
		"two rows, each right by itself":  {append(row(borrower, lender, 0, 10, 0), row(borrower, lender, 0, 0, 10)[1:]...), false},
		"own row as it is":                {row(lender, lender, 100, 0, 0), true},
		"own row from before":             {row(lender, lender, 7, 0, 0), true},
		"own row with more minted":        {row(lender, lender, 101, 0, 0), false},
		"own row with use":                {row(lender, lender, 100, 1, 0), false},
		"own loan that was never given":   {row(lender, Replica{"z", 1}, 1, 0, 0), false},
		"what the borrower lent to us":    {row(borrower, lender, 1000, 10, 0), true},
		"what others do with one another": {row(borrower, Replica{"z", 1}, 0, 5, 0), true},
	} {
		t.Run(name, func(t *testing.T) {
			c := make()
			mark := c.Mark()
			err := c.Merge(append(append([]byte{}, other...), tc.b[1:]...))
			if tc.ok && err != nil || !tc.ok && !errors.Is(err, ErrTwin) {
				t.Fatal(err)
			}
			if !tc.ok && c.Mark() != mark {
				t.Error("refused, and yet something was taken in")
			}
			if c.Level() < 90 || c.Level() > 100 || c.Outstanding(borrower) < 0 {
				t.Errorf("level %d, outstanding %d", c.Level(), c.Outstanding(borrower))
			}
		})
	}
}

// What comes back in parts comes back once.
func TestBoundedReturnsInParts(t *testing.T) {
	a, b := bounded(t, lender, 10), bounded(t, borrower, 0)
	if err := a.Lend(borrower, 6); err != nil {
		t.Fatal(err)
	}
	merge(t, b, whole(a))
	for i, level := range []int64{5, 6, 7} {
		if err := errors.Join(b.Return(lender, 1), b.TakeLoan(lender, 1)); err != nil {
			t.Fatal(err)
		}
		before := a.Outstanding(borrower)
		merge(t, a, whole(b))
		if a.Level() != level || before-a.Outstanding(borrower) != 2 {
			t.Fatalf("after %d: level %d, outstanding %d", i+1, a.Level(), a.Outstanding(borrower))
		}
	}
	if b.Loan(lender) != 0 || !errors.Is(b.Return(lender, 1), ErrShort) {
		t.Fatal(b.Loan(lender))
	}
	if v, err := a.Value(); v != 7 || err != nil {
		t.Fatal(v, err)
	}
}

func TestBoundedOverflow(t *testing.T) {
	c := bounded(t, lender, math.MaxInt64)
	if err := c.Mint(1); !errors.Is(err, ErrOverflow) {
		t.Fatal(err)
	}
	if err := c.Lend(borrower, math.MaxInt64); err != nil {
		t.Fatal(err)
	}
	if err := c.Merge(row(borrower, lender, 0, 0, math.MaxInt64)); err != nil {
		t.Fatal(err)
	}
	if c.Level() != math.MaxInt64 {
		t.Fatalf("level is %d after all was returned", c.Level())
	}
	if err := c.Lend(borrower, 1); !errors.Is(err, ErrOverflow) {
		t.Fatal(err)
	}
	if err := c.Lend(Replica{}, 1); !errors.Is(err, ErrArgument) {
		t.Fatal(err)
	}

	// Of two that minted, more is left than an int64 holds; and what was used is
	// heard before what was minted.
	view := bounded(t, Replica{"view", 1}, 1)
	if err := view.Merge(whole(c)); err != nil {
		t.Fatal(err)
	}
	if v, err := view.Value(); !errors.Is(err, ErrOverflow) {
		t.Fatal(v, err)
	}
	view = bounded(t, Replica{"view", 1}, 1)
	if err := view.Merge(row(borrower, lender, 0, 5, 0)); err != nil {
		t.Fatal(err)
	}
	if v, err := view.Value(); v != 0 || err != nil {
		t.Fatal(v, err)
	}
}
