// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package storm

import (
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// Reading describes the unsettled deliveries of a source at a step: all deliveries that it
// received and has not acked, dead-lettered or returned. It includes those in the hold.
type Reading struct {
	// Attempts is the highest number of attempts of an unsettled delivery, failed probes
	// included. Zero if there are no unsettled deliveries.
	Attempts int

	// Age is the time since the oldest unsettled delivery was received. Zero if there are no
	// unsettled deliveries.
	Age time.Duration
}

// The outcomes from which a rate was computed, as in dlq.Storm.Basis.
const (
	basisNone   = ""
	basisWindow = "window"
	basisKept   = "kept"
	basisTrip   = "trip"
	basisProbes = "probes"
)

// Detector distinguishes a storm from ordinary failures, for one source. It calls a storm
// when the error rate, the attempts and the age are all over their thresholds at the same
// [Detector.Step], and ends it with hysteresis.
//
// # What the error rate counts
//
// A delivery counts once, by the outcome of its first attempt. Retries do not count:
// otherwise a source with 1 % poison, each tried five times, would have a rate of 4.8 %.
// Deliveries put into the hold do not count, and neither does anything else that the guard
// refused.
//
// # The rate while the breaker is not closed
//
// A held source has no outcomes, so the rate of its window would fade during the hold. Freeze
// keeps the present rate. From the first probe on, the rate is that of the probes since the
// breaker opened, within Window. If Window has no probe, the last such rate stands. MinSample
// does not apply to probes, since they are few by design. Thaw returns to the live window,
// which has moved on meanwhile.
//
// While probes pass they are the source's traffic. Then a delivery that fails counts once, by
// its first attempt.
//
// # The rate without traffic
//
// Even without a breaker a window can run empty in a storm: nothing is dead-lettered, the
// retry set is full, intake stops, and there are no first attempts any more. So when the
// window falls under MinSample, its last rate is kept. It stands as long as no first attempt
// has succeeded since, and a delivery from that time is still unsettled. A source that is
// only quiet has no such delivery, and no rate.
//
// # Use
//
// The present instant is a monotonic duration since an origin that the caller chooses. An
// instant before the last one counts as the last one. Only the first probe allocates. A
// Detector takes about 1 KiB, or 2 KiB after its first probe, and starts no goroutine. Its
// methods must not be called concurrently: the source calls them under its own lock.
type Detector struct {
	cfg    dlq.StormConfig // defaults filled in
	read   Reading         // of the last Step
	oldest time.Duration   // when the oldest unsettled delivery was received
	active bool            // there is a storm
	frozen bool            // the breaker is not closed

	// last is the newest rate that the live window does not have itself. It is empty if there
	// is none.
	last      tally
	lastProbe bool          // last is a rate of probes
	refuted   bool          // a first attempt succeeded after seen
	seen      time.Duration // the instant of last

	since   time.Duration // when active last changed
	calm    time.Duration // since when the rate is calm, or never
	settled time.Duration // since when the rate is calm and the age within bounds, or never

	total   uint64 // the highest success counter so far
	ignored uint64
	probes  *window // nil until the first probe
	live    window
}

const never = time.Duration(-1 << 63)

// NewDetector returns a detector without outcomes and without a storm. The error is that of
// [dlq.StormConfig.Validate].
func NewDetector(c dlq.StormConfig) (*Detector, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	c = c.WithDefaults()
	return &Detector{cfg: c, calm: never, settled: never, live: newWindow(c.Window)}, nil
}

// Failure counts a delivery whose first attempt failed. Do not report failures of retries or
// probes here. Report a slow handler once: early or when it returns. If this failure trips
// the breaker, call Failure first and [Detector.Freeze] after it, so that the frozen rate
// includes the failure.
func (d *Detector) Failure(now time.Duration) {
	if d.cfg.Off {
		return
	}
	d.slide(now)
	d.live.addFailed(1)
}

// Successes takes the caller's counter of deliveries whose first attempt succeeded since the
// detector was made. So a success costs nothing here. Successes since the last call count as
// of now: call it before each Step, and every sixtieth of Window if steps are rarer.
//
// If the total includes successes of retries and probes, the rate is too low by their share. A
// total smaller than the highest one so far is ignored, and counted by [Detector.Ignored].
// Nothing is counted until a total is above the highest one.
func (d *Detector) Successes(now time.Duration, total uint64) {
	if d.cfg.Off {
		return
	}
	d.slide(now)
	if total <= d.total {
		if total < d.total {
			d.ignored++
		}
		return
	}
	d.live.addOK(total - d.total)
	d.total = total
	d.refuted = true
}

// Diverted counts n deliveries that were put into the hold instead of being handled. They
// only count for [dlq.Storm.Diverted]: a refusal by the guard is not an outcome.
func (d *Detector) Diverted(now time.Duration, n int) {
	if d.cfg.Off || n <= 0 {
		return
	}
	d.slide(now)
	d.live.addDiverted(uint64(n))
}

// Freeze says that the breaker is no longer closed, for any reason. The present rate stands
// until a probe gives a newer one. If there is no rate now, there is none until then. While
// frozen, another Freeze changes nothing.
func (d *Detector) Freeze(now time.Duration) {
	if d.cfg.Off || d.frozen {
		return
	}
	d.slide(now)
	d.last, _ = d.rate()
	d.frozen, d.lastProbe, d.refuted, d.seen = true, false, false, now
	if d.probes != nil {
		d.probes.restart(&d.live)
	}
}

// Probe counts the outcome of a probe, which need not be the first attempt of its delivery.
// While probes pass, report no failure of a retry. A probe of the same scope by another
// process may be reported as well. While not frozen Probe does nothing.
func (d *Detector) Probe(now time.Duration, ok bool) {
	if !d.frozen {
		return
	}
	d.slide(now)
	if d.probes == nil {
		d.probes = new(window)
		d.probes.restart(&d.live)
	}
	if ok {
		d.probes.addOK(1)
	} else {
		d.probes.addFailed(1)
	}
	d.last, d.lastProbe, d.refuted, d.seen = d.probes.sum, true, false, now
}

// Thaw says that the breaker is closed again. The live window counts again, with outcomes
// from before the trip that are still within Window. While not frozen Thaw does nothing.
func (d *Detector) Thaw(now time.Duration) {
	if !d.frozen {
		return
	}
	d.slide(now)
	d.frozen = false
}

// Step judges the source, and returns whether Active of [Detector.Storm] changed. Call it at
// each tick, after [Detector.Successes].
//
// Without a storm the cheapest test comes first: a source whose attempts are within bounds
// costs two comparisons, and the window is not read.
func (d *Detector) Step(now time.Duration, r Reading) (changed bool) {
	d.read = r
	d.oldest = now - r.Age
	if d.active {
		return d.clear(now)
	}
	if r.Attempts <= d.cfg.Attempts || r.Age <= d.cfg.Age {
		return false
	}
	return d.fire(now)
}

// fire calls a storm if the rate is over its threshold, too. A detector that is off has no
// rate.
func (d *Detector) fire(now time.Duration) bool {
	d.slide(now)
	if t, _ := d.rate(); !t.over(d.cfg.ErrorRate) {
		return false
	}
	d.active, d.since = true, now
	d.calm, d.settled = never, never
	return true
}

func (d *Detector) clear(now time.Duration) bool {
	d.slide(now)
	if t, _ := d.rate(); t.over(d.cfg.ClearRate) {
		d.calm, d.settled = never, never
		return false
	}
	if d.calm == never {
		d.calm = now
	}
	if d.read.Age > d.cfg.Age {
		d.settled = never
	} else if d.settled == never {
		d.settled = now
	}
	if (d.settled == never || now-d.settled < d.cfg.ClearFor) && now-d.calm < max(d.cfg.Window, d.cfg.ClearFor) {
		return false
	}
	d.active, d.since = false, now
	return true
}

// Storm returns the verdict of the last Step, and the figures as of the last call of any
// method.
func (d *Detector) Storm() dlq.Storm {
	t, basis := d.rate()
	return dlq.Storm{
		Active:   d.active,
		Since:    d.since,
		Failed:   t.failed,
		Outcomes: t.outcomes(),
		Basis:    basis,
		Attempts: d.read.Attempts,
		Age:      d.read.Age,
		Diverted: d.live.sum.diverted,
		Config:   d.cfg,
	}
}

// Ignored returns how many totals [Detector.Successes] ignored because they were smaller than
// an earlier one. More than zero is a fault of the caller's counter; then the error rate is
// too high.
func (d *Detector) Ignored() uint64 { return d.ignored }

// slide moves the windows to now. It keeps a rate that the live window would lose.
func (d *Detector) slide(now time.Duration) {
	if now < d.live.end {
		return // probes need not slide either: they move with the live window
	}
	before, until := d.live.sum, d.live.end-1
	d.live.slide(now)
	if !d.frozen {
		if d.sampled(before) && !d.sampled(d.live.sum) {
			d.last, d.lastProbe, d.refuted, d.seen = before, false, false, until
		}
		return
	}
	if d.probes != nil {
		d.probes.slide(now)
		if d.probes.sum.outcomes() > 0 {
			d.last = d.probes.sum
		}
	}
}

// rate returns the outcomes of the present rate and their basis; none if no rate is known.
func (d *Detector) rate() (tally, string) {
	basis := basisKept
	switch {
	case d.frozen && d.lastProbe:
		return d.last, basisProbes
	case d.frozen:
		basis = basisTrip
	case d.sampled(d.live.sum):
		return d.live.sum, basisWindow
	case d.refuted || d.oldest > d.seen:
		return tally{}, basisNone
	case d.lastProbe:
		basis = basisProbes
	}
	if d.last.outcomes() == 0 {
		return tally{}, basisNone
	}
	return d.last, basis
}

func (d *Detector) sampled(t tally) bool { return t.outcomes() >= uint64(d.cfg.MinSample) }

func (t tally) over(rate float64) bool {
	n := t.outcomes()
	return n > 0 && float64(t.failed)/float64(n) > rate
}
