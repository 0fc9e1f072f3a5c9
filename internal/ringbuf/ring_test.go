// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package ringbuf_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"weak"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

func TestConfigValidate(t *testing.T) {
	for _, ok := range []ringbuf.Config{{}, {MaxCount: 1, MaxBytes: 1, LaneShare: 1}, {MaxCount: 1<<24 - 1, MaxBytes: 1<<40 - 1, LaneShare: 0.01}} {
		if err := ok.Validate(); err != nil {
			t.Errorf("%+v: %v", ok, err)
		}
	}
	bad := ringbuf.Config{MaxCount: 1 << 24, MaxBytes: -1, LaneShare: math.NaN()}
	_, err := ringbuf.NewRing[int](bad, nil)
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{"MaxCount is 16777216, want 1 to 16777215", "MaxBytes is -1, want 1 to 1099511627775", "LaneShare is NaN, want above 0"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in %q", want, err)
		}
	}
	for _, share := range []float64{-0.1, 1.1, math.Inf(1)} {
		if (ringbuf.Config{LaneShare: share}).Validate() == nil {
			t.Errorf("LaneShare %v accepted", share)
		}
	}
}

func TestTooLarge(t *testing.T) {
	eachKind(t, ringbuf.Config{MaxBytes: 100, LaneShare: 0.5}, func(t *testing.T, r *ringbuf.Ring[msg]) {
		l := r.Lane(7)
		n, err := l.TryPut(msg{}, msg{pad: 43}, msg{})
		var facts *ringbuf.TooLargeError
		if n != 1 || !errors.Is(err, ringbuf.ErrTooLarge) || !errors.As(err, &facts) {
			t.Fatalf("%d, %v", n, err)
		}
		if *facts != (ringbuf.TooLargeError{Lane: 7, Size: 51, Limit: 50}) {
			t.Fatalf("%+v", *facts)
		}
		if st := r.Stats(); st.Count != 1 || st.Bytes != 8 || st.Refused != 1 {
			t.Fatalf("%+v", st)
		}
	})
}

func TestNegativeSizeCountsAsZero(t *testing.T) {
	r, err := ringbuf.NewRing(ringbuf.Config{}, func(int) int { return -5 })
	if err != nil {
		t.Fatal(err)
	}
	for _, vs := range [][]int{{1, 2}, {3}} {
		if _, err := r.Lane(0).TryPut(vs...); err != nil {
			t.Fatal(err)
		}
	}
	if st := r.Stats(); st.Count != 3 || st.Bytes != 0 {
		t.Fatalf("%+v", st)
	}
}

func TestLeaseMisuse(t *testing.T) {
	eachKind(t, ringbuf.Config{}, func(t *testing.T, r *ringbuf.Ring[msg]) {
		l := r.Lane(0)
		mustPut(t, l, msg{seq: 1}, msg{seq: 2}, msg{seq: 3})
		if _, err := l.TryLease(nil); err == nil {
			t.Error("a lease into nothing was given")
		}
		s := mustLease(t, l, 2)
		for _, n := range []int{-1, 3} {
			if err := s.Commit(n); err == nil || errors.Is(err, ringbuf.ErrLeaseOver) {
				t.Errorf("Commit(%d): %v", n, err)
			}
		}
		mustCommit(t, s, 1)
		next := mustLease(t, l, 2)
		s.Release() // must not end next
		if err := s.Commit(1); err != ringbuf.ErrLeaseOver {
			t.Errorf("second Commit: %v", err)
		}
		mustCommit(t, next, 2)
		if n := l.Len(); n != 0 {
			t.Errorf("%d left", n)
		}
		var zero ringbuf.Lease[msg]
		zero.Release()
		if err := zero.Commit(0); err != ringbuf.ErrLeaseOver {
			t.Errorf("zero Lease: %v", err)
		}
	})
}

