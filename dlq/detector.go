// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Defaults of a [StormConfig] field left at zero.
const (
	defaultErrorRate = 0.05
	defaultAttempts  = 3
	defaultAge       = 60 * time.Second
	defaultWindow    = 60 * time.Second
	defaultMinSample = 20
	defaultClearFor  = 10 * time.Second
)

// StormConfig says when a [Detector] calls a storm, and when it calls it over.
// The zero value is valid and means the documented defaults.
//
// The three thresholds are joined by and: each by itself is ordinary. Errors
// without age are a burst, age without errors is a slow handler or a pause,
// attempts without either are one poison message.
type StormConfig struct {
	// ErrorRate is the share of outcomes within Window that must be exceeded.
	// In (0, 1); default 0.05. A rate of exactly ErrorRate is no storm.
	//
	// A [BudgetConfig] must earn more than this share costs; its Validate
	// takes this value. The default budget carries thresholds up to 0.0909.
	ErrorRate float64

	// Attempts must be exceeded by the highest number of attempts among the
	// source's unsettled deliveries. In [1, 1000000]; default 3.
	Attempts int

	// Age must be exceeded by the oldest unsettled delivery, one in the hold
	// included. In [1ms, 24h]; default 60s. No storm can be seen before this
	// much time has passed since the first failure: until then the [Budget]
	// is what bounds dead-lettering.
	Age time.Duration

	// Window is the length of the sliding window of the error rate. In
	// [60ms, 1h]; default 60s. It moves in sixtieths of itself: an outcome
	// counts for Window at least and one sixtieth longer at most.
	Window time.Duration

	// MinSample is the number of outcomes that must be in Window before they
	// make a rate. In [1, 1000000]; default 20.
	//
	// A source that sees fewer than this in every Window never has a rate
	// while its breaker is closed, so no storm either. Its dead letters are
	// bounded by the [Budget] alone, and an outage is seen by the breaker's
	// rule on a run of failures; once that has tripped, the outcomes of
	// probes are a rate and a storm can follow.
	MinSample int

	// ClearRate ends a storm: while the error rate is at or below it, the
	// storm is calm. In (0, ErrorRate]; default half of ErrorRate.
	ClearRate float64

	// ClearFor is how long a storm must have been calm, and Age not exceeded,
	// before it is over. In [1ms, 1h]; default 10s.
	//
	// While Age stays exceeded, a calm that lasts a whole Window (or ClearFor
	// if that is longer) ends the storm too. Else a single poison message,
	// waiting for the storm to end before it may be dead-lettered, would be
	// the old delivery that keeps the storm up.
	ClearFor time.Duration

	// Off makes a detector that never calls a storm. The other fields are
	// still checked.
	Off bool
}

// Validate reports every field out of its range, not the first one alone.
func (c StormConfig) Validate() error {
	d := c.withDefaults()
	var errs []error
	check := func(ok bool, field string, value any, want string) {
		if !ok {
			errs = append(errs, fmt.Errorf("dlq: storm config: %s is %v: must be %s", field, value, want))
		}
	}
	rateOK := d.ErrorRate > 0 && d.ErrorRate < 1
	check(rateOK, "ErrorRate", c.ErrorRate, "in (0, 1)")
	check(1 <= d.Attempts && d.Attempts <= 1e6, "Attempts", c.Attempts, "in [1, 1000000]")
	check(time.Millisecond <= d.Age && d.Age <= 24*time.Hour, "Age", c.Age, "in [1ms, 24h]")
	check(windowBuckets*time.Millisecond <= d.Window && d.Window <= time.Hour, "Window", c.Window, "in [60ms, 1h]")
	check(1 <= d.MinSample && d.MinSample <= 1e6, "MinSample", c.MinSample, "in [1, 1000000]")
	check(!rateOK || d.ClearRate > 0 && d.ClearRate <= d.ErrorRate, "ClearRate", c.ClearRate,
		fmt.Sprintf("in (0, %v], the upper end being ErrorRate", d.ErrorRate))
	check(time.Millisecond <= d.ClearFor && d.ClearFor <= time.Hour, "ClearFor", c.ClearFor, "in [1ms, 1h]")
	return errors.Join(errs...)
}

