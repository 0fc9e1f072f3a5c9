// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package ringbuf_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

// Producers and consumers of every temper share few lanes. Each producer's
// messages must come out once, in its order, and no bound may ever be passed.
// STORMGUARD_FULL=1 makes it long.
func TestSoak(t *testing.T) {
	each := 1500
	if os.Getenv("STORMGUARD_FULL") == "1" {
		each = 200_000
	}
	for name, open := range kinds {
		for _, procs := range []int{1, 2, 4} {
			for _, capacity := range []int{1, 2, 16, 256, 4096} {
				t.Run(fmt.Sprintf("%s/procs=%d/cap=%d", name, procs, capacity), func(t *testing.T) {
					defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(procs))
					r, err := open(ringbuf.Config{MaxCount: capacity, MaxBytes: int64(capacity) * 20, LaneShare: 0.8})
					if err != nil {
						t.Fatal(err)
					}
					soak(t, r, capacity, each)
				})
			}
		}
	}
}

func soak(t *testing.T, r *ringbuf.Ring[msg], capacity, each int) {
	const lanes, producers, consumers = 3, 4, 4
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var left atomic.Int64
	left.Store(producers * int64(each))
	next := make([][producers]uint32, lanes) // guarded by the lane's lease
	var producing, consuming sync.WaitGroup
	for p := range producers {
		producing.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(p)))
			l := r.Lane(uint64(p % lanes))
			for seq := 0; seq < each; {
				ms := make([]msg, min(1+rng.IntN(70), each-seq))
				for i := range ms {
					// The largest message fills the smallest lane.
					ms[i] = msg{from: uint32(p), seq: uint32(seq + i), pad: rng.IntN(8)}
				}
				for done := 0; done < len(ms); {
					c, stop := ctx, context.CancelFunc(func() {})
					if rng.IntN(8) == 0 {
						c, stop = context.WithCancel(ctx)
						if rng.IntN(2) == 0 {
							go stop()
						}
					}
					var n int
					var err error
					if rng.IntN(4) == 0 {
						n, err = l.TryPut(ms[done:]...)
						runtime.Gosched()
					} else {
						n, err = l.Put(c, ms[done:]...)
					}
					stop()
					if err != nil && !errors.Is(err, ringbuf.ErrFull) && (ctx.Err() != nil || !errors.Is(err, context.Canceled)) {
						t.Error(err)
						return
					}
					done += n
				}
				seq += len(ms)
			}
		})
	}
	for c := range consumers {
		consuming.Go(func() {
			rng := rand.New(rand.NewPCG(2, uint64(c)))
			lane := c % lanes
			l := r.Lane(uint64(lane))
			dst := make([]msg, 1+rng.IntN(70))
			s, err := l.Lease(ctx, dst)
			for {
				if err != nil {
					if !errors.Is(err, context.Canceled) {
						t.Error(err)
					}
					return
				}
				if st := r.Stats(); st.Count > capacity || st.Bytes > int64(capacity)*20 {
					t.Errorf("over the bound: %+v", st)
				}
				n := rng.IntN(s.Len() + 1)
				for _, m := range dst[:n] {
					if want := next[lane][m.from]; m.seq != want {
						t.Errorf("lane %d, producer %d: message %d, want %d", lane, m.from, m.seq, want)
						cancel()
					}
					next[lane][m.from] = m.seq + 1
				}
				last := left.Add(-int64(n)) == 0
				if last {
					cancel()
				}
				dst = make([]msg, 1+rng.IntN(70))
				if last || rng.IntN(2) == 0 {
					if err := s.Commit(n); err != nil {
						t.Error(err)
					}
					s, err = l.Lease(ctx, dst)
				} else {
					s, err = s.Next(ctx, n, dst)
				}
			}
		})
	}
	consuming.Wait()
	producing.Wait()
	if st := r.Stats(); st.Count != 0 || st.Bytes != 0 || st.Waiting != 0 {
		t.Errorf("at the end: %+v", st)
	}
	if _, _, err := r.Audit(); err != nil {
		t.Error(err)
	}
}
