// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package wire_test

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stormguard-mq/stormguard/internal/crdt/wire"
)

// What is wrong is named, with its value, what is allowed, and where; and then
// nothing is left.
func TestFault(t *testing.T) {
	for name, tc := range map[string]struct {
		hex  string
		read func(*wire.Reader)
		want string
	}{
		"empty":        {"", func(r *wire.Reader) { r.Uint("n", 0, 9) }, "n at byte 1 is cut off, want a varint"},
		"cut off":      {"80", func(r *wire.Reader) { r.Uint("n", 0, 9) }, "n at byte 1 is cut off, want a varint"},
		"65 bits":      {"ffffffffffffffffff02", func(r *wire.Reader) { r.Uint("n", 0, math.MaxUint64) }, "n at byte 1 is more than 64 bits, want a varint of at most 64 bits"},
		"eleven bytes": {"8080808080808080808000", func(r *wire.Reader) { r.Uint("n", 0, math.MaxUint64) }, "more than 64 bits"},
		"long":         {"8100", func(r *wire.Reader) { r.Uint("n", 0, 9) }, "n at byte 1 is 1 in 2 bytes, want the shortest varint"},
		"long zero":    {"8000", func(r *wire.Reader) { r.Uint("n", 0, 9) }, "n at byte 1 is 0 in 2 bytes, want the shortest varint"},
		"above":        {"0a", func(r *wire.Reader) { r.Uint("n", 0, 9) }, "n at byte 1 is 10, want 0 to 9"},
		"below":        {"01", func(r *wire.Reader) { r.Uint("n", 2, 9) }, "n at byte 1 is 1, want 2 to 9"},
		"another":      {"02", func(r *wire.Reader) { r.Uint("n", 1, 1) }, "n at byte 1 is 2, want 1"},
		"far above":    {"8080808080808080808001", func(r *wire.Reader) { r.Uint("n", 0, math.MaxInt64) }, "more than 64 bits"},
		"above 63":     {"80808080808080808001", func(r *wire.Reader) { r.Uint("n", 0, math.MaxInt64) }, "n at byte 1 is 9223372036854775808, want 0 to 9223372036854775807"},
		"bytes":        {"0102", func(r *wire.Reader) { r.Bytes("b", 3) }, "b at byte 1 is 2 bytes, want 3 bytes"},
		"no bytes":     {"0102", func(r *wire.Reader) { r.Bytes("b", -1) }, "b at byte 1 is 2 bytes, want -1 bytes"},
		"text":         {"0361", func(r *wire.Reader) { r.Text("t", 0, 9) }, "t at byte 2 is 1 bytes, want 3 bytes"},
		"long text":    {"0a61", func(r *wire.Reader) { r.Text("t", 0, 9) }, "t at byte 1 is 10, want 0 to 9"},
		"no text":      {"0061", func(r *wire.Reader) { r.Text("t", 1, 9) }, "t at byte 1 is 0, want 1 to 9"},
		"byte":         {"", func(r *wire.Reader) { r.Byte("x") }, "x at byte 1 is 0 bytes, want 1 bytes"},
		"bool":         {"02", func(r *wire.Reader) { r.Bool("x") }, "x at byte 1 is 2, want 0 to 1"},
		"16 bits":      {"01", func(r *wire.Reader) { r.Uint16("x") }, "x at byte 1 is 1 bytes, want 2 bytes"},
		"32 bits":      {"010203", func(r *wire.Reader) { r.Uint32("x") }, "x at byte 1 is 3 bytes, want 4 bytes"},
		"64 bits":      {"01020304050607", func(r *wire.Reader) { r.Uint64("x") }, "x at byte 1 is 7 bytes, want 8 bytes"},
		"end":          {"0102", func(r *wire.Reader) { r.End() }, "end at byte 1 is 2 bytes, want nothing"},
		"end of one":   {"01", func(r *wire.Reader) { r.End() }, "end at byte 1 is 1 bytes, want nothing"},
		"said":         {"0102", func(r *wire.Reader) { r.Fail("x", 3, "4") }, "x at byte 1 is 3, want 4"},
		"said before":  {"0102", func(r *wire.Reader) { r.Uint16("y"); r.FailAt(1, "x", 3, "4") }, "x at byte 1 is 3, want 4"},
	} {
		t.Run(name, func(t *testing.T) {
			b, err := hex.DecodeString("00" + tc.hex)
			if err != nil {
				t.Fatal(err)
			}
			r := wire.Read(b)
			r.Byte("first")
			tc.read(&r)
			f := r.Fault()
			if f == nil || !strings.Contains(f.Error(), tc.want) {
				t.Fatalf("%v, want %s", f, tc.want)
			}
			if r.Len() != 0 || r.Rest() != nil {
				t.Fatalf("%d bytes are left after %v", r.Len(), f)
			}
			r.Fail("another", 1, "2")
			got := []any{r.Uint("n", 0, 9), r.Text("t", 0, 9), r.Byte("b"), r.Bool("b"), r.Uint16("b"), r.Uint32("b"), r.Uint64("b")}
			for i, v := range got {
				if v != []any{uint64(0), "", byte(0), false, uint16(0), uint32(0), uint64(0)}[i] {
					t.Errorf("read %d after a fault is %v", i, v)
				}
			}
			if r.Fault() != f {
				t.Fatalf("%v came after %v", r.Fault(), f)
			}
		})
	}
}

