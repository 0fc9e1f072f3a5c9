// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package simnet

import (
	"container/heap"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/gossip"
)

// echo answers every packet.
type echo struct{ wake time.Duration }

func (e *echo) Step(_ time.Duration, ev gossip.Event, actions []gossip.Action) []gossip.Action {
	e.wake = gossip.Never
	if ev.Kind != gossip.Packet {
		return actions
	}
	return append(actions, gossip.Action{Kind: gossip.Send, Addr: ev.Addr, Packet: ev.Packet})
}

func (e *echo) Wake() time.Duration { return e.wake }

// echoes returns a net of nodes with packets going to and fro.
func echoes(nodes, packets, size int) *Net {
	net := New(Config{Link: Link{Base: 500 * us, Jitter: 500 * us}})
	for range nodes {
		net.Add(func(int, *rand.Rand) Process { return &echo{wake: gossip.Never} })
	}
	body := make([]byte, size)
	for i := range packets {
		net.send(i%nodes, Addr((i+1+i/nodes)%nodes), body)
	}
	return net
}

func TestDeliveryAllocatesNothing(t *testing.T) {
	net := echoes(10, 200, 100)
	net.Run(100 * ms)
	if n := testing.AllocsPerRun(10, func() { net.Run(net.Now() + 10*ms) }); n > 0 {
		t.Errorf("%v allocations in 2000 deliveries", n)
	}
}

func BenchmarkDelivery(b *testing.B) {
	for _, c := range []struct {
		name                 string
		nodes, packets, size int
	}{
		{"3nodes/60B", 3, 12, 60},
		{"50nodes/100B", 50, 2500, 100},
		{"50nodes/1400B", 50, 2500, 1400},
	} {
		b.Run(c.name, func(b *testing.B) {
			net := echoes(c.nodes, c.packets, c.size)
			net.Run(10 * ms)
			b.ReportAllocs()
			b.ResetTimer()
			begin := net.Stats().Delivered
			for net.Stats().Delivered < begin+uint64(b.N) {
				net.step(never - 1)
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "deliveries/s")
		})
	}
}

// BenchmarkHeaps compares the two heaps alone: the typed one, and the standard
// library's with events that are interfaces.
func BenchmarkHeaps(b *testing.B) {
	const pending = 2500
	b.Run("typed", func(b *testing.B) {
		rng := rand.New(rand.NewPCG(1, 1))
		var h flights
		for i := range pending {
			h.push(flight{at: time.Duration(rng.Int64N(1e6)), seq: uint64(i)})
		}
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			f := h.pop()
			f.at += time.Duration(rng.Int64N(1e6))
			f.seq = uint64(pending + i)
			h.push(f)
		}
	})
	b.Run("container", func(b *testing.B) {
		rng := rand.New(rand.NewPCG(1, 1))
		var h boxed
		for i := range pending {
			heap.Push(&h, event(&flight{at: time.Duration(rng.Int64N(1e6)), seq: uint64(i)}))
		}
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			old := heap.Pop(&h).(event)
			heap.Push(&h, event(&flight{at: old.when() + time.Duration(rng.Int64N(1e6)), seq: uint64(pending + i)}))
		}
	})
}

type event interface {
	when() time.Duration
	number() uint64
}

func (f *flight) when() time.Duration { return f.at }
func (f *flight) number() uint64      { return f.seq }

type boxed []event //nolint:recvcheck // heap.Interface changes its length through a pointer

func (h boxed) Len() int { return len(h) }
func (h boxed) Less(i, j int) bool {
	return h[i].when() < h[j].when() || h[i].when() == h[j].when() && h[i].number() < h[j].number()
}
func (h boxed) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *boxed) Push(x any)   { *h = append(*h, x.(event)) }
func (h *boxed) Pop() any {
	s := *h
	x := s[len(s)-1]
	*h = s[:len(s)-1]
	return x
}
