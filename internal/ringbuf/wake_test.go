// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package ringbuf_test

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

// bubble runs f once per kind of ring in a synctest bubble: a call that is
// never woken fails the test as a deadlock.
func bubble(t *testing.T, cfg ringbuf.Config, f func(*testing.T, *ringbuf.Ring[msg])) {
	for name, open := range kinds {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, err := open(cfg)
				if err != nil {
					t.Fatal(err)
				}
				f(t, r)
			})
		})
	}
}

type result struct {
	n   int
	err error
}

func goPut(l *ringbuf.Lane[msg], ctx context.Context, ms ...msg) <-chan result {
	c := make(chan result, 1)
	go func() {
		n, err := l.Put(ctx, ms...)
		c <- result{n, err}
	}()
	synctest.Wait()
	return c
}

func goLease(l *ringbuf.Lane[msg], ctx context.Context, n int) <-chan ringbuf.Lease[msg] {
	c := make(chan ringbuf.Lease[msg], 1)
	go func() {
		s, err := l.Lease(ctx, make([]msg, n))
		if err != nil {
			close(c)
			return
		}
		c <- s
	}()
	synctest.Wait()
	return c
}

func mustPut(t *testing.T, l *ringbuf.Lane[msg], ms ...msg) {
	t.Helper()
	if n, err := l.TryPut(ms...); n != len(ms) || err != nil {
		t.Fatalf("TryPut: %d, %v", n, err)
	}
}

func mustLease(t *testing.T, l *ringbuf.Lane[msg], n int) ringbuf.Lease[msg] {
	t.Helper()
	s, err := l.TryLease(make([]msg, n))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func mustCommit(t *testing.T, s ringbuf.Lease[msg], n int) {
	t.Helper()
	if err := s.Commit(n); err != nil {
		t.Fatal(err)
	}
}

func pending[T any](t *testing.T, c <-chan T) {
	t.Helper()
	synctest.Wait()
	select {
	case v := <-c:
		t.Fatalf("did not wait: %v", v)
	default:
	}
}

func TestLeaseWaitsForMessage(t *testing.T) {
	bubble(t, ringbuf.Config{}, func(t *testing.T, r *ringbuf.Ring[msg]) {
		l := r.Lane(1)
		c := goLease(l, t.Context(), 8)
		pending(t, c)
		mustPut(t, l, msg{seq: 1}, msg{seq: 2})
		if s := <-c; s.Len() != 2 {
			t.Fatalf("leased %d", s.Len())
		}
	})
}

func TestLeaseWaitsForLease(t *testing.T) {
	for name, end := range map[string]func(ringbuf.Lease[msg]){
		"commit":  func(s ringbuf.Lease[msg]) { _ = s.Commit(1) },
		"release": ringbuf.Lease[msg].Release,
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, ringbuf.Config{}, func(t *testing.T, r *ringbuf.Ring[msg]) {
				l := r.Lane(1)
				mustPut(t, l, msg{seq: 1}, msg{seq: 2})
				first := mustLease(t, l, 1)
				c := goLease(l, t.Context(), 8)
				pending(t, c)
				end(first)
				<-c
			})
		})
	}
}

func goNext(s ringbuf.Lease[msg], ctx context.Context, n, size int) <-chan ringbuf.Lease[msg] {
	c := make(chan ringbuf.Lease[msg], 1)
	go func() {
		s, err := s.Next(ctx, n, make([]msg, size))
		if err != nil {
			close(c)
			return
		}
		c <- s
	}()
	synctest.Wait()
	return c
}

// Next frees what it commits before it waits, wakes who waits for that, and
// ends with its context.
func TestNextWaitsForMessage(t *testing.T) {
	bubble(t, ringbuf.Config{MaxCount: 2}, func(t *testing.T, r *ringbuf.Ring[msg]) {
		l, other := r.Lane(1), r.Lane(2)
		mustPut(t, l, make([]msg, 2)...)
		put := goPut(other, t.Context(), make([]msg, 1)...)
		pending(t, put)
		next := goNext(mustLease(t, l, 2), t.Context(), 2, 8)
		if got := <-put; got != (result{1, nil}) {
			t.Fatal(got)
		}
		pending(t, next)
		mustPut(t, l, msg{})
		s := <-next
		ctx, cancel := context.WithCancel(t.Context())
		next = goNext(s, ctx, 1, 8)
		pending(t, next)
		cancel()
		if s, ok := <-next; ok {
			t.Fatalf("leased %d", s.Len())
		}
		mustPut(t, l, msg{})
		mustLease(t, l, 1) // no lease stayed open
	})
}