func (c StormConfig) withDefaults() StormConfig {
	if c.ErrorRate == 0 {
		c.ErrorRate = defaultErrorRate
	}
	if c.Attempts == 0 {
		c.Attempts = defaultAttempts
	}
	if c.Age == 0 {
		c.Age = defaultAge
	}
	if c.Window == 0 {
		c.Window = defaultWindow
	}
	if c.MinSample == 0 {
		c.MinSample = defaultMinSample
	}
	if c.ClearRate == 0 {
		c.ClearRate = c.ErrorRate / 2
	}
	if c.ClearFor == 0 {
		c.ClearFor = defaultClearFor
	}
	return c
}

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

// Basis says which outcomes an error rate was taken from.
type Basis uint8

const (
	// basisNone means that no rate is known: fewer than MinSample outcomes,
	// and none from before that still stands.
	basisNone Basis = iota
	// basisWindow is the live window.
	basisWindow
	// basisKept is the last rate of a live window that has since run under
	// MinSample. [Detector] says how long it stands.
	basisKept
	// basisTrip is the rate seen when the breaker tripped.
	basisTrip
	// basisProbes is the rate of the probes since the trip.
	basisProbes
)

// Known tells whether there is a rate at all.
func (b Basis) Known() bool { return b != basisNone }

// String returns one of "none", "window", "kept", "trip" and "probes".
func (b Basis) String() string {
	switch b {
	case basisNone:
		return "none"
	case basisWindow:
		return "window"
	case basisKept:
		return "kept"
	case basisTrip:
		return "trip"
	case basisProbes:
		return "probes"
	}
	return "Basis(" + strconv.Itoa(int(b)) + ")"
}

// Storm is a detector's verdict with what it rests on, as of the detector's
// last call.
type Storm struct {
	Active bool

	// Since is the instant at which Active last changed; zero if it never did.
	Since time.Duration

	// Failed of Outcomes are what the rate was taken from, and Basis says
	// where they come from. All zero if no rate is known.
	Failed, Outcomes uint64
	Basis            Basis

	// Attempts and Age are those of the last Step.
	Attempts int
	Age      time.Duration

	// Diverted is the number of deliveries put to the hold within Window.
	// It has no part in the verdict.
	Diverted uint64

	// Config holds the thresholds in force, defaults filled in.
	Config StormConfig
}

// ErrorRate is Failed / Outcomes, and 0 if no rate is known.
func (s Storm) ErrorRate() float64 {
	if s.Outcomes == 0 {
		return 0
	}
	return float64(s.Failed) / float64(s.Outcomes)
}

// String gives the verdict and each reading beside its threshold, for people:
//
//	storm: error rate 100% (20 of 20, trip) > 5%, attempts 9 > 3, age 1m1s > 1m0s, 5980 diverted in 1m0s
func (s Storm) String() string {
	var b strings.Builder
	switch {
	case s.Config.Off:
		b.WriteString("detector off: ")
	case s.Active:
		b.WriteString("storm: ")
	default:
		b.WriteString("no storm: ")
	}
	if s.Basis == basisNone {
		fmt.Fprintf(&b, "error rate unknown (under %d outcomes)", s.Config.MinSample)
	} else {
		fmt.Fprintf(&b, "error rate %s (%d of %d, %v) %s %s", percent(s.ErrorRate()), s.Failed, s.Outcomes, s.Basis,
			sign(s.ErrorRate() > s.Config.ErrorRate), percent(s.Config.ErrorRate))
	}
	fmt.Fprintf(&b, ", attempts %d %s %d, age %v %s %v", s.Attempts, sign(s.Attempts > s.Config.Attempts), s.Config.Attempts,
		s.Age.Round(10*time.Millisecond), sign(s.Age > s.Config.Age), s.Config.Age)
	if s.Diverted > 0 {
		fmt.Fprintf(&b, ", %d diverted in %v", s.Diverted, s.Config.Window)
	}
	return b.String()
}

func sign(over bool) string {
	if over {
		return ">"
	}
	return "<="
}

func percent(r float64) string {
	return strconv.FormatFloat(math.Round(r*1e5)/1e3, 'f', -1, 64) + "%"
}

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
	cfg    StormConfig // defaults filled in
	read   Reading     // of the last Step
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
// that of [StormConfig.Validate].
func NewDetector(c StormConfig) (*Detector, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	c = c.withDefaults()
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
// are for [Storm.Diverted] only: a refusal by the guard is not an outcome.
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
// attempt of its delivery or not. A probe of the same scope made by another
// process may be reported as well. While not frozen it does nothing.
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
func (d *Detector) Storm() Storm {
	t, basis := d.rate()
	return Storm{
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
func (d *Detector) rate() (tally, Basis) {
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