// A loop of Next over single messages is a loop of Commit and Lease.
func TestNextOneByOne(t *testing.T) {
	eachKind(t, ringbuf.Config{MaxCount: 256, MaxBytes: 256 * 10}, func(t *testing.T, r *ringbuf.Ring[msg]) {
		l, dst := r.Lane(1), make([]msg, 1)
		const n = 100
		for i := range n {
			mustPut(t, l, msg{seq: uint32(i), pad: i % 3})
		}
		s, err := l.TryLease(dst)
		for i := range n {
			if want := (msg{seq: uint32(i), pad: i % 3}); err != nil || s.Len() != 1 || dst[0] != want {
				t.Fatalf("message %d: %v of %d, %v; want %v", i, dst[0], s.Len(), err, want)
			}
			if _, _, err := r.Audit(); err != nil || l.Len() != n-i {
				t.Fatalf("before message %d: %d held, %v", i, l.Len(), err)
			}
			if i == n-1 {
				break
			}
			old := s
			if s, err = s.Next(t.Context(), 1, dst); err != nil {
				t.Fatal(err)
			}
			if _, err := old.Next(t.Context(), 1, dst); err != ringbuf.ErrLeaseOver {
				t.Fatalf("Next of a lease that is over: %v", err)
			}
		}
		mustCommit(t, s, 1)
		if st := r.Stats(); st.Count != 0 || st.Bytes != 0 {
			t.Fatalf("%+v", st)
		}
	})
}

