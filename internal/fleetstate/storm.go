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

// StormConfig has the settings of [Storms]. The zero value is valid and means the documented
// defaults.
type StormConfig struct {
	// Share is the least part of a key's reporting processes that must be in a storm, so that the
	// fleet is in one. In (0, 1]; unset means 0.5. At least two must be, unless only one reports.
	Share float64

	// Silent is how long a process must be silent before its snapshots are dropped. In a large
	// fleet its rest is added, see crdt.Contact. In [100ms, 10m]; unset means 5 s.
	Silent time.Duration

	// Every is how often changes of a snapshot are sent while its verdict stays the same. In
	// [10ms, 1m]; unset means 1 s.
	Every time.Duration

	// Keys is how many keys one process may report. It holds for this process and for each peer.
	// Further keys are left out and counted. In [1, 100000]; unset means 1000.
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

// Validate returns nil, or an [ErrConfig] that lists everything that is wrong with c.
func (c StormConfig) Validate() error {
	var w checks
	c = c.WithDefaults()
	w.share("Share", c.Share)
	w.span("Silent", c.Silent, 100*time.Millisecond, 10*time.Minute)
	w.span("Every", c.Every, 10*time.Millisecond, time.Minute)
	w.count("Keys", c.Keys, 1e5)
	return errors.Join(w...)
}

// Thresholds says which of a storm's three thresholds are crossed.
type Thresholds uint8

// The thresholds of [dlq.StormConfig].
const (
	CrossedRate     Thresholds = 1 << iota // the error rate is above its threshold
	CrossedAttempts                        // a delivery was tried more often
	CrossedAge                             // a delivery has waited longer

	crossedAll = CrossedRate | CrossedAttempts | CrossedAge
)

// Report is the view of one process's detector: a snapshot of its window. The next report replaces
// it. Reports never add up over time.
type Report struct {
	Active   bool       // in a storm by its own verdict, with its own hysteresis
	Crossed  Thresholds // crossed now, whatever Active is
	Failed   uint64
	Outcomes uint64 // the rate is Failed divided by this; 0 if no rate is known
	Attempts int
	Age      time.Duration
	Diverted uint64
	Reason   string // for people; at most 128 bytes are sent
}

// ReportOf makes a report of a detector's state.
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

// Storm is the fleet's state for one key, computed from the snapshots.
type Storm struct {
	Active    bool
	Reporters int // heard processes that report the key, this one included
	Affected  int // reporters in a storm by their own detectors
	Need      int // how many reporters must be affected

	// Sums and maxima over the reporters' current windows.
	Failed, Outcomes, Diverted uint64
	Attempts                   int
	Age                        time.Duration
	Reason                     string // reason of the affected reporter with the highest age
}

// JudgeStorm defines a storm of the fleet, as a pure function of the reports of the processes that
// are heard. At least max(2, ceil(share·reporters)) of them, or the only one, must be in a storm by
// their own detectors. Each of these has crossed its three thresholds and not yet met its own
// hysteresis for the end. So the fleet's verdict needs no hysteresis of its own.
//
// Nothing cumulative is added. When two sides of a split meet again, each has the windows of that
// moment. Failures during the split that are over are in no window. One process with a broken path
// is no storm of the fleet.
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
