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

// StormConfig says when a guard calls a storm, and when it calls it over.
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
	// much time has passed since the first failure: until then the budget
	// bounds dead-lettering.
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
	// bounded by the budget alone, and an outage is seen by the breaker's
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

	// Off means that no storm is ever called. The other fields are
	// still checked.
	Off bool
}

// Validate reports every field out of its range, not the first one alone.
func (c StormConfig) Validate() error {
	d := c.WithDefaults()
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
	check(60*time.Millisecond <= d.Window && d.Window <= time.Hour, "Window", c.Window, "in [60ms, 1h]")
	check(1 <= d.MinSample && d.MinSample <= 1e6, "MinSample", c.MinSample, "in [1, 1000000]")
	check(!rateOK || d.ClearRate > 0 && d.ClearRate <= d.ErrorRate, "ClearRate", c.ClearRate,
		fmt.Sprintf("in (0, %v], the upper end being ErrorRate", d.ErrorRate))
	check(time.Millisecond <= d.ClearFor && d.ClearFor <= time.Hour, "ClearFor", c.ClearFor, "in [1ms, 1h]")
	return errors.Join(errs...)
}

// WithDefaults returns c with every unset field replaced by its default.
func (c StormConfig) WithDefaults() StormConfig {
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

// Storm says whether a source is in a storm, and what that rests on.
type Storm struct {
	Active bool

	// Since is the instant at which Active last changed; zero if it never did.
	Since time.Duration

	// Failed of Outcomes make the error rate. Both are zero if no rate is known.
	Failed, Outcomes uint64

	// Basis says where the outcomes come from: the live "window"; "kept", the last
	// rate of a window that has since run under MinSample; "trip", the rate when the
	// breaker tripped; "probes" since the trip. It is empty if no rate is known.
	Basis string

	// Attempts is the highest number of attempts among the unsettled deliveries, and
	// Age the time since the oldest of them was received.
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
	if s.Basis == "" {
		fmt.Fprintf(&b, "error rate unknown (under %d outcomes)", s.Config.MinSample)
	} else {
		fmt.Fprintf(&b, "error rate %s (%d of %d, %s) %s %s", percent(s.ErrorRate()), s.Failed, s.Outcomes, s.Basis,
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

// FleetStorm is what a fleet makes of one key. The zero value is no storm.
type FleetStorm struct {
	Active    bool
	Reporters int // processes that report the key and are heard, this one included
	Affected  int // of them in storm by their own detectors
	Need      int // how many that would have to be
}

// String says the verdict and its numbers, for people.
func (s FleetStorm) String() string {
	word := "no storm"
	if s.Active {
		word = "storm"
	}
	return fmt.Sprintf("%s of the fleet: %d of %d processes, %d make one", word, s.Affected, s.Reporters, s.Need)
}
