// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"runtime"
	"sync"

	"github.com/puzpuzpuz/xsync/v4"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

const (
	ringCap   = 4096 // messages, on all sides; the eight lanes or channels share it
	ringBatch = 64
	pairs     = 8
)

var ring = newRing(1 << 20)

// newRing is the memory hold against channels: one producer and one consumer
// (spsc), and eight of each. An operation is one message, a pointer, from its
// producer to its consumer. Our side always counts messages and bytes against
// its budget, calls the forms that end with a context, and leases and commits
// (Next does both).
//
// held is the number of messages in the garbage collection cases.
func newRing(held int) Group {
	return Group{
		Name:  "ring",
		About: "ringbuf against buffered channels, and what a million held messages cost the collector",
		Cases: []Case{
			{Name: "spsc_channel", Open: openChannels(1, 1)},
			{Name: "spsc_ring_batch64", Open: openLanes(1, ringBatch, ringBatch, sized)},
			{Name: "spsc_ring_single", Open: openLanes(1, 1, 1, sized)},
			{Name: "spsc_ring_put1_lease64", Open: openLanes(1, 1, ringBatch, sized)},
			{Name: "spsc_channel_of_64", Open: openSlices},
			{Name: "spsc_xsync", Open: openXsyncSPSC},
			{Name: "8x8_channel", Open: openChannels(pairs, 1)},
			{Name: "8x8_channels8", Open: openChannels(pairs, pairs)},
			{Name: "8x8_lanes8_batch64", Open: openLanes(pairs, ringBatch, ringBatch, sized)},
			{Name: "8x8_lanes8_batch64_count", Open: openLanes(pairs, ringBatch, ringBatch, nil)},
			{Name: "spsc_ring_batch64_count", Open: openLanes(1, ringBatch, ringBatch, nil)},
			{Name: "8x8_xsync_mpmc", Open: openXsyncMPMC},
			{Name: "gc_slabs", N: 21, Open: openHeld("slabs", held)},
			{Name: "gc_pointers", N: 5, Open: openHeld("pointers", held)},
			{Name: "gc_nothing", N: 21, Open: openHeld("nothing", held)},
		},
		Ratios: []Ratio{
			{Name: "spsc_batch64", Kind: Throughput, Ours: "spsc_ring_batch64", Theirs: "spsc_channel"},
			{Name: "lanes8_batch64", Kind: Throughput, Ours: "8x8_lanes8_batch64", Theirs: "8x8_channel"},
			{Name: "spsc_batch64_count", Kind: Throughput, Ours: "spsc_ring_batch64_count", Theirs: "spsc_channel"},
			{Name: "lanes8_batch64_count", Kind: Throughput, Ours: "8x8_lanes8_batch64_count", Theirs: "8x8_channel"},
			{Name: "spsc_single", Kind: Throughput, Ours: "spsc_ring_single", Theirs: "spsc_channel"},
			{Name: "spsc_put1_lease64", Kind: Throughput, Ours: "spsc_ring_put1_lease64", Theirs: "spsc_channel"},
			{Name: "lanes8_batch64_channels8", Kind: Throughput, Ours: "8x8_lanes8_batch64", Theirs: "8x8_channels8"},
			{Name: "channel_of_64", Kind: Throughput, Ours: "spsc_channel_of_64", Theirs: "spsc_channel"},
			{Name: "xsync_spsc", Kind: Throughput, Ours: "spsc_xsync", Theirs: "spsc_channel"},
			{Name: "xsync_mpmc", Kind: Throughput, Ours: "8x8_xsync_mpmc", Theirs: "8x8_channel"},
			{Name: "gc_ms_1m_held", Kind: Millis, Ours: "gc_slabs"},
			{Name: "gc_ms_1m_held_pointers", Kind: Millis, Ours: "gc_pointers"},
			{Name: "gc_ms_nothing_held", Kind: Millis, Ours: "gc_nothing"},
		},
	}
}

// sized is asked for each message's bytes.
func sized(*token) int { return 256 }

// A token is what the rings and channels carry: 32 bytes by pointer.
type token struct{ _ [4]uint64 }

