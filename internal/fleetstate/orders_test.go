// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// orderer is a process with a clock of its own.
type orderer struct {
	*Orders

	self crdt.Replica
	wall time.Time
}

func newOrderer(t interface{ Fatal(...any) }, name string, wall time.Time) *orderer {
	o := &orderer{self: crdt.Replica{Name: name, Incarnation: 1}, wall: wall}
	var err error
	if o.Orders, err = NewOrders(o.self, func() time.Time { return o.wall }); err != nil {
		t.Fatal(err)
	}
	o.timed = true
	return o
}

func (o *orderer) hear(t interface{ Fatal(...any) }, from *orderer) {
	b, _ := from.Delta(0, nil, o.self, 0, math.MaxInt)
	if err := o.Merge(crdt.Contact{From: from.self}, b); err != nil {
		t.Fatal(err)
	}
}

func (o *orderer) texts() (all []string) {
	for _, in := range o.InForce() {
		all = append(all, in.ID+" "+in.Text)
	}
	return all
}

// A process that starts with a clock that is behind carries out nothing that is over, and
// what is in force once it knows the fleet's time.
func TestOrdersBeforeTheFleetsTime(t *testing.T) {
	start := time.Unix(1_800_000_000, 0)
	a := newOrderer(t, "a", start)
	for id, lasts := range map[string]time.Duration{"1": 30 * time.Second, "2": time.Hour} {
		if err := a.Give(id, "deadletter", start.Add(lasts)); err != nil {
			t.Fatal(err)
		}
	}
	a.wall = a.wall.Add(10 * time.Minute)
	b := newOrderer(t, "b", a.wall.Add(-30*time.Minute))
	b.timed = false
	told := 0
	stop := b.Watch(func() { told++ })
	defer stop()
	if err := b.Give("x", "pause", b.wall.Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	b.hear(t, a)
	if got := b.texts(); !slices.Equal(got, []string{"x pause"}) {
		t.Errorf("before it knows a clock: %q", got)
	}
	before := told
	b.Offset(30 * time.Minute)
	if got := b.texts(); !slices.Equal(got, []string{"2 deadletter", "x pause"}) || told == before {
		t.Errorf("then: %q, told %d times", got, told-before)
	}
}

// An order that a process is given before it knows the fleet's time lasts as long as it says in
// all processes, and is in its place among those of others, however wrong that process's clock is.
func TestOrderGivenBeforeTheFleetsTime(t *testing.T) {
	for _, off := range []time.Duration{-3 * time.Hour, 0, 3 * time.Hour} {
		t.Run(off.String(), func(t *testing.T) {
			start := time.Unix(1_800_000_000, 0)
			a := newOrderer(t, "a", start)
			give := func(o *orderer, id string) {
				t.Helper()
				if err := o.Give(id, "pause", o.wall.Add(10*time.Minute)); err != nil {
					t.Fatal(err)
				}
			}
			give(a, "1")
			a.wall = a.wall.Add(time.Minute)
			b := newOrderer(t, "b", a.wall.Add(off))
			b.timed = false
			b.hear(t, a)
			give(b, "2")
			a.hear(t, b)
			if got := a.texts(); !slices.Equal(got, []string{"1 pause"}) {
				t.Errorf("before b knows the time a has %q", got)
			}
			a.wall, b.wall = a.wall.Add(time.Second), b.wall.Add(time.Second)
			b.Offset(-off)
			a.hear(t, b)
			give(a, "3")
			b.hear(t, a)
			for _, o := range []*orderer{a, b} {
				if got := o.texts(); !slices.Equal(got, []string{"1 pause", "2 pause", "3 pause"}) {
					t.Fatalf("%s has %q", o.self.Name, got)
				}
			}
			if until, want := a.InForce()[1].Until, start.Add(11*time.Minute); !until.Equal(want) {
				t.Errorf("it ends at %v, want %v", until, want)
			}
		})
	}
}

// An order that is given in the knowledge of another comes after it in all processes,
// however wrong the clocks are; its time is the fleet's.
func TestOrdersKeepTheirSequence(t *testing.T) {
	start := time.Unix(1_800_000_000, 0)
	ahead, behind := newOrderer(t, "ahead", start.Add(time.Hour)), newOrderer(t, "behind", start)
	ahead.Offset(-time.Hour)
	if err := ahead.Give("1", "pause", ahead.wall.Add(10*time.Minute)); err != nil {
		t.Fatal(err)
	}
	behind.hear(t, ahead)
	if err := behind.Give("2", "resume", behind.wall.Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	ahead.hear(t, behind)
	for _, o := range []*orderer{ahead, behind} {
		if got := o.texts(); !slices.Equal(got, []string{"1 pause", "2 resume"}) {
			t.Errorf("%s: %q", o.self.Name, got)
		}
	}
	if until := behind.InForce()[0].Until; !until.Equal(start.Add(10 * time.Minute)) {
		t.Errorf("the order ends at %v by the other clock, want 10m from %v", until, start)
	}
	behind.wall = behind.wall.Add(9 * time.Minute)
	if got := behind.texts(); !slices.Equal(got, []string{"1 pause"}) {
		t.Errorf("after nine minutes: %q", got)
	}
	if err := behind.Answer("1", strings.Repeat("x", 2*MaxAnswer)); err != nil {
		t.Fatal(err)
	}
	ahead.hear(t, behind)
	if a := ahead.Answers("1"); len(a) != 1 || len(a["behind"]) != MaxAnswer {
		t.Errorf("%v", a)
	}
	behind.wall = behind.wall.Add(2 * time.Hour)
	if err := behind.Give("3", "pause", behind.wall.Add(time.Minute)); err != nil { // which forgets
		t.Fatal(err)
	}
	if got, a := behind.texts(), behind.Answers("1"); !slices.Equal(got, []string{"3 pause"}) || len(a) != 0 {
		t.Errorf("two hours later: %q %v", got, a)
	}
}

// Whatever the sequence in which processes hear each other, all have the same orders in
// the same sequence in the end.
func TestOrdersConverge(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		start := time.Unix(1_800_000_000, 0)
		var all []*orderer
		for i := range 4 {
			all = append(all, newOrderer(t, fmt.Sprint("n", i), start.Add(time.Duration(rapid.IntRange(-3600, 3600).Draw(t, "skew"))*time.Second)))
		}
		for i := range rapid.IntRange(1, 30).Draw(t, "steps") {
			a, b := all[rapid.IntRange(0, 3).Draw(t, "a")], all[rapid.IntRange(0, 3).Draw(t, "b")]
			switch {
			case rapid.Bool().Draw(t, "give"):
				if err := a.Give(fmt.Sprint(i), "order", start.Add(24*time.Hour)); err != nil {
					t.Fatal(err)
				}
				if got := a.texts(); got[len(got)-1] != fmt.Sprint(i, " order") {
					t.Fatalf("the last order is not the last of %q", got)
				}
			case a != b:
				a.hear(t, b)
			}
		}
		for range 2 {
			for _, a := range all {
				for _, b := range all {
					if a != b {
						a.hear(t, b)
					}
				}
			}
		}
		for _, o := range all[1:] {
			if got, want := o.texts(), all[0].texts(); !slices.Equal(got, want) {
				t.Fatalf("%s has %q, n0 has %q", o.self.Name, got, want)
			}
		}
	})
}

