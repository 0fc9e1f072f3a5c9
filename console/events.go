// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package console

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// An Event is one line in the timeline of an incident: a breaker or storm began or ended,
// dead letters of one cause, or an order.
type Event struct {
	At   time.Time `json:"at"`
	Kind string    `json:"kind"` // one of the constants below
	// Subject is the breaker's scope, the source, or the person who gave the order.
	Subject string  `json:"subject"`
	Detail  string  `json:"detail,omitempty"`
	Lasted  float64 `json:"lasted_seconds,omitempty"` // how long the ended breaker state or storm lasted

	// Count is the number of dead letters, Until the time of the latest, and Cause their
	// cause. All are empty for other events.
	Count int       `json:"count,omitempty"`
	Until time.Time `json:"until,omitzero"`
	Cause string    `json:"cause,omitempty"`

	reason, title string // the two parts of Detail
	class         string // class of the event's first error
}

// The kinds of events.
const (
	EventOpened     = "breaker opened"
	EventClosed     = "breaker closed"
	EventStormBegan = "storm began"
	EventStormEnded = "storm ended"
	EventDead       = "dead letters"
	EventOrder      = "order"
	EventRefused    = "order refused"
)

const (
	mostEvents = 10_000
	// joinDead is the longest gap between two dead letters of one event. An event's dead
	// letters have the same source, reason and cause.
	joinDead = time.Minute
	// joinFor is the longest duration of one event.
	joinFor = time.Hour
)

// events holds the latest events of this process.
type events struct {
	mu  sync.Mutex
	all []*Event
	now func() time.Time
}

func (e *events) add(ev *Event) {
	if len(e.all) >= mostEvents {
		e.all = slices.Delete(e.all, 0, len(e.all)-mostEvents+1)
	}
	e.all = append(e.all, ev)
}

// watcher returns the functions that a guard calls.
func (e *events) watcher() guard.Watcher {
	return guard.Watcher{StateChange: e.stateChange, DeadLetter: e.deadLetter}
}

func (e *events) stateChange(c guard.StateChange) {
	ev := &Event{At: e.now().UTC(), Subject: cmp.Or(c.Source, c.Scope), Detail: c.Detail, Lasted: c.For.Seconds()}
	switch {
	case c.Reason == guard.ReasonStorm && c.Active:
		ev.Kind = EventStormBegan
	case c.Reason == guard.ReasonStorm:
		ev.Kind = EventStormEnded
	case c.Active:
		ev.Kind = EventOpened
		if c.Error != "" {
			ev.Detail += ": " + c.Error
		}
	default:
		ev.Kind = EventClosed
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.add(ev)
}

func (e *events) deadLetter(d guard.DeadLetter) {
	now := e.now().UTC()
	cause := d.Record.Cause.ID
	reason, title := string(d.Record.Reason), clip(d.Record.Cause.Title)
	detail := reason + ": " + title
	e.mu.Lock()
	defer e.mu.Unlock()
	for i := len(e.all) - 1; i >= 0 && now.Sub(e.all[i].At) < joinFor; i-- {
		if ev := e.all[i]; ev.Kind == EventDead && ev.Subject == d.Source && ev.Cause == cause && ev.Detail == detail && now.Sub(ev.Until) <= joinDead {
			ev.Count++
			ev.Until = now
			return
		}
	}
	e.add(&Event{At: now, Kind: EventDead, Subject: d.Source, Detail: detail, Count: 1, Until: now, Cause: cause, reason: reason, title: title, class: d.Class.String()})
}

// since returns the events since then, with the orders of the audit, oldest first. An order
// comes before its effects.
func (c *Console) since(then time.Time) []Event {
	all := []Event{}
	for _, e := range c.audit.entries() {
		if e.At.Before(then) {
			continue
		}
		ev := Event{At: e.At, Kind: EventOrder, Subject: e.Who, Detail: e.Order}
		if e.Why != "" {
			ev.Detail += " (" + e.Why + ")"
		}
		if e.Error != "" {
			ev.Kind, ev.Detail = EventRefused, ev.Detail+": "+e.Error
		}
		all = append(all, ev)
	}
	c.events.mu.Lock()
	for _, ev := range c.events.all {
		if !ev.At.Before(then) || !ev.Until.Before(then) {
			all = append(all, *ev)
		}
	}
	c.events.mu.Unlock()
	slices.SortStableFunc(all, func(a, b Event) int { return a.At.Compare(b.At) })
	return all
}
