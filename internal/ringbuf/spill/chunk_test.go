// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

import (
	"bytes"
	"math"
	"testing"

	"pgregory.net/rapid"
)

func TestChunkReadsWhatItWrote(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.StringN(1, 80, MaxName).Filter(func(s string) bool { return s != "" }).Draw(t, "name")
		recs := rapid.SliceOfN(rapid.SliceOf(rapid.Byte()), 1, 40).Draw(t, "records")
		first := rapid.Uint64Range(1, math.MaxUint64-100).Draw(t, "first")
		var lens []uint32
		var data []byte
		for _, r := range recs {
			lens, data = append(lens, uint32(len(r))), append(data, r...)
		}
		b := appendChunk([]byte("before"), name, first, 7, -5, lens, data)[len("before"):]
		c, err := parseChunk(append(b, "behind"...))
		if err != nil || c.name != name || c.first != first || c.commit != 7 || c.when != -5 || c.n != len(recs) || c.size != len(b) {
			t.Fatalf("%+v, %v", c, err)
		}
		froms := c.offsets()
		for i, r := range recs {
			got, _, err := c.record(i, froms[i])
			if err != nil || !bytes.Equal(got, r) {
				t.Fatalf("record %d: %q, %v; want %q", i, got, err, r)
			}
		}
		// A byte that is wrong is noticed, and costs no record but its own if it is in one.
		at := rapid.IntRange(0, len(b)-1).Draw(t, "at")
		b[at] ^= byte(rapid.IntRange(1, 255).Draw(t, "xor"))
		c, err = parseChunk(b)
		if head := len(b) - len(data); (err == nil) != (at >= head) {
			t.Fatalf("byte %d of a header of %d: %v", at, head, err)
		} else if err != nil {
			return
		}
		bad := 0
		for i := range recs {
			if _, _, err := c.record(i, froms[i]); err != nil {
				bad++
			}
		}
		if bad != 1 {
			t.Fatalf("%d records are bad", bad)
		}
		b[at] ^= 0
	})
}

func FuzzChunk(f *testing.F) {
	f.Add(appendChunk(nil, "orders", 1, 2, 3, []uint32{3, 0, 2}, []byte("abcde")))
	f.Add(newPosition(position{name: "orders", head: 3, tail: 9, commit: 4}))
	f.Add([]byte(chunkMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		if c, err := parseChunk(b); err == nil {
			var lens []uint32
			var data []byte
			whole := true
			for i, from := range c.offsets() {
				rec, next, err := c.record(i, from)
				whole = whole && err == nil
				lens, data = append(lens, uint32(next-from)), append(data, rec...)
			}
			if !whole { // it is cut short, or a record is wrong
				return
			}
			if again := appendChunk(nil, c.name, c.first, c.commit, c.when, lens, data); !bytes.Equal(again, b[:c.size]) {
				t.Errorf("%q was read, and is written as %q", b, again)
			}
		}
		if p, n, err := parsePosition(b); err == nil && !bytes.Equal(newPosition(p), b[:n]) {
			t.Errorf("%q was read as %+v", b, p)
		}
		if name, seq, ok := parseKey(b); ok && !bytes.Equal(newKey(string(name), seq), b) {
			t.Errorf("%q is read as a key", b)
		}
	})
}
