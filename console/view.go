// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package console

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// Status is a process at a glance.
type Status struct {
	Process string    `json:"process"`
	At      time.Time `json:"at"`
	Fleet   bool      `json:"fleet"` // it is in one, which answers below fleet/

	Sources  int `json:"sources"`
	Held     int `json:"held"`     // sources that are not simply running
	Storms   int `json:"storms"`   // sources in a storm
	Paused   int `json:"paused"`   // sources that an operator paused
	Breakers int `json:"breakers"` // breakers that are not closed

	Unsettled    int    `json:"unsettled"`     // messages in this process
	DeadLettered uint64 `json:"dead_lettered"` // since the sources began

	// Attention are the sources that are not simply running, those that wait for a
	// person first. At most 20.
	Attention []Attention `json:"attention"`
}

// Attention is one source that is not simply running, with its strongest reason.
type Attention struct {
	Source string `json:"source"`
	Hold
}

// A Source is one guarded source.
type Source struct {
	Name  string `json:"name"`
	Group string `json:"group"`
	// State is running, or the reason of the strongest hold: paused, storm, breaker,
	// dlq, limiter, backpressure, or ended.
	State string `json:"state"`
	Holds []Hold `json:"holds"`

	Breaker Breaker `json:"breaker"`
	Storm   Storm   `json:"storm"`

	Waiting    int `json:"waiting"` // messages by state
	Processing int `json:"processing"`
	Settling   int `json:"settling"`
	Holding    int `json:"held"`
	Spilled    int `json:"spilled"` // of all these, on the disk of the process
	RetryWait  int `json:"retry_wait"`
	Window     int `json:"window"` // messages that the source may have
	Room       int `json:"room"`   // how many more

	Received     uint64 `json:"received"` // since the source began
	Acked        uint64 `json:"acked"`
	Failures     uint64 `json:"failures"` // handler calls
	DeadLettered uint64 `json:"dead_lettered"`
	Returned     uint64 `json:"returned"`
	Quarantined  uint64 `json:"quarantined"`

	Credits   float64 `json:"credits"`            // DLQ budget left
	OldestAge float64 `json:"oldest_age_seconds"` // of the oldest unsettled message

	wider []Breaker // the scopes above the breaker that are open
}

// A Hold is one reason why a source is not simply running.
type Hold struct {
	Reason    string  `json:"reason"`
	Detail    string  `json:"detail"`
	Until     float64 `json:"until_seconds"` // how long it lasts at least; 0 means until somebody clears it
	ClearedBy string  `json:"cleared_by"`
}

// A Breaker is one circuit breaker, which sources of one scope may share; or a wider scope that
// is open, a topic's or a group's, and the sources that it holds. That takes no order.
type Breaker struct {
	Name    string   `json:"name"` // its scope; empty if the source has none
	Group   string   `json:"group,omitempty"`
	State   string   `json:"state"` // closed, open or half-open
	Cause   string   `json:"cause,omitempty"`
	Forced  bool     `json:"forced"`
	Fleet   bool     `json:"fleet"`         // held by the fleet
	Since   float64  `json:"since_seconds"` // how long it has been in this state
	Until   float64  `json:"until_seconds"` // until a call may be admitted; 0 means now, or until somebody clears it
	Ratio   float64  `json:"failure_ratio"`
	Sources []string `json:"sources,omitempty"` // that share it
}

// A Storm is what the storm detector reads.
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

// needs ranks what waits for a person before what waits for nobody.
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

// sources are those that a pattern names, by name.
func (c *Console) sources(pattern string) []Source {
	all := []Source{}
	for _, s := range c.controls(pattern) {
		all = append(all, view(s.group, s.Control.State()))
	}
	return all
}

// states are those of all sources.
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

// controls are the sources that a pattern names: one name, or a prefix and a *.
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
		Since: max(0, s.Now-b.Since).Seconds(), Ratio: b.Ratio,
	}
	const aYear = 365 * 24 * time.Hour
	if left := b.Until - s.Now; b.Until > 0 && left > 0 && left < aYear { // a force without an end has none
		v.Until = left.Seconds()
	}
	return v
}

// breakers are those of all sources, each once, and the wider scopes that are open.
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
