// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package offsets

import (
	"math/rand/v2"
	"slices"
	"testing"
	"testing/quick"
)

// The metadata keeps every offset, within what a broker takes.
func TestAheadSurvives(t *testing.T) {
	t.Parallel()
	if err := quick.Check(func(seed uint64) bool {
		random := rand.New(rand.NewPCG(seed, 0))
		at := random.Int64N(1 << 40)
		want := map[int64]bool{}
		for range random.IntN(500) {
			want[at+1+random.Int64N(MaxAhead-1)] = true
		}
		var ahead []int64
		for n := range want {
			ahead = append(ahead, n)
		}
		slices.Sort(ahead)
		meta := Encode(at, ahead)
		got := Decode(at, meta)
		if len(got) != len(want) || len(meta) > 1024 {
			return false
		}
		for n := range want {
			if !got[n] {
				return false
			}
		}
		return true
	}, nil); err != nil {
		t.Error(err)
	}
}

// The longest metadata is as long as it says.
func TestMaxMetadata(t *testing.T) {
	t.Parallel()
	full := make([]int64, MaxAhead-1)
	for i := range full {
		full[i] = int64(i) + 1
	}
	if n := int64(len(Encode(0, full))); n != MaxMetadata {
		t.Errorf("%d bytes, want %d", n, MaxMetadata)
	}
}
