// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// sample is a file with three lanes, one of them partly drained, and what it holds.
func sample(t testing.TB) (data []byte, want map[string]map[uint64]string) {
	dir := t.TempDir()
	s := open(t, Config{Dir: dir})
	want = map[string]map[uint64]string{"a": {}, "orders/7": {}, "z": {}}
	add := func(lane string, n, size int) {
		vs := numbered(len(want[lane])+1, len(want[lane])+1+n, size)
		put(t, s.Lane(lane), vs...)
		for _, v := range vs {
			want[lane][uint64(len(want[lane])+1)] = v
		}
	}
	add("a", 3, 100)
	add("orders/7", 40, 60)
	add("z", 1, 20000)
	add("a", 1, 0)
	add("orders/7", 70, 80)
	l := s.Lane("orders/7")
	dst := make([]string, 22)
	lease, err := l.TryLease(dst)
	if err != nil {
		t.Fatal(err)
	}
	if err := lease.Commit(22); err != nil {
		t.Fatal(err)
	}
	flushed(t, s)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	for seq := range uint64(22) {
		delete(want["orders/7"], seq+1)
	}
	data, err = os.ReadFile(filepath.Join(dir, fileName))
	if err != nil {
		t.Fatal(err)
	}
	// What lies behind the pages in use is only zeros.
	_, meta, err := newestMeta(bytes.NewReader(data), int64(len(data)))
	if err != nil {
		t.Fatal(err)
	}
	return data[:meta.pages*uint64(meta.pageSize)], want
}

// chunkList is a store that is read.
type chunkList map[string][]stored

func (c chunkList) write(*transaction) error { return errors.New("read only") }
func (c chunkList) lanes() int               { return 1 }
func (c chunkList) close() error             { return nil }

func (c chunkList) read(dst []stored, lane string, seq uint64, limit int) ([]stored, error) {
	for _, k := range c[lane] {
		if k.seq >= seq && (limit > 0 || len(dst) == 0) {
			dst = append(dst, k)
			limit -= len(k.data)
		}
	}
	return dst, nil
}

// deliver opens a file in memory as Open does one on disk, and leases all it has.
func deliver(data []byte) (got map[string]map[uint64]string, damages []Damage, err error) {
	chunks := chunkList{}
	visit := func(lane string, seq uint64, v []byte) {
		chunks[lane] = append(chunks[lane], stored{seq, bytes.Clone(v)})
	}
	r := bytes.NewReader(data)
	img, err := inspect(r, int64(len(data)), visit)
	if bad, ok := errors.AsType[*broken](err); ok {
		damages = append(damages, Damage{Page: bad.page, Offset: bad.offset, Reason: bad.reason})
		positions, found, err := salvage(r, int64(len(data)))
		if err != nil {
			return nil, nil, err
		}
		img = newImage()
		for _, p := range positions {
			img.place(p)
		}
		clear(chunks)
		for _, f := range found {
			v := data[f.off : f.off+int64(f.size)]
			visit(f.name, f.first, v)
			img.add(f.name, f.first, v, Damage{}, piece{})
		}
		img.finish()
	} else if err != nil {
		return nil, nil, err
	}
	damages = append(damages, img.damages...)
	got = map[string]map[uint64]string{}
	for name, l := range img.lanes {
		got[name] = map[uint64]string{}
		rd := reader{seq: l.chunk, lost: l.lost}
		for head := l.head; head < l.tail; {
			recs, pos, lost, err := rd.take(chunks, name, head, l.tail, 16, math.MaxInt64)
			if err != nil {
				return nil, nil, err
			}
			if len(lost) > 0 {
				return nil, nil, fmt.Errorf("lane %q: not found at once: %v", name, lost)
			}
			for _, rec := range recs {
				got[name][rec.seq] = string(rec.data)
			}
			if pos <= head {
				return nil, nil, fmt.Errorf("lane %q: no progress at %d", name, head)
			}
			head = pos
		}
		if len(got[name]) != l.count {
			return nil, nil, fmt.Errorf("lane %q: %d delivered, %d counted", name, len(got[name]), l.count)
		}
	}
	return got, damages, nil
}

