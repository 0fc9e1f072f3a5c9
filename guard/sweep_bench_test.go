// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"testing"
	"time"
)

// A look of the storm detector at keys whose heads have all failed once: the same for
// each number of keys. When it looked at them all, 300,000 keys took some 800,000 times as
// long as one:
//
//	go test ./guard -run '^$' -bench Sweep
func BenchmarkSweep(b *testing.B) {
	for _, keys := range []int{1, 1000, 300_000} {
		b.Run(fmt.Sprint(keys), func(b *testing.B) {
			s := failedHeads(b, OrderKey, keys)
			for b.Loop() {
				s.now += stormEvery
				s.sweep(s.now, nil)
			}
		})
	}
}

// A message that goes the machine's whole way; in turns of 64.
func BenchmarkMachine(b *testing.B) {
	for _, order := range []Order{OrderSource, OrderKey, OrderNone} {
		b.Run(order.String(), func(b *testing.B) {
			s := newSim(b, Policy{Order: order, Workers: 1})
			n := 0
			b.ReportAllocs()
			for b.Loop() {
				for range 64 {
					s.put(s.now, n, uint64(n%50), 1)
					n++
					s.now += time.Microsecond
				}
				for range 64 {
					st := s.next(s.now)
					s.settled(s.done(s.now, st.it, result{}).it, nil)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(n), "ns/message")
		})
	}
}

// failedHeads is a machine with a message for each key, or so many messages where there
// are no keys, all of which have failed and wait.
func failedHeads(tb interface{ Fatalf(string, ...any) }, order Order, n int) *sim {
	s := newSim(tb, Policy{Order: order, Workers: 1, Window: maxWindow, NoBreaker: true, Retry: Retry{Base: time.Hour, Max: time.Hour}})
	for m := range n {
		s.put(s.now, m, uint64(m), 1)
	}
	for range n {
		st := s.next(s.now)
		if st.kind != stepHandle {
			tb.Fatalf("nothing to handle: %+v", s.account())
		}
		s.finish(st.it, errDown)
	}
	return s
}
