// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"testing"
)

type nopPort struct{}

func (nopPort) Lane(int) uint64            { return 0 }
func (nopPort) Size(int) int               { return 1 }
func (nopPort) Meta(int) Meta              { return Meta{} }
func (nopPort) Ack(int) error              { return nil }
func (nopPort) Extend([]int)               {}
func (nopPort) Return([]int, Reason) error { return nil }
func (nopPort) Demand(int)                 {}
func (nopPort) Flush() error               { return nil }

func BenchmarkLoop(b *testing.B) {
	run := func(b *testing.B, feed bool) {
		g, err := New(Config{})
		if err != nil {
			b.Fatal(err)
		}
		s, err := Open(g, SourceConfig{Name: "s"}, Limits{}, nopPort{}, func(context.Context, int) error { return nil })
		if err != nil {
			b.Fatal(err)
		}
		b.ReportAllocs()
		b.ResetTimer()
		if feed {
			f := s.Feed()
			go func() {
				for i := range b.N {
					_, _ = f.Put(context.Background(), i)
				}
				f.Close()
			}()
			_ = s.RunFeed(context.Background())
		} else {
			in := make(chan int, 4096)
			go func() {
				for i := range b.N {
					in <- i
				}
				close(in)
			}()
			_ = s.Run(context.Background(), in)
		}
		b.StopTimer()
		if a := s.Account(); a.Acked != uint64(b.N) {
			b.Fatal(a)
		}
		_, _ = g.Close(context.Background())
	}
	b.Run("bare", func(b *testing.B) {
		in := make(chan int, 4096)
		go func() {
			for i := range b.N {
				in <- i
			}
			close(in)
		}()
		for range in {
		}
	})
	b.Run("channel", func(b *testing.B) { run(b, false) })
	b.Run("feed", func(b *testing.B) { run(b, true) })
}
