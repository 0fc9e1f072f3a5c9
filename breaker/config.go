// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package breaker

import (
	"errors"
	"fmt"
	"time"
)

// Config has the settings of a breaker that an operator may set from a file, a flag or
// the environment. The zero value is valid and means the documented defaults.
type Config struct {
	// Window is the length of the sliding window of the failure ratio. It has sixty
	// buckets. In [1s, 1h]; unset means 60 s. The breaker sees a call that takes longer
	// than Window only through Slow.
	Window time.Duration

	// Ratio is the share of first attempts that may fail within Window. The breaker
	// opens above Ratio, not at Ratio. In (0, 1); unset means 0.05.
	Ratio float64

	// Z is how many standard deviations of confidence the ratio needs: the breaker
	// compares the lower end of the Wilson score interval with Ratio. In (0, 10]; unset
	// means 3.
	//
	// Examples, with Z = 3 and the default Run. At 2 calls a second or more, a dependency
	// that fails 3 % of them opens a breaker less than once in 20 hours. At lower rates,
	// where few calls make a ratio, it opens once in 6 to 15 hours. A breaker notices after
	// about a hundred deliveries that 10 % of them fail, and after Run that all fail.
	Z float64

	// Plain compares the ratio itself, as if Z were 0. On small samples noise then opens
	// the breaker: if 3 % really fail, in about every second stretch of 12 000 deliveries.
	// Plain cannot be combined with Z.
	Plain bool

	// MinSample is how many outcomes the window needs before the breaker judges the
	// ratio. In [1, 1000000]; unset means 20.
	MinSample int

	// Run is how many failed attempts in a row open the breaker, whatever the ratio. They
	// are counted over the whole scope, with no success between them. In [2, 1000000];
	// unset means 5.
	//
	// The attempts must come from at least two deliveries: one poison message that is
	// retried in place is not an outage. One delivery is enough if an error of the
	// dependency is among them. Above 570 calls a second it takes one attempt more, above
	// 19,000 two more.
	Run int

	// NoRun turns the rule of Run off. NoRun cannot be combined with Run.
	NoRun bool

	// Base and Cap are the backoff of open periods: the period of level n lasts
	// min(Cap, Base·2^(n-1)). Base is in [1ms, 1h]; unset means 100 ms. Cap is in
	// [Base, 24h]; unset means 30 s, or Base if that is more.
	//
	// A period is at least Base, and at most a tenth of the time since the trip. If the
	// half-open breaker has carried eight calls at once since the trip, the time counts
	// from the last moment at which it did. The level rises once that tenth allows the
	// full period of the level.
	Base, Cap time.Duration

	// Jitter spreads every open period over ±Jitter of its length, so a period is at most
	// Cap·(1+Jitter). In [0, 0.5]; the default is 0: periods are exact.
	Jitter float64

	// Memory is how long the breaker remembers a close. In [1ms, 24h]; unset means 60 s.
	//
	// Each close lowers the level of the backoff by one. A trip within Memory of a close
	// keeps that level, and needs more successes in a row to close
	// ([Config.Successes]). Its first open period is Base all the same.
	Memory time.Duration

	// Successes is how many probes must succeed in a row to close the breaker. In
	// [1, 1000]; unset means 10.
	//
	// A breaker that trips within Memory of a close needs twice as many as the last time,
	// up to 64 times Successes. So with a dependency that fails some calls it stays
	// half-open and carries what the dependency can. The number halves after a time of
	// Memory in which at most Ratio of the probes failed.
	Successes int

	// Probes is how many probes may be out at once when probing begins, and the least
	// number later. Beside it counts a number that begins at 1: each success doubles it, up
	// to 64, and two failures halve it. The larger of both is the limit. In [1, 64]; unset
	// means 1.
	Probes int

	// Lease is how long a probe may stay out. A probe that is not settled within Lease is
	// lost (a panic, a Goexit, a hang) and counts as failed. In [1ms, 24h]; unset means
	// 60 s.
	//
	// A guard's lease is the longer of Policy.Timeout and Slow, plus 10 s, if that is more
	// than Lease. While a fleet holds the breaker, FleetConfig.Lease counts.
	Lease time.Duration

	// Slow is the age at which the caller reports a call that still runs. Slow must be
	// positive and less than Window minus one bucket: a later report would come when the
	// window has moved on. Unset means 10 s, or Window/6 if that is less.
	Slow time.Duration
}