// check compares what was delivered of a damaged file with what it held. Every message
// is delivered as it was, or is named; with strict not, some damage is reported.
func check(got, want map[string]map[uint64]string, damages []Damage, strict bool) error {
	named := func(lane string, seq uint64) bool {
		return slices.ContainsFunc(damages, func(d Damage) bool {
			return d.Lane == lane && d.First <= seq && seq <= d.Last || !strict
		})
	}
	for lane, all := range want {
		for seq, v := range all {
			g, ok := got[lane][seq]
			if ok && g != v {
				return fmt.Errorf("lane %q, message %d: %.20q, want %.20q", lane, seq, g, v)
			}
			if !ok && (len(damages) == 0 || !named(lane, seq)) {
				return fmt.Errorf("lane %q, message %d: lost, and not named by %v", lane, seq, damages)
			}
		}
	}
	for lane, all := range got {
		for seq := range all {
			if _, ok := want[lane][seq]; !ok && len(damages) == 0 {
				return fmt.Errorf("lane %q, message %d: delivered, and not held", lane, seq)
			}
			if _, ok := want[lane]; !ok {
				return fmt.Errorf("there is no lane %q", lane)
			}
		}
	}
	return nil
}

func stride(short int) int {
	if long {
		return 1
	}
	return short
}

// Every single bit of a file, the wrong way: what is held is delivered or named, and nothing
// else is delivered.
func TestEveryBit(t *testing.T) {
	if raceEnabled {
		t.Skip("one goroutine for each file: runs without the race detector")
	}
	data, want := sample(t)
	got, damages, err := deliver(data)
	if err == nil && len(damages) > 0 {
		err = fmt.Errorf("damage: %v", damages)
	}
	if err = errors.Join(err, check(got, want, damages, true)); err != nil {
		t.Fatal(err)
	}
	var flips, harmless, rebuilt, lost, wrong atomic.Int64
	var workers sync.WaitGroup
	procs := runtime.GOMAXPROCS(0)
	for p := range procs {
		workers.Go(func() {
			data := bytes.Clone(data)
			for bit := p * stride(1999); bit < 8*len(data) && wrong.Load() < 20; bit += procs * stride(1999) {
				data[bit/8] ^= 1 << (bit % 8)
				got, damages, err := deliver(data)
				if err == nil {
					err = check(got, want, damages, true)
				}
				if err != nil {
					wrong.Add(1)
					t.Errorf("bit %d of byte %d, page %d: %v", bit%8, bit/8, bit/8/pageSize, err)
				}
				data[bit/8] ^= 1 << (bit % 8)
				flips.Add(1)
				switch {
				case len(damages) == 0:
					harmless.Add(1)
				case damages[0].Lane == "":
					rebuilt.Add(1)
				default:
					lost.Add(1)
				}
			}
		})
	}
	workers.Wait()
	t.Logf("%d bits: %d where nothing is held, %d in messages and positions, %d in the structure",
		flips.Load(), harmless.Load(), lost.Load(), rebuilt.Load())
	if harmless.Load() == 0 || rebuilt.Load() == 0 || lost.Load() == 0 {
		t.Error("the sample has nothing of one kind")
	}
}

// Every length that a file can be cut to.
func TestEveryTruncation(t *testing.T) {
	if raceEnabled {
		t.Skip("one goroutine for each file: runs without the race detector")
	}
	data, want := sample(t)
	most := 0
	for n := 0; n < len(data); n += stride(997) {
		got, damages, err := deliver(data[:n])
		if err == nil {
			err = check(got, want, damages, false)
		}
		if err == nil && len(damages) == 0 {
			err = errors.New("not noticed")
		}
		if err != nil {
			t.Fatalf("cut to %d bytes: %v", n, err)
		}
		total := 0
		for _, all := range got {
			total += len(all)
		}
		most = max(most, total)
	}
	if most < 90 {
		t.Errorf("at best %d messages were kept", most)
	}
}