// A loop of Next must not keep a Lease waiting that came before, nor a Put that
// waits for room.
func TestNextGivesWay(t *testing.T) {
	for _, size := range []int{1, 8} {
		bubble(t, ringbuf.Config{}, func(t *testing.T, r *ringbuf.Ring[msg]) {
			l := r.Lane(1)
			mustPut(t, l, make([]msg, 3)...)
			s := mustLease(t, l, 1)
			other := goLease(l, t.Context(), 1)
			pending(t, other)
			next := goNext(s, t.Context(), 1, size)
			s = <-other
			pending(t, next)
			mustCommit(t, s, 1)
			<-next
		})
		for name, cfg := range map[string]ringbuf.Config{
			"ring": {MaxCount: 3},
			"lane": {MaxCount: 6, LaneShare: 0.5},
		} {
			t.Run(name, func(t *testing.T) {
				bubble(t, cfg, func(t *testing.T, r *ringbuf.Ring[msg]) {
					l, to := r.Lane(1), r.Lane(1)
					if name == "ring" {
						to = r.Lane(2)
					}
					mustPut(t, l, make([]msg, 3)...)
					put := goPut(to, t.Context(), msg{})
					pending(t, put)
					s := <-goNext(mustLease(t, l, 1), t.Context(), 1, size)
					if got := <-put; got != (result{1, nil}) {
						t.Fatal(got)
					}
					// Nor does it go on once the ring is closed.
					r.Close()
					if s, ok := <-goNext(s, t.Context(), 1, size); ok {
						t.Fatalf("leased %d after Close", s.Len())
					}
				})
			})
		}
	}
}

// A Next that waits behind others must not miss the end of the lane, nor the
// turn of one that gives up, in whatever order that comes.
func TestNextBehindOneThatLeaves(t *testing.T) {
	for name, leave := range map[string]func(context.CancelFunc, *ringbuf.Ring[msg], *ringbuf.Lane[msg]){
		"cancel": func(cancel context.CancelFunc, _ *ringbuf.Ring[msg], _ *ringbuf.Lane[msg]) { cancel() },
		"drop":   func(_ context.CancelFunc, r *ringbuf.Ring[msg], l *ringbuf.Lane[msg]) { r.Drop(l) },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, ringbuf.Config{}, func(t *testing.T, r *ringbuf.Ring[msg]) {
				for round := range 3000 {
					l := r.Lane(1)
					mustPut(t, l, make([]msg, 3)...)
					s := mustLease(t, l, 1)
					ctx, cancel := context.WithCancel(t.Context())
					other := goLease(l, ctx, 1)
					next := make(chan error, 1)
					go func() {
						s, err := s.Next(t.Context(), 1, make([]msg, 1))
						s.Release()
						next <- err
					}()
					for range round % 10 {
						runtime.Gosched()
					}
					leave(cancel, r, l)
					if s, ok := <-other; ok {
						s.Release()
					}
					if err := <-next; err != nil && err != ringbuf.ErrDropped && err != ringbuf.ErrLeaseOver {
						t.Fatal(err)
					}
					cancel()
					r.Drop(l)
				}
			})
		})
	}
}

// A reader that was woken and is then cancelled must not take the wake-up along.
func TestCancelledLeasePassesWakeOn(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	bubble(t, ringbuf.Config{}, func(t *testing.T, r *ringbuf.Ring[msg]) {
		for range 50 {
			l := r.Lane(1)
			ctx, cancel := context.WithCancel(t.Context())
			a, b := goLease(l, ctx, 1), goLease(l, t.Context(), 1)
			cancel()
			mustPut(t, l, msg{}) // wakes a, which has not left yet
			if s, ok := <-a; ok {
				pending(t, b)
				s.Release()
			}
			mustCommit(t, <-b, 1)
		}
	})
}

