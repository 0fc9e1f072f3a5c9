// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"math"
	"time"
)

// buckets is the number of buckets, of [breaker.Config.Bucket] each. The window covers
// between 59 and 60 sixtieths of Config.Window.
const buckets = 60

type bucket struct{ ok, bad uint32 }

// window is a sliding count of successes and failures, guarded by Breaker.mu. roll costs
// one step for each bucket that expires, at most 60.
type window struct {
	width   time.Duration
	edge    time.Duration // end of the current bucket, exclusive
	cur     int
	ok, bad uint64 // sums over b
	b       [buckets]bucket
}

func (w *window) reset(now time.Duration) {
	*w = window{width: w.width, edge: later(now, w.width)}
}

// roll moves to the bucket of now and reports whether it crossed an edge. An instant before
// the current bucket counts in the current bucket: callers read their clocks before they
// wait for the lock.
func (w *window) roll(now time.Duration) bool {
	if now < w.edge {
		return false
	}
	steps := int64((now-w.edge)/w.width) + 1
	w.edge = later(w.edge, time.Duration(steps)*w.width)
	if steps >= buckets {
		w.cur, w.ok, w.bad = 0, 0, 0
		clear(w.b[:])
		return true
	}
	for range steps {
		w.cur = (w.cur + 1) % buckets
		old := &w.b[w.cur]
		w.ok -= uint64(old.ok)
		w.bad -= uint64(old.bad)
		*old = bucket{}
	}
	return true
}

// succeeded adds n successes, read at an edge (crossed) or inside a bucket. Successes read
// at an edge happened before the edge.
func (w *window) succeeded(n uint64, crossed bool) {
	i := w.cur
	if crossed {
		i = (i + buckets - 1) % buckets
	}
	add := min(n, uint64(math.MaxUint32-w.b[i].ok))
	w.b[i].ok += uint32(add)
	w.ok += add
}

func (w *window) failed() {
	if w.b[w.cur].bad < math.MaxUint32 {
		w.b[w.cur].bad++
		w.bad++
	}
}
