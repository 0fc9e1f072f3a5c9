// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package offsets

import (
	"testing"

	"pgregory.net/rapid"
)

// Whatever is delivered and settled in whatever order, the mark is the end of the
// settled prefix of what was delivered, and gaps between offsets change nothing.
func TestTrackerMarksTheSettledPrefix(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tr := New()
		type entry struct {
			offset int64
			done   bool
		}
		var all []entry
		marked := int64(-1)
		next := rapid.Int64Range(0, 10).Draw(t, "first")
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			switch rapid.SampledFrom([]string{"deliver", "atOnce", "settle", "again", "take"}).Draw(t, "step") {
			case "deliver":
				tr.Deliver(next)
				all = append(all, entry{next, false})
				next += rapid.Int64Range(1, 5).Draw(t, "gap")
			case "atOnce": // handled before anything else was delivered
				tr.Settle(next, "")
				all = append(all, entry{next, true})
				next += rapid.Int64Range(1, 5).Draw(t, "gap")
			case "settle":
				if len(all) > 0 {
					i := rapid.IntRange(0, len(all)-1).Draw(t, "which")
					all[i].done = true
					tr.Settle(all[i].offset, "")
				}
			case "again":
				if len(all) > 0 {
					tr.Deliver(all[rapid.IntRange(0, len(all)-1).Draw(t, "which")].offset)
				}
			case "take":
				want := int64(-1)
				oldest := int64(-1)
				for _, e := range all {
					if !e.done {
						oldest = e.offset
						break
					}
					want = e.offset + 1
				}
				ahead := 0
				for _, e := range all {
					if e.done && oldest >= 0 && e.offset > oldest {
						ahead++
					}
				}
				if n := tr.Ahead(); n != ahead {
					t.Fatalf("%d ahead, want %d, of %v", n, ahead, all)
				}
				offset, _, due := tr.Take()
				if due != (want > marked) || due && offset != want {
					t.Fatalf("mark %d (due %t), want %d after %d, of %v", offset, due, want, marked, all)
				}
				if due {
					marked = offset
				}
				if oldest < 0 {
					oldest = want
				}
				if at, given := tr.Position(); at != oldest || given != marked {
					t.Fatalf("position %d, marked %d; want %d, %d, of %v", at, given, oldest, marked, all)
				}
			}
		}
	})
}

func TestTrackerKeepsMetadataAndHeedsAReset(t *testing.T) {
	tr := New()
	for _, o := range []int64{3, 4, 9} {
		tr.Deliver(o)
	}
	tr.Settle(4, "four")
	tr.Settle(3, "three")
	if o, meta, due := tr.Take(); o != 5 || meta != "four" || !due {
		t.Errorf("%d %q %t", o, meta, due)
	}
	tr.Rewound()
	tr.Settle(9, "nine")
	if o, _, due := tr.Take(); due {
		t.Errorf("marked %d after a reset", o)
	}
	tr.Resumed()
	if _, given := tr.Position(); given != -1 {
		t.Errorf("the mark %d of before the reset is still to be committed", given)
	}
	if o, meta, due := tr.Take(); o != 10 || meta != "nine" || !due {
		t.Errorf("%d %q %t", o, meta, due)
	}
	if _, given := tr.Position(); given != 10 {
		t.Errorf("the last mark is %d", given)
	}
}

func BenchmarkTrackerAtOnce(b *testing.B) {
	tr := New()
	for i := range int64(b.N) {
		tr.Settle(i, "")
		if i%64 == 63 {
			tr.Take()
		}
	}
}
