// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// The slowest refill of the largest burst takes more nanoseconds than a Duration
// holds.
func TestSlowestRefill(t *testing.T) {
	cfg := Config{Limit: Limit{Rate: .001, Burst: maxBurst}, Roster: Roster{Members: []Member{{Name: "a"}, {Name: "b"}}}}
	if w := cfg.Warnings(); len(w) != 0 {
		t.Errorf("%q", w)
	}
	n, err := NewNode(crdt.Replica{Name: "a"}, cfg, 0)
	if err != nil {
		t.Fatal(err)
	}
	if pace := n.row("k").pace; pace != maxPace {
		t.Errorf("a step each %v, want %v", pace, maxPace)
	}
}

// However much is waited for, more than a number holds, nobody lends what is not
// there.
func TestEndlessDemandMintsNothing(t *testing.T) {
	a, b := pairOf(t, Config{Limit: Limit{Rate: 1e9, Burst: maxBurst}})
	now := 2 * time.Second
	for i := range 50 {
		if i == 10 {
			for range 9300 {
				a.Demand(now, "k", maxBurst)
			}
			b.Demand(now, "k", maxBurst)
		}
		a.Tick(now)
		b.Tick(now)
		for _, err := range []error{second(say(now, a, b)), second(say(now, b, a))} {
			if err != nil {
				t.Fatal(err)
			}
		}
		now += 5 * ms
	}
	va, _ := a.View(now, "k")
	vb, _ := b.View(now, "k")
	if va.Level < 0 || va.Level+vb.Level+vb.Held > maxBurst*micro {
		t.Errorf("%d and %d own tokens, %d borrowed, of %d", va.Level/micro, vb.Level/micro, vb.Held/micro, maxBurst)
	}
}

// Many handles and goroutines of one set, in time that passes: what is admitted in
// any interval is never above the bound, and little is lost.
func TestSetUnderContention(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limit := Limit{Rate: 1000, Burst: 200}
		s, err := New(crdt.Replica{Name: "a"}, Config{Limit: limit})
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		bound := bucket{rate: limit.Rate, burst: float64(limit.Burst), level: float64(limit.Burst)}
		over := 0.0
		var mu sync.Mutex
		var total atomic.Int64
		admit := func(n int) {
			mu.Lock()
			defer mu.Unlock()
			bound.refill(time.Since(start))
			bound.level -= float64(n)
			over = max(over, -bound.level)
			total.Add(int64(n))
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		var all sync.WaitGroup
		for g := range 12 {
			all.Go(func() {
				l := s.Key("k")
				for i := 0; ctx.Err() == nil; i++ {
					n := 1 + (g*7+i)%40
					switch g % 4 {
					case 0:
						if l.Allow() {
							admit(1)
						}
						time.Sleep(time.Duration(1+g) * ms)
					case 1:
						if l.AllowN(n) {
							admit(n)
						}
						time.Sleep(3 * ms)
					case 2:
						short, stop := context.WithTimeout(ctx, time.Duration(1+i%30)*ms)
						if l.WaitN(short, n) == nil {
							admit(n)
						}
						stop()
					default:
						if wait := l.Admit(0); wait > 0 {
							time.Sleep(wait)
						} else {
							admit(1)
						}
					}
				}
			})
		}
		all.Wait()
		s.Close()
		if over > 1e-6 || total.Load() < 5000 {
			t.Errorf("%v over the bound, %d admitted in 5 s", over, total.Load())
		}
	})
}
