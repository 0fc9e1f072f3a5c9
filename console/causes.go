// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package console

import (
	"cmp"
	"slices"
	"time"
)

// A Cause is the dead letters of one error: the same type, place and text without ids.
type Cause struct {
	Cause   string    `json:"cause"`   // as a rule of the quarantine names it; empty if the letters have none
	Title   string    `json:"title"`   // the error
	Class   string    `json:"class"`   // whose fault it is: dependency, message or unknown; no rule matches the first
	Count   int       `json:"count"`   // dead letters
	Reasons []string  `json:"reasons"` // why they are dead letters, by name
	Sources []string  `json:"sources"` // where they came from, by name
	First   time.Time `json:"first"`
	Last    time.Time `json:"last"`
}

// causes are those of the dead letters from then on, the most frequent first. An event that
// began earlier counts whole.
func (e *events) causes(then time.Time) []Cause {
	all := make(map[string]*Cause)
	e.mu.Lock()
	for _, ev := range e.all {
		if ev.Kind != EventDead || ev.Until.Before(then) {
			continue
		}
		c := all[ev.Cause]
		if c == nil {
			c = &Cause{Cause: ev.Cause, Title: ev.title, Class: ev.class, First: ev.At}
			all[ev.Cause] = c
		}
		c.Count += ev.Count
		if ev.Until.After(c.Last) { // one event may go on while the next begins
			c.Last = ev.Until
		}
		c.Reasons, c.Sources = append(c.Reasons, ev.reason), append(c.Sources, ev.Subject)
	}
	e.mu.Unlock()
	out := []Cause{}
	for _, c := range all {
		for _, names := range []*[]string{&c.Reasons, &c.Sources} {
			slices.Sort(*names)
			*names = slices.Compact(*names)
		}
		out = append(out, *c)
	}
	slices.SortFunc(out, func(a, b Cause) int { return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Cause, b.Cause)) })
	return out
}
