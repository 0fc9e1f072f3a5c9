// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import (
	"errors"
	"math"
	"strings"
	"testing"
)

func TestReplica(t *testing.T) {
	for name, ok := range map[string]bool{"": false, "a": true, strings.Repeat("x", maxName): true, strings.Repeat("x", maxName+1): false} {
		r := Replica{Name: name}
		if err := r.Validate(); (err == nil) != ok || err != nil && !errors.Is(err, errArgument) {
			t.Errorf("name of %d bytes: %v", len(name), err)
		}
		for _, k := range []func(Replica) error{
			func(r Replica) error { _, err := NewGCounter(r); return err },
			func(r Replica) error { _, err := NewLWWSet(r); return err },
		} {
			if err := k(r); (err == nil) != ok {
				t.Errorf("name of %d bytes: %v", len(name), err)
			}
		}
	}
	a, b, c := Replica{"a", 2}, Replica{"b", 1}, Replica{"b", 2}
	if a.Compare(b) != -1 || c.Compare(b) != 1 || b.Compare(Replica{"b", 1}) != 0 {
		t.Error("order of replicas")
	}
}

// The largest row of each type fits into MinRoom.
func TestMinRoom(t *testing.T) {
	long := func(c string) Replica { return Replica{strings.Repeat(c, maxName), math.MaxUint64} }
	at := Stamp{math.MaxUint64, math.MaxUint64}
	g, _ := NewGCounter(long("x"))
	s, _ := NewLWWSet(long("x"))
	l, _ := NewOpLog(long("x"), OpLogConfig{}, func(Record[[maxBody]byte], bool) {})
	if err := g.Add(math.MaxUint64); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Add(strings.Repeat("e", MaxElement), strings.Repeat("n", MaxNote), at); err != nil {
		t.Fatal(err)
	}
	l.base, l.epoch = math.MaxUint64, math.MaxUint64
	l.origins[l.self].floor, l.origins[l.self].applied = math.MaxUint64-3, math.MaxUint64-3
	if _, err := l.Append(OpAdd, at, [maxBody]byte{}); err != nil {
		t.Fatal(err)
	}
	for name, s := range map[string]state{"GCounter": g, "LWWSet": s, "OpLog": l} {
		d, upto := s.Delta(nil, 0, MinRoom)
		if len(d) == 0 || upto != s.Mark() {
			t.Errorf("%s: %d bytes of %d up to %d of %d", name, len(d), len(whole(s)), upto, s.Mark())
		}
	}
}

// Join of a row is Merge of a message with that row alone.
func TestGCounterJoin(t *testing.T) {
	c, _ := NewGCounter(origin1)
	o, _ := NewGCounter(origin2)
	for _, n := range []uint64{3, 0, 2} {
		if err := o.Add(n); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := c.Join(origin2, o.Of(origin2)); err != nil {
				t.Fatal(err)
			}
		}
		if v, err := c.Value(); v != o.Of(origin2) || err != nil {
			t.Errorf("%d, %v; want %d", v, err, o.Of(origin2))
		}
	}
	if err := c.Join(origin2, 4); err != nil || c.Of(origin2) != 5 || c.Mark() != 2 {
		t.Errorf("%v: an older row made it %d, mark %d", err, c.Of(origin2), c.Mark())
	}
	if err := c.Join(Replica{}, 1); !errors.Is(err, errArgument) || c.Mark() != 2 {
		t.Error(err)
	}
}

func TestGCounterOverflow(t *testing.T) {
	c, _ := NewGCounter(origin1)
	if err := c.Add(math.MaxUint64); err != nil {
		t.Fatal(err)
	}
	if err := c.Add(1); !errors.Is(err, errOverflow) || c.Of(origin1) != math.MaxUint64 {
		t.Fatal(err, c.Of(origin1))
	}
	o, _ := NewGCounter(origin2)
	if err := o.Add(2); err != nil {
		t.Fatal(err)
	}
	merge(t, c, whole(o))
	if v, err := c.Value(); !errors.Is(err, errOverflow) {
		t.Fatal(v, err)
	}
	// Rows are right all the same, and without the great one so is the sum.
	c.Forget(origin1)
	if v, err := c.Value(); v != 2 || err != nil {
		t.Fatal(v, err)
	}
	c.Forget(origin1)
	merge(t, c, whole(o))
	if v, err := c.Value(); v != 2 || err != nil {
		t.Fatal(v, err)
	}
}

// A merge that is no news allocates nothing.
func TestMergeAllocations(t *testing.T) {
	g, _ := NewGCounter(origin1)
	s, _ := NewLWWSet(origin1)
	if err := g.Add(3); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Add("element", "note", Stamp{1, 1}); err != nil {
		t.Fatal(err)
	}
	for name, s := range map[string]state{"GCounter": g, "LWWSet": s} {
		d := whole(s)
		if n := testing.AllocsPerRun(100, func() {
			if err := s.Merge(d); err != nil {
				t.Error(err)
			}
		}); n > 2 { // the two readers
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}
