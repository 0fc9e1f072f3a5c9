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

// StormConfig says when a storm begins and when it ends. The zero value is valid and means
// the defaults below.
//
// A storm begins when ErrorRate, Attempts and Age are all exceeded. Each alone is normal:
// errors without age are a burst, age without errors is a slow handler or a pause, and
// attempts without both are one poison message.
type StormConfig struct {
	// ErrorRate is the share of failures among the outcomes within Window that a storm
	// exceeds. In (0, 1); default 0.05. A rate of exactly ErrorRate is no storm.
	//
	// A [BudgetConfig] must earn more than this share costs; its Validate checks this. The
	// default budget allows an ErrorRate up to 0.0909.
	ErrorRate float64

	// Attempts is exceeded if an unsettled delivery of the source has more attempts. In [1,
	// 1000000]; default 3.
	Attempts int

	// Age is exceeded if the oldest unsettled delivery, held ones included, is older. In
	// [1ms, 24h]; default 60s. No storm can begin earlier than this after the first
	// failure: until then the budget limits dead letters.
	Age time.Duration

	// Window is the length of the sliding window of the error rate. In [60ms, 1h]; default
	// 60s. The window moves in steps of a sixtieth of its length, so an outcome counts for
	// Window, and for up to one step more.
	Window time.Duration

	// MinSample is the number of outcomes in Window from which there is an error rate. In
	// [1, 1000000]; default 20.
	//
	// A source with fewer outcomes in every Window has no rate while its breaker is closed,
	// and so no storm. Only the budget limits its dead letters. The breaker still sees an
	// outage, by a run of failures. After it trips, the outcomes of probes make a rate, and
	// a storm can begin.
	MinSample int

	// ClearRate is the error rate at or below which a storm is calm. In (0, ErrorRate];
	// default half of ErrorRate.
	ClearRate float64

	// ClearFor is how long a storm must be calm, with Age not exceeded, before it ends. In
	// [1ms, 1h]; default 10s.
	//
	// If Age stays exceeded, a calm of a whole Window (or of ClearFor, if that is longer)
	// also ends the storm. Otherwise one poison message could keep the storm up by its age:
	// it cannot be dead-lettered before the storm ends.
	ClearFor time.Duration

	// Off turns storms off. The other fields are still checked.
	Off bool
}

// Validate reports every field out of its range, all at once.
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

// Storm says whether a source is in a storm, with the measured values and the thresholds.
type Storm struct {
	Active bool

	// Since is the instant of the latest change of Active; zero if it never changed.
	Since time.Duration

	// Failed and Outcomes make the error rate. Both are zero if no rate is known.
	Failed, Outcomes uint64

	// Basis says where Failed and Outcomes come from; empty if no rate is known:
	//
	//   - "window": the current window
	//   - "kept": the latest rate of a window that now has fewer than MinSample outcomes
	//   - "trip": the rate when the breaker tripped
	//   - "probes": the probes since the breaker tripped
	Basis string

	// Attempts is the highest number of attempts of an unsettled delivery, and Age the time
	// since the oldest unsettled delivery was received.
	Attempts int
	Age      time.Duration

	// Diverted is the number of deliveries that went to the hold within Window. It does not
	// affect Active.
	Diverted uint64

	// Config holds the thresholds, with defaults filled in.
	Config StormConfig
}

// ErrorRate returns Failed / Outcomes, or 0 if no rate is known.
func (s Storm) ErrorRate() float64 {
	if s.Outcomes == 0 {
		return 0
	}
	return float64(s.Failed) / float64(s.Outcomes)
}

// String returns Active, and each value with its threshold, for people:
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

// FleetStorm says whether a key is in a storm of the fleet. The zero value is no storm.
type FleetStorm struct {
	Active    bool
	Reporters int // reachable processes that report the key, this one included
	Affected  int // reporters that are in a storm by their own detectors
	Need      int // the smallest Affected that makes a storm of the fleet
}

// String returns Active and the numbers, for people.
func (s FleetStorm) String() string {
	word := "no storm"
	if s.Active {
		word = "storm"
	}
	return fmt.Sprintf("%s of the fleet: %d of %d processes, %d make one", word, s.Affected, s.Reporters, s.Need)
}
