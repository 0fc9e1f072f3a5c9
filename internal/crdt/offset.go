// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import "time"

const (
	// offsetWindow is how many samples compete for one step of the average: the
	// eight of NTP's clock filter (RFC 5905, section 10).
	offsetWindow = 8
	// offsetWeight makes the newest window's weight 1/4. If a peer's clock makes a step, the
	// average has nine tenths of it after eight windows.
	offsetWeight = 4
	// offsetMost bounds a sample. A clock that is so wrong is refused anyway, and the average
	// must not overflow.
	offsetMost = time.Hour
)

// An offsetEstimator estimates how far a peer's clock is ahead of ours. Of each eight samples
// it takes the one with the shortest round trip, whose midpoint errs by at most half of that
// trip. It averages these best samples, the newest with weight 1/4. Until the first eight
// samples are complete, the estimate is the best sample so far.
//
// If delays differ by direction, the estimate is wrong by half the difference, and the samples
// cannot show that. The zero value is ready. It is not safe for concurrent use.
type offsetEstimator struct {
	mean    time.Duration // average of the best samples of complete windows
	windows int           // 0 or 1: whether mean has a window

	count    int           // samples in this window
	best     time.Duration // offset of the sample with the shortest round trip in this window
	bestTrip time.Duration // round trip of best
}

// Add adds one exchange. By our clock the request left at sent, and its answer came at heard.
// By the peer's clock the request came at received, and the answer left at replied. Add
// returns whether the sample was used. It is not used if the answer came before the request.
// It is not used either if our wall clock was set by more than a millisecond in between, which
// the monotonic readings of sent and heard show.
func (e *offsetEstimator) Add(sent, received, replied, heard time.Time) bool {
	away := heard.Sub(sent) // monotonic if both have a monotonic reading
	trip := away - replied.Sub(received)
	if set := heard.Round(0).Sub(sent.Round(0)) - away; away < 0 || trip < 0 || set < -time.Millisecond || set > time.Millisecond {
		return false
	}
	// Halve first: each difference may be as large as a Duration, and the sum would overflow.
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

// Offset returns how far the peer's clock is ahead of ours, negative if it is behind; false
// before the first sample.
func (e *offsetEstimator) Offset() (time.Duration, bool) {
	if e.windows == 0 {
		return e.best, e.count > 0
	}
	return e.mean, true
}
