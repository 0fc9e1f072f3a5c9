// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package mark_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/stormguard-mq/stormguard/internal/mark"
)

var records = []mark.Record{
	{State: mark.Begun, At: 1, Owner: 7},
	{State: mark.BegunOver, At: -1, Owner: 1<<64 - 1, Note: "shipped", Value: []byte("created\x00packed")},
	{State: mark.Done, At: 1<<63 - 1, Value: []byte{0}},
	{State: mark.Doubt, Note: "x"},
	{State: mark.DoubtOver, Value: bytes.Repeat([]byte{0xff}, 300)},
}

func equal(a, b mark.Record) bool {
	return a.State == b.State && a.At == b.At && a.Owner == b.Owner && a.Note == b.Note && bytes.Equal(a.Value, b.Value)
}

func TestRoundTrip(t *testing.T) {
	for _, want := range records {
		got, err := mark.Decode("k", mark.Encode("k", want))
		if err != nil || !equal(got, want) {
			t.Errorf("%+v, %v; want %+v", got, err, want)
		}
	}
}

// Each truncation, each flipped bit and each other key is seen.
func TestDamage(t *testing.T) {
	for _, r := range records {
		whole := mark.Encode("order-17", r)
		for n := range whole {
			if _, err := mark.Decode("order-17", whole[:n]); !errors.Is(err, mark.ErrDamaged) {
				t.Fatalf("%+v, cut to %d of %d bytes: %v", r, n, len(whole), err)
			}
		}
		for bit := range 8 * len(whole) {
			flipped := bytes.Clone(whole)
			flipped[bit/8] ^= 1 << (bit % 8)
			if _, err := mark.Decode("order-17", flipped); !errors.Is(err, mark.ErrDamaged) {
				t.Fatalf("%+v, bit %d flipped: %v", r, bit, err)
			}
		}
		if _, err := mark.Decode("order-18", whole); !errors.Is(err, mark.ErrDamaged) {
			t.Errorf("another key's record: %v", err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, r := range records {
		f.Add("order-17", mark.Encode("order-17", r))
		f.Add("order-18", mark.Encode("order-17", r))
	}
	f.Add("", []byte{})
	long := mark.Encode("k", mark.Record{State: mark.Doubt, Note: "note"})
	long[18] = 0xff // a note longer than the record
	f.Add("k", long)
	f.Fuzz(func(t *testing.T, key string, b []byte) {
		r, err := mark.Decode(key, b)
		if err != nil {
			if !errors.Is(err, mark.ErrDamaged) {
				t.Fatal(err)
			}
			return
		}
		if !bytes.Equal(mark.Encode(key, r), b) {
			t.Fatalf("%q is read as %+v, and written as %q", b, r, mark.Encode(key, r))
		}
	})
}
