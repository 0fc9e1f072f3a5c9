// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"
)

// Orders that are over make room for others, and those in force stay. When those in force fill
// the board, the next one is refused.
func TestOrdersThatAreOverMakeRoom(t *testing.T) {
	if raceEnabled {
		t.Skip("it has one goroutine: run without -race")
	}
	o := newOrderer(t, "a", time.Unix(1_800_000_000, 0))
	for _, id := range []string{"pause", "resume"} {
		if err := o.Give(id, "", o.wall.Add(25*time.Hour)); err != nil {
			t.Fatal(err)
		}
	}
	for i := range maxOrderElements/2 + maxOrders {
		o.wall = o.wall.Add(100 * time.Millisecond)
		if err := o.Give(fmt.Sprint(i), "credits", o.wall.Add(50*time.Millisecond)); err != nil {
			t.Fatalf("order %d: %v", i, err)
		}
	}
	o.wall = o.wall.Add(time.Second)
	if got := o.texts(); !slices.Equal(got, []string{"pause ", "resume "}) {
		t.Errorf("in force: %q", got)
	}
	for i := range maxOrders - 2 {
		if err := o.Give(fmt.Sprint("in force ", i), "", o.wall.Add(time.Hour)); err != nil {
			t.Fatal(err)
		}
	}
	if err := o.Give("more", "", o.wall.Add(time.Hour)); !errors.Is(err, ErrBusy) {
		t.Error("one more:", err)
	}
}

// Of two orders whose givers had not heard of each other the one that was given later is the
// later, however wrong the wall clocks are.
func TestLaterOrderIsTheLater(t *testing.T) {
	for _, off := range []time.Duration{-3 * time.Hour, 3 * time.Hour} {
		start := time.Unix(1_800_000_000, 0)
		a, wrong := newOrderer(t, "a", start), newOrderer(t, "wrong", start.Add(off))
		wrong.Offset(-off)
		give := func(o *orderer, id string) {
			t.Helper()
			if err := o.Give(id, "pause", o.wall.Add(time.Hour)); err != nil {
				t.Fatal(err)
			}
			a.wall, wrong.wall = a.wall.Add(time.Second), wrong.wall.Add(time.Second)
		}
		give(a, "1")
		give(wrong, "2")
		give(a, "3")
		a.hear(t, wrong)
		wrong.hear(t, a)
		for _, o := range []*orderer{a, wrong} {
			if got := o.texts(); !slices.Equal(got, []string{"1 pause", "2 pause", "3 pause"}) {
				t.Errorf("off by %v: %s has %q", off, o.self.Name, got)
			}
		}
	}
}

// An order comes after all that its giver had heard of: also before it knew the fleet's time, and
// after those that are over.
func TestOrderComesAfterWhatWasHeard(t *testing.T) {
	start := time.Unix(1_800_000_000, 0)
	a, behind := newOrderer(t, "a", start), newOrderer(t, "behind", start.Add(-20*time.Millisecond))
	behind.timed = false
	if err := a.Give("1", "pause", start.Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	behind.hear(t, a)
	for _, id := range []string{"2", "3"} {
		if err := behind.Give(id, "resume", behind.wall.Add(time.Hour)); err != nil {
			t.Fatal(err)
		}
	}
	behind.Offset(0)
	a.hear(t, behind)
	for _, o := range []*orderer{a, behind} {
		if got := o.texts(); !slices.Equal(got, []string{"1 pause", "2 resume", "3 resume"}) {
			t.Errorf("%s has %q", o.self.Name, got)
		}
	}
}
