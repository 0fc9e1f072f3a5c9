// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"math"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

// never is a deadline that is never reached.
const never = time.Duration(math.MaxInt64)

// falseRuns is how many runs of failures without a common cause may open the breaker in an
// hour. falseRate is the share of calls that fail without such a cause.
const (
	falseRuns = 0.05
	falseRate = 0.03
)

var defaultRun = breaker.Config{}.WithDefaults().Run

// runLength is how many failures in a row open a breaker that sees n outcomes in a window.
// It is least, plus one above 570 calls a second, plus two above 19,000: so chance alone
// makes at most falseRuns runs an hour, with the default length.
func runLength(least int, n uint64, window time.Duration) int {
	hourly := max(float64(n)/window.Hours(), 1)
	return least + max(0, int(math.Ceil(math.Log(hourly/falseRuns)/-math.Log(falseRate)))-defaultRun)
}

// topLevel is the first level whose period is limit, and the highest level of the backoff.
// Without an end, a long outage would need as many closes to forget as it had failed probes.
func topLevel(base, limit time.Duration) int {
	n := 1
	for (breaker.Config{Base: base, Cap: limit}).Period(n) < limit {
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
