// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package breaker

import (
	"math"
	"time"
)

// never is a deadline that does not come.
const never = time.Duration(math.MaxInt64)

// period is the length of the n-th consecutive open period, n from 1:
// min(limit, base·2^(n-1)). It cannot overflow.
func period(base, limit time.Duration, n int) time.Duration {
	shift := max(n-1, 0)
	if shift >= 63 || base > limit>>shift {
		return limit
	}
	return base << shift
}

// Period is the length of the n-th consecutive open period, n from 1, without
// jitter. Base and Cap must be set.
func (c Config) Period(n int) time.Duration { return period(c.Base, c.Cap, n) }

// topRung is the first rung whose period is limit. The ladder ends there: a
// long outage must not take as many closes to forget as it had failed probes.
func topRung(base, limit time.Duration) int {
	n := 1
	for period(base, limit, n) < limit {
		n++
	}
	return n
}

// jittered spreads d over d·(1±j) by u in [0, 1).
func jittered(d time.Duration, j, u float64) time.Duration {
	if j == 0 {
		return d
	}
	return time.Duration(float64(d) * (1 + j*(2*u-1)))
}

// later is now + d, or never if that overflows.
func later(now, d time.Duration) time.Duration {
	if d > 0 && now > never-d {
		return never
	}
	return now + d
}
