// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package ringbuf_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

const benchCap = 4096

// BenchmarkRing puts rings beside channels of the same capacity. Only the
// ratios mean something: the scheduler moves all of them alike.
//
//	go test -run - -bench 'Ring/' -benchtime 0.5s -count 5 ./ringbuf
func BenchmarkRing(b *testing.B) {
	m := new(message)
	for _, pairs := range []int{1, 8} {
		p := fmt.Sprintf("pairs=%d/", pairs)
		b.Run(p+"channel", func(b *testing.B) { benchChannel(b, pairs, m) })
		b.Run(p+"channel-of-64", func(b *testing.B) { benchSlices(b, pairs, m) })
		for _, batch := range []int{1, 64} {
			b.Run(fmt.Sprintf("%sring/batch=%d", p, batch), func(b *testing.B) {
				benchRing(b, pairs, batch, nil, m)
			})
		}
		b.Run(p+"ring-bytes/batch=64", func(b *testing.B) {
			benchRing(b, pairs, 64, func(*message) int { return 256 }, m)
		})
	}
}

type message struct{ _ [4]uint64 }

// share splits b.N over n goroutines in whole batches.
func share(b *testing.B, n, batch int) int {
	each := (b.N + n - 1) / n
	return (each + batch - 1) / batch * batch
}

func benchChannel(b *testing.B, pairs int, m *message) {
	ch := make(chan *message, benchCap)
	each := share(b, pairs, 1)
	b.ReportAllocs()
	b.ResetTimer()
	var wg sync.WaitGroup
	for range pairs {
		wg.Go(func() {
			for range each {
				ch <- m
			}
		})
		wg.Go(func() {
			for range each {
				<-ch
			}
		})
	}
	wg.Wait()
}

func benchSlices(b *testing.B, pairs int, m *message) {
	ch := make(chan []*message, benchCap/64)
	back := make(chan []*message, benchCap/64+2*pairs)
	for range cap(back) {
		back <- make([]*message, 64)
	}
	each := share(b, pairs, 64)
	b.ReportAllocs()
	b.ResetTimer()
	var wg sync.WaitGroup
	for range pairs {
		wg.Go(func() {
			for n := 0; n < each; n += 64 {
				s := <-back
				for i := range s {
					s[i] = m
				}
				ch <- s
			}
		})
		wg.Go(func() {
			for n := 0; n < each; n += 64 {
				s := <-ch
				clear(s)
				back <- s
			}
		})
	}
	wg.Wait()
}