// duel runs so many producers and consumers, which share n messages evenly.
func duel(n, each int, produce, consume func(i, n int) error) error {
	var wg sync.WaitGroup
	errs := make(chan error, 2*each)
	for i := range each {
		wg.Go(func() { errs <- produce(i, share(n, each, i)) })
		wg.Go(func() { errs <- consume(i, share(n, each, i)) })
	}
	wg.Wait()
	for range 2 * each {
		if err := <-errs; err != nil {
			return err
		}
	}
	return nil
}

// openChannels spreads pairs of producers and consumers over channels. No
// select on a context: what a channel can do at its best.
func openChannels(pairs, channels int) func(context.Context) (Runner, error) {
	return func(context.Context) (Runner, error) {
		all := make([]chan *token, channels)
		for i := range all {
			all[i] = make(chan *token, ringCap/channels)
		}
		m := new(token)
		return Runner{Do: func(_ context.Context, n int) error {
			return duel(n, pairs,
				func(i, n int) error {
					c := all[i%channels]
					for range n {
						c <- m
					}
					return nil
				},
				func(i, n int) error {
					c := all[i%channels]
					for range n {
						<-c
					}
					return nil
				})
		}}, nil
	}
}

// openLanes gives each pair a lane of its own, in one ring with one budget. put
// and lease are how many messages a call may have.
func openLanes(pairs, put, lease int, size ringbuf.Sizer[*token]) func(context.Context) (Runner, error) {
	return func(ctx context.Context) (Runner, error) {
		r, err := ringbuf.NewRing(ringbuf.Config{MaxCount: ringCap}, size)
		if err != nil {
			return Runner{}, err
		}
		ctx, cancel := context.WithCancel(ctx) // one that could end
		m := new(token)
		return Runner{
			Do: func(_ context.Context, n int) error {
				return duel(n, pairs,
					func(i, n int) error {
						l, vs := r.Lane(uint64(i)), make([]*token, put)
						for k := range vs {
							vs[k] = m
						}
						for ; n > 0; n -= put {
							if _, err := l.Put(ctx, vs[:min(put, n)]...); err != nil {
								return err
							}
						}
						return nil
					},
					func(i, n int) error {
						if n == 0 {
							return nil
						}
						l, dst := r.Lane(uint64(i)), make([]*token, lease)
						s, err := l.Lease(ctx, dst)
						for err == nil && n > s.Len() {
							n -= s.Len()
							s, err = s.Next(ctx, s.Len(), dst)
						}
						if err != nil {
							return err
						}
						return s.Commit(s.Len())
					})
			},
			Close: func() error { cancel(); return r.Close() },
		}, nil
	}
}

// openSlices is the rival that batches too: a channel of slices of 64, which
// come back through another to be used again. It bounds, acks and cancels nothing.
func openSlices(context.Context) (Runner, error) {
	full, empty := make(chan []*token, ringCap/ringBatch), make(chan []*token, ringCap/ringBatch+2)
	for range cap(empty) {
		empty <- make([]*token, ringBatch)
	}
	m := new(token)
	return Runner{Do: func(_ context.Context, n int) error {
		return duel(n, 1,
			func(_, n int) error {
				for ; n > 0; n -= ringBatch {
					s := (<-empty)[:min(ringBatch, n)]
					for i := range s {
						s[i] = m
					}
					full <- s
				}
				return nil
			},
			func(_, n int) error {
				for n > 0 {
					s := <-full
					n -= len(s)
					clear(s)
					empty <- s[:ringBatch]
				}
				return nil
			})
	}}, nil
}

func openXsyncSPSC(context.Context) (Runner, error) {
	q := xsync.NewSPSCQueue[*token](ringCap)
	return openXsync(1, q.TryEnqueue, q.TryDequeue), nil
}

func openXsyncMPMC(context.Context) (Runner, error) {
	q := xsync.NewMPMCQueue[*token](ringCap)
	return openXsync(pairs, q.TryEnqueue, q.TryDequeue), nil
}

// openXsync waits as xsync's documentation does: it has no blocking form.
func openXsync(pairs int, put func(*token) bool, take func() (*token, bool)) Runner {
	m := new(token)
	return Runner{Do: func(_ context.Context, n int) error {
		return duel(n, pairs,
			func(_, n int) error {
				for range n {
					for !put(m) {
						runtime.Gosched()
					}
				}
				return nil
			},
			func(_, n int) error {
				for range n {
					for _, ok := take(); !ok; _, ok = take() {
						runtime.Gosched()
					}
				}
				return nil
			})
	}}
}
