// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/quarantine"
)

// lister is a process with a list and a clock of its own.
type lister struct {
	*Quarantine

	now time.Time
}

func newLister(t *testing.T, name string, now time.Time) *lister {
	t.Helper()
	l := &lister{now: now}
	var err error
	l.Quarantine, err = NewQuarantine(crdt.Replica{Name: name, Incarnation: 1}, func() time.Time { return l.now })
	mustNot(t, err)
	return l
}

func (l *lister) hear(t *testing.T, from *lister) {
	t.Helper()
	b, _ := from.Delta(0, nil, l.self, 0, math.MaxInt)
	mustNot(t, l.Merge(crdt.Contact{From: from.self}, b))
}

func (l *lister) put(t *testing.T, name string, lasts time.Duration) {
	t.Helper()
	mustNot(t, l.Add(dlq.QuarantineEntry{Rule: tenant(name), Until: l.now.Add(lasts)}))
}

// What a process writes before it knows the fleet's time is in force there at once, and with the
// right times everywhere as soon as that is known. What it heard meanwhile is not lost.
func TestQuarantineBeforeTheFleetsTime(t *testing.T) {
	for _, off := range []time.Duration{-30 * time.Hour, 0, 30 * time.Hour} {
		t.Run(off.String(), func(t *testing.T) {
			start := time.Unix(1_800_000_000, 0)
			a := newLister(t, "a", start)
			b := newLister(t, "b", start.Add(off))
			both := func(d time.Duration) { a.now, b.now = a.now.Add(d), b.now.Add(d) }
			a.Offset([]time.Duration{0})
			for _, name := range []string{"heard", "removed early", "early, then removed", "early, then again"} {
				a.put(t, name, time.Hour)
			}
			both(time.Second)
			b.hear(t, a)
			b.put(t, "early", 2*time.Hour)
			b.put(t, "early, then removed", time.Hour)
			b.put(t, "early, then again", time.Hour)
			mustNot(t, b.Remove(tenant("removed early"), ""))
			a.hear(t, b)
			if got, want := rulesOf(a.Quarantine), "early, then again early, then removed heard removed early"; got != want {
				t.Errorf("before b knows the time a has %q", got)
			}
			both(time.Second)
			mustNot(t, a.Remove(tenant("early, then removed"), "")) // later than what b wrote
			a.put(t, "early, then again", 3*time.Hour)
			b.Offset([]time.Duration{-off, -off})
			a.hear(t, b)
			b.hear(t, a)
			for _, l := range []*lister{a, b} {
				if got, want := rulesOf(l.Quarantine), "early early, then again heard"; got != want {
					t.Errorf("%s has %q, want %q", l.self.Name, got, want)
				}
				for _, e := range l.Entries() {
					wrote, lasts := start.Add(time.Second), 2*time.Hour
					switch e.Rule.Value {
					case "heard":
						wrote, lasts = start, time.Hour
					case "early, then again":
						wrote, lasts = start.Add(2*time.Second), 3*time.Hour
					}
					if shift := l.now.Sub(a.now); !e.At.Add(-shift).Equal(wrote) || !e.Until.Add(-shift).Equal(wrote.Add(lasts)) {
						t.Errorf("%s: %+v, want it from %v for %v", l.self.Name, e, wrote, lasts)
					}
				}
			}
		})
	}
}

// Of two writes about a rule whose writers had not heard of each other the later one decides,
// however wrong the clocks are.
func TestLaterWriteIsTheLater(t *testing.T) {
	for _, off := range []time.Duration{-time.Hour, time.Hour} {
		start := time.Unix(1_800_000_000, 0)
		a, b := newLister(t, "a", start), newLister(t, "b", start.Add(off))
		a.Offset([]time.Duration{0})
		b.Offset([]time.Duration{-off, -off})
		a.put(t, "x", time.Hour)
		b.put(t, "y", time.Hour)
		a.now, b.now = a.now.Add(time.Second), b.now.Add(time.Second)
		mustNot(t, a.Remove(tenant("y"), ""))
		mustNot(t, b.Remove(tenant("x"), ""))
		a.hear(t, b)
		b.hear(t, a)
		if got := rulesOf(a.Quarantine) + rulesOf(b.Quarantine); got != "" {
			t.Errorf("off by %v: %q", off, got)
		}
	}
}

