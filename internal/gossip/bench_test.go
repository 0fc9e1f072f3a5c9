// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip_test

import "testing"

// BenchmarkRound is a change at one node of a fleet, and everything that follows
// from it until the next, 2 ms later: packets to all peers, and their answers.
func BenchmarkRound(b *testing.B) {
	for _, nodes := range []int{3, 50} {
		b.Run(map[int]string{3: "3nodes", 50: "50nodes"}[nodes], func(b *testing.B) {
			f := newFleet(b, 1, lan)
			f.start(nodes)
			f.Run(3000 * ms) // by then all have met
			before := f.Net.Stats().Delivered
			b.ReportAllocs()
			for b.Loop() {
				f.add(0)
				f.Run(f.Now() + 2*ms)
			}
			n := float64(f.Net.Stats().Delivered - before)
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/n, "ns/packet")
			b.ReportMetric(n/float64(b.N), "packets/op")
		})
	}
}
