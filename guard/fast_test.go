// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"testing"
)

// The closed path alone: what a message costs besides being received.
func BenchmarkClosedPath(b *testing.B) {
	g, err := New(Config{})
	if err != nil {
		b.Fatal(err)
	}
	s, err := Open(g, SourceConfig{Name: "s"}, Limits{}, nopPort{}, func(context.Context, int) error { return nil })
	if err != nil {
		b.Fatal(err)
	}
	s.ctx = context.Background()
	l := &loop[int]{s: s, ctx: s.ctx}
	b.ReportAllocs()
	for i := range b.N {
		l.fast(i, false)
	}
	s.rest()
	b.StopTimer()
	_, _ = g.Close(context.Background())
}

func BenchmarkFunc(b *testing.B) {
	g, err := New(Config{})
	if err != nil {
		b.Fatal(err)
	}
	f, err := Protect(g, SourceConfig{Name: "f"}, func(context.Context, int) error { return nil })
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	ctx := context.Background()
	b.Run("one", func(b *testing.B) {
		b.ReportAllocs()
		for i := range b.N {
			_ = f.Do(ctx, i)
		}
	})
	b.Run("parallel", func(b *testing.B) {
		b.ReportAllocs()
		b.SetParallelism(4)
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				_ = f.Do(ctx, 1)
			}
		})
	})
	_, _ = g.Close(ctx)
}

// Attempt and the closed path that it looks at cost no allocation but the chunk's.
func TestAttemptAllocates(t *testing.T) {
	if RaceEnabled {
		t.Skip("the race detector allocates; run without -race")
	}
	g := Must(New(Config{}))
	seen := 0
	s := Must(Open(g, SourceConfig{Name: "s"}, Limits{}, nopPort{}, func(ctx context.Context, _ int) error {
		seen += Attempt(ctx)
		return nil
	}))
	s.ctx = context.Background()
	l := &loop[int]{s: s, ctx: s.ctx}
	n := testing.AllocsPerRun(callsPerChunk*100, func() { l.fast(1, false) })
	if n > 0 || seen != callsPerChunk*100+1 {
		t.Errorf("%v allocations in a call, %d attempts", n, seen)
	}
	s.rest()
	_, _ = g.Close(context.Background())
}
