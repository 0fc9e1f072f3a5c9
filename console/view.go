// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package console

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// Status is a summary of a process.
type Status struct {
	Process string    `json:"process"`
	At      time.Time `json:"at"`
	Fleet   bool      `json:"fleet"` // the process is in a fleet: requests below fleet/ are served

	Sources  int `json:"sources"`
	Held     int `json:"held"`     // sources with a hold
	Storms   int `json:"storms"`   // sources in a storm
	Paused   int `json:"paused"`   // sources that an operator paused
	Breakers int `json:"breakers"` // breakers that are not closed

	Unsettled    int    `json:"unsettled"`     // unsettled messages in this process
	DeadLettered uint64 `json:"dead_lettered"` // dead letters since the sources began

	// Attention lists at most 20 held sources, those that wait for a person first.
	Attention []Attention `json:"attention"`
}

// Attention is one held source, with its strongest reason.
type Attention struct {
	Source string `json:"source"`
	Hold
}

// A Source is one guarded source.
type Source struct {
	Name  string `json:"name"`
	Group string `json:"group"`
	// State is running, ended, or the reason of the strongest hold: paused, storm, breaker,
	// dlq, limiter or backpressure.
	State string `json:"state"`
	Holds []Hold `json:"holds"`

	Breaker Breaker `json:"breaker"`
	Storm   Storm   `json:"storm"`

	Waiting    int `json:"waiting"` // messages in each state
	Processing int `json:"processing"`
	Settling   int `json:"settling"`
	Holding    int `json:"held"`
	Spilled    int `json:"spilled"` // messages of all these states that are on the process's disk
	RetryWait  int `json:"retry_wait"`
	Window     int `json:"window"` // how many messages the source may have
	Room       int `json:"room"`   // how many more messages the source may take

	Received     uint64 `json:"received"` // since the source began
	Acked        uint64 `json:"acked"`
	Failures     uint64 `json:"failures"` // failed calls of the handler
	DeadLettered uint64 `json:"dead_lettered"`
	Returned     uint64 `json:"returned"`
	Quarantined  uint64 `json:"quarantined"`

	Credits   float64 `json:"credits"`            // DLQ budget left
	OldestAge float64 `json:"oldest_age_seconds"` // age of the oldest unsettled message, in seconds

	// Errors are the latest errors of unsettled messages, grouped by cause, those of most
	// messages first. Only the answer about one source has them.
	Errors []Failing `json:"errors,omitempty"`

	wider []Breaker // open scopes above the breaker
}

// A Failing is an error of unsettled messages.
type Failing struct {
	Cause    string `json:"cause"`    // the id of the error's group
	Title    string `json:"title"`    // the error
	Class    string `json:"class"`    // as in Cause
	Messages int    `json:"messages"` // unsettled messages that failed with it last
	Attempts int    `json:"attempts"` // the most calls of one of them so far
}

// A Hold is one reason why a source is held.
type Hold struct {
	Reason    string  `json:"reason"`
	Detail    string  `json:"detail"`
	Until     float64 `json:"until_seconds"` // minimum time left, in seconds; 0 means until somebody clears the hold
	ClearedBy string  `json:"cleared_by"`
}

// A Breaker is one circuit breaker, which the sources of one scope may share. It may also
// be an open wider scope, a topic's or a group's, with the sources that it holds. A wider
// scope takes no orders.
type Breaker struct {
	Name    string   `json:"name"` // the breaker's scope; empty if the source has no breaker
	Group   string   `json:"group,omitempty"`
	State   string   `json:"state"` // closed, open or half-open
	Cause   string   `json:"cause,omitempty"`
	Forced  bool     `json:"forced"`
	Fleet   bool     `json:"fleet"`         // the fleet holds the breaker
	Since   float64  `json:"since_seconds"` // seconds since the breaker closed, or ceased to be closed
	Until   float64  `json:"until_seconds"` // seconds until a call may be admitted; 0 means now, or until somebody clears the breaker
	Ratio   float64  `json:"failure_ratio"`
	Sources []string `json:"sources,omitempty"` // sources that share the breaker
}

// A Storm holds the values of the storm detector.
type Storm struct {
	Active    bool    `json:"active"`
	ErrorRate float64 `json:"error_rate"`
	Attempts  int     `json:"attempts"`
	Age       float64 `json:"age_seconds"`
}

const mostAttention = 20

func (c *Console) status(now time.Time, all []Source) Status {
	st := Status{Process: c.process, At: now.UTC(), Fleet: c.fleet != nil, Attention: []Attention{}}
	open := make(map[string]bool)
	for _, s := range all {
		st.Sources++
		st.Unsettled += s.Waiting + s.Processing + s.Settling + s.Holding + s.RetryWait
		st.DeadLettered += s.DeadLettered
		if s.Storm.Active {
			st.Storms++
		}
		if s.State == statePaused {
			st.Paused++
		}
		if s.Breaker.Name != "" && s.Breaker.State != "closed" {
			open[s.Group+" "+s.Breaker.Name] = true
		}
		for _, b := range s.wider {
			open[s.Group+" "+b.Name] = true
		}
		if len(s.Holds) > 0 {
			st.Held++
			st.Attention = append(st.Attention, Attention{s.Name, s.Holds[0]})
		}
	}
	st.Breakers = len(open)
	slices.SortStableFunc(st.Attention, func(a, b Attention) int { return cmp.Compare(needs(a), needs(b)) })
	st.Attention = st.Attention[:min(len(st.Attention), mostAttention)]
	return st
}

