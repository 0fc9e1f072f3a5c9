// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"math"
	"time"
)

// A forecast learns the demand for a key, in micro-tokens per window. It keeps the
// exponentially weighted mean and variance of the windows (Finch, Incremental calculation
// of weighted mean and variance, 2009).
type forecast struct {
	mean, variance float64
	asked          int64         // demand in the present window
	since          time.Duration // start of the present window
}

const (
	minWindow    = 10 * time.Millisecond
	newestWeight = 1. / 8 // weight of the newest window
	forgotten    = 200    // windows after which nothing is left of a mean

	// A window counts as a jump if it differs from the mean by more than the factor jump, and
	// the larger of both is at least jumpFrom. In a Poisson process with mean jumpFrom one
	// window in 3,000 does so by chance, with a larger mean fewer.
	jump     = 4
	jumpFrom = 8 * micro
)

// observe closes the windows that have ended. most bounds the demand of one window: nobody
// can meet a demand above the whole limit.
func (f *forecast) observe(now, window time.Duration, most float64) {
	took := now - f.since
	if took < window {
		return
	}
	n := int(min(took/window, forgotten))
	x := min(float64(f.asked)/float64(max(took/window, 1)), most)
	if lo, hi := min(x, f.mean), max(x, f.mean); hi > jump*lo && hi >= jumpFrom {
		f.mean, f.variance = x, x*micro // no fluctuation: demand began or ended
		n = 0
	}
	for range n {
		d := x - f.mean
		f.mean += newestWeight * d
		f.variance = (1 - newestWeight) * (f.variance + newestWeight*d*d)
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

// alpha is the confidence in the forecast: max(0.3, 1 − 0.7·σ/μ), or 0.3 without demand.
func (f *forecast) alpha() float64 {
	if f.mean <= 0 {
		return 0.3
	}
	return max(0.3, 1-0.7*math.Sqrt(f.variance)/f.mean)
}
