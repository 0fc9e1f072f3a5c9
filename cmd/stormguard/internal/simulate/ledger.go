// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"math"
	"time"
)

const (
	// bin is the resolution of windows.
	bin = 10 * time.Millisecond
	// window is the span over which an error is measured.
	window = 10 * time.Second
)

// A bucket is one ideal token bucket. It fills by true time.
type bucket struct {
	rate, burst float64 // tokens per second, tokens
	level       float64
	at          time.Duration
}

func newBucket(rate, burst float64) bucket { return bucket{rate: rate, burst: burst, level: burst} }

// flow fills the bucket until now.
func (b *bucket) flow(now time.Duration) {
	b.level = min(b.burst, b.level+b.rate*(now-b.at).Seconds())
	b.at = now
}

// A ledger judges one key's limit from outside. It counts the requests and the admissions
// of the whole fleet, in the order of true time. It knows nothing of limiters.
type ledger struct {
	ideal bucket  // one bucket with the same demand
	bound bucket  // pays for each admission, and may fall below 0
	over  float64 // the most tokens that bound was below 0

	asked, admitted []int // requests and admissions of the fleet, by bin
	wanted          []int // admissions of the ideal bucket, by bin
	byNode          []int // admissions of the fleet, by node
}

func newLedger(rate, burst float64, length time.Duration, nodes int) *ledger {
	n := int(length/bin) + 2
	return &ledger{
		ideal: newBucket(rate, burst), bound: newBucket(rate, burst),
		asked: make([]int, n), admitted: make([]int, n), wanted: make([]int, n), byNode: make([]int, nodes),
	}
}

// limit changes the limit from now on.
func (l *ledger) limit(now time.Duration, rate, burst float64) {
	for _, b := range []*bucket{&l.ideal, &l.bound} {
		b.flow(now)
		b.rate, b.burst = rate, burst
		b.level = min(b.level, burst)
	}
}

// reset fills the ideal bucket only. So the burst that the fleet admits for a reset is over
// the bound.
func (l *ledger) reset(now time.Duration) {
	l.ideal.flow(now)
	l.ideal.level = l.ideal.burst
}

// ask counts one request.
func (l *ledger) ask(now time.Duration) {
	l.asked[now/bin]++
	l.ideal.flow(now)
	if l.ideal.level >= 1 {
		l.ideal.level--
		l.wanted[now/bin]++
	}
}

// admit counts one admission.
func (l *ledger) admit(now time.Duration, node int) {
	l.admitted[now/bin]++
	l.byNode[node]++
	l.bound.flow(now)
	l.bound.level--
	l.over = max(l.over, -l.bound.level)
}

// worst is the largest error of any window in [from, to): the fleet's admissions compared
// with the ideal bucket's, in percent with its sign. A span shorter than a window is one
// window.
func (l *ledger) worst(from, to time.Duration) (percent float64) {
	width := int(min(window, to-from) / bin)
	first, last := int(from/bin), int(to/bin)
	var admitted, wanted int
	for i := first; i < last; i++ {
		admitted += l.admitted[i]
		wanted += l.wanted[i]
		if i-first >= width {
			admitted -= l.admitted[i-width]
			wanted -= l.wanted[i-width]
		}
		if i-first >= width-1 && wanted > 0 {
			if e := 100 * float64(admitted-wanted) / float64(wanted); math.Abs(e) > math.Abs(percent) {
				percent = e
			}
		}
	}
	return percent
}

// windows returns the fewest and the most admissions of any window in [from, to).
func (l *ledger) windows(from, to time.Duration) (fewest, most int) {
	width := int(window / bin)
	first, last := int(from/bin), int(to/bin)
	sum := 0
	fewest = math.MaxInt
	for i := first; i < last; i++ {
		sum += l.admitted[i]
		if i-first >= width {
			sum -= l.admitted[i-width]
		}
		if i-first >= width-1 {
			fewest, most = min(fewest, sum), max(most, sum)
		}
	}
	return fewest, most
}

func total(bins []int) (n int) {
	for _, b := range bins {
		n += b
	}
	return n
}