// needs ranks an attention: those that wait for a person come first.
func needs(a Attention) int {
	switch a.Reason {
	case guard.ReasonDLQ.String():
		return 0
	case guard.ReasonStorm.String():
		return 1
	case guard.ReasonBreaker.String():
		return 2
	case guard.ReasonOperator.String():
		return 3
	}
	return 4
}

// sources returns the sources that match a pattern, sorted by name. Without a * in the pattern it
// also looks at the errors of their messages.
func (c *Console) sources(pattern string) []Source {
	all := []Source{}
	for _, s := range c.controls(pattern) {
		v := view(s.group, s.Control.State())
		if !strings.HasSuffix(pattern, "*") {
			for _, f := range s.Failing() {
				v.Errors = append(v.Errors, Failing{f.Cause.ID, f.Cause.Title, f.Class.String(), f.Messages, f.Attempts})
			}
		}
		all = append(all, v)
	}
	return all
}

// states returns the states of all sources.
func (c *Console) states() (all []guard.State) {
	for _, s := range c.controls("*") {
		all = append(all, s.State())
	}
	return all
}

// A control is a source and the group of its guard.
type control struct {
	guard.Control

	group string
}

// controls returns the sources that match a pattern: one name, or a prefix and a *.
func (c *Console) controls(pattern string) []control {
	var all []control
	for _, g := range c.guards {
		for _, s := range g.Sources() {
			if matches(pattern, s.Name()) {
				all = append(all, control{s, g.Config().Group})
			}
		}
	}
	slices.SortStableFunc(all, func(a, b control) int { return cmp.Compare(a.Name(), b.Name()) })
	return all
}

const (
	stateRunning = "running"
	statePaused  = "paused"
	stateEnded   = "ended"
)

func view(group string, s guard.State) Source {
	v := Source{
		Name: s.Source, Group: group, State: stateRunning, Holds: []Hold{},
		Breaker: breakerView(s),
		Storm: Storm{
			Active: s.Storm.Active || s.FleetStorm.Active, ErrorRate: s.Storm.ErrorRate(),
			Attempts: s.Storm.Attempts, Age: s.Storm.Age.Seconds(),
		},
		Waiting: s.Account.Waiting, Processing: s.Account.Processing, Settling: s.Account.Settling,
		Holding: s.Account.Held, Spilled: s.Spilled, RetryWait: s.Account.RetryWait, Window: s.Window, Room: s.Room,
		Received: s.Account.Received, Acked: s.Account.Acked, Failures: s.Tally.Failures,
		DeadLettered: s.Account.DeadLettered, Returned: s.Account.Returned, Quarantined: s.Tally.Quarantined,
		Credits: s.Budget, OldestAge: s.OldestAge.Seconds(),
	}
	for _, b := range s.Wider {
		of := s
		of.Breaker = b
		v.wider = append(v.wider, breakerView(of))
	}
	for _, h := range s.Holds {
		v.Holds = append(v.Holds, Hold{h.Reason.String(), h.Detail, h.Until.Seconds(), h.ClearedBy})
	}
	switch {
	case s.Ended:
		v.State = stateEnded
	case len(s.Holds) == 0:
	case s.Holds[0].Reason == guard.ReasonOperator:
		v.State = statePaused
	default:
		v.State = s.Holds[0].Reason.String()
	}
	return v
}

func breakerView(s guard.State) Breaker {
	b := s.Breaker
	if b.Name == "" && !b.Forced {
		return Breaker{State: "closed"}
	}
	v := Breaker{
		Name: b.Name, State: b.State.String(), Cause: string(b.Cause), Forced: b.Forced, Fleet: b.Held,
		Since: max(0, s.Now-cmp.Or(b.Tripped, b.Since)).Seconds(), Ratio: b.Ratio,
	}
	const aYear = 365 * 24 * time.Hour
	if left := b.Until - s.Now; b.Until > 0 && left > 0 && left < aYear { // a force without an end has no time left
		v.Until = left.Seconds()
	}
	return v
}

// breakers returns the breakers of all sources, each once, and the open wider scopes.
func (c *Console) breakers(pattern string) []Breaker {
	all := make(map[string]*Breaker)
	for _, s := range c.sources("*") {
		for _, is := range append(s.wider, s.Breaker) {
			if is.Name == "" || !matches(pattern, is.Name) {
				continue
			}
			key := s.Group + " " + is.Name
			b := all[key]
			if b == nil {
				is.Group = s.Group
				b = &is
				all[key] = b
			}
			b.Sources = append(b.Sources, s.Name)
		}
	}
	out := []Breaker{}
	for _, key := range slices.Sorted(maps.Keys(all)) {
		out = append(out, *all[key])
	}
	return out
}
