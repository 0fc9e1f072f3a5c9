// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package storm

import (
	"math"
	"time"
)

// windowBuckets is the resolution of a sliding window: its length is cut into so many
// buckets, and one more is being filled. A bucket is at least one millisecond long, by the
// lower bound of dlq.StormConfig.Window.
const windowBuckets = 60

// window counts outcomes over a sliding time. An outcome counts for at least the window's
// length and at most one bucket (1/60) longer.
//
// Adding costs one comparison and two additions while the bucket lasts.
// Sliding by k buckets costs min(k, 61) subtractions, whatever they hold.
type window struct {
	width time.Duration // of one bucket
	end   time.Duration // first instant after the bucket being filled
	at    int           // index of the bucket being filled
	sum   tally         // of all buckets in ring
	ring  [windowBuckets + 1]bucket
}

// bucket has saturating counts: they do not wrap. sum only has counts that a bucket has taken.
type bucket struct{ failed, ok, diverted uint32 }

type tally struct{ failed, ok, diverted uint64 }

// outcomes returns failed plus ok; diverted deliveries are not outcomes.
func (t tally) outcomes() uint64 { return t.failed + t.ok }

func newWindow(length time.Duration) window {
	width := length / windowBuckets
	return window{width: width, end: width}
}

// slide moves the window to now. An instant before the current bucket counts as in it.
func (w *window) slide(now time.Duration) {
	if now < w.end {
		return
	}
	steps := (now-w.end)/w.width + 1 // a number of buckets, not a time
	w.end += steps * w.width         //nolint:durationcheck // steps is a number
	if steps > windowBuckets {
		w.ring = [windowBuckets + 1]bucket{}
		w.sum = tally{}
		return
	}
	for range int(steps) {
		if w.at++; w.at == len(w.ring) {
			w.at = 0
		}
		b := &w.ring[w.at]
		w.sum.failed -= uint64(b.failed)
		w.sum.ok -= uint64(b.ok)
		w.sum.diverted -= uint64(b.diverted)
		*b = bucket{}
	}
}

// restart empties the window and moves it to other's position, so that both slide at the same
// instants from now on.
func (w *window) restart(other *window) { *w = window{width: other.width, end: other.end} }

func (w *window) addFailed(n uint64)   { fill(&w.ring[w.at].failed, &w.sum.failed, n) }
func (w *window) addOK(n uint64)       { fill(&w.ring[w.at].ok, &w.sum.ok, n) }
func (w *window) addDiverted(n uint64) { fill(&w.ring[w.at].diverted, &w.sum.diverted, n) }

func fill(b *uint32, sum *uint64, n uint64) {
	n = min(n, math.MaxUint32-uint64(*b))
	*b += uint32(n)
	*sum += n
}
