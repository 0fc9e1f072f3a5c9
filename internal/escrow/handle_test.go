// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

func local(t testing.TB, l Limit) *Handle {
	t.Helper()
	x, err := Local(l)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// Alone, a limit is its bucket and nothing else, whatever the order of calls.
func TestLocalIsABucket(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := Limit{
			Rate:  rapid.SampledFrom([]float64{1, 3, 1000, 12345}).Draw(t, "rate"),
			Burst: rapid.SampledFrom([]int{1, 2, 5, 300, 5000}).Draw(t, "burst"),
		}
		var now hand
		s, err := New(crdt.Replica{Name: "a"}, Config{Limit: limit}, WithClock(now.read))
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		l := s.Key("k")
		// In nano-tokens, exactly: a level of whole nanoseconds times the rate.
		level, most := int64(limit.Burst)*1e9, int64(limit.Burst)*1e9
		for range 60 {
			d := time.Duration(rapid.IntRange(0, 2000).Draw(t, "µs")) * time.Microsecond
			now.move(d)
			level = min(most, level+int64(d)*int64(limit.Rate))
			n := rapid.SampledFrom([]int{1, 1, 1, 2, 40, limit.Burst, limit.Burst + 1}).Draw(t, "n")
			for range rapid.SampledFrom([]int{1, 1, 70}).Draw(t, "times") {
				got, want := l.AllowN(n), level >= int64(n)*1e9
				if rapid.Bool().Draw(t, "admit") && n == 1 && !got {
					got = l.Admit(0) == 0
				}
				// What the pool gave while the bucket was full counts as if it were
				// still there; and micro-tokens are whole.
				behind := min(64, int64(limit.Burst)/4)*1e9 + 1e3
				if got && !want || !got && level-int64(n)*1e9 > behind {
					t.Fatal("differs from a bucket")
				}
				if got {
					level -= int64(n) * 1e9
				}
			}
		}
	})
}

func TestWaitPaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := local(t, Limit{Rate: 10, Burst: 2})
		start := time.Now()
		for i := range 12 {
			if err := l.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
			want := max(0, time.Duration(i-1)*100*ms)
			if got := time.Since(start); got < want || got > want+time.Microsecond {
				t.Errorf("wait %d ended after %v, want %v", i, got, want)
			}
		}
	})
}

// Who came first is served first, and none that came later slips in between.
func TestWaitIsFair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := local(t, Limit{Rate: 10, Burst: 5})
		for l.Allow() {
		}
		var order []int
		var mu sync.Mutex
		var all sync.WaitGroup
		for i, n := range []int{1, 5, 1, 2, 1} {
			all.Go(func() {
				if err := l.WaitN(t.Context(), n); err != nil {
					t.Error(err)
				}
				mu.Lock()
				order = append(order, i)
				mu.Unlock()
			})
			synctest.Wait()
		}
		time.Sleep(250 * ms) // there is a token, and the second waits for five
		if l.Allow() {
			t.Error("an Allow was before waiters")
		}
		all.Wait()
		if !slices.IsSorted(order) {
			t.Errorf("served in the order %v", order)
		}
	})
}

// A wait ends with its context, and whoever is behind gets on at once.
func TestWaitEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := local(t, Limit{Rate: 1, Burst: 10})
		for l.Allow() {
		}
		ctx, cancel := context.WithTimeout(t.Context(), 1500*ms)
		defer cancel()
		var all sync.WaitGroup
		all.Go(func() {
			if err := l.WaitN(ctx, 9); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%v, want the deadline", err)
			}
		})
		synctest.Wait()
		start := time.Now()
		if err := l.Wait(t.Context()); err != nil || time.Since(start) != 1500*ms {
			t.Errorf("%v after %v, want 1.5s: there was one token, for whom the other left", err, time.Since(start))
		}
		all.Wait()
		if err := l.WaitN(t.Context(), 11); !errors.Is(err, ErrBurst) {
			t.Errorf("%v, want ErrBurst", err)
		}
		cancel()
		if err := l.Wait(ctx); err == nil {
			t.Error("an ended context waits")
		}
		all.Go(func() {
			if err := l.WaitN(t.Context(), 9); !errors.Is(err, ErrClosed) {
				t.Errorf("%v, want ErrClosed", err)
			}
		})
		synctest.Wait()
		l.set.Close()
		all.Wait()
		if err := l.Wait(t.Context()); !errors.Is(err, ErrClosed) || l.Allow() || l.Admit(0) == 0 {
			t.Errorf("a closed set admits: %v", err)
		}
	})
}

