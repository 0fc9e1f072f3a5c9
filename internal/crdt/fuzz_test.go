// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import (
	"encoding/hex"
	"errors"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// fuzzState feeds any bytes to a fresh state and to one with content of its own.
// Nothing panics; what is refused changed nothing; what is accepted comes out as
// something that is accepted and comes out the same again.
func fuzzState(f *testing.F, k kind, seeds ...[]byte) {
	f.Helper()
	f.Add([]byte{})
	for _, s := range seeds {
		f.Add(s)
		f.Add(append(append([]byte{}, s...), 0))
		f.Add(s[:len(s)-1])
	}
	observer := Replica{"observer", 1}
	f.Fuzz(func(t *testing.T, b []byte) {
		sent := string(b)
		s := k.make(observer)
		if err := s.Merge(b); err != nil {
			var fe *formatError
			known := errors.As(err, &fe) && fe.Offset >= 0 && fe.Offset <= len(b) && fe.Field != "" && fe.Want != "" ||
				errors.Is(err, errTwin) || errors.Is(err, ErrGap) || errors.Is(err, ErrFull)
			if !known || s.Mark() != 0 || len(whole(s)) != 0 {
				t.Fatalf("%v; mark %d", err, s.Mark())
			}
			return
		}
		if string(b) != sent {
			t.Fatal("Merge wrote to the message")
		}
		one := whole(s)
		for i := range b {
			b[i] = 0x5A
		}
		if string(whole(s)) != string(one) {
			t.Fatalf("%x became %x when the message was written over", one, whole(s))
		}
		// A repeated row or, in a log, records that wait, are all that may differ.
		if len(one) > len(sent)+9 {
			t.Fatalf("%d bytes came out as %d", len(sent), len(one))
		}
		again := k.make(observer)
		if k.name == "OpLog" && strings.Contains(k.dump(s), "observer") {
			return // its own records of which the new one knows nothing
		}
		merge(t, again, one)
		if got := whole(again); string(got) != string(one) {
			t.Fatalf("%x came out as %x", one, got)
		}
		mark := again.Mark()
		merge(t, again, one)
		if again.Mark() != mark {
			t.Fatal("not idempotent")
		}
	})
}

func kindOf(name string) kind {
	for _, k := range kinds {
		if k.name == name {
			return k
		}
	}
	panic(name)
}

func FuzzGCounter(f *testing.F) {
	c, _ := NewGCounter(origin1)
	_ = c.Add(300)
	fuzzState(f, kindOf("GCounter"), whole(c))
}

func FuzzLWWSet(f *testing.F) {
	s, _ := NewLWWSet(origin1)
	_, _ = s.Add("element", "note", Stamp{1_700_000_000_000, 3})
	_, _ = s.Remove("gone", Stamp{1_700_000_000_000, 4})
	fuzzState(f, kindOf("LWWSet"), whole(s))
}

func FuzzOpLog(f *testing.F) {
	l := newLogged(origin1, OpLogConfig{})
	_, _ = l.Append(OpAdd, Stamp{1_700_000_000_000, 3}, body{Key: 1, Amount: 5})
	_, _ = l.Append(OpReset, Stamp{1_700_000_000_000, 4}, body{})
	_, _ = l.Append(OpConsume, Stamp{1_700_000_000_000, 5}, body{Key: 1, Amount: 5})
	k := kindOf("OpLog")
	k.make = func(self Replica) state { return newLogged(self, OpLogConfig{MaxRecords: 64, MaxHeld: 4}) }
	fuzzState(f, k, whole(l), after(l, 1))
}

