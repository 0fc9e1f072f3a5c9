// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package ringbuf

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"
)

// Audit checks what must be true of the budget and the reserves while no call
// is under way, and returns the room that is in reserves. Unlike Stats it leaves
// them where they are.
func (r *Ring[T]) Audit() (messages int, bytes int64, err error) {
	entries := 0
	held := uint64(0)
	reserved := uint64(0)
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, l := range r.lanes {
		l.mu.Lock()
		held += pack(l.count, l.bytes)
		reserved += l.reserve
		switch {
		case l.entry == 0 && l.reserve != 0:
			err = fmt.Errorf("lane %d has a reserve and no entry", id)
		case l.entry != 0 && r.reserves[l.entry-1].Load() != l:
			err = fmt.Errorf("lane %d is not in its entry %d", id, l.entry)
		case !covers(r.reserveMax, l.reserve):
			err = fmt.Errorf("lane %d has %x in reserve, want at most %x", id, l.reserve, r.reserveMax)
		}
		if l.entry != 0 {
			entries++
		}
		l.mu.Unlock()
	}
	free := false
	for i := range r.reserves {
		if r.reserves[i].Load() != nil {
			entries--
		} else {
			free = true
		}
	}
	used := r.used.Load()
	switch {
	case err != nil:
	case r.crowded.Load() && free:
		err = errors.New("an entry is free, and no lane would look for it")
	case entries != 0:
		err = fmt.Errorf("%d more entries in lanes than in the ring", entries)
	case used != held+reserved:
		err = fmt.Errorf("used is %x, want %x held and %x in reserve", used, held, reserved)
	case !covers(r.bound, used):
		err = fmt.Errorf("used is %x, want at most %x", used, r.bound)
	}
	return int(reserved >> bytesBits), int64(reserved & maxBytes), err
}

// Two lanes in one cache line would slow each other down.
func TestLaneFillsCacheLines(t *testing.T) {
	if size := unsafe.Sizeof(Lane[int]{}); unsafe.Sizeof(uintptr(0)) == 8 && size != 256 {
		t.Errorf("a lane has %d bytes, want 256", size)
	}
}

// A ring has no more in reserve than its part, however it is configured, and a
// small one has nothing.
func TestReservesAreAPart(t *testing.T) {
	for _, c := range []struct{ count, reserve int }{{1, 0}, {255, 0}, {256, 8}, {4096, 128}, {65536, 128}, {maxCount, 128}} {
		r, err := NewRing[int](Config{MaxCount: c.count, MaxBytes: maxBytes}, nil)
		if err != nil {
			t.Fatal(err)
		}
		n, bytes := int(r.reserveMax>>bytesBits), int64(r.reserveMax&maxBytes)
		if n != c.reserve || n*reserveLanes*reservePart > c.count || bytes*reserveLanes*reservePart > maxBytes {
			t.Errorf("a ring of %d has %d messages and %d bytes in a lane's reserve, want %d messages", c.count, n, bytes, c.reserve)
		}
	}
}

// While somebody takes reserves back, no lane gets one, whatever it has begun
// before; that is what makes a second look at the budget exact.
func TestNoReserveWhileReclaimed(t *testing.T) {
	r, err := NewRing[int](Config{MaxCount: 1024}, nil)
	if err != nil {
		t.Fatal(err)
	}
	lanes := []*Lane[int]{r.Lane(0), r.Lane(1), r.Lane(2)}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for _, l := range lanes {
		wg.Go(func() {
			dst := make([]int, 1)
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				_, err := l.TryPut(n, n)
				for err == nil && l.Len() > 0 {
					var s Lease[int]
					if s, err = l.TryLease(dst); err == nil {
						err = s.Commit(1)
					}
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for range 5000 {
		r.reclaims.Add(1)
		r.reclaim()
		for _, l := range lanes {
			l.mu.Lock()
			if l.reserve != 0 {
				t.Errorf("lane %d has %x in reserve", l.id, l.reserve)
			}
			l.mu.Unlock()
		}
		r.reclaims.Add(-1)
		if t.Failed() {
			break
		}
	}
	close(stop)
	wg.Wait()
}

// A commit that waits for the lane's lock looks at the flags when it has it.
func TestFlagsAreReadUnderTheLock(t *testing.T) {
	r, err := NewRing[int](Config{MaxCount: 1024}, nil)
	if err != nil {
		t.Fatal(err)
	}
	l := r.Lane(0)
	for range 50 {
		if _, err := l.TryPut(1, 2); err != nil {
			t.Fatal(err)
		}
		s, err := l.TryLease(make([]int, 2))
		if err != nil {
			t.Fatal(err)
		}
		l.mu.Lock()
		if l.entry == 0 {
			t.Fatal("the lane has no entry")
		}
		before := l.reserve
		done := make(chan error)
		go func() { done <- s.Commit(2) }()
		for range 100 {
			runtime.Gosched()
		}
		r.reclaims.Add(1)
		l.mu.Unlock()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if l.reserve != before {
			t.Fatalf("%x in reserve, was %x", l.reserve, before)
		}
		r.reclaims.Add(-1)
	}
}

// A lane that finds no entry while another gives one up does not keep all others from
// the entries that are free: nobody may be left who would say that they are.
func TestFreedEntriesAreFound(t *testing.T) {
	r, err := NewRing[int](Config{MaxCount: 1024}, nil)
	if err != nil {
		t.Fatal(err)
	}
	var lanes [reserveLanes + 1]*Lane[int]
	for i := range lanes {
		lanes[i] = r.Lane(uint64(i))
	}
	join := func(l *Lane[int]) bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.entry != 0 || l.joinLocked()
	}
	yield := func(l *Lane[int]) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.yieldLocked()
	}
	for range 20000 {
		for _, l := range lanes[:reserveLanes] {
			if !join(l) {
				t.Fatal("a lane found no entry")
			}
		}
		var ready atomic.Int32
		together := func() { // they spin, so as to begin at once
			for ready.Add(1); ready.Load() < 2; {
				runtime.Gosched()
			}
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			together()
			join(lanes[reserveLanes])
		})
		wg.Go(func() {
			together()
			yield(lanes[0])
		})
		wg.Wait()
		if _, _, err := r.Audit(); err != nil {
			t.Fatal(err)
		}
		yield(lanes[reserveLanes])
		yield(lanes[0])
	}
}
