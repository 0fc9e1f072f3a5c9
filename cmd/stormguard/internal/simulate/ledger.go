// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"math"
	"time"
)

const (
	// bin is the resolution in which windows are looked at.
	bin = 10 * time.Millisecond
	// window is what an error is measured over.
	window = 10 * time.Second
)

// A bucket is one ideal token bucket, fed by true time.
type bucket struct {
	rate, burst float64 // tokens per second, tokens
	level       float64
	at          time.Duration
}

func newBucket(rate, burst float64) bucket { return bucket{rate: rate, burst: burst, level: burst} }

// flow lets time pass until now.
func (b *bucket) flow(now time.Duration) {
	b.level = min(b.burst, b.level+b.rate*(now-b.at).Seconds())
	b.at = now
}

// A ledger judges one key's limit from outside: what the whole fleet was asked
// for and what it admitted, in the order of true time. It knows nothing of
// limiters.
type ledger struct {
	ideal bucket // what one bucket would admit of the same demand
	bound bucket // what was admitted, taken out whether it is there or not
	over  float64

	asked, admitted []int // by bin
	wanted          []int // what the ideal bucket admitted
	byNode          []int // admitted
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

// reset fills what is ideal; what a real fleet admits for it is over the bound.
func (l *ledger) reset(now time.Duration) {
	l.ideal.flow(now)
	l.ideal.level = l.ideal.burst
}

// ask books one request.
func (l *ledger) ask(now time.Duration) {
	l.asked[now/bin]++
	l.ideal.flow(now)
	if l.ideal.level >= 1 {
		l.ideal.level--
		l.wanted[now/bin]++
	}
}

// admit books one admission.
func (l *ledger) admit(now time.Duration, node int) {
	l.admitted[now/bin]++
	l.byNode[node]++
	l.bound.flow(now)
	l.bound.level--
	l.over = max(l.over, -l.bound.level)
}

// worst is the largest error of any window in [from, to), as admitted against
// ideal, in percent with its sign. A span shorter than a window is one window.
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

// windows are the fewest and the most admissions in any window in [from, to).
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
