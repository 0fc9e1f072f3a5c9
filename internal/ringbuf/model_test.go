// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package ringbuf_test

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

type modelLane struct {
	held   []msg
	lane   *ringbuf.Lane[msg]
	lease  ringbuf.Lease[msg]
	leased int // 0: no lease
}

func bytesOf(ms []msg) (n int) {
	for _, m := range ms {
		n += sizeOf(m)
	}
	return n
}

// The ring must do what slices would do: every message out once, in the order
// of its lane, never above a bound, and never full below it. Rings of 256 and
// more have reserves.
func TestModel(t *testing.T) {
	for name, open := range kinds {
		t.Run(name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) { checkModel(t, open) })
		})
	}
}

func checkModel(t *rapid.T, open func(ringbuf.Config) (*ringbuf.Ring[msg], error)) {
	cfg := ringbuf.Config{
		MaxCount:  rapid.SampledFrom([]int{1, 2, 5, 16, 100, 256, 300}).Draw(t, "count"),
		MaxBytes:  int64(rapid.SampledFrom([]int{20, 100, 3000, 1 << 20}).Draw(t, "bytes")),
		LaneShare: rapid.SampledFrom([]float64{0, 0.25, 0.5}).Draw(t, "share"),
	}
	r, err := open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	share := cfg.LaneShare
	if share == 0 {
		share = 1
	}
	laneCount := max(1, int(share*float64(cfg.MaxCount)))
	laneBytes := max(1, int(share*float64(cfg.MaxBytes)))

	lanes := make([]*modelLane, 3)
	for i := range lanes {
		lanes[i] = &modelLane{lane: r.Lane(uint64(i))}
	}
	total := func() (n, bytes int) {
		for _, l := range lanes {
			n, bytes = n+len(l.held), bytes+bytesOf(l.held)
		}
		return n, bytes
	}
	var refused, blocked uint64
	seq := uint32(0)

	// expect places in the model and says what the ring must answer.
	expect := func(l *modelLane, ms []msg) (int, error) {
		for i, m := range ms {
			n, bytes := total()
			switch size := sizeOf(m); {
			case size > laneBytes:
				return i, ringbuf.ErrTooLarge
			case n+1 > cfg.MaxCount || bytes+size > int(cfg.MaxBytes),
				len(l.held)+1 > laneCount || bytesOf(l.held)+size > laneBytes:
				return i, ringbuf.ErrFull
			}
			l.held = append(l.held, m)
		}
		return len(ms), nil
	}
	draw := func(t *rapid.T) (int, *modelLane) {
		i := rapid.IntRange(0, len(lanes)-1).Draw(t, "lane")
		return i, lanes[i]
	}
	drawBatch := func(t *rapid.T, i int) []msg {
		ms := make([]msg, rapid.SampledFrom([]int{0, 1, 1, 2, 3, 7, 70, 200}).Draw(t, "n"))
		for k := range ms {
			seq++
			ms[k] = msg{from: uint32(i), seq: seq, pad: rapid.SampledFrom([]int{0, 0, 1, 5, 40, 400}).Draw(t, "pad")}
		}
		return ms
	}

	t.Repeat(map[string]func(*rapid.T){
		"TryPut": func(t *rapid.T) {
			i, l := draw(t)
			ms := drawBatch(t, i)
			want, wantErr := expect(l, ms)
			n, err := l.lane.TryPut(ms...)
			if n != want || !errors.Is(err, wantErr) {
				t.Fatalf("TryPut of %d: %d, %v; want %d, %v", len(ms), n, err, want, wantErr)
			}
			if err != nil {
				refused++
			}
		},
		"PutThenCancel": func(t *rapid.T) {
			i, l := draw(t)
			ms := drawBatch(t, i)
			want, wantErr := expect(l, ms)
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			if wantErr == ringbuf.ErrFull {
				wantErr = context.Canceled
				blocked++
				go func() {
					for r.Stats().Blocked < blocked {
						runtime.Gosched()
					}
					cancel()
				}()
			}
			n, err := l.lane.Put(ctx, ms...)
			if n != want || !errors.Is(err, wantErr) {
				t.Fatalf("Put of %d: %d, %v; want %d, %v", len(ms), n, err, want, wantErr)
			}
			if errors.Is(err, ringbuf.ErrTooLarge) {
				refused++
			}
		},
		"TryLease": func(t *rapid.T) {
			_, l := draw(t)
			dst := make([]msg, rapid.SampledFrom([]int{1, 1, 2, 7, 80}).Draw(t, "len"))
			s, err := l.lane.TryLease(dst)
			switch {
			case l.leased > 0:
				if err != ringbuf.ErrLeased {
					t.Fatalf("TryLease under a lease: %v", err)
				}
			case len(l.held) == 0:
				if err != ringbuf.ErrEmpty {
					t.Fatalf("TryLease of an empty lane: %v", err)
				}
			default:
				want := l.held[:min(len(dst), len(l.held))]
				if err != nil || !slices.Equal(dst[:s.Len()], want) {
					t.Fatalf("TryLease: %v, %v; want %v", dst[:s.Len()], err, want)
				}
				l.lease, l.leased = s, s.Len()
			}
		},
		"Commit": func(t *rapid.T) {
			_, l := draw(t)
			n := rapid.IntRange(-1, l.lease.Len()+1).Draw(t, "n")
			err := l.lease.Commit(n)
			switch {
			case l.lease.Len() > 0 && (n < 0 || n > l.lease.Len()):
				if err == nil || err == ringbuf.ErrLeaseOver {
					t.Fatalf("Commit(%d) of %d: %v", n, l.lease.Len(), err)
				}
			case l.leased == 0:
				if err != ringbuf.ErrLeaseOver {
					t.Fatalf("Commit of a lease that is over: %v", err)
				}
			case err != nil:
				t.Fatal(err)
			default:
				l.held, l.leased = l.held[n:], 0
			}
		},
		"Next": func(t *rapid.T) {
			_, l := draw(t)
			n := rapid.IntRange(-1, l.lease.Len()+1).Draw(t, "n")
			dst := make([]msg, rapid.SampledFrom([]int{0, 1, 1, 1, 2, 7, 80}).Draw(t, "len"))
			ctx, cancel := context.WithCancel(context.Background())
			left := len(l.held) - n
			if done := rapid.Bool().Draw(t, "done"); done || left == 0 {
				cancel()
			}
			defer cancel()
			s, err := l.lease.Next(ctx, n, dst)
			switch {
			case l.lease.Len() > 0 && (n < 0 || n > l.lease.Len()):
				if err == nil || err == ringbuf.ErrLeaseOver {
					t.Fatalf("Next(%d) of %d: %v", n, l.lease.Len(), err)
				}
				return
			case l.leased == 0:
				if err != ringbuf.ErrLeaseOver {
					t.Fatalf("Next of a lease that is over: %v", err)
				}
				return
			}
			l.held, l.leased = l.held[n:], 0
			switch {
			case ctx.Err() != nil:
				if err != context.Canceled || s.Len() > 0 {
					t.Fatalf("Next with a ctx that is done: %d messages, %v", s.Len(), err)
				}
			case len(dst) == 0:
				if err == nil || s.Len() > 0 {
					t.Fatalf("Next into nothing: %d messages, %v", s.Len(), err)
				}
			default:
				want := l.held[:min(len(dst), len(l.held))]
				if err != nil || !slices.Equal(dst[:s.Len()], want) {
					t.Fatalf("Next: %v, %v; want %v", dst[:s.Len()], err, want)
				}
				l.lease, l.leased = s, s.Len()
			}
		},
		"Release": func(t *rapid.T) {
			_, l := draw(t)
			l.lease.Release()
			l.leased = 0
		},
		"Drain": func(t *rapid.T) {
			_, l := draw(t)
			vs, err := l.lane.Drain()
			if l.leased > 0 {
				if err != ringbuf.ErrLeased {
					t.Fatalf("Drain under a lease: %v", err)
				}
				return
			}
			if err != nil || !slices.Equal(vs, l.held) {
				t.Fatalf("Drain: %v, %v; want %v", vs, err, l.held)
			}
			l.held = nil
		},
		"Drop": func(t *rapid.T) {
			i, l := draw(t)
			if n := r.Drop(l.lane); n != len(l.held) {
				t.Fatalf("Drop: %d, want %d", n, len(l.held))
			}
			if _, err := l.lane.TryLease(make([]msg, 1)); err != ringbuf.ErrDropped {
				t.Fatalf("TryLease of a dropped lane: %v", err)
			}
			*l = modelLane{lane: r.Lane(uint64(i)), lease: l.lease}
		},
		"DropEmpty": func(t *rapid.T) {
			want := 0
			for _, l := range lanes {
				if len(l.held) == 0 {
					want++
				}
			}
			if n := r.DropEmpty(); n != want {
				t.Fatalf("DropEmpty: %d, want %d", n, want)
			}
			for i, l := range lanes {
				l.lane = r.Lane(uint64(i))
			}
		},
		"Stats": func(t *rapid.T) { // not after every step: it takes reserves back
			n, bytes := total()
			want := ringbuf.Stats{Count: n, Bytes: int64(bytes), Lanes: len(lanes), Blocked: blocked, Refused: refused}
			if got := r.Stats(); got != want {
				t.Fatalf("Stats: %+v, want %+v", got, want)
			}
		},
		"": func(t *rapid.T) {
			if _, _, err := r.Audit(); err != nil {
				t.Fatal(err)
			}
			for i, l := range lanes {
				vs, err := l.lane.Snapshot(nil)
				if err != nil || !slices.Equal(vs, l.held) || l.lane.Len() != len(l.held) {
					t.Fatalf("lane %d holds %v, %v; want %v", i, vs, err, l.held)
				}
			}
		},
	})
}
