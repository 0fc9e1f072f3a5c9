// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"runtime"
	"sync"

	"github.com/puzpuzpuz/xsync/v4"

	"github.com/stormguard-mq/stormguard/ringbuf"
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
// its budget, calls the forms that end with a context, and leases and commits.
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
			{Name: "gc_slabs", N: 5, Open: openSlabs(held)},
			{Name: "gc_pointers", N: 5, Open: openPointers(held)},
			{Name: "gc_nothing", N: 5, Open: openNothing},
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
						l, dst := r.Lane(uint64(i)), make([]*token, lease)
						for n > 0 {
							s, err := l.Lease(ctx, dst)
							if err != nil {
								return err
							}
							n -= s.Len()
							if err := s.Commit(s.Len()); err != nil {
								return err
							}
						}
						return nil
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

// A record is a message as brokers have them: key, value and three headers.
type record struct {
	seq        uint64
	key, value []byte
	headers    [3]header
}

type header struct{ name, value string }

func newRecord(seq int) record {
	return record{
		seq: uint64(seq), key: make([]byte, 16), value: make([]byte, 256), headers: [3]header{
			{"traceparent", fmt.Sprintf("00-%032x-%016x-01", seq, seq)}, {"origin", fmt.Sprint(seq)}, {"kind", "order"},
		},
	}
}

type recordCodec struct{}

func (recordCodec) Append(dst []byte, v record) []byte {
	dst = binary.AppendUvarint(dst, v.seq)
	dst = appendField(dst, v.key)
	dst = appendField(dst, v.value)
	for _, h := range v.headers {
		dst = appendField(dst, h.name)
		dst = appendField(dst, h.value)
	}
	return dst
}

func appendField[T []byte | string](dst []byte, f T) []byte {
	return append(binary.AppendUvarint(dst, uint64(len(f))), f...)
}

func (recordCodec) Decode(src []byte) (v record, err error) {
	number := func() uint64 {
		n, k := binary.Uvarint(src)
		src = src[k:]
		return n
	}
	field := func() []byte {
		n := number()
		f := src[:n]
		src = src[n:]
		return f
	}
	v.seq, v.key, v.value = number(), field(), field()
	for i := range v.headers {
		v.headers[i] = header{string(field()), string(field())}
	}
	return v, nil
}

// collect is n whole collections, from their start to the end of their sweep.
func collect(_ context.Context, n int) error {
	for range n {
		runtime.GC()
	}
	return nil
}

// openNothing is the floor: a collection while nothing is held.
func openNothing(context.Context) (Runner, error) { return Runner{Do: collect}, nil }

func openSlabs(held int) func(context.Context) (Runner, error) {
	return openHeld(held, func(cfg ringbuf.Config) (*ringbuf.Ring[record], error) {
		return ringbuf.NewSlabRing(cfg, recordCodec{})
	})
}

func openPointers(held int) func(context.Context) (Runner, error) {
	return openHeld(held, func(cfg ringbuf.Config) (*ringbuf.Ring[record], error) {
		return ringbuf.NewRing[record](cfg, nil)
	})
}

// openHeld holds records during its own turns only.
func openHeld(held int, newRing func(ringbuf.Config) (*ringbuf.Ring[record], error)) func(context.Context) (Runner, error) {
	return func(context.Context) (Runner, error) {
		var r *ringbuf.Ring[record]
		return Runner{
			Before: func(context.Context, int) (err error) {
				if r, err = newRing(ringbuf.Config{MaxCount: held, MaxBytes: int64(held) * 1024}); err != nil {
					return err
				}
				l := r.Lane(0)
				for i := range held {
					if _, err := l.TryPut(newRecord(i)); err != nil {
						return err
					}
				}
				return nil
			},
			Do: collect,
			After: func(context.Context) error {
				err := r.Close()
				r = nil
				return err
			},
		}, nil
	}
}