// What may be put up is bounded, and what a peer sends is too.
func TestOrdersAreBounded(t *testing.T) {
	o := newOrderer(t, "a", time.Unix(1_800_000_000, 0))
	until := o.wall.Add(time.Minute)
	for id, text := range map[string]string{"": "x", "a|b": "x", strings.Repeat("i", 33): "x", "long": strings.Repeat("x", MaxOrder+1)} {
		if err := o.Give(id, text, until); !errors.Is(err, ErrConfig) {
			t.Errorf("%q of %d bytes: %v", id, len(text), err)
		}
	}
	for i := range maxOrders {
		if err := o.Give(fmt.Sprint(i), strings.Repeat("x", MaxOrder), until); err != nil {
			t.Fatal(err)
		}
	}
	if err := o.Give("more", "x", until); !errors.Is(err, ErrBusy) {
		t.Error("one more:", err)
	}
	full := newOrderer(t, "b", o.wall)
	for i := range 2 * maxOrderElements { // answers make way for each other, and for orders
		if err := full.Answer(fmt.Sprint(i), ""); err != nil {
			t.Fatal(err)
		}
		if n := full.set.Len(); n > maxOrderElements {
			t.Fatalf("%d elements", n)
		}
	}
	if full.Answers(fmt.Sprint(2*maxOrderElements-1)) == nil {
		t.Error("the latest answer is forgotten")
	}
	full.hear(t, o)
	if n := len(full.InForce()); n != maxOrders {
		t.Errorf("%d orders of a peer were heard beside a board full of answers", n)
	}
	var err error
	for i := range 2 * maxOrderElements / maxOrders { // orders do not
		peer := newOrderer(t, fmt.Sprint("peer", i), o.wall)
		for n := range maxOrders {
			if err := peer.Give(fmt.Sprint(i, "-", n), "x", until); err != nil {
				t.Fatal(err)
			}
		}
		b, _ := peer.Delta(0, nil, full.self, 0, math.MaxInt)
		if err = full.Merge(crdt.Contact{From: peer.self}, b); err != nil {
			break
		}
	}
	if n := full.set.Len(); !errors.Is(err, ErrBusy) || n >= maxOrderElements+maxOrders {
		t.Errorf("%d elements, %v", n, err)
	}
	b, _ := o.Delta(0, nil, full.self, 0, math.MaxInt)
	if err := o.Merge(crdt.Contact{From: full.self}, []byte{1, 2, 3}); !errors.Is(err, ErrMalformed) {
		t.Error("garbage:", err)
	}
	full.wall = full.wall.Add(2 * time.Hour)
	_, _ = full.Delta(0, nil, o.self, 0, math.MaxInt) // which forgets
	if err := full.Merge(crdt.Contact{From: o.self}, b); err != nil {
		t.Error("two hours later:", err)
	}
}

