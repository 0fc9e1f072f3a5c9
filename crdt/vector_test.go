// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import (
	"errors"
	"math"
	"testing"

	"pgregory.net/rapid"
)

var drawClock = rapid.Custom(func(t *rapid.T) VectorClock {
	v := VectorClock{}
	for _, r := range names {
		if n := rapid.Uint64Range(0, 2).Draw(t, "n"); n > 0 || rapid.Bool().Draw(t, "zero entry") {
			v[r] = n
		}
	}
	return v
})

// Compare against its definition, entry by entry.
func TestVectorClockCompare(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := drawClock.Draw(t, "a"), drawClock.Draw(t, "b")
		leq, geq := true, true
		for _, r := range names {
			leq = leq && a[r] <= b[r]
			geq = geq && a[r] >= b[r]
		}
		want := Concurrent
		switch {
		case leq && geq:
			want = Equal
		case leq:
			want = Before
		case geq:
			want = After
		}
		if got := a.Compare(b); got != want {
			t.Fatalf("%v to %v is %v, want %v", a, b, got, want)
		}
		got, err := ParseVectorClock(a.Append(nil))
		if err != nil || got.Compare(a) != Equal {
			t.Fatalf("%v came out as %v, %v", a, got, err)
		}
	})
}

func TestVectorClockLaws(t *testing.T) {
	join := func(vs ...VectorClock) VectorClock {
		j := VectorClock{}
		for _, v := range vs {
			j.Merge(v)
		}
		return j
	}
	rapid.Check(t, func(t *rapid.T) {
		a, b, c := drawClock.Draw(t, "a"), drawClock.Draw(t, "b"), drawClock.Draw(t, "c")
		for _, pair := range [][2]VectorClock{
			{join(a, b), join(b, a)},
			{join(join(a, b), c), join(a, join(b, c))},
			{join(a, a, b, a), join(a, b)},
		} {
			if pair[0].Compare(pair[1]) != Equal {
				t.Fatalf("%v is not %v", pair[0], pair[1])
			}
		}
		for _, v := range []VectorClock{a, b} {
			if o := v.Compare(join(a, b)); o != Before && o != Equal {
				t.Fatalf("%v is %v its join", v, o)
			}
		}
	})
}

func TestVectorClockTick(t *testing.T) {
	v := VectorClock{}
	if err := v.Tick(origin1); err != nil || v[origin1] != 1 || (VectorClock)(nil).Compare(v) != Before {
		t.Fatal(err, v)
	}
	v[origin1] = math.MaxUint64
	if err := v.Tick(origin1); !errors.Is(err, ErrOverflow) || v[origin1] != math.MaxUint64 {
		t.Fatal(err, v)
	}
	for o, want := range map[Order]string{Equal: "equal", Before: "before", After: "after", Concurrent: "concurrent", 9: "unknown"} {
		if o.String() != want {
			t.Errorf("%d is %q", o, o.String())
		}
	}
}

func TestVectorClockRefusesDisorder(t *testing.T) {
	one := appendReplica(nil, origin1)
	two := appendReplica(nil, origin2)
	msg := func(parts ...[]byte) []byte {
		b := []byte{formatVector}
		for _, p := range parts {
			b = append(append(b, p...), 1)
		}
		return b
	}
	if _, err := ParseVectorClock(msg(one, two)); err != nil {
		t.Error(err)
	}
	for _, b := range [][]byte{msg(two, one), msg(one, one)} {
		var fe *FormatError
		if _, err := ParseVectorClock(b); !errors.As(err, &fe) || fe.Field != "replica" || fe.Offset != 10 {
			t.Error(err)
		}
	}
}
