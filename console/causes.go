// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package console

import (
	"cmp"
	"slices"
	"time"
)

// A Cause is a group of dead letters with one error: the same type, place and text without
// ids.
type Cause struct {
	Cause   string         `json:"cause"`   // the cause's id in a rule of the quarantine; empty if the dead letters have no cause
	Title   string         `json:"title"`   // the error
	Class   string         `json:"class"`   // whose fault the error is: dependency, message or unknown; no rule matches class dependency
	Count   int            `json:"count"`   // dead letters
	Reasons map[string]int `json:"reasons"` // dead letters by reason
	Sources []string       `json:"sources"` // sources of the dead letters, sorted
	First   time.Time      `json:"first"`
	Last    time.Time      `json:"last"`
}

// causes returns the causes of dead letters since then, the most frequent first. An event
// that began before then counts in full.
func (e *events) causes(then time.Time) []Cause {
	all := make(map[string]*Cause)
	e.mu.Lock()
	for _, ev := range e.all {
		if ev.Kind != EventDead || ev.Until.Before(then) {
			continue
		}
		c := all[ev.Cause]
		if c == nil {
			c = &Cause{Cause: ev.Cause, Title: ev.title, Class: ev.class, Reasons: make(map[string]int), First: ev.At}
			all[ev.Cause] = c
		}
		c.Count += ev.Count
		if ev.Until.After(c.Last) { // one event may go on while the next begins
			c.Last = ev.Until
		}
		c.Reasons[ev.reason] += ev.Count
		c.Sources = append(c.Sources, ev.Subject)
	}
	e.mu.Unlock()
	out := []Cause{}
	for _, c := range all {
		slices.Sort(c.Sources)
		c.Sources = slices.Compact(c.Sources)
		out = append(out, *c)
	}
	slices.SortFunc(out, func(a, b Cause) int { return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Cause, b.Cause)) })
	return out
}
