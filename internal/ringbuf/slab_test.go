// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package ringbuf_test

import (
	"bytes"
	"errors"
	"runtime"
	"slices"
	"testing"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

// rawCodec stores bytes as they are and cannot read those that begin with '!'.
type rawCodec struct{}

var errBang = errors.New("bang")

func (rawCodec) Append(dst []byte, v []byte) []byte { return append(dst, v...) }

func (rawCodec) Decode(src []byte) ([]byte, error) {
	if len(src) > 0 && src[0] == '!' {
		return nil, errBang
	}
	return bytes.Clone(src), nil
}

func newRaw(t *testing.T, cfg ringbuf.Config) *ringbuf.Ring[[]byte] {
	t.Helper()
	r, err := ringbuf.NewSlabRing(cfg, rawCodec{})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// Records of every length around the edges of chunks come out as they went in,
// also when the chunks are reused.
func TestSlabRecordSizes(t *testing.T) {
	r := newRaw(t, ringbuf.Config{})
	for round := range 3 {
		l := r.Lane(uint64(round))
		var want [][]byte
		for _, n := range []int{0, 1, 247, 248, 249, 251, 252, 253, 500, 508, 65528, 65532, 65533, 65537, 1 << 20, 1<<20 - 4, 3 << 20, 4 << 20, 4<<20 - 4, 5 << 20, 0, 0, 7} {
			v := bytes.Repeat([]byte{byte(n + round)}, n)
			if _, err := l.TryPut(v); err != nil {
				t.Fatal(n, err)
			}
			want = append(want, v)
		}
		dst := make([][]byte, 3)
		for len(want) > 0 {
			s, err := l.TryLease(dst)
			if err != nil {
				t.Fatal(err)
			}
			for i, v := range dst[:s.Len()] {
				if !bytes.Equal(v, want[i]) {
					t.Fatalf("round %d: %d bytes came out, want %d", round, len(v), len(want[i]))
				}
			}
			if err := s.Commit(s.Len()); err != nil {
				t.Fatal(err)
			}
			want = want[s.Len():]
		}
		r.Drop(l)
	}
}

// What a lane has passed on does not decide what it keeps: one that holds little
// has small chunks, also if it never runs empty.
func TestSlabChunksFollowWhatIsHeld(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates: run without -race")
	}
	const lanes, passed, size = 50, 4000, 1000
	r := newRaw(t, ringbuf.Config{})
	v, large, dst := make([]byte, size), make([]byte, 1<<20-4), make([][]byte, 1)
	pass := func(l *ringbuf.Lane[[]byte], v []byte) {
		if _, err := l.TryPut(v); err != nil {
			t.Fatal(err)
		}
		s, err := l.TryLease(dst)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Commit(1); err != nil {
			t.Fatal(err)
		}
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for id := range uint64(lanes) {
		l := r.Lane(id)
		pass(r.Lane(lanes+id), large)
		if _, err := l.TryPut(v); err != nil {
			t.Fatal(err)
		}
		for range passed {
			pass(l, v)
		}
	}
	dst[0] = nil
	runtime.GC()
	runtime.ReadMemStats(&after)
	if each := (int64(after.HeapAlloc) - int64(before.HeapAlloc)) / lanes; each > 300<<10 {
		t.Errorf("%d bytes for a lane that holds %d", each, size)
	}
	runtime.KeepAlive(r)
}

// A chunk that was made for one large message goes with it, also from a lane that
// is not empty.
func TestSlabLargeMessageLeavesNothing(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates: run without -race")
	}
	r := newRaw(t, ringbuf.Config{})
	l, dst := r.Lane(1), make([][]byte, 3)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for range 4 {
		if _, err := l.TryPut([]byte("a"), make([]byte, 5<<20), []byte("b"), []byte("c")); err != nil {
			t.Fatal(err)
		}
		for l.Len() > 1 {
			s, err := l.TryLease(dst[:min(l.Len()-1, len(dst))])
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Commit(s.Len()); err != nil {
				t.Fatal(err)
			}
		}
		clear(dst)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	// The chunk behind it was made while 5 MiB were held, and another one is spare.
	if n := int64(after.HeapAlloc) - int64(before.HeapAlloc); n > 10<<20 {
		t.Errorf("%d bytes are still there", n)
	}
	runtime.KeepAlive(r)
}

func TestDecodeError(t *testing.T) {
	r := newRaw(t, ringbuf.Config{})
	l := r.Lane(5)
	if _, err := l.TryPut([]byte("a"), []byte("!b"), []byte("c")); err != nil {
		t.Fatal(err)
	}
	check := func(err error) {
		t.Helper()
		var facts *ringbuf.DecodeError
		if !errors.Is(err, errBang) || !errors.As(err, &facts) || facts.Lane != 5 || string(facts.Data) != "!b" {
			t.Fatalf("%v", err)
		}
	}
	vs, err := l.Snapshot(nil)
	check(err)
	if len(vs) != 1 || string(vs[0]) != "a" {
		t.Fatalf("Snapshot: %q", vs)
	}
	dst := make([][]byte, 8)
	s, err := l.TryLease(dst)
	if err != nil || s.Len() != 1 || string(dst[0]) != "a" {
		t.Fatalf("%d, %v", s.Len(), err)
	}
	if err := s.Commit(1); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		s, err = l.TryLease(dst)
		check(err)
		if s.Len() != 1 {
			t.Fatalf("lease on %d messages, want the one that cannot be read", s.Len())
		}
		s.Release()
	}
	vs, err = l.Drain()
	check(err)
	if len(vs) != 1 || string(vs[0]) != "c" {
		t.Fatalf("Drain: %q", vs)
	}
	if st := r.Stats(); st.Count != 0 || st.Bytes != 0 {
		t.Fatalf("%+v", st)
	}
}

type panicCodec struct{ rawCodec }

func (panicCodec) Decode([]byte) ([]byte, error) { panic("codec") }

func TestCodecPanicReleasesLease(t *testing.T) {
	r, err := ringbuf.NewSlabRing(ringbuf.Config{}, panicCodec{})
	if err != nil {
		t.Fatal(err)
	}
	l := r.Lane(0)
	if _, err := l.TryPut([]byte("a")); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		func() {
			defer func() {
				if recover() == nil {
					t.Fatal("no panic: the lease was still open")
				}
			}()
			_, _ = l.TryLease(make([][]byte, 1))
		}()
	}
}

