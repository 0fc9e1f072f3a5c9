// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
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

// loneFleet is a fleet of one, for the price of the sweeper's part in it.
func loneFleet(b *testing.B) Fleet {
	start := time.Now()
	self := crdt.Replica{Name: "a", Incarnation: 1}
	v, err := fleetstate.NewVerdicts(0, fleetstate.Config{}, self, fleetstate.Roster{Number: 1, Names: []string{"a"}})
	if err != nil {
		b.Fatal(err)
	}
	s, err := fleetstate.NewStorms(fleetstate.StormConfig{}, self)
	if err != nil {
		b.Fatal(err)
	}
	return fleetstate.NewMember(func() time.Duration { return time.Since(start) }, v, s)
}

func BenchmarkLoop(b *testing.B) {
	run := func(b *testing.B, feed bool, opts ...Option) {
		g, err := New(Config{}, opts...)
		if err != nil {
			b.Fatal(err)
		}
		s, err := Open(g, SourceConfig{Name: "s"}, Limits{}, nopPort{}, func(context.Context, int) error { return nil })
		if err != nil {
			b.Fatal(err)
		}
		if err := s.ForceClosed(); err != nil { // a fleet of one begins half-open
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
	b.Run("fleet", func(b *testing.B) { run(b, false, WithFleet(loneFleet(b))) })
}