// WithDefaults returns c with every unset field replaced by its default.
func (c Config) WithDefaults() Config {
	def(&c.Window, 60*time.Second)
	def(&c.Ratio, 0.05)
	if !c.Plain {
		def(&c.Z, 3)
	}
	def(&c.MinSample, 20)
	if !c.NoRun {
		def(&c.Run, 5)
	}
	def(&c.Base, 100*time.Millisecond)
	def(&c.Cap, max(30*time.Second, c.Base))
	def(&c.Memory, 60*time.Second)
	def(&c.Successes, 10)
	def(&c.Probes, 1)
	def(&c.Lease, 60*time.Second)
	def(&c.Slow, min(10*time.Second, c.Window/6))
	return c
}

func def[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// checks collects the errors of a configuration.
type checks []error

func (w *checks) bad(field string, value any, want string) {
	*w = append(*w, fmt.Errorf("breaker: config: %s: %v is not in %s", field, value, want))
}

func (w *checks) span(field string, v, lo, hi time.Duration) {
	if v < lo || v > hi {
		w.bad(field, v, fmt.Sprintf("[%v, %v]", lo, hi))
	}
}

func (w *checks) count(field string, v, lo, hi int) {
	if v < lo || v > hi {
		w.bad(field, v, fmt.Sprintf("[%d, %d]", lo, hi))
	}
}

// Validate reports all wrong fields of c in one error: each field, its value and the
// allowed range. Unset fields are judged as their defaults.
func (c Config) Validate() error {
	var w checks
	if c.Plain && c.Z != 0 {
		w.bad("Z", c.Z, "{0} with Plain")
	}
	if c.NoRun && c.Run != 0 {
		w.bad("Run", c.Run, "{0} with NoRun")
	}
	c = c.WithDefaults()
	w.span("Window", c.Window, time.Second, time.Hour)
	if !(c.Ratio > 0 && c.Ratio < 1) {
		w.bad("Ratio", c.Ratio, "(0, 1)")
	}
	if !c.Plain && !(c.Z > 0 && c.Z <= 10) {
		w.bad("Z", c.Z, "(0, 10]")
	}
	w.count("MinSample", c.MinSample, 1, 1e6)
	if !c.NoRun {
		w.count("Run", c.Run, 2, 1e6)
	}
	w.span("Base", c.Base, time.Millisecond, time.Hour)
	w.span("Cap", c.Cap, max(c.Base, time.Millisecond), 24*time.Hour)
	if !(c.Jitter >= 0 && c.Jitter <= 0.5) {
		w.bad("Jitter", c.Jitter, "[0, 0.5]")
	}
	w.span("Memory", c.Memory, time.Millisecond, 24*time.Hour)
	w.count("Successes", c.Successes, 1, 1000)
	w.count("Probes", c.Probes, 1, 64)
	w.span("Lease", c.Lease, time.Millisecond, 24*time.Hour)
	if limit := c.Window - c.Bucket(); c.Slow <= 0 || c.Slow >= limit {
		w.bad("Slow", c.Slow, fmt.Sprintf("(0s, %v), below Window less a bucket", limit))
	}
	return errors.Join(w...)
}

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

// earlyProbe limits an open period to 1/earlyProbe of the time that the breaker has been
// open, so that no long wait follows a short outage.
const earlyProbe = 10

// PeriodAfter is the length of the n-th consecutive open period, n from 1, without jitter,
// of a breaker that has been open for the time open: Period(n), or a tenth of open if that
// is less, but at least Base.
func (c Config) PeriodAfter(n int, open time.Duration) time.Duration {
	return min(c.Period(n), max(c.Base, open/earlyProbe))
}

// Bucket is the length of one of the window's sixty buckets. Window must be set.
func (c Config) Bucket() time.Duration { return c.Window / buckets }

// buckets is the number of buckets of the window.
const buckets = 60
