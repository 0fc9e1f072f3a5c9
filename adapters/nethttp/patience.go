// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"slices"
	"sync/atomic"
	"time"
)

// This is the rule for a failed request whose client had left. docs/http.md explains it.
const (
	// latest is how many of the latest successes give the normal time, which 19 in 20 of them did
	// not exceed. Before normalAfter successes it is not known.
	latest      = 256
	normalAfter = 20

	// leastPatience is how long a pause of this process may delay any request.
	leastPatience = 100 * time.Millisecond

	// blindPatience stands for the normal time while that is not known. A client's timeout is
	// rarely shorter. A person often leaves earlier.
	blindPatience = 500 * time.Millisecond

	// abandonAfter is how many clients in a row, without a success between them, may wait for the normal
	// time in vain. The next such client counts.
	abandonAfter = 5
)

// normal records how long the latest successes took. All methods are safe for concurrent use; none
// takes a lock.
type normal struct {
	n    atomic.Uint64 // successes so far
	took [latest]atomic.Int64
	left atomic.Int64 // clients in a row that waited for the normal time and left
}

// succeeded records a success that took d.
func (t *normal) succeeded(d time.Duration) {
	t.took[(t.n.Add(1)-1)%latest].Store(int64(d))
	if t.left.Load() != 0 { // most successes only read it
		t.left.Store(0)
	}
}

// abandoned tells whether a failed request whose client left after d is the
// dependency's failure.
func (t *normal) abandoned(d time.Duration) bool {
	usual, known := t.usual()
	inVain := max(usual, leastPatience)
	if !known {
		inVain = blindPatience
	}
	switch {
	case d >= inVain && t.left.Add(1) > abandonAfter, d >= longestPatience:
		return true
	default:
		return known && d >= max(2*usual, leastPatience)
	}
}

// usual is the time that 19 in 20 of the latest successes did not exceed.
func (t *normal) usual() (d time.Duration, known bool) {
	n := min(t.n.Load(), latest)
	if n < normalAfter {
		return 0, false
	}
	all := make([]int64, n)
	for i := range all {
		all[i] = t.took[i].Load()
	}
	slices.Sort(all)
	return time.Duration(all[n*19/20]), true
}
