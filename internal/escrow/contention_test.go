// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// meet makes sets of a fleet that talk every millisecond until ctx ends.
func meet(ctx context.Context, t *testing.T, l Limit, n int, talk *sync.WaitGroup) []*Set {
	t.Helper()
	cfg := Config{Limit: l}
	for i := range n {
		cfg.Roster.Members = append(cfg.Roster.Members, Member{Name: fmt.Sprint("n", i)})
	}
	clock := monotonic()
	time.Sleep(ms) // a stamp of 0 is none
	sets := make([]*Set, n)
	for i, m := range cfg.Roster.Members {
		s, err := New(crdt.Replica{Name: m.Name, Incarnation: 1}, cfg, WithClock(clock))
		if err != nil {
			t.Fatal(err)
		}
		sets[i] = s
	}
	type packet struct {
		from, to   int
		b          []byte
		upto       uint64
		sent, echo time.Duration
	}
	talk.Go(func() {
		acked, heard := map[[2]int]uint64{}, map[[2]int]time.Duration{}
		for ctx.Err() == nil {
			var all []packet
			for i, s := range sets {
				for j, to := range sets {
					if i != j {
						b, upto := s.Delta(clock(), nil, to.node.self, acked[[2]int{i, j}], 1200)
						all = append(all, packet{i, j, b, upto, clock(), heard[[2]int{i, j}]})
					}
				}
			}
			time.Sleep(ms)
			for _, p := range all {
				c := crdt.Contact{From: sets[p.from].node.self, Now: clock(), Sent: p.sent, Echo: p.echo}
				if err := sets[p.to].Merge(c, p.b); err != nil {
					t.Error(err)
				}
				heard[[2]int{p.to, p.from}], acked[[2]int{p.from, p.to}] = p.sent, p.upto
			}
		}
	})
	return sets
}

// Nodes that each gather for more than there is for all of them must not all hold
// a part and wait for ever.
func TestLargeWaitsDoNotBlockEachOther(t *testing.T) {
	if raceEnabled {
		t.Skip("it has one goroutine: run without -race")
	}
	for _, tt := range []struct {
		limit    Limit
		nodes, n int
	}{
		{Limit{100, 100}, 2, 80},
		{Limit{100, 100}, 3, 80},
		{Limit{100, 100}, 10, 100},
		{Limit{5, 5}, 2, 5},
		{Limit{5, 5}, 5, 4},
		{Limit{5, 5}, 10, 5},
	} {
		t.Run(fmt.Sprint(tt), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				var talk, all sync.WaitGroup
				sets := meet(ctx, t, tt.limit, tt.nodes, &talk)
				time.Sleep(3 * time.Second)
				start := time.Now()
				for i, s := range sets {
					all.Go(func() {
						few, stop := context.WithTimeout(ctx, 30*time.Second)
						defer stop()
						if err := s.Key("k").WaitN(few, tt.n); err != nil {
							v, _ := s.View("k")
							t.Errorf("node %d: %v, with %d of its own and %d borrowed", i, err, v.Level/micro, v.Held/micro)
						}
					})
				}
				all.Wait()
				t.Logf("all served after %v", time.Since(start))
				cancel()
				talk.Wait()
				for _, s := range sets {
					s.Close()
				}
			})
		})
	}
}
