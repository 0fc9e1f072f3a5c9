// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package breaker

import (
	"errors"
	"fmt"
	"time"
)

// Config is what an operator may set from a file, a flag or the environment.
// The zero value is valid and means the documented defaults.
type Config struct {
	// Window is how far back the failure ratio looks, sliding, in sixty
	// buckets. In [1s, 1h]; unset means 60 s. A call that takes longer than
	// Window is only seen through Slow.
	Window time.Duration

	// Ratio is the share of first attempts that may fail within Window. In
	// (0, 1); unset means 0.05. The breaker opens above it, not at it.
	Ratio float64

	// Z is how many standard deviations of confidence the ratio needs: the
	// lower end of the Wilson score interval is compared with Ratio. In
	// (0, 10]; unset means 3. At 3, and with the default Run, a dependency that
	// fails 3 % opens a breaker less than once in 20 hours at 2 calls a second and
	// more; below, where few calls make a ratio, once in 6 to 15 hours. One that
	// fails 10 % takes about a hundred deliveries to notice, one that fails them all
	// Run of them.
	Z float64

	// Plain compares the naked ratio, as if Z were 0. On small samples that
	// trips on noise: at a true 3 %, about every second stretch of 12 000
	// deliveries. It cannot be combined with Z.
	Plain bool

	// MinSample is how many outcomes the window must hold before the ratio is
	// judged. In [1, 1000000]; unset means 20.
	MinSample int

	// Run is how many attempts in a row, over the whole scope and with no
	// success between, open the breaker whatever the ratio. They must come
	// from at least two deliveries, so that one poison message that is retried
	// in place is not an outage. One is enough if an error of the dependency is among them.
	// At a high rate it takes more: one above 570 calls a second, two above 19,000.
	// In [2, 1000000]; unset means 5.
	Run int

	// NoRun turns the rule of Run off. It cannot be combined with Run.
	NoRun bool

	// Base and Cap are the backoff of open periods: the n-th level lasts
	// min(Cap, Base·2^(n-1)). Base in [1ms, 1h], unset means 100 ms; Cap in
	// [Base, 24h], unset means 30 s, or Base if that is more. A period lasts no
	// longer than a tenth of the time since the trip, or since the breaker last
	// carried eight calls at once, half-open; but Base at least. The level climbs
	// once the period may be as long as it.
	Base, Cap time.Duration

	// Jitter spreads every open period over ±Jitter of its length, so at most
	// Cap·(1+Jitter). In [0, 0.5]; 0, the default, is exact.
	Jitter float64

	// Memory is how long a close is remembered. Each close steps one level down; a
	// trip within Memory of it goes on from there, and needs a longer row of
	// successes to close ([Config.Successes]). It opens for Base all the same. In
	// [1ms, 24h]; unset means 60 s.
	Memory time.Duration

	// Successes is how many probes must succeed in a row to close. A breaker that
	// trips within Memory of a close needs twice as many as the last time, up to
	// 64 times: a dependency that fails some calls is half-open then, which
	// carries what it can. A Memory of probes of which no more than Ratio fail
	// halves that again. In [1, 1000]; unset means 10.
	Successes int

	// Probes is how many probes may be out at once when probing begins. Each
	// success doubles that number, up to 64, and two failures halve it. In
	// [1, 64]; unset means 1.
	Probes int

	// Lease is how long a probe may stay out. A probe that is not settled by
	// then is lost (a panic, a Goexit, a hang) and counts as failed. In
	// [1ms, 24h]; unset means 60 s. A guard gives a probe its Policy.Timeout, or
	// Slow, and 10 s more, if that is longer. While a fleet holds the breaker,
	// FleetConfig.Lease counts.
	Lease time.Duration

	// Slow is the age at which the caller reports a call that still runs,
	// early, before it ends. It must
	// be positive and below Window less one bucket, or the report would come
	// when the window has moved on; unset means 10 s, or Window/6 if less.
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

// checks collects what is wrong with a configuration.
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

// Validate reports everything that is wrong with c at once: each field, its value and
// the allowed range. Unset fields are judged as their defaults.
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

// earlyProbe: the next probe comes no later than after a tenth of the time that the
// breaker has been open, so that a short outage is not followed by a long wait.
const earlyProbe = 10

// PeriodAfter is the length of the n-th consecutive open period, n from 1, of a
// breaker that has been open for a time: Period, or a tenth of that time if it is
// less, but no less than Base.
func (c Config) PeriodAfter(n int, open time.Duration) time.Duration {
	return min(c.Period(n), max(c.Base, open/earlyProbe))
}

// Bucket is the length of one of the window's sixty buckets. Window must be set.
func (c Config) Bucket() time.Duration { return c.Window / buckets }

// buckets is the resolution of the window.
const buckets = 60