// aliasCodec gives out the ring's own memory.
type aliasCodec struct{ rawCodec }

func (aliasCodec) Decode(src []byte) ([]byte, error) { return src, nil }

// A value that points into the ring is good until its lease is over, and for
// ever if the lane was drained or dropped instead.
func TestAliasedValuesLiveAsLongAsTheirLease(t *testing.T) {
	r, err := ringbuf.NewSlabRing(ringbuf.Config{}, aliasCodec{})
	if err != nil {
		t.Fatal(err)
	}
	overwrite := func() {
		for id := range uint64(8) {
			if _, err := r.Lane(100 + id).TryPut(bytes.Repeat([]byte("x"), 200)); err != nil {
				t.Fatal(err)
			}
		}
	}
	l := r.Lane(0)
	if _, err := l.TryPut([]byte("leased")); err != nil {
		t.Fatal(err)
	}
	dst := make([][]byte, 1)
	if _, err := l.TryLease(dst); err != nil {
		t.Fatal(err)
	}
	if _, err := l.TryPut([]byte("behind")); err != nil {
		t.Fatal(err)
	}
	r.Drop(l)
	overwrite()
	if string(dst[0]) != "leased" {
		t.Errorf("after Drop: %q", dst[0])
	}
	l = r.Lane(1)
	if _, err := l.TryPut([]byte("drained")); err != nil {
		t.Fatal(err)
	}
	vs, err := l.Drain()
	if err != nil {
		t.Fatal(err)
	}
	overwrite()
	if string(vs[0]) != "drained" {
		t.Errorf("after Drain: %q", vs[0])
	}
}

// FuzzSlab reads its input as a script on two lanes and compares with slices.
func FuzzSlab(f *testing.F) {
	f.Add([]byte{0, 3, 1, 0, 255, 2, 4, 2, 1, 5})
	f.Fuzz(func(t *testing.T, script []byte) {
		r := newRaw(t, ringbuf.Config{MaxCount: 40, MaxBytes: 300_000})
		var held [2][][]byte
		seq := byte(0)
		next := func() int {
			if len(script) == 0 {
				return 0
			}
			b := script[0]
			script = script[1:]
			return int(b)
		}
		for len(script) > 0 {
			c := next()
			id := c & 1
			l := r.Lane(uint64(id))
			switch c >> 1 % 4 {
			case 0, 1:
				n := next()
				if c>>1%4 == 1 {
					n *= next() + 1
				}
				seq++
				v := bytes.Repeat([]byte{seq | 0x80}, n)
				total, count := n, 1
				for _, lane := range held {
					for _, m := range lane {
						total, count = total+len(m), count+1
					}
				}
				_, err := l.TryPut(v)
				if want := total > 300_000 || count > 40; (err == ringbuf.ErrFull) != want || err != nil && !want {
					t.Fatalf("TryPut: %v, with it %d messages, %d bytes", err, count, total)
				}
				if err == nil {
					held[id] = append(held[id], v)
				}
			case 2:
				dst := make([][]byte, next()%9+1)
				s, err := l.TryLease(dst)
				if err != nil {
					if len(held[id]) != 0 {
						t.Fatal(err)
					}
					continue
				}
				if !slices.EqualFunc(dst[:s.Len()], held[id][:s.Len()], bytes.Equal) {
					t.Fatalf("lane %d gave other messages than it took", id)
				}
				n := next() % (s.Len() + 1)
				if err := s.Commit(n); err != nil {
					t.Fatal(err)
				}
				held[id] = held[id][n:]
			default:
				r.Drop(l)
				held[id] = nil
			}
		}
		for id := range held {
			vs, err := r.Lane(uint64(id)).Drain()
			if err != nil || !slices.EqualFunc(vs, held[id], bytes.Equal) {
				t.Fatalf("lane %d: %d messages at the end, want %d; %v", id, len(vs), len(held[id]), err)
			}
		}
		if st := r.Stats(); st.Count != 0 || st.Bytes != 0 {
			t.Fatalf("%+v", st)
		}
	})
}
