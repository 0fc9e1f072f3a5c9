// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

func TestReserve(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := local(t, Limit{Rate: 10, Burst: 5})
		reserve := func(n int, want time.Duration) Reservation {
			t.Helper()
			r, err := l.Reserve(n)
			if err != nil || r.Delay() != want {
				t.Errorf("%d: %v after %v, want %v", n, err, r.Delay(), want)
			}
			return r
		}
		reserve(0, 0)
		reserve(5, 0)
		second := reserve(2, 200*ms)
		reserve(3, 500*ms)
		if _, err := l.Reserve(1); !errors.Is(err, ErrShare) {
			t.Errorf("%v, want ErrShare", err)
		}
		if _, err := l.Reserve(6); !errors.Is(err, ErrBurst) {
			t.Errorf("%v, want ErrBurst", err)
		}
		if l.Allow() {
			t.Error("admitted before reservations")
		}
		second.Cancel()
		time.Sleep(150 * ms)
		if l.Allow() {
			t.Error("what was given back is there before it was due")
		}
		time.Sleep(50 * ms)
		if !l.AllowN(2) || l.Allow() {
			t.Error("two were given back, and are due")
		}
		second.Cancel()
		time.Sleep(300 * ms)
		if l.Allow() {
			t.Error("the third's tokens were given away")
		}
		v, _ := l.set.View("local")
		if v.Sums.Own != 10*micro || v.Sums.Minted != v.Level+v.Sums.Own+v.Reserved || v.Reserved != 0 {
			t.Errorf("%+v", v)
		}
	})
}

// Whatever is reserved, given back, cut and admitted at once: the bucket holds, and
// the books tie up.
func TestReservationsAreWithinTheBucket(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := Config{Limit: Limit{Rate: 100, Burst: rapid.IntRange(1, 30).Draw(t, "burst")}}
		var now hand
		s, err := New(crdt.Replica{Name: "a"}, cfg, WithClock(now.read))
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		l := s.Key("k")
		var all []Reservation
		var bursts []int64 // admissions by millisecond
		admitted := func(at time.Duration, n int) {
			for len(bursts) <= int(at/ms) {
				bursts = append(bursts, 0)
			}
			bursts[at/ms] += int64(n)
		}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			now.move(time.Duration(rapid.IntRange(0, 40).Draw(t, "ms")) * ms)
			n := rapid.IntRange(1, cfg.Limit.Burst).Draw(t, "n")
			switch rapid.IntRange(0, 3).Draw(t, "what") {
			case 0, 1:
				if r, err := l.Reserve(n); err == nil {
					all = append(all, r)
				} else if !errors.Is(err, ErrShare) {
					t.Fatal(err)
				}
			case 2:
				if l.AllowN(n) {
					admitted(now.read(), n)
				}
			case 3:
				if len(all) > 0 {
					rapid.SampledFrom(all).Draw(t, "cancel").Cancel()
				}
			}
			v, _ := s.View("k")
			if v.Sums.Minted != v.Level+v.Sums.Own+v.Reserved || v.Level < 0 || v.Level+v.Reserved > v.Cap {
				t.Fatalf("%+v", v)
			}
		}
		for _, r := range all {
			if !r.booking.cancelled {
				admitted(r.booking.due+ms-1, int(r.booking.amount/micro))
			}
		}
		for i := range bursts {
			sum := int64(0)
			for j := i; j < len(bursts); j++ {
				sum += bursts[j]
				// A millisecond is counted whole at both ends, and a pool behind.
				if most := int64(cfg.Limit.Burst) + int64(j-i+2)/10 + 1; sum > most {
					t.Fatalf("%d in %d ms, of %d", sum, j-i, most)
				}
			}
		}
	})
}