// Fields are read as they were written, one after another, and cost nothing.
func TestFields(t *testing.T) {
	b := []byte{7}
	b = binary.AppendUvarint(b, 300)
	b = binary.AppendUvarint(b, math.MaxUint64)
	b = wire.AppendText(b, "text")
	b = append(b, 1)
	b = binary.LittleEndian.AppendUint16(b, 0x1112)
	b = binary.LittleEndian.AppendUint32(b, 0x11121314)
	b = binary.LittleEndian.AppendUint64(b, 0x1112131415161718)
	b = append(b, "rest"...)
	r := wire.Read(b)
	first, small, great := r.Byte("b"), r.Uint("n", 300, 300), r.Uint("n", 0, math.MaxUint64)
	at := r.Offset()
	ahead := r
	text, truth := r.Text("t", 4, 4), r.Bool("b")
	u16, u32, u64 := r.Uint16("x"), r.Uint32("x"), r.Uint64("x")
	if first != 7 || small != 300 || great != math.MaxUint64 || at != 13 || text != "text" || !truth ||
		u16 != 0x1112 || u32 != 0x11121314 || u64 != 0x1112131415161718 || string(r.Rest()) != "rest" || r.Len() != 4 {
		t.Fatal(first, small, great, at, text, truth, u16, u32, u64, r.Rest())
	}
	part := r.Bytes("b", 2)
	if &part[0] != &b[len(b)-4] || cap(part) != 2 {
		t.Fatal("bytes are a copy, or have room for what follows")
	}
	if ahead.Text("t", 0, 9) != "text" {
		t.Fatal("a copy does not read on by itself")
	}
	if r.Bytes("b", 2); r.Fault() != nil || r.Offset() != len(b) {
		t.Fatal(r.Fault(), r.Offset())
	}
	if r.End(); r.Fault() != nil {
		t.Fatal(r.Fault())
	}
	if n := testing.AllocsPerRun(100, func() {
		r := wire.Read(b)
		_, _, _ = r.Byte("b"), r.Uint("n", 0, 300), r.Uint("n", 0, math.MaxUint64)
		_ = r.Bytes("t", int(r.Uint("t", 0, 9)))
		_, _ = r.Bool("b"), r.Uint32("x")
	}); n != 0 {
		t.Fatalf("%v allocations", n)
	}
}

// Whatever is read, in whatever order: nothing panics, nothing is read twice or left
// out, and what was read writes the same bytes again.
func FuzzReader(f *testing.F) {
	f.Add([]byte{}, []byte{})
	f.Add([]byte{0, 1, 2, 3, 4, 5, 6}, []byte("\x01\x02\x03abc\x00\x01\x02\x01\x02\x03\x04\x01\x02\x03\x04\x05\x06\x07\x08"))
	f.Add([]byte{0, 0}, []byte("\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x80\x00"))
	f.Fuzz(func(t *testing.T, plan, b []byte) {
		r := wire.Read(b)
		var again []byte
		for _, what := range plan {
			before, field := r.Offset(), len(again)
			switch what % 7 {
			case 0:
				again = binary.AppendUvarint(again, r.Uint("n", uint64(what/7), math.MaxUint64))
			case 1:
				again = append(again, r.Byte("b"))
			case 2:
				again = wire.AppendText(again, r.Text("t", int(what/64), int(what)))
			case 3:
				again = append(again, r.Bytes("b", int(what/7)-1)...)
			case 4:
				again = binary.LittleEndian.AppendUint16(again, r.Uint16("x"))
			case 5:
				again = binary.LittleEndian.AppendUint32(again, r.Uint32("x"))
			case 6:
				again = binary.LittleEndian.AppendUint64(again, r.Uint64("x"))
			}
			if fault := r.Fault(); fault != nil {
				if r.Len() != 0 || fault.Offset < before || fault.Offset > len(b) {
					t.Fatalf("%v, from byte %d, with %d left", fault, before, r.Len())
				}
				again = again[:field]
				break
			}
		}
		if !bytes.HasPrefix(b, again) || r.Fault() == nil && r.Offset() != len(again) {
			t.Fatalf("%x was read, up to byte %d, from %x: %v", again, r.Offset(), b, r.Fault())
		}
	})
}

// There are seeds in the repository.
func TestSeeds(t *testing.T) {
	seeds, err := filepath.Glob("testdata/fuzz/FuzzReader/*")
	if err != nil || len(seeds) == 0 {
		t.Fatal("no seeds", err)
	}
	for _, s := range seeds {
		if b, err := os.ReadFile(s); err != nil || !bytes.HasPrefix(b, []byte("go test fuzz v1\n")) {
			t.Error(s, err)
		}
	}
}