// A waiter whose token is due sooner wakes the driver from its sleep for another.
func TestWaitersOfTwoKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := New(crdt.Replica{Name: "a"}, Config{Limit: Limit{Rate: .1, Burst: 1}, Limits: map[string]Limit{"fast": {Rate: 10, Burst: 1}}})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		slow, fast := s.Key("slow"), s.Key("fast")
		if !slow.Allow() || !fast.Allow() {
			t.Fatal("denied within the burst")
		}
		start := time.Now()
		var all sync.WaitGroup
		all.Go(func() {
			if err := slow.Wait(t.Context()); err != nil || time.Since(start) != 10*time.Second {
				t.Errorf("%v after %v, want 10s", err, time.Since(start))
			}
		})
		synctest.Wait()
		if err := fast.Wait(t.Context()); err != nil || time.Since(start) != 100*ms {
			t.Errorf("%v after %v, want 100ms", err, time.Since(start))
		}
		all.Wait()
	})
}

// However many call at once, no token is spent twice and none gets lost.
func TestPoolUnderContention(t *testing.T) {
	const burst = 20_000
	var now hand
	s, err := New(crdt.Replica{Name: "a"}, Config{Limit: Limit{Rate: 1000, Burst: burst}}, WithClock(now.read))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	l := s.Key("k")
	for round := range 5 {
		var got atomic.Int64
		var all sync.WaitGroup
		for g := range 8 {
			all.Go(func() {
				for denied := 0; denied < 3; {
					n := 1 + (g%2)*2
					if l.AllowN(n) {
						got.Add(int64(n))
					} else {
						denied++
					}
				}
				for l.Admit(0) == 0 {
					got.Add(1)
				}
			})
		}
		all.Wait()
		if got.Load() != burst {
			t.Fatalf("round %d: %d of %d admitted", round, got.Load(), burst)
		}
		v, _ := s.View("k")
		if v.Level != 0 || v.Sums.Own != int64(round+1)*burst*micro {
			t.Fatalf("round %d: %+v", round, v)
		}
		now.move(burst / 1000 * time.Second)
	}
}

// Two sets that talk lend to each other's waiters.
func TestSetsLend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := Config{Limit: Limit{Rate: 1000, Burst: 100}, Roster: Roster{Members: []Member{{Name: "a"}, {Name: "b"}}}}
		clock := monotonic()
		var sets []*Set
		for _, m := range cfg.Roster.Members {
			s, err := New(crdt.Replica{Name: m.Name, Incarnation: 1}, cfg, WithClock(clock))
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			sets = append(sets, s)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var talk sync.WaitGroup
		talk.Go(func() {
			var acked, merged [2]uint64
			var heard [2]time.Duration
			for ctx.Err() == nil {
				for i, s := range sets {
					from, to := crdt.Replica{Name: cfg.Roster.Members[i].Name, Incarnation: 1}, crdt.Replica{Name: cfg.Roster.Members[1-i].Name, Incarnation: 1}
					b, upto := s.Delta(clock(), nil, to, acked[i], 1200)
					sent := clock()
					time.Sleep(ms)
					if err := sets[1-i].Merge(crdt.Contact{From: from, Now: clock(), Sent: sent, Echo: heard[i]}, b); err != nil {
						t.Error(err)
					}
					heard[1-i], merged[1-i] = sent, max(merged[1-i], upto)
					acked[i] = merged[1-i]
				}
			}
		})
		time.Sleep(time.Second)
		l := sets[0].Key("k")
		start := time.Now()
		for range 2100 {
			if err := l.Wait(ctx); err != nil {
				t.Fatal(err)
			}
		}
		if took := time.Since(start); took < 2*time.Second || took > 2050*ms {
			t.Errorf("2,100 at 1,000/s with a burst of 100 took %v, want about 2s", took)
		}
		if v, _ := sets[0].View("k"); v.Sums.Borrowed < 900*micro {
			t.Errorf("borrowed %d", v.Sums.Borrowed/micro)
		}
		cancel()
		talk.Wait()
	})
}

