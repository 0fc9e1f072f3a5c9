// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"math"
	"time"
)

// A forecast learns how much a key is asked for, in micro-tokens per window:
// exponentially weighted mean and variance (Finch, Incremental calculation of
// weighted mean and variance, 2009) of what was asked for in each.
type forecast struct {
	mean, variance float64
	asked          int64 // in the window that began at since
	since          time.Duration
}

const (
	minWindow = 10 * time.Millisecond
	newest    = 1. / 8 // weight of the newest window
	forgotten = 200    // windows after which nothing is left of a mean

	// One window in 3,000 of a Poisson process of jumpFrom, and fewer of a faster
	// one, is as far from its mean as jump.
	jump     = 4
	jumpFrom = 8 * micro
)

// observe closes the windows that have ended. most is what one window can be
// asked for at most: more than the whole limit is no demand that anybody can meet.
func (f *forecast) observe(now, window time.Duration, most float64) {
	took := now - f.since
	if took < window {
		return
	}
	n := int(min(took/window, forgotten))
	x := min(float64(f.asked)/float64(max(took/window, 1)), most)
	if lo, hi := min(x, f.mean), max(x, f.mean); hi > jump*lo && hi >= jumpFrom {
		f.mean, f.variance = x, x*micro // no fluctuation: something began or ended
		n = 0
	}
	for range n {
		d := x - f.mean
		f.mean += newest * d
		f.variance = (1 - newest) * (f.variance + newest*d*d)
		if n == forgotten {
			f.mean, f.variance = x, 0
			break
		}
	}
	f.asked = 0
	f.since = now - took%window
	if f.mean < micro/1000 {
		f.mean, f.variance = 0, 0
	}
}

// alpha is the confidence in the forecast: max(0.3, 1 − 0.7·σ/μ), and 0.3 when
// nothing is asked for.
func (f *forecast) alpha() float64 {
	if f.mean <= 0 {
		return 0.3
	}
	return max(0.3, 1-0.7*math.Sqrt(f.variance)/f.mean)
}
