// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package storm

import (
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// Reading is what a source knows about its unsettled deliveries at a step: all
// that it received and has not acked, dead-lettered or returned, wherever they
// wait.
type Reading struct {
	// Attempts is the highest number of attempts among them, failed probes
	// included. Zero if there are none.
	Attempts int

	// Age is the time since the oldest of them was received, one in the hold
	// included. Zero if there are none.
	Age time.Duration
}

// What a rate was taken from, as dlq.Storm.Basis says it.
const (
	basisNone   = ""
	basisWindow = "window"
	basisKept   = "kept"
	basisTrip   = "trip"
	basisProbes = "probes"
)

// Detector tells a storm from ordinary failures, for one source. It calls a
// storm when the error rate, the attempts and the age are all over their
// thresholds at the same [Detector.Step], and ends it with hysteresis.
//
// # What the error rate counts
//
// A delivery counts once, by the outcome of its first attempt. Retries do not
// count: a source with 1 % poison, each tried five times, would read 4.8 %.
// Nor do deliveries put to the hold, or anything else that the guard refused.
//
// # The rate while the breaker is not closed
//
// A held source has no outcomes, so a rate taken from its window would fade as
// the hold goes on. Freeze keeps the rate of the moment. The first probe
// replaces it, and from then on the rate is that of the probes since the trip,
// within Window; when Window holds none, the last such rate stands. MinSample
// is not asked of probes, since they are few by design. Thaw returns to the
// live window, which has slid on meanwhile.
//
// While probes pass they are the source's traffic. Then a delivery that fails
// counts once, by its first attempt.
//
// # The rate without traffic
//
// Also without a breaker a window can run empty under a storm: nothing is
// dead-lettered, the retry set is full, intake stops, and no first attempt is
// made any more. So when the window falls under MinSample its last rate is
// kept, and stands while no first attempt has succeeded since and a delivery
// from then is still unsettled. A source that is merely quiet has no such
// delivery, and no rate.
//
// # Use
//
// Every method takes the present instant, monotonic, as a duration since an
// origin of the caller's choice; one before the last counts as the last.
// Nothing allocates but the first probe. A Detector is about 1 KiB, 2 KiB once
// it has seen a probe, and starts no goroutine. Its methods must not be called
// concurrently: the source calls them under its own lock.
type Detector struct {
	cfg    dlq.StormConfig // defaults filled in
	read   Reading         // of the last Step
	oldest time.Duration
	active bool
	frozen bool

	// last is the newest rate that the live window does not give itself, seen
	// at the instant seen. It is empty if there is none.
	last      tally
	lastProbe bool // last is of probes
	refuted   bool // a first attempt succeeded after seen
	seen      time.Duration

	since   time.Duration // active last changed
	calm    time.Duration // rate calm from here on, or never
	settled time.Duration // rate calm and age back from here on, or never

	total   uint64 // the success counter as last read
	ignored uint64
	probes  *window // nil until the first probe
	live    window
}

const never = time.Duration(-1 << 63)

// NewDetector returns a detector with no outcomes and no storm. The error is
// that of [dlq.StormConfig.Validate].
func NewDetector(c dlq.StormConfig) (*Detector, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	c = c.WithDefaults()
	return &Detector{cfg: c, calm: never, settled: never, live: newWindow(c.Window)}, nil
}

// Failure counts a delivery whose first attempt failed. Report neither the
// failure of a retry nor that of a probe here, and a slow handler once: early
// or when it returns. If this failure trips the breaker, call Failure first
// and [Detector.Freeze] after, so that the frozen rate holds it.
func (d *Detector) Failure(now time.Duration) {
	if d.cfg.Off {
		return
	}
	d.slide(now)
	d.live.addFailed(1)
}

// Successes takes the number of deliveries whose first attempt succeeded,
// counted elsewhere since the detector was made, so that a success costs
// nothing here. Those since the last call count as of now: call it before each
// Step, and every sixtieth of Window if steps are rarer.
//
// A total that holds other successes too, those of retries and probes, makes
// the rate read low by their share. One smaller than the last is ignored, and
// counted by [Detector.Ignored]: nothing is counted until it is past the last.
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

// Diverted counts n deliveries put to the hold instead of being handled. They
// are for [dlq.Storm.Diverted] only: a refusal by the guard is not an outcome.
func (d *Detector) Diverted(now time.Duration, n int) {
	if d.cfg.Off || n <= 0 {
		return
	}
	d.slide(now)
	d.live.addDiverted(uint64(n))
}

// Freeze says that the breaker left closed, for whatever reason. The rate seen
// now stands until a probe gives a newer one. With no rate to be seen there is
// none until then. While frozen, a further Freeze changes nothing.
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

// Probe counts the outcome of a probe made while frozen, be it the first
// attempt of its delivery or not; while probes pass, report no failure of a
// retry. A probe of the same scope made by another process may be reported as
// well. While not frozen it does nothing.
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

// Thaw says that the breaker is closed again: the live window counts again,
// with those outcomes from before the trip that are still within Window.
// While not frozen it does nothing.
func (d *Detector) Thaw(now time.Duration) {
	if !d.frozen {
		return
	}
	d.slide(now)
	d.frozen = false
}

// Step judges the source and reports whether Active of [Detector.Storm]
// changed. Call it at each tick, after [Detector.Successes].
//
// Without a storm the cheapest test comes first: a source whose attempts are
// within bounds costs two comparisons, and the window is not looked at.
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

// fire calls a storm if the rate, too, is over its threshold. A detector that
// is off has no rate.
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

// Storm returns the verdict of the last Step, and what is known as of the last
// call of any method.
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

// Ignored is the number of totals that [Detector.Successes] ignored because
// they were smaller than an earlier one. More than zero is a fault of the
// caller's counter, and the error rate then reads high.
func (d *Detector) Ignored() uint64 { return d.ignored }

// slide brings the windows to now and keeps a rate that is about to be lost.
func (d *Detector) slide(now time.Duration) {
	if now < d.live.end {
		return // nor need the probes slide: they move with the live window
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

// rate returns the outcomes that count now, none if no rate is known.
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