// What is wrong is named, with its value, what is allowed, and where.
func TestMalformed(t *testing.T) {
	for _, tc := range []struct {
		kind, hex, want string
	}{
		{"GCounter", "12", "GCounter: format at byte 0 is 0x12, want 0x11"},
		{"GCounter", "21", "format at byte 0 is 0x21, want 0x11"},
		{"GCounter", "11", "first row at byte 1 is missing, want at least one"},
		{"GCounter", "1100", "replica name at byte 1 is 0, want 1 to 255"},
		{"GCounter", "118002", "replica name at byte 1 is 256, want 1 to 255"},
		{"GCounter", "110561", "replica name at byte 2 is 1 bytes, want 5 bytes"},
		{"GCounter", "110161", "replica incarnation at byte 3 is cut off, want a varint"},
		{"GCounter", "110161ffffffffffffffffff02", "replica incarnation at byte 3 is more than 64 bits"},
		{"GCounter", "1101618000", "replica incarnation at byte 3 is 0 in 2 bytes, want the shortest varint"},
		{"GCounter", "1101610100", "count at byte 4 is 0, want 1 to 18446744073709551615"},
		{"GCounter", "110161010501", "replica name at byte 6 is 0 bytes, want 1 bytes"},
		{"LWWSet", "41" + "8104", "element at byte 1 is 513, want 0 to 384"},
		{"LWWSet", "41" + "0005", "stamp logical at byte 3 is cut off"},
		{"LWWSet", "41" + "000506" + "016101" + "02", "removed at byte 7 is 2, want 0 to 1"},
		{"LWWSet", "41" + "000506" + "016101" + "00" + "8102", "note at byte 8 is 257, want 0 to 256"},
		{"LWWSet", "41" + "000506" + "016101" + "00" + "0261", "note at byte 9 is 1 bytes, want 2 bytes"},
		{"OpLog", "6100", "first run at byte 2 is missing"},
		{"OpLog", "6100" + "016101" + "00" + "00", "count at byte 6 is 0, want 1 to 1048576"},
		{"OpLog", "6100" + "016101" + "00" + "818040", "count at byte 6 is 1048577"},
		{"OpLog", "6100" + "016101" + "00" + "01" + "00", "records at byte 7 is 1 bytes, want 56 bytes"},
		{"OpLog", "6100" + "016101" + "02" + "01" + rec(2, 0, 1), "number at byte 7 is 2, want above the floor, 2"},
		{"OpLog", "6100" + "016101" + "02" + "02" + rec(3, 0, 1) + rec(5, 0, 1), "number at byte 63 is 5, want one more"},
		{"OpLog", "6100" + "016101" + "02" + "01" + rec(math.MaxUint64, 0, 1), "number at byte 7 is 18446744073709551615"},
		{"OpLog", "6100" + "016101" + "02" + "01" + rec(3, 0, 4), "operation at byte 7 is 4, want 1 to 3"},
		{"OpLog", "6100" + "016101" + "02" + "01" + rec(3, 0, 0), "operation at byte 7 is 0, want 1 to 3"},
		{"OpLog", "6100" + "016101" + "02" + "01" + rec(3, 0, 1<<32|1), "operation at byte 7 is 4294967297"},
		{"OpLog", "6100" + "016101" + "02" + "01" + rec(3, 0, 3), "epoch of a RESET at byte 7 is 0, want at least 1"},
	} {
		b, err := hex.DecodeString(tc.hex)
		if err != nil {
			t.Fatal(err)
		}
		s := kindOf(tc.kind).make(origin1)
		err = s.Merge(b)
		if err == nil || !strings.Contains(err.Error(), tc.want) || !errors.Is(err, ErrMalformed) || s.Mark() != 0 {
			t.Errorf("%s %s: %v, want %s", tc.kind, tc.hex, err, tc.want)
		}
	}
}

// rec is a record of 56 bytes in hex, written down by hand.
func rec(seq, epoch, op uint64) string {
	b := make([]byte, 56)
	for i, v := range []uint64{seq, epoch, 0, 0, op} {
		for j := range 8 {
			b[i*8+j] = byte(v >> (8 * j))
		}
	}
	return hex.EncodeToString(b)
}

// The layouts on the wire, byte by byte: they change with the version only.
func TestWire(t *testing.T) {
	g, _ := NewGCounter(Replica{"ab", 1})
	s, _ := NewLWWSet(Replica{"a", 2})
	l := newLogged(Replica{"a", 1}, OpLogConfig{})
	if err := g.Add(300); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Remove("xy", Stamp{5, 6}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Add("z", "hi", Stamp{7, 8}); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Append(OpReset, Stamp{0x1112, 0x13}, body{Key: 0x21, Spare: 0x22, Amount: -2}); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		got  []byte
		want string
	}{
		"GCounter": {whole(g), "11" + "02616201ac02"},
		"LWWSet":   {whole(s), "41" + "0278790506" + "016102" + "01" + "017a0708" + "016102" + "00" + "026869"},
		"OpLog": {whole(l), "61" + "00" + "016101" + "00" + "01" +
			"0100000000000000" + "0100000000000000" + "1211000000000000" + "1300000000000000" + "0300000000000000" +
			"2100000022000000" + "feffffffffffffff"},
	} {
		if got := hex.EncodeToString(tc.got); got != tc.want {
			t.Errorf("%s is\n%s, want\n%s", name, got, tc.want)
		}
	}
}

// A length that the message does not have allocates nothing, and what is
// accepted allocates a small multiple of the message.
func TestDecodeAllocatesLittle(t *testing.T) {
	measure := func(f func()) uint64 {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		f()
		runtime.ReadMemStats(&after)
		return after.TotalAlloc - before.TotalAlloc
	}
	var rows []byte
	for i := range 10_000 { // the shortest rows there are
		rows = append(rows, 1, byte(i), byte(i>>7)&0x7F, 1)
	}
	wide := []byte{formatOpLog, 0, 1, 'a', 1, 0}
	wide = append(wide, 0xFF, 0xFF, 0x3F) // 1048575 records that are not there
	for name, tc := range map[string]struct {
		kind string
		b    []byte
		most uint64
	}{
		"shortest rows":     {"GCounter", append([]byte{formatGCounter}, rows...), 100 * 40_000},
		"records announced": {"OpLog", wide, 16 << 10},
		"name announced":    {"GCounter", []byte{formatGCounter, 0xFF, 1}, 16 << 10},
	} {
		s := kindOf(tc.kind).make(origin1)
		if got := measure(func() { _ = s.Merge(tc.b) }); got > tc.most {
			t.Errorf("%s: %d bytes allocated for a message of %d, want at most %d", name, got, len(tc.b), tc.most)
		}
	}
}

// There are seeds in the repository for each decoder.
func TestSeeds(t *testing.T) {
	for _, k := range kinds {
		seeds, err := filepath.Glob("testdata/fuzz/Fuzz" + k.name + "/*")
		if err != nil || len(seeds) == 0 {
			t.Errorf("no seeds for %s: %v", k.name, err)
		}
		for _, s := range seeds {
			if b, err := os.ReadFile(s); err != nil || !strings.HasPrefix(string(b), "go test fuzz v1\n") {
				t.Error(s, err)
			}
		}
	}
}
