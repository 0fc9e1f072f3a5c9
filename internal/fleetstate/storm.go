// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"cmp"
	"errors"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/scope"
)

// StormConfig is what an operator may set. The zero value is valid and means the
// documented defaults.
type StormConfig struct {
	// Share is how many of the processes that report a key must be affected for
	// the fleet to be. In (0, 1]; unset means 0.5. At least two must be, unless
	// only one reports.
	Share float64

	// Silent is the silence after which a process's snapshots are dropped. In a large
	// fleet what it rests is added, see crdt.Contact. In [100ms, 10m]; unset means 5 s.
	Silent time.Duration

	// Every is how often a snapshot whose verdict has not changed is told anew. In
	// [10ms, 1m]; unset means 1 s.
	Every time.Duration

	// Keys is how many keys one process may report, its own and each peer's; what
	// comes above it is left out and counted. In [1, 100000]; unset means 1000.
	Keys int
}

// WithDefaults returns c with every unset field replaced by its default.
func (c StormConfig) WithDefaults() StormConfig {
	def(&c.Share, 0.5)
	def(&c.Silent, 5*time.Second)
	def(&c.Every, time.Second)
	def(&c.Keys, 1000)
	return c
}

// Validate reports everything that is wrong with c at once, as an error that is
// [ErrConfig], or nil.
func (c StormConfig) Validate() error {
	var w checks
	c = c.WithDefaults()
	w.share("Share", c.Share)
	w.span("Silent", c.Silent, 100*time.Millisecond, 10*time.Minute)
	w.span("Every", c.Every, 10*time.Millisecond, time.Minute)
	w.count("Keys", c.Keys, 1e5)
	return errors.Join(w...)
}

// Thresholds are which of a storm's three are crossed.
type Thresholds uint8

// The thresholds of [dlq.StormConfig].
const (
	CrossedRate     Thresholds = 1 << iota // more failures than the threshold
	CrossedAttempts                        // a delivery tried more often
	CrossedAge                             // a delivery that has waited longer

	crossedAll = CrossedRate | CrossedAttempts | CrossedAge
)

// Report is what one process's own detector sees: a snapshot of its own
// window, which the next replaces. It never adds up.
type Report struct {
	Active   bool       // in storm by its own verdict, with its own hysteresis
	Crossed  Thresholds // now, whatever Active is
	Failed   uint64
	Outcomes uint64 // with Failed, the rate's basis; 0 if no rate is known
	Attempts int
	Age      time.Duration
	Diverted uint64
	Reason   string // for people; at most 128 bytes travel
}

// ReportOf makes a report of what a detector says.
func ReportOf(s dlq.Storm, reason string) Report {
	r := Report{
		Active: s.Active, Failed: s.Failed, Outcomes: s.Outcomes,
		Attempts: s.Attempts, Age: s.Age, Diverted: s.Diverted, Reason: reason,
	}
	if s.Outcomes > 0 && s.ErrorRate() > s.Config.ErrorRate {
		r.Crossed |= CrossedRate
	}
	if s.Attempts > s.Config.Attempts {
		r.Crossed |= CrossedAttempts
	}
	if s.Age > s.Config.Age {
		r.Crossed |= CrossedAge
	}
	return r
}

// Storm is what the fleet makes of the snapshots of one key.
type Storm struct {
	Active    bool
	Reporters int // processes that report the key and are heard, this one included
	Affected  int // of them in storm by themselves
	Need      int // how many that would have to be

	// Sums and the highest over the reporters' windows as they are.
	Failed, Outcomes, Diverted uint64
	Attempts                   int
	Age                        time.Duration
	Reason                     string // of the longest of the affected
}

// JudgeStorm is the definition of a storm of the fleet, a pure function of the
// reports of the processes that are heard: at least max(2, ceil(share·reporters))
// of them, or the only one, are in storm by their own detectors. Each has
// crossed its three thresholds and has not met its own hysteresis for the end
// yet, so the fleet's verdict needs none of its own.
//
// Nothing cumulative is added: sides of a split that meet again have each the
// windows of that moment, and what failed meanwhile and is over is in none. One
// process with a broken path is no storm of the fleet.
func JudgeStorm(share float64, reports []Report) Storm {
	s := Storm{Reporters: len(reports), Need: scope.Need(share, len(reports))}
	var worst *Report
	for i := range reports {
		r := &reports[i]
		s.Failed += r.Failed
		s.Outcomes += r.Outcomes
		s.Diverted += r.Diverted
		s.Attempts = max(s.Attempts, r.Attempts)
		s.Age = max(s.Age, r.Age)
		if !r.Active {
			continue
		}
		s.Affected++
		if worst == nil || cmp.Or(cmp.Compare(r.Age, worst.Age), cmp.Compare(r.Reason, worst.Reason)) > 0 {
			worst = r
		}
	}
	if worst != nil {
		s.Reason = worst.Reason
	}
	s.Active = s.Reporters > 0 && s.Affected >= s.Need
	return s
}