func TestKeys(t *testing.T) {
	var now hand
	s, err := New(crdt.Replica{Name: "a"}, Config{Limit: Limit{Rate: 10, Burst: 10}, MaxKeys: 10}, WithClock(now.read))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	first := s.Key("0")
	if first != s.Key("0") {
		t.Error("two handles of a key")
	}
	for i := range 10 {
		if !s.Key(fmt.Sprint(i)).Allow() {
			t.Error("denied within the burst")
		}
	}
	if s.Key("one more").Allow() || s.Key("").Allow() {
		t.Error("more keys than MaxKeys")
	}
	for i := range 1000 {
		now.move(time.Second)
		if !s.Key(fmt.Sprint("new", i)).Allow() {
			t.Fatal("an idle key was not forgotten")
		}
	}
	s.mu.Lock()
	if s.known > 20 || s.node.Keys() > 10 {
		t.Errorf("%d handles, %d keys", s.known, s.node.Keys())
	}
	s.mu.Unlock()
	again, n := s.Key("0"), 0
	for first.Allow() || again.Allow() {
		n++
	}
	if n > 10 {
		t.Errorf("two handles of a key admitted %d", n)
	}
}

// A new key costs the same however many there are: what is copied for it is spread
// over many. Each key has one handle, and one that is asked for is soon read
// without the lock.
func TestManyKeys(t *testing.T) {
	const keys = 100_000
	s, err := New(crdt.Replica{Name: "a"}, Config{Limit: Limit{Rate: 10, Burst: 10}, MaxKeys: keys})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	copied := 0
	all := make([]*Handle, keys)
	was := map[*shard]int{}
	for i := range keys {
		key := fmt.Sprint(i)
		all[i] = s.Key(key)
		h := &s.handles[maphash.String(s.seed, key)%uint64(len(s.handles))]
		if n := len(*h.read.Load()); n != was[h] {
			was[h] = n
			copied += n
		}
	}
	if copied > 12*keys {
		t.Errorf("%d copies for %d keys", copied, keys)
	}
	for i, l := range all {
		if s.Key(fmt.Sprint(i)) != l {
			t.Fatalf("two handles of key %d", i)
		}
	}
	last := fmt.Sprint(keys - 1)
	h := &s.handles[maphash.String(s.seed, last)%uint64(len(s.handles))]
	for range keys {
		s.Key(last)
	}
	if (*h.read.Load())[last] == nil {
		t.Error("a key that is often asked for is always looked up under the lock")
	}
}

// A wait that no clock reaches ends with its context.
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
}

func BenchmarkNewKey(b *testing.B) {
	s, err := New(crdt.Replica{Name: "a"}, Config{Limit: Limit{Rate: 10, Burst: 10}, MaxKeys: 1e7})
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		i++
		s.Key(fmt.Sprint(i))
	}
}

func BenchmarkAllow(b *testing.B) {
	l := local(b, Limit{Rate: 1e9, Burst: 1e9})
	b.ReportAllocs()
	for b.Loop() {
		l.Allow()
	}
}

func BenchmarkAllowParallel(b *testing.B) {
	l := local(b, Limit{Rate: 1e9, Burst: 1e9})
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			l.Allow()
		}
	})
}

func BenchmarkDeny(b *testing.B) {
	l := local(b, Limit{Rate: .001, Burst: 1})
	b.ReportAllocs()
	for b.Loop() {
		l.Allow()
	}
}

func BenchmarkKey(b *testing.B) {
	s := local(b, Limit{Rate: 1e9, Burst: 1e9}).set
	keys := make([]string, 1024)
	for i := range keys {
		keys[i] = fmt.Sprint("orders.", i)
	}
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		s.Key(keys[i&1023]).Allow()
		i++
	}
}