// What was committed, drained or dropped must not be kept alive by the ring.
func TestValuesAreCollectable(t *testing.T) {
	type big struct{ _ [100]byte }
	r, err := ringbuf.NewRing[*big](ringbuf.Config{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	dead := map[string][]weak.Pointer[big]{}
	fill := func(how string, l *ringbuf.Lane[*big], n int) {
		for range n {
			v := new(big)
			dead[how] = append(dead[how], weak.Make(v))
			if _, err := l.TryPut(v); err != nil {
				t.Fatal(err)
			}
		}
	}
	keep := new(big)
	l := r.Lane(0)
	fill("commit", l, 5)
	fill("grow", l, 30)
	s, err := l.TryLease(make([]*big, 35))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.TryPut(keep); err != nil {
		t.Fatal(err)
	}
	if err := s.Commit(35); err != nil {
		t.Fatal(err)
	}
	wrapped := r.Lane(3)
	fill("wrap", wrapped, 3)
	for _, n := range []int{2, 3} {
		s, err := wrapped.TryLease(make([]*big, n))
		if err != nil {
			t.Fatal(err)
		}
		if n == 3 { // one stays, so that the buffer does not start over
			if _, err := wrapped.TryPut(keep); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Commit(n); err != nil {
			t.Fatal(err)
		}
		if n == 2 {
			fill("wrap", wrapped, 2)
		}
	}
	single := r.Lane(4)
	fill("single", single, 1)
	if _, err := single.TryPut(keep); err != nil {
		t.Fatal(err)
	}
	if s, err = single.TryLease(make([]*big, 1)); err != nil {
		t.Fatal(err)
	}
	if err := s.Commit(1); err != nil {
		t.Fatal(err)
	}
	nexts := r.Lane(5)
	fill("next", nexts, 1)
	if _, err := nexts.TryPut(keep); err != nil {
		t.Fatal(err)
	}
	if s, err = nexts.TryLease(make([]*big, 1)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Next(t.Context(), 1, make([]*big, 1)); err != nil {
		t.Fatal(err)
	}
	drained := r.Lane(1)
	fill("drain", drained, 9)
	if _, err := drained.Drain(); err != nil {
		t.Fatal(err)
	}
	dropped := r.Lane(2)
	fill("drop", dropped, 9)
	r.Drop(dropped)

	for range 3 {
		runtime.GC()
	}
	for how, ps := range dead {
		for i, p := range ps {
			if p.Value() != nil {
				t.Errorf("%s: value %d is still alive", how, i)
			}
		}
	}
	if vs, _ := l.Snapshot(nil); !slices.Equal(vs, []*big{keep}) {
		t.Errorf("holds %v", vs)
	}
	runtime.KeepAlive(r)
}

func TestNoAllocations(t *testing.T) {
	if raceEnabled {
		t.Skip("sync.Pool drops at random under the race detector")
	}
	eachKind(t, ringbuf.Config{MaxCount: 1000}, func(t *testing.T, r *ringbuf.Ring[msg]) {
		ctx := t.Context()
		l, dst, ms := r.Lane(0), make([]msg, 100), make([]msg, 100)
		step := func() {
			if n, err := l.Put(ctx, msg{seq: 1}); n != 1 || err != nil {
				t.Fatal(n, err)
			}
			if n, err := l.TryPut(ms...); n != len(ms) || err != nil {
				t.Fatal(n, err)
			}
			s, err := l.TryLease(dst)
			if err != nil {
				t.Fatal(err)
			}
			s.Release()
			for l.Len() > 0 {
				s, err = l.Lease(ctx, dst)
				if err != nil {
					t.Fatal(err)
				}
				mustCommit(t, s, s.Len())
			}
			if _, err := l.TryLease(dst); err != ringbuf.ErrEmpty {
				t.Fatal(err)
			}
		}
		step()
		if n := testing.AllocsPerRun(200, step); n != 0 {
			t.Errorf("%v allocations", n)
		}
	})
}

// A lane that never runs empty reuses its memory as well.
func TestNoAllocationsWhileNeverEmpty(t *testing.T) {
	if raceEnabled {
		t.Skip("sync.Pool drops at random under the race detector")
	}
	eachKind(t, ringbuf.Config{}, func(t *testing.T, r *ringbuf.Ring[msg]) {
		l, dst, ms := r.Lane(0), make([]msg, 64), make([]msg, 64)
		for i := range ms {
			ms[i].pad = 1000
		}
		mustPut(t, l, ms...)
		step := func() {
			for range 100 {
				mustPut(t, l, ms...)
				s, err := l.TryLease(dst)
				if err != nil {
					t.Fatal(err)
				}
				mustCommit(t, s, len(ms))
			}
		}
		step()
		if n := testing.AllocsPerRun(20, step); n != 0 {
			t.Errorf("%v allocations", n)
		}
	})
}

// A lane that goes back and forth between full and empty keeps its buffer, and
// one that stays small gives it back.
func TestBufferIsKeptForAWhile(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates: run without -race")
	}
	r, err := ringbuf.NewRing(ringbuf.Config{MaxCount: 4096}, sizeOf)
	if err != nil {
		t.Fatal(err)
	}
	var lanes []*ringbuf.Lane[msg]
	for id := range uint64(8) { // more than the ring keeps spare buffers for
		lanes = append(lanes, r.Lane(id))
	}
	ms, dst := make([]msg, 4096), make([]msg, 4096)
	round := func(l *ringbuf.Lane[msg], n int) {
		mustPut(t, l, ms[:n]...)
		s, err := l.TryLease(dst)
		if err != nil {
			t.Fatal(err)
		}
		mustCommit(t, s, n)
	}
	step := func() {
		for _, l := range lanes {
			round(l, len(ms))
			for range 20 {
				round(l, 64)
			}
		}
	}
	step()
	if n := testing.AllocsPerRun(10, step); n != 0 {
		t.Errorf("%v allocations", n)
	}
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	for _, l := range lanes {
		for range 100 {
			round(l, 1)
		}
	}
	// Eight buffers of 4096 were held; one of them stays spare.
	if after, all := heap(), uint64(8*4096*20); before < after+all/2 {
		t.Errorf("%d bytes before, %d after; want %d fewer", before, after, all/2)
	}
	runtime.KeepAlive(r)
}

// A buffer that grows while it wraps keeps the order and the sizes.
func TestGrowWhileWrapped(t *testing.T) {
	eachKind(t, ringbuf.Config{}, func(t *testing.T, r *ringbuf.Ring[msg]) {
		l := r.Lane(0)
		put := func(from, to int) {
			for i := from; i < to; i++ {
				mustPut(t, l, msg{seq: uint32(i), pad: i})
			}
		}
		put(0, 4)
		mustCommit(t, mustLease(t, l, 2), 2)
		put(4, 20)
		dst := make([]msg, 1)
		bytes := r.Stats().Bytes
		for i := 2; i < 20; i++ {
			s, err := l.TryLease(dst)
			if err != nil || dst[0] != (msg{seq: uint32(i), pad: i}) {
				t.Fatalf("message %d: %v, %v", i, dst[0], err)
			}
			mustCommit(t, s, 1)
			bytes -= int64(sizeOf(dst[0]))
			if got := r.Stats().Bytes; got != bytes {
				t.Fatalf("after message %d: %d bytes, want %d", i, got, bytes)
			}
		}
	})
}

// A single message must not go over the ring's bounds where its lane has room.
func TestFullRingRefusesOne(t *testing.T) {
	for name, cfg := range map[string]ringbuf.Config{
		"bytes": {MaxBytes: 100, LaneShare: 0.5},
		"count": {MaxCount: 10, LaneShare: 0.5},
	} {
		t.Run(name, func(t *testing.T) {
			eachKind(t, cfg, func(t *testing.T, r *ringbuf.Ring[msg]) {
				mustPut(t, r.Lane(1), make([]msg, 5)...)
				mustPut(t, r.Lane(2), make([]msg, 4)...)
				l, m := r.Lane(3), msg{}
				if name == "bytes" {
					m.pad = 92 - 72
				}
				mustPut(t, l, m)
				if n, err := l.TryPut(msg{pad: 1}); n != 0 || err != ringbuf.ErrFull {
					t.Fatalf("TryPut: %d, %v", n, err)
				}
				mustCommit(t, mustLease(t, r.Lane(1), 1), 1)
				mustPut(t, l, msg{})
			})
		})
	}
}

// Callers that meet on the shared budget, or have room in reserve, must not take
// each other for full: each holds at most its quarter.
func TestNeverFullBelowTheBound(t *testing.T) {
	for _, capacity := range []int{4, 100, 256, 4096} {
		t.Run(fmt.Sprint(capacity), func(t *testing.T) {
			r, err := ringbuf.NewRing(ringbuf.Config{MaxCount: capacity, MaxBytes: int64(capacity) * 10}, func(int) int { return 10 })
			if err != nil {
				t.Fatal(err)
			}
			var wg sync.WaitGroup
			for id := range 4 {
				wg.Go(func() {
					l, dst, vs := r.Lane(uint64(id)), make([]int, capacity/4), make([]int, capacity/4)
					rng := rand.New(rand.NewPCG(3, uint64(id)))
					for held := 0; held < 100_000; {
						if rng.IntN(2) == 0 {
							if len(vs) == 0 {
								continue
							}
							n := 1 + rng.IntN(min(len(vs), 70))
							if _, err := l.TryPut(vs[:n]...); err != nil {
								t.Error(err)
								return
							}
							vs, held = vs[n:], held+n
							continue
						}
						s, err := l.TryLease(dst[:1+rng.IntN(min(len(dst), 70))])
						if err == ringbuf.ErrEmpty {
							continue
						}
						if err != nil {
							t.Error(err)
							return
						}
						vs = dst[:min(len(vs)+s.Len(), len(dst))]
						if err := s.Commit(s.Len()); err != nil {
							t.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			if _, _, err := r.Audit(); err != nil {
				t.Error(err)
			}
		})
	}
}

// A lane keeps what it frees for its next messages, and gives it back to whoever
// finds too little room, and when it ends.
func TestReserve(t *testing.T) {
	for name, end := range map[string]func(*ringbuf.Ring[msg], *ringbuf.Lane[msg]){
		"taken back": nil,
		"drop":       func(r *ringbuf.Ring[msg], l *ringbuf.Lane[msg]) { r.Drop(l) },
		"drop empty": func(r *ringbuf.Ring[msg], _ *ringbuf.Lane[msg]) { r.DropEmpty() },
		"close":      func(r *ringbuf.Ring[msg], _ *ringbuf.Lane[msg]) { r.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			eachKind(t, ringbuf.Config{MaxCount: 256, MaxBytes: 256 * 10}, func(t *testing.T, r *ringbuf.Ring[msg]) {
				audit := func() (int, int64) {
					t.Helper()
					n, bytes, err := r.Audit()
					if err != nil {
						t.Fatal(err)
					}
					return n, bytes
				}
				l := r.Lane(1)
				mustPut(t, l, make([]msg, 6)...)
				n, bytes := audit()
				mustCommit(t, mustLease(t, l, 2), 2)
				if got, gotBytes := audit(); n == 0 || got != n+2 || gotBytes != bytes+2*msgSize {
					t.Fatalf("%d messages and %d bytes in reserve, and %d and %d once two are committed", n, bytes, got, gotBytes)
				}
				mustPut(t, l, msg{}, msg{})
				if got, gotBytes := audit(); got != n || gotBytes != bytes {
					t.Fatalf("%d messages and %d bytes in reserve, want %d and %d again", got, gotBytes, n, bytes)
				}
				mustCommit(t, mustLease(t, l, 6), 6)
				if n, _ := audit(); n == 0 {
					t.Fatal("nothing in reserve")
				}
				if end == nil {
					mustPut(t, r.Lane(2), make([]msg, 256)...)
					if _, err := r.Lane(3).TryPut(msg{}); err != ringbuf.ErrFull {
						t.Fatal(err)
					}
				} else {
					end(r, l)
				}
				if n, bytes := audit(); n != 0 || bytes != 0 {
					t.Fatalf("%d messages and %d bytes still in reserve", n, bytes)
				}
			})
		})
	}
}

// More lanes than may have a reserve share a ring like any others, and one that
// ends leaves its place to the next.
func TestReserveOfManyLanes(t *testing.T) {
	r, err := ringbuf.NewRing(ringbuf.Config{MaxCount: 1 << 12}, sizeOf)
	if err != nil {
		t.Fatal(err)
	}
	turn := func(id uint64) {
		mustPut(t, r.Lane(id), msg{}, msg{})
		mustCommit(t, mustLease(t, r.Lane(id), 1), 1)
	}
	reserved := func() int {
		t.Helper()
		n, _, err := r.Audit()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	for id := range uint64(16) {
		turn(id)
	}
	all := reserved()
	for id := range uint64(100) {
		turn(16 + id)
	}
	if n := reserved(); n != all {
		t.Fatalf("%d in reserve, want %d: 16 lanes may have one", n, all)
	}
	r.Drop(r.Lane(3))
	some := reserved()
	turn(50)
	if n := reserved(); n <= some {
		t.Fatalf("%d in reserve, was %d: a place is free", n, some)
	}
	if st := r.Stats(); st.Count != 116 {
		t.Fatalf("%+v", st)
	}
	if n := reserved(); n != 0 {
		t.Fatalf("Stats left %d in reserve", n)
	}
}

// Buffers go from lane to lane: a lane per key costs its handle, not a buffer.
func TestLanesAreCheap(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates: run without -race")
	}
	eachKind(t, ringbuf.Config{}, func(t *testing.T, r *ringbuf.Ring[msg]) {
		id := uint64(0)
		dst := make([]msg, 1)
		one := func() {
			id++
			l := r.Lane(id)
			mustPut(t, l, msg{})
			s, err := l.TryLease(dst)
			if err != nil {
				t.Fatal(err)
			}
			mustCommit(t, s, 1)
			r.DropEmpty()
		}
		one()
		if n := testing.AllocsPerRun(200, one); n > 2 {
			t.Errorf("%v allocations per lane", n)
		}
		const lanes = 5000
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		for i := range lanes {
			mustPut(t, r.Lane(uint64(i)<<20), msg{})
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		if each := (after.HeapAlloc - before.HeapAlloc) / lanes; each > 900 {
			t.Errorf("%d bytes for a lane with one message", each)
		}
		runtime.KeepAlive(r)
	})
}