// A cut does not take a reservation back, and is not applied before it is due.
func TestReservedBeforeACut(t *testing.T) {
	var now hand
	cfg := Config{Limit: Limit{Rate: 10, Burst: 10}}
	s, err := New(crdt.Replica{Name: "a"}, cfg, WithClock(now.read))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	l := s.Key("k")
	if !l.AllowN(10) {
		t.Fatal("denied")
	}
	r, err := l.Reserve(10)
	if err != nil || r.Delay() != time.Second {
		t.Fatal(err, r.Delay())
	}
	if err := s.Adopt(now.read(), changed(cfg.Configuration(), func(c *Configuration) { c.Limit = Limit{1, 2} })); err != nil {
		t.Fatal(err)
	}
	if s.Applied() != 1 || r.Delay() != time.Second {
		t.Errorf("applied %d, delay %v", s.Applied(), r.Delay())
	}
	now.set(time.Second)
	if s.Applied() != 2 || l.Allow() {
		t.Errorf("applied %d when it was due", s.Applied())
	}
	now.set(10 * time.Second) // what was not minted is owed
	if v, _ := s.View("k"); v.Sums.Own != 20*micro || v.Level != 0 {
		t.Errorf("%+v", v)
	}
	if now.set(11 * time.Second); !l.Allow() {
		t.Error("denied when all is paid")
	}
}

// What a cancelled reservation gives back behind a fence is void.
func TestCancelBehindAFence(t *testing.T) {
	var now hand
	s, err := New(crdt.Replica{Name: "a"}, Config{Limit: Limit{Rate: 20, Burst: 20}}, WithClock(now.read))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	l := s.Key("k")
	if !l.AllowN(15) {
		t.Fatal("denied")
	}
	r, err := l.Reserve(10)
	if err != nil || r.Delay() != 250*ms {
		t.Fatal(r.Delay(), err)
	}
	r.Cancel()
	s.Mint(10 * ms)
	now.set(20 * ms)
	if l.Allow() || !s.Stats().Fenced {
		t.Fatal("allowed behind the fence")
	}
	now.set(time.Second)
	if l.Allow() || s.Stats().Level != 0 {
		t.Errorf("the fence has passed, and %d are there", s.Stats().Level)
	}
}

// Level, loans and reservations are never more than the cap.
func TestRefundBesideAReservation(t *testing.T) {
	var now hand
	s, err := New(crdt.Replica{Name: "x"}, Config{Limit: Limit{Rate: 10, Burst: 10}}, WithClock(now.read))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	l := s.Key("k")
	if !l.AllowN(10) {
		t.Fatal("denied")
	}
	now.set(500 * ms)
	if _, err := l.Reserve(10); err != nil {
		t.Fatal(err)
	}
	l.Refund(10)
	if l.Allow() {
		t.Error("a token above the burst")
	}
}

// A wait that no clock reaches ends with its context, and a reservation is due never.
func TestWaitBeyondTheClock(t *testing.T) {
	l, err := Local(Limit{Rate: 0.001, Burst: 1e9})
	if err != nil {
		t.Fatal(err)
	}
	if !l.AllowN(999_000_000) {
		t.Fatal("denied")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*ms)
	defer cancel()
	if err := l.WaitN(ctx, 1e9); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	r, err := l.Reserve(1e9)
	if err != nil || r.Delay() < 290*365*24*time.Hour || l.Allow() {
		t.Errorf("due in %v: %v", r.Delay(), err)
	}
}

// A reservation that is still to be minted delays a wait, and does not end it: the wait has its
// token after it, and so has everybody else.
func TestWaitBehindAReservation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := local(t, Limit{Rate: 1, Burst: 10})
		if !l.AllowN(10) {
			t.Fatal("the burst is denied")
		}
		if _, err := l.Reserve(5); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		begun := time.Now()
		if err := l.Wait(ctx); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begun); took < 6*time.Second || took > 7*time.Second {
			t.Errorf("it took %s", took)
		}
		time.Sleep(1100 * time.Millisecond)
		if !l.Allow() {
			t.Error("denied afterwards")
		}
	})
}
