// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"testing"
)

// BenchmarkOpLog puts the records of an OpLog beside encoding/binary, which
// writes and reads the same bytes by reflection, and beside the same by hand,
// field by field. An operation is 64 records of 56 bytes. Delta and Merge do more
// than the others: names, floors, checks; Merge also applies.
//
//	go test -run - -bench OpLog -count 5 ./crdt
func BenchmarkOpLog(b *testing.B) {
	const n = 64
	l := newLogged(origin1, OpLogConfig{})
	for i := range n {
		if _, err := l.Append(OpAdd, Stamp{1_700_000_000_000, uint64(i)}, body{Key: 1, Amount: int64(i)}); err != nil {
			b.Fatal(err)
		}
	}
	message := whole(l)
	raw := append([]byte{}, memory(l.kept)...)
	byHand := func(dst []byte) []byte {
		for i := range l.kept {
			r := &l.kept[i]
			for _, v := range [...]uint64{r.Seq, r.Epoch, r.At.Physical, r.At.Logical, r.Op} {
				dst = binary.LittleEndian.AppendUint64(dst, v)
			}
			dst = binary.LittleEndian.AppendUint32(dst, r.Body.Key)
			dst = binary.LittleEndian.AppendUint32(dst, r.Body.Spare)
			dst = binary.LittleEndian.AppendUint64(dst, uint64(r.Body.Amount))
		}
		return dst
	}
	var buf bytes.Buffer
	if err := binary.Write(&buf, binary.LittleEndian, l.kept); err != nil || !bytes.Equal(buf.Bytes(), raw) || !bytes.Equal(byHand(nil), raw) {
		b.Fatal("the three do not write the same bytes", err)
	}

	b.Run("encode/Delta", func(b *testing.B) {
		dst := make([]byte, 0, len(message))
		b.ReportAllocs()
		for b.Loop() {
			dst, _ = l.Delta(dst[:0], 0, math.MaxInt)
		}
	})
	b.Run("encode/by-hand", func(b *testing.B) {
		dst := make([]byte, 0, len(raw))
		b.ReportAllocs()
		for b.Loop() {
			dst = byHand(dst[:0])
		}
	})
	b.Run("encode/binary.Write", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			buf.Reset()
			if err := binary.Write(&buf, binary.LittleEndian, l.kept); err != nil {
				b.Fatal(err)
			}
		}
	})
	for shift, name := range []string{"aligned", "unaligned"} {
		space := make([]byte, 8+len(raw))
		at := space[shift : shift+len(raw)]
		copy(at, raw)
		b.Run("decode/overlay-"+name, func(b *testing.B) {
			scratch, sum := make([]record[body], n), uint64(0)
			b.ReportAllocs()
			for b.Loop() {
				records, ok := overlay[record[body]](at)
				if !ok {
					copy(memory(scratch), at)
					records = scratch
				}
				for i := range records {
					sum += records[i].Seq
				}
			}
			if sum == 0 {
				b.Fatal("nothing read")
			}
		})
	}
	b.Run("decode/binary.Read", func(b *testing.B) {
		records, sum := make([]record[body], n), uint64(0)
		b.ReportAllocs()
		for b.Loop() {
			if _, err := binary.Decode(raw, binary.LittleEndian, records); err != nil {
				b.Fatal(err)
			}
			for i := range records {
				sum += records[i].Seq
			}
		}
	})
	b.Run("merge/again", func(b *testing.B) {
		to := newLogged(origin2, OpLogConfig{})
		b.ReportAllocs()
		for b.Loop() {
			if err := to.Merge(message); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkGCounter merges and encodes rows of 50 replicas, beside a plain map
// of names with the greater count kept, without any encoding.
func BenchmarkGCounter(b *testing.B) {
	const replicas = 50
	from, _ := NewGCounter(origin1)
	plain := make(map[string]uint64)
	for i := range replicas {
		from.join(Replica{fmt.Sprintf("consumer-%02d", i), 1_700_000_000_000_000_000}, uint64(i)+1)
		plain[fmt.Sprintf("consumer-%02d", i)] = uint64(i) + 1
	}
	message := whole(from)
	b.Run("Merge", func(b *testing.B) {
		to, _ := NewGCounter(origin2)
		b.ReportAllocs()
		for b.Loop() {
			if err := to.Merge(message); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("plain-map", func(b *testing.B) {
		to := make(map[string]uint64)
		b.ReportAllocs()
		for b.Loop() {
			for k, n := range plain {
				to[k] = max(to[k], n)
			}
		}
	})
	b.Run("Delta-all", func(b *testing.B) {
		dst := make([]byte, 0, len(message))
		b.ReportAllocs()
		for b.Loop() {
			dst, _ = from.Delta(dst[:0], 0, math.MaxInt)
		}
	})
	b.Run("Delta-one", func(b *testing.B) {
		var dst []byte
		since := from.Mark() - 1
		b.ReportAllocs()
		for b.Loop() {
			dst, _ = from.Delta(dst[:0], since, math.MaxInt)
		}
	})
}