func benchRing(b *testing.B, pairs, batch int, size ringbuf.Sizer[*message], m *message) {
	r, err := ringbuf.NewRing(ringbuf.Config{MaxCount: benchCap}, size)
	if err != nil {
		b.Fatal(err)
	}
	defer r.Close()
	each := share(b, pairs, batch)
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	b.ReportAllocs()
	b.ResetTimer()
	var wg sync.WaitGroup
	for i := range pairs {
		l := r.Lane(uint64(i))
		wg.Go(func() {
			vs := make([]*message, batch)
			for i := range vs {
				vs[i] = m
			}
			for n := 0; n < each; n += batch {
				if _, err := l.Put(ctx, vs...); err != nil {
					b.Error(err)
					return
				}
			}
		})
		wg.Go(func() {
			dst := make([]*message, batch)
			for n := 0; n < each; {
				s, err := l.Lease(ctx, dst)
				if err != nil {
					b.Error(err)
					return
				}
				n += s.Len()
				if err := s.Commit(s.Len()); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// record stands for a real message: a value, a key and headers.
type record struct {
	key, value []byte
	headers    [][2]string
	seq        uint64
}

type recordCodec struct{}

func (recordCodec) Append(dst []byte, v record) []byte {
	dst = binary.AppendUvarint(dst, v.seq)
	for _, f := range [...][]byte{v.key, v.value} {
		dst = binary.AppendUvarint(dst, uint64(len(f)))
		dst = append(dst, f...)
	}
	for _, h := range v.headers {
		for _, f := range h {
			dst = binary.AppendUvarint(dst, uint64(len(f)))
			dst = append(dst, f...)
		}
	}
	return dst
}

// Decode points into src and leaves the headers alone: the benchmark measures
// the ring.
func (recordCodec) Decode(src []byte) (v record, err error) {
	field := func() []byte {
		n, k := binary.Uvarint(src)
		f := src[k : k+int(n)]
		src = src[k+int(n):]
		return f
	}
	seq, k := binary.Uvarint(src)
	src = src[k:]
	v.seq, v.key, v.value = seq, field(), field()
	return v, nil
}

func BenchmarkSlab(b *testing.B) {
	v := record{key: make([]byte, 16), value: make([]byte, 256), headers: [][2]string{{"trace", "0123456789abcdef"}, {"origin", "orders"}, {"n", "1"}}}
	r, err := ringbuf.NewSlabRing(ringbuf.Config{}, recordCodec{})
	if err != nil {
		b.Fatal(err)
	}
	l := r.Lane(0)
	vs, dst := make([]record, 64), make([]record, 64)
	for i := range vs {
		vs[i] = v
	}
	b.ReportAllocs()
	for n := 0; n < b.N; n += 64 {
		if _, err := l.TryPut(vs...); err != nil {
			b.Fatal(err)
		}
		s, err := l.TryLease(dst)
		if err != nil {
			b.Fatal(err)
		}
		if err := s.Commit(s.Len()); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkGC is the time of one garbage collection while the ring holds a
// million messages.
//
//	go test -run - -bench GC -benchtime 20x ./ringbuf
func BenchmarkGC(b *testing.B) {
	const held = 1 << 20
	fill := func(b *testing.B, r *ringbuf.Ring[record]) {
		l := r.Lane(0)
		for i := range held {
			v := record{seq: uint64(i), key: make([]byte, 16), value: make([]byte, 256), headers: [][2]string{
				{fmt.Sprint("trace", i&7), "0123456789abcdef"}, {"origin", fmt.Sprint(i)}, {"n", "1"},
			}}
			if _, err := l.TryPut(v); err != nil {
				b.Fatal(err)
			}
		}
	}
	collect := func(b *testing.B, r *ringbuf.Ring[record]) {
		if r != nil {
			fill(b, r)
		}
		runtime.GC()
		var longest time.Duration
		for b.Loop() {
			start := time.Now()
			runtime.GC()
			longest = max(longest, time.Since(start))
		}
		b.ReportMetric(float64(longest.Microseconds()), "max-µs")
		runtime.KeepAlive(r)
	}
	cfg := ringbuf.Config{MaxCount: held, MaxBytes: 1 << 30}
	b.Run("empty", func(b *testing.B) { collect(b, nil) })
	b.Run("slabs", func(b *testing.B) {
		r, err := ringbuf.NewSlabRing(cfg, recordCodec{})
		if err != nil {
			b.Fatal(err)
		}
		collect(b, r)
	})
	b.Run("pointers", func(b *testing.B) {
		r, err := ringbuf.NewRing[record](cfg, nil)
		if err != nil {
			b.Fatal(err)
		}
		collect(b, r)
	})
}

// BenchmarkLanes is a lane for one message, from its making to its end.
func BenchmarkLanes(b *testing.B) {
	r, err := ringbuf.NewRing[*message](ringbuf.Config{}, nil)
	if err != nil {
		b.Fatal(err)
	}
	m := new(message)
	dst := make([]*message, 1)
	b.ReportAllocs()
	for n := 0; b.Loop(); n++ {
		l := r.Lane(uint64(n))
		if _, err := l.TryPut(m); err != nil {
			b.Fatal(err)
		}
		s, err := l.TryLease(dst)
		if err != nil {
			b.Fatal(err)
		}
		if err := s.Commit(1); err != nil {
			b.Fatal(err)
		}
		r.Drop(l)
	}
}