func TestPutWaitsForRoom(t *testing.T) {
	bubble(t, ringbuf.Config{MaxCount: 3}, func(t *testing.T, r *ringbuf.Ring[msg]) {
		a, b := r.Lane(1), r.Lane(2)
		mustPut(t, a, make([]msg, 3)...)
		c := goPut(b, t.Context(), make([]msg, 2)...)
		pending(t, c)
		s := mustLease(t, a, 3)
		pending(t, c) // leased messages keep their budget
		mustCommit(t, s, 1)
		pending(t, c)
		if n := b.Len(); n != 1 {
			t.Fatalf("placed %d while waiting, want 1", n)
		}
		mustCommit(t, mustLease(t, a, 1), 1)
		if got := <-c; got != (result{2, nil}) {
			t.Fatal(got)
		}
	})
}

func TestPutWaitsForLaneShare(t *testing.T) {
	bubble(t, ringbuf.Config{MaxCount: 4, LaneShare: 0.5}, func(t *testing.T, r *ringbuf.Ring[msg]) {
		a, b := r.Lane(1), r.Lane(2)
		mustPut(t, a, make([]msg, 2)...)
		c := goPut(a, t.Context(), make([]msg, 1)...)
		pending(t, c)
		mustPut(t, b, msg{})
		mustCommit(t, mustLease(t, b, 1), 1)
		pending(t, c)
		mustCommit(t, mustLease(t, a, 1), 1)
		if got := <-c; got != (result{1, nil}) {
			t.Fatal(got)
		}
	})
}

// What other lanes have in reserve serves a Put that waits, and so does what
// they free while it waits: they keep nothing then.
func TestReserveServesPut(t *testing.T) {
	bubble(t, ringbuf.Config{MaxCount: 256, MaxBytes: 256 * 10}, func(t *testing.T, r *ringbuf.Ring[msg]) {
		a, b, c := r.Lane(1), r.Lane(2), r.Lane(3)
		mustPut(t, a, make([]msg, 150)...)
		mustPut(t, b, make([]msg, 100)...)
		mustCommit(t, mustLease(t, a, 4), 4)
		mustCommit(t, mustLease(t, b, 4), 4)
		if n, _, err := r.Audit(); n < 8 || err != nil {
			t.Fatalf("%d in reserve, %v", n, err)
		}
		if got := <-goPut(c, t.Context(), make([]msg, 14)...); got != (result{14, nil}) {
			t.Fatal(got)
		}
		large := goPut(c, t.Context(), msg{pad: 600}) // 512 bytes are left
		pending(t, large)
		for n := 0; ; n++ {
			// Lane a places as well, so it may have a reserve again.
			mustCommit(t, mustLease(t, a, 3), 3)
			synctest.Wait()
			select {
			case got := <-large:
				if got != (result{1, nil}) {
					t.Fatal(got)
				}
				return
			default:
			}
			if held := a.Len() + b.Len() + c.Len(); held*msgSize <= 2560-608 {
				t.Fatalf("%d messages are held and a Put of 608 bytes waits", held)
			}
			mustPut(t, a, msg{})
		}
	})
}

func TestPutEndsWithContext(t *testing.T) {
	for name, cfg := range map[string]ringbuf.Config{
		"ring": {MaxCount: 3},
		"lane": {MaxCount: 100, LaneShare: 0.03},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, cfg, func(t *testing.T, r *ringbuf.Ring[msg]) {
				l := r.Lane(1)
				mustPut(t, l, msg{})
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				if n, err := l.Put(ctx, make([]msg, 5)...); n != 2 || !errors.Is(err, context.DeadlineExceeded) {
					t.Fatalf("Put: %d, %v", n, err)
				}
				if n, err := l.Put(ctx, msg{}); n != 0 || !errors.Is(err, context.DeadlineExceeded) {
					t.Fatalf("Put with a ctx that is done: %d, %v", n, err)
				}
				if n, err := l.TryPut(); n != 0 || err != nil {
					t.Fatalf("TryPut of nothing: %d, %v", n, err)
				}
				mustCommit(t, mustLease(t, l, 3), 3)
				if n, err := l.Put(ctx, msg{}); n != 0 || !errors.Is(err, context.DeadlineExceeded) {
					t.Fatalf("Put into room with a ctx that is done: %d, %v", n, err)
				}
				if _, err := l.Lease(ctx, make([]msg, 1)); !errors.Is(err, context.DeadlineExceeded) {
					t.Fatalf("Lease with a ctx that is done: %v", err)
				}
				if st := r.Stats(); st.Waiting != 0 {
					t.Fatalf("%+v", st)
				}
			})
		})
	}
}

