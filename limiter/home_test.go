// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limiter

import (
	"slices"
	"testing"
	"time"
)

// Below the number of nodes a limit is still reached, and shared: 5/s over ten
// nodes, all of which have more waiters than they can serve.
func TestSmallLimit(t *testing.T) {
	for _, lossy := range []float64{0, .35} {
		for seed := range uint64(5) {
			f := newFleet(t, 10, Limit{Rate: 5, Burst: 5}, seed)
			f.loss = lossy
			f.pass(4 * time.Second) // the fleet meets, and the bucket fills
			began := f.now
			for range 40 {
				for i := range f.nodes {
					f.wait(i)
				}
			}
			f.pass(began + 10*time.Second)
			t.Logf("seed %d, loss %.2f: %d in 10 s, by node %v", seed, lossy, f.admitted, f.by)
			if f.admitted < 53 || f.admitted > 55 || f.over > 0 {
				t.Errorf("seed %d, loss %.2f: %d admitted, %v over; want 53 to 55 and none", seed, lossy, f.admitted, f.over)
			}
			if most := slices.Max(f.by); most > 16 {
				t.Errorf("seed %d, loss %.2f: a node got %d, above three times its 5.4: %v", seed, lossy, most, f.by)
			}
		}
	}
}
