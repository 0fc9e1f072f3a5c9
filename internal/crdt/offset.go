// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import "time"

const (
	// offsetWindow is how many samples compete for one step of the average: the
	// eight of NTP's clock filter (RFC 5905, section 10).
	offsetWindow = 8
	// offsetWeight is the newest window's weight: 1/4. A step of a peer's clock
	// is nine tenths known after eight windows.
	offsetWeight = 4
	// offsetMost is where a sample is cut off. A clock that wrong is refused
	// anyway, and the average must not overflow.
	offsetMost = time.Hour
)

// An offsetEstimator follows how far a peer's clock is ahead of ours. Of each
// eight samples it takes the one with the shortest round trip, whose midpoint
// errs by at most half of that trip, and averages those, the newest with weight
// 1/4. Until the first eight are complete, the best sample so far is the estimate.
//
// Delays that differ by direction shift the estimate by half the difference, and
// nothing in the samples can show it. The zero value is ready. It is not safe
// for concurrent use.
type offsetEstimator struct {
	mean    time.Duration
	windows int // that went into mean; it stops counting at 1

	count    int // samples in this window
	best     time.Duration
	bestTrip time.Duration
}

// Add takes one exchange: the request left at sent and its answer came at heard
// by our clock; the peer received the one at received and sent the other at
// replied by its own. It reports whether the sample was used: not if the answer
// came before the request, or our wall clock was set by more than a millisecond in
// between, which the monotonic reading in sent and heard shows.
func (e *offsetEstimator) Add(sent, received, replied, heard time.Time) bool {
	away := heard.Sub(sent) // monotonic if both have that reading
	trip := away - replied.Sub(received)
	if set := heard.Round(0).Sub(sent.Round(0)) - away; away < 0 || trip < 0 || set < -time.Millisecond || set > time.Millisecond {
		return false
	}
	// Half of each first: a difference of times may be as large as a Duration.
	off := received.Sub(sent.Round(0))/2 + replied.Sub(heard.Round(0))/2
	off = min(max(off, -offsetMost), offsetMost)
	if e.count == 0 || trip < e.bestTrip {
		e.best, e.bestTrip = off, trip
	}
	if e.count++; e.count < offsetWindow {
		return true
	}
	if e.windows == 0 {
		e.mean, e.windows = e.best, 1
	} else {
		e.mean += (e.best - e.mean) / offsetWeight
	}
	e.count = 0
	return true
}

// Offset is how far the peer's clock is ahead of ours, negative when it is
// behind; false before the first sample.
func (e *offsetEstimator) Offset() (time.Duration, bool) {
	if e.windows == 0 {
		return e.best, e.count > 0
	}
	return e.mean, true
}