// A cancelled Put that was first in the queue must let those behind it have the
// room it did not take.
func TestCancelledPutPassesRoomOn(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	for range 20 {
		bubble(t, ringbuf.Config{MaxCount: 1}, func(t *testing.T, r *ringbuf.Ring[msg]) {
			other, l := r.Lane(0), r.Lane(1)
			mustPut(t, other, msg{})
			ctx, cancel := context.WithCancel(t.Context())
			a, b := goPut(l, ctx, msg{seq: 1}), goPut(l, t.Context(), msg{seq: 2})
			cancel()
			mustCommit(t, mustLease(t, other, 1), 1)
			if got := <-a; got.err == nil {
				mustCommit(t, mustLease(t, l, 1), 1)
			}
			if got := <-b; got != (result{1, nil}) {
				t.Fatal(got)
			}
		})
	}
}

// One waiter cannot use all that was freed; the next one can.
func TestRoomLeftOverServesNextWaiter(t *testing.T) {
	bubble(t, ringbuf.Config{MaxBytes: 100}, func(t *testing.T, r *ringbuf.Ring[msg]) {
		l := r.Lane(1)
		mustPut(t, l, msg{pad: 92 - 40}, msg{pad: 32})
		big := goPut(l, t.Context(), msg{pad: 22}, msg{pad: 92})
		small := goPut(l, t.Context(), msg{})
		pending(t, big)
		pending(t, small)
		mustCommit(t, mustLease(t, l, 2), 1)
		if got := <-small; got != (result{1, nil}) {
			t.Fatal(got)
		}
		pending(t, big)
		for l.Len() > 1 {
			mustCommit(t, mustLease(t, l, 1), 1)
			synctest.Wait()
		}
		mustCommit(t, mustLease(t, l, 1), 1)
		if got := <-big; got != (result{2, nil}) {
			t.Fatal(got)
		}
	})
}

// Small messages may overtake a large one that waits, but not for ever.
func TestLargePutDoesNotStarve(t *testing.T) {
	for name, cfg := range map[string]ringbuf.Config{
		"ring": {MaxBytes: 100},
		"lane": {MaxBytes: 200, LaneShare: 0.5},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, cfg, func(t *testing.T, r *ringbuf.Ring[msg]) {
				l, to := r.Lane(1), r.Lane(1)
				if name == "ring" {
					to = r.Lane(2)
				}
				mustPut(t, l, make([]msg, 10)...)
				large := goPut(to, t.Context(), msg{pad: 92})
				for n := 0; ; n++ {
					if n == 1000 {
						t.Fatal("1000 small messages overtook")
					}
					small := goPut(l, t.Context(), msg{})
					for l.Len() > 8 || n > 500 && l.Len() > 0 {
						mustCommit(t, mustLease(t, l, 1), 1)
						synctest.Wait()
					}
					select {
					case <-small:
						continue
					default:
					}
					for l.Len() > 0 {
						mustCommit(t, mustLease(t, l, 1), 1)
						synctest.Wait()
						select {
						case got := <-large:
							if got != (result{1, nil}) {
								t.Fatal(got)
							}
							r.Close()
							<-small
							return
						default:
						}
					}
				}
			})
		})
	}
}