// In a large fleet every order is answered by all, one order after the other: the answers do
// not shut out later orders, and each order has all of its own.
func TestOrdersOfALargeFleet(t *testing.T) {
	if raceEnabled {
		t.Skip("it has one goroutine: the run without the race detector has it")
	}
	start := time.Unix(1_800_000_000, 0)
	const processes, orders = 100, 100
	giver := newOrderer(t, "giver", start)
	var others []*orderer
	for i := range processes {
		others = append(others, newOrderer(t, fmt.Sprint("n", i), start))
	}
	heard := make(map[[2]string]uint64) // by whom, of whom: as the gossip has it
	news := func(o, from *orderer) {
		pair := [2]string{o.self.Name, from.self.Name}
		b, upto := from.Delta(0, nil, o.self, heard[pair], math.MaxInt)
		heard[pair] = upto
		if err := o.Merge(crdt.Contact{From: from.self}, b); err != nil {
			t.Fatal(err)
		}
	}
	for i := range orders {
		id := fmt.Sprint(i)
		if err := giver.Give(id, "pause", giver.wall.Add(30*time.Minute)); err != nil {
			t.Fatalf("order %d: %v", i, err)
		}
		for _, o := range others {
			news(o, giver)
			if err := o.Answer(id, "done"); err != nil {
				t.Fatalf("order %d: %v", i, err)
			}
			news(giver, o)
		}
		if n := len(giver.Answers(id)); n != processes {
			t.Fatalf("order %d: %d answers", i, n)
		}
		for _, o := range append(others, giver) {
			o.wall = o.wall.Add(time.Second)
		}
	}
	for _, o := range append(others, giver) {
		if n := len(o.InForce()); n != orders {
			t.Errorf("%s: %d orders in force", o.self.Name, n)
		}
	}
}