// The same through Open, for a few of each: bbolt accepts what was inspected or built, the
// copies are there, and a second Open of a file that was rebuilt says no more of its structure.
func TestOpenDamaged(t *testing.T) {
	data, want := sample(t)
	try := func(what string, data []byte, strict bool) {
		want := want
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, fileName), data, 0o600); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			s, rec, err := Open(Config{Dir: dir}, text{})
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			got := map[string]map[uint64]string{}
			n := 0
			for l := range s.Lanes() {
				got[l.Name()] = map[uint64]string{}
				lease, err := l.TryLease(make([]string, 1))
				if err != nil {
					t.Fatalf("%s: lane %q: %v", what, l.Name(), err)
				}
				seq := l.l.ends[0] - 1
				lease.Release()
				dst := make([]string, 1000)
				lease, err = l.TryLease(dst)
				if err != nil {
					t.Fatalf("%s: lane %q: %v", what, l.Name(), err)
				}
				for i := range lease.Len() {
					if i > 0 {
						seq = l.l.ends[i-1]
						for !strings.HasPrefix(dst[i], fmt.Sprint(seq)) && seq < 200 {
							seq++ // over a gap
						}
					}
					got[l.Name()][seq] = dst[i]
				}
				n += lease.Len()
				lease.Release()
			}
			if err := check(got, want, rec.Damaged, strict); err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			if n != rec.Messages || rec.SetAside != nil {
				t.Fatalf("%s: %d delivered of %+v", what, n, rec)
			}
			for _, d := range rec.Damaged {
				if _, err := os.Stat(filepath.Join(dir, d.File)); err != nil || d.File == "" && d.Offset >= 0 {
					t.Fatalf("%s: no copy: %v, %v", what, d, err)
				}
			}
			put(t, s.Lane("new"), "1, one more")
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			if rec.Rebuilt == "" {
				break
			}
			want = got // what was lost is told once
			want["new"] = map[uint64]string{1: "1, one more"}
		}
	}
	samples := 15
	if long {
		samples = 500
	}
	for bit := 3; bit < 8*len(data); bit += 8*len(data)/samples + 1 {
		data[bit/8] ^= 1 << (bit % 8)
		try(fmt.Sprintf("bit %d of byte %d", bit%8, bit/8), data, true)
		data[bit/8] ^= 1 << (bit % 8)
	}
	for n := 0; n < len(data); n += len(data)/5 + 1 {
		try(fmt.Sprintf("cut to %d", n), data[:n], false)
	}
	for what, at := range map[string]int{"first meta": 0, "second meta": pageSize, "all": 0} {
		bad := bytes.Clone(data)
		clear(bad[at : at+200])
		if what == "all" {
			clear(bad)
		}
		try(what, bad, what != "all")
	}
}

// Whatever lies in the directory: no panic, and no message that was not put.
func FuzzFile(f *testing.F) {
	data, want := sample(f)
	f.Add(0, []byte{})
	f.Add(16, []byte{1})
	f.Add(pageSize+16+40, []byte{0xff, 0xff})
	f.Add(3*pageSize, []byte("\x03\x00\x00\x00\x00\x00\x00\x00\x01\x00\x01\x00"))
	f.Add(4*pageSize+10, []byte{0xff, 0xff, 0xff})
	f.Add(5*pageSize+20, []byte("SGc1SGp1"))
	f.Fuzz(func(t *testing.T, at int, over []byte) {
		bad := bytes.Clone(data)
		if at < 0 || at >= len(bad) {
			return
		}
		copy(bad[at:], over)
		got, damages, err := deliver(bad)
		if err != nil {
			t.Fatal(err)
		}
		if err := check(got, want, damages, false); err != nil {
			t.Fatal(err)
		}
	})
}