// The list of a process that never hears another is bounded, and what is over makes room.
func TestQuarantineOfOneThatIsAlone(t *testing.T) {
	l := newLister(t, "a", time.Unix(1_800_000_000, 0))
	for i := range quarantine.Max {
		l.put(t, fmt.Sprint(i), time.Minute)
	}
	if err := l.Add(dlq.QuarantineEntry{Rule: tenant("more")}); !errors.Is(err, dlq.ErrQuarantine) {
		t.Error("one more:", err)
	}
	mustNot(t, l.Remove(tenant("7"), ""))
	l.put(t, "8", time.Hour)
	if n := len(l.Entries()); n != quarantine.Max-1 {
		t.Errorf("%d entries", n)
	}
	l.now = l.now.Add(time.Minute)
	l.put(t, "more", time.Hour)
	if got := rulesOf(l.Quarantine); got != "8 more" {
		t.Errorf("%q", got)
	}
	for i := range 2 * maxElements {
		l.now = l.now.Add(30 * time.Second)
		if err := l.Remove(tenant(fmt.Sprint("gone ", i)), ""); err != nil {
			if i < maxElements-quarantine.Max-2 {
				t.Fatal(i, err)
			}
			break
		}
	}
	l.now = l.now.Add(9 * 24 * time.Hour)
	l.put(t, "anew", time.Hour)
	if got := rulesOf(l.Quarantine); got != "anew" {
		t.Errorf("%q", got)
	}
}

// A rule that was removed, and then added for a shorter time, does not come back after that: not
// from a process that was cut off before it was removed.
func TestRemovedRuleStaysRemovedAfterAShorterOne(t *testing.T) {
	for _, removed := range []bool{true, false} {
		start := time.Unix(1_800_000_000, 0)
		a, b := newLister(t, "a", start), newLister(t, "b", start)
		for _, l := range []*lister{a, b} {
			l.Offset([]time.Duration{0})
		}
		a.put(t, "acme", 24*time.Hour)
		b.hear(t, a)
		a.now = a.now.Add(time.Minute)
		if removed {
			mustNot(t, a.Remove(tenant("acme"), ""))
		}
		a.put(t, "acme", 5*time.Minute)
		c := newLister(t, "c", a.now) // it knows a alone, and only what counts there
		c.Offset([]time.Duration{0})
		c.hear(t, a)

		b.now = a.now
		for range 130 { // each minute, as in the gossip
			for _, l := range []*lister{a, b, c} {
				l.now = l.now.Add(time.Minute)
				_, _ = l.Delta(0, nil, crdt.Replica{}, 0, 1024)
			}
		}
		if got := rulesOf(b.Quarantine); got != "acme" {
			t.Fatalf("the one that is cut off has %q", got)
		}
		d := newLister(t, "d", a.now) // it begins, and meets b first
		d.Offset([]time.Duration{0})
		d.hear(t, b)
		for _, l := range []*lister{a, c} {
			l.hear(t, b)
			l.hear(t, d)
			b.hear(t, l)
			d.hear(t, l)
		}
		all := []*lister{a, b, c, d}
		for _, l := range all {
			if got := rulesOf(l.Quarantine); got != "" {
				t.Errorf("removed=%v: %s has %q", removed, l.self.Name, got)
			}
		}

		c.put(t, "acme", time.Hour)
		for _, l := range all[:2] {
			l.hear(t, c)
		}
		d.hear(t, b)
		for _, l := range all {
			if got := rulesOf(l.Quarantine); got != "acme" {
				t.Errorf("removed=%v: added anew, and %s has %q", removed, l.self.Name, got)
			}
		}
		for _, l := range all { // when none of it can be in force any more, it is forgotten
			l.now = l.now.Add(removedFor + time.Minute)
			_, _ = l.Delta(0, nil, crdt.Replica{}, 0, 1024)
			if n := l.countLocked(); n != 0 {
				t.Errorf("removed=%v: %s remembers %d", removed, l.self.Name, n)
			}
		}
	}
}
