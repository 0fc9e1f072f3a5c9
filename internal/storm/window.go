// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package storm

import (
	"math"
	"time"
)

// windowBuckets is the resolution of a sliding window: its length is cut into
// this many buckets, and one more is being filled. dlq.StormConfig.Window has a lower
// bound of one millisecond each.
const windowBuckets = 60

// window counts outcomes over a sliding stretch of time. An outcome counts
// for at least the window's length and at most one bucket (1/60) longer.
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

// bucket saturates instead of wrapping; the counts in sum are those it took.
type bucket struct{ failed, ok, diverted uint32 }

type tally struct{ failed, ok, diverted uint64 }

// outcomes leaves the diverted out: they are not outcomes.
func (t tally) outcomes() uint64 { return t.failed + t.ok }

func newWindow(length time.Duration) window {
	width := length / windowBuckets
	return window{width: width, end: width}
}

// slide brings the window to now. An instant before the current bucket is
// taken as being in it.
func (w *window) slide(now time.Duration) {
	if now < w.end {
		return
	}
	steps := (now-w.end)/w.width + 1 // a number
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

// restart empties the window and puts it where other is, so that both slide at
// the same instants from here on.
func (w *window) restart(other *window) { *w = window{width: other.width, end: other.end} }

func (w *window) addFailed(n uint64)   { fill(&w.ring[w.at].failed, &w.sum.failed, n) }
func (w *window) addOK(n uint64)       { fill(&w.ring[w.at].ok, &w.sum.ok, n) }
func (w *window) addDiverted(n uint64) { fill(&w.ring[w.at].diverted, &w.sum.diverted, n) }

func fill(b *uint32, sum *uint64, n uint64) {
	n = min(n, math.MaxUint32-uint64(*b))
	*b += uint32(n)
	*sum += n
}