func TestCloseAndDropWakeAll(t *testing.T) {
	for name, end := range map[string]func(*ringbuf.Ring[msg]) error{
		"close": func(r *ringbuf.Ring[msg]) error { _ = r.Close(); _ = r.Close(); return ringbuf.ErrClosed },
		"drop": func(r *ringbuf.Ring[msg]) error {
			for l := range r.Lanes() {
				if l.ID() != 3 {
					r.Drop(l)
				}
			}
			return ringbuf.ErrDropped
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, ringbuf.Config{MaxCount: 4, LaneShare: 0.5}, func(t *testing.T, r *ringbuf.Ring[msg]) {
				full, other, third := r.Lane(1), r.Lane(2), r.Lane(3)
				mustPut(t, full, make([]msg, 2)...)
				mustPut(t, third, make([]msg, 2)...)
				open := mustLease(t, full, 1)
				share, ring := goPut(full, t.Context(), msg{}), goPut(other, t.Context(), msg{})
				second, empty := goLease(full, t.Context(), 1), goLease(other, t.Context(), 1)
				want := end(r)
				if got := <-share; got.err != want {
					t.Errorf("Put at the lane's share: %v", got)
				}
				if got := <-ring; got.err != want && !(want == ringbuf.ErrDropped && got.err == nil) {
					t.Errorf("Put at the ring's bound: %v", got)
				}
				for _, c := range []<-chan ringbuf.Lease[msg]{second, empty} {
					if s, ok := <-c; ok && want == ringbuf.ErrClosed {
						t.Errorf("Lease gave %d messages", s.Len())
					}
				}
				if _, err := full.TryPut(msg{}); err != want {
					t.Errorf("TryPut afterwards: %v", err)
				}
				if _, err := full.Lease(t.Context(), make([]msg, 1)); err != want {
					t.Errorf("Lease afterwards: %v", err)
				}
				err := open.Commit(1)
				if want == ringbuf.ErrClosed {
					if err != nil {
						t.Errorf("Commit after Close: %v", err)
					}
					if vs, err := full.Drain(); len(vs) != 1 || err != nil {
						t.Errorf("Drain after Close: %v, %v", vs, err)
					}
					if _, err := r.Lane(9).TryPut(msg{}); err != ringbuf.ErrClosed {
						t.Errorf("new lane after Close: %v", err)
					}
				} else if err != ringbuf.ErrLeaseOver {
					t.Errorf("Commit after Drop: %v", err)
				}
			})
		})
	}
}

func TestDropEmptyKeepsLanesInUse(t *testing.T) {
	bubble(t, ringbuf.Config{MaxCount: 1}, func(t *testing.T, r *ringbuf.Ring[msg]) {
		mustPut(t, r.Lane(1), msg{})
		writes, reads := goPut(r.Lane(2), t.Context(), msg{}), goLease(r.Lane(3), t.Context(), 1)
		r.Lane(4)
		if n := r.DropEmpty(); n != 1 {
			t.Errorf("dropped %d lanes, want 1", n)
		}
		r.Close()
		<-writes
		<-reads
	})
}

// Room may go into a reserve just while a Put goes to sleep that needs it.
func TestPutGoesToSleepBesideReserve(t *testing.T) {
	r, err := ringbuf.NewRing[int](ringbuf.Config{MaxCount: 256}, nil)
	if err != nil {
		t.Fatal(err)
	}
	a, b := r.Lane(0), r.Lane(1)
	dst := make([]int, 1)
	move := func(l *ringbuf.Lane[int]) {
		s, err := l.TryLease(dst)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Commit(1); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := a.TryPut(make([]int, 256)...); err != nil {
		t.Fatal(err)
	}
	for round := range 20_000 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := b.Put(ctx, round); err != nil {
				t.Errorf("round %d: %v", round, err)
			}
		})
		for range round % 7 {
			runtime.Gosched()
		}
		for range round % 30 {
			move(a)
			_, _ = a.TryPut(round) // full if b was faster
		}
		for b.Len() == 0 && a.Len() == 256 {
			move(a)
		}
		wg.Wait()
		cancel()
		if t.Failed() {
			return
		}
		move(b)
		for a.Len() < 256 {
			if _, err := a.TryPut(round); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// Room, or the end of the lane, may come just while a Put goes to sleep.
func TestPutGoesToSleepOnce(t *testing.T) {
	r, err := ringbuf.NewRing[int](ringbuf.Config{MaxCount: 1}, nil)
	if err != nil {
		t.Fatal(err)
	}
	dst := make([]int, 1)
	for round := range 20_000 {
		a, b := r.Lane(0), r.Lane(1)
		if _, err := a.TryPut(round); err != nil {
			t.Fatal(err)
		}
		s, err := a.TryLease(dst)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		var wg sync.WaitGroup
		wg.Go(func() {
			want := error(nil)
			if round%2 == 1 {
				want = ringbuf.ErrDropped
			}
			if _, err := b.Put(ctx, round); err != want {
				t.Errorf("round %d: %v", round, err)
			}
		})
		for range round % 200 {
			runtime.Gosched()
		}
		if round%2 == 1 {
			r.Drop(b)
		}
		if round%2 == 1 {
			wg.Wait()
		}
		if err := s.Commit(1); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		cancel()
		r.Drop(b)
		if t.Failed() {
			return
		}
	}
}
