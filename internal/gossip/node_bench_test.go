// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip_test

import (
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/gossip"
)

// BenchmarkNodeDelay is the time from a change at one of three nodes to its
// arrival at another, each version at each peer, over real sockets on the
// loopback, while every node changes 10,000 times a second. An op is a change.
func BenchmarkNodeDelay(b *testing.B) {
	for _, tt := range []struct {
		name, network string
		opts          []gossip.Option
	}{
		{"udp", gossip.UDP, nil},
		{"udp-sealed", gossip.UDP, []gossip.Option{gossip.WithKeyring(ring(b, 1))}},
		{"tcp", gossip.TCP, nil},
		{"tcp-sealed", gossip.TCP, []gossip.Option{gossip.WithKeyring(ring(b, 1))}},
	} {
		b.Run(tt.name, func(b *testing.B) {
			nodes := []*live{begin(b, tt.network, "a", nil, nil, tt.opts...)}
			for _, name := range []string{"b", "c"} {
				nodes = append(nodes, begin(b, tt.network, name, nodes[0].seed(), nil, tt.opts...))
			}
			eventually(b, 20*time.Second, "all hear each other", func() bool { return whole(nodes...) })
			const perSecond = 10_000
			var mu sync.Mutex
			born := map[string][]time.Time{}
			var delays []time.Duration
			for _, n := range nodes {
				n.section.mu.Lock()
				n.section.board.merged = func(key string, was, is uint64) {
					now := time.Now()
					mu.Lock()
					defer mu.Unlock()
					for v := was; v < is; v++ {
						delays = append(delays, now.Sub(born[key][v]))
					}
				}
				n.section.mu.Unlock()
			}
			before := nodes[0].Stats()
			b.ResetTimer()
			var wg sync.WaitGroup
			for _, n := range nodes {
				wg.Go(func() {
					begin := time.Now()
					for done := 0; done < b.N; {
						due := min(int(time.Since(begin)*perSecond/time.Second)+1, b.N)
						for ; done < due; done++ {
							mu.Lock()
							born[n.self.String()] = append(born[n.self.String()], time.Now())
							mu.Unlock()
							n.section.add()
						}
						time.Sleep(50 * time.Microsecond)
					}
				})
			}
			wg.Wait()
			elapsed := b.Elapsed()
			b.StopTimer()
			eventually(b, 10*time.Second, "equal", func() bool { return agreed(nodes...) })
			after := nodes[0].Stats()
			mu.Lock()
			defer mu.Unlock()
			slices.Sort(delays)
			at := func(q float64) float64 {
				return float64(delays[int(q*float64(len(delays)-1))].Microseconds()) / 1000
			}
			b.ReportMetric(at(0.5), "p50-ms")
			b.ReportMetric(at(0.99), "p99-ms")
			b.ReportMetric(at(0.999), "p99.9-ms")
			b.ReportMetric(float64(after.PacketsOut-before.PacketsOut)/elapsed.Seconds(), "packets/s")
		})
	}
}
