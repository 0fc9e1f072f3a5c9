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

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/escrow"
)

// A static fleet: each process has a file, and the operator is the sequencer.
func newStatic(t testing.TB, seed uint64, nodes int) *realm {
	w := newRealm(t, seed, nodes, nodes, ConfiguratorConfig{Static: true}, ground{lag: 20 * ms})
	w.file(1, 1000, nodes)
	return w
}

// file writes a configuration for the first nodes, of weight 1.
func (w *realm) file(number uint64, rate float64, nodes int) {
	c := nation(nodes)
	c.Number, c.Roster.Number, c.Limit.Rate = number, number, rate
	w.configurations[number] = c
	w.newest = max(w.newest, number)
}

func (w *realm) load(t testing.TB, i int, number uint64) {
	t.Helper()
	n := w.nodes[i]
	n.file = number
	if err := n.c.Load(n.clock(), number, w.configurations[number]); err != nil {
		t.Fatal(err)
	}
	n.poke()
}

// uses tells whether everybody uses so much.
func (w *realm) uses(t testing.TB, within time.Duration, what string, rates ...float64) {
	t.Helper()
	if !w.runUntil(w.now+within, func() bool {
		for i, rate := range rates {
			if n := w.nodes[i]; n.alive && math.Abs(n.applier.using()-rate) > 1e-9*rate {
				return false
			}
		}
		return true
	}) {
		w.report()
		t.Fatalf("%s: not %v", what, rates)
	}
}

func TestConfiguratorStaticRollout(t *testing.T) {
	for _, restart := range []bool{false, true} {
		w := newStatic(t, 1, 3)
		w.nodes[0].file, w.nodes[1].file, w.nodes[2].file = 1, 1, 1
		w.begun(3)
		w.uses(t, 0, "begun", 1000.0/3, 1000.0/3, 1000.0/3)
		w.file(2, 500, 3)
		w.file(3, 2000, 3)
		roll := func(i int, number uint64) {
			t.Helper()
			if !restart {
				w.load(t, i, number)
				w.run(w.now + 100*ms)
				return
			}
			w.nodes[i].file = number
			w.nodes[i].stop()
			w.nodes[i].start()
			w.run(w.now + 200*ms)
			if w.nodes[i].applier.using() == 0 {
				w.report()
				t.Fatalf("%d does not mint after it has started again", i)
			}
		}
		roll(0, 2)
		w.uses(t, 0, "a cut, in the first", 500.0/3, 500.0/3, 500.0/3)
		s := w.nodes[0].c.Status(w.nodes[0].clock())
		if !slices.Equal(s.Lacking, []string{"n001", "n002"}) || s.Members[1].Loaded != 1 || s.Members[1].Known != 2 || s.Complete != 1 || s.Loaded != 2 {
			t.Fatalf("%+v", s)
		}
		roll(1, 2)
		roll(2, 2)
		if s := w.nodes[0].c.Status(w.nodes[0].clock()); s.Complete != 2 {
			t.Fatalf("%+v", s)
		}
		roll(2, 3)
		w.uses(t, 0, "a rise: nobody loses by it", 2000.0/3, 2000.0/3, 2000.0/3)
		roll(0, 3)
		roll(1, 3)
		w.rests(t, sec, "all have it")
		w.uses(t, 0, "a rise", 2000.0/3, 2000.0/3, 2000.0/3)
	}
}

// Who gains waits until who loses has loaded it, not only heard of it.
func TestConfiguratorStaticShrinkThenGrow(t *testing.T) {
	w := newStatic(t, 1, 3)
	w.nodes[0].file, w.nodes[1].file, w.nodes[2].file = 1, 1, 1
	w.begun(3)
	c := nation(3)
	c.Number, c.Roster.Number = 2, 2
	c.Roster.Members[0].Weight = 8
	w.configurations[2] = c
	w.load(t, 0, 2)
	w.run(w.now + sec)
	w.uses(t, 0, "one has loaded it", 1000.0/3, 100, 100)
	w.load(t, 1, 2)
	w.run(w.now + sec)
	w.uses(t, 0, "two have", 1000.0/3, 100, 100)
	w.nodes[2].stop()
	w.nodes[2].start() // with the file before
	w.run(w.now + 2*sec)
	w.uses(t, 0, "the third has started again", 1000.0/3, 100, 100)
	w.load(t, 2, 2)
	w.uses(t, sec, "all have", 800, 100, 100)
	w.file(3, 1000, 2) // n002 is gone, and says nothing
	w.nodes[2].stop()
	w.load(t, 0, 3)
	w.load(t, 1, 3)
	w.uses(t, sec, "without the third", 500, 500)
}

// Two files with one number: each refuses the other's, names it, and what both have is
// no more than before. Where there was nothing before, that with the lower rate is in
// force, or the one by which somebody mints.
func TestConfiguratorStaticTwoOfOneNumber(t *testing.T) {
	w := newStatic(t, 1, 2)
	w.nodes[0].file, w.nodes[1].file = 1, 1
	w.begun(2)
	w.file(2, 4000, 2)
	w.load(t, 0, 2)
	w.file(2, 3000, 2)
	if n := w.nodes[1]; n.c.Load(n.clock(), 2, w.configurations[2]) != nil {
		t.Fatal("it has not heard of the first")
	}
	w.nodes[1].file = 2
	w.run(w.now + 2*sec)
	w.uses(t, 0, "they differ", 500, 500)
	for i, n := range w.nodes {
		if s := n.c.Status(n.clock()); s.Differs == nil || s.Differs.Number != 2 || s.Differs.Peer.Name != w.nodes[1-i].name || s.Complete != 1 {
			t.Errorf("%d: %+v", i, s)
		}
		if err := n.c.Load(n.clock(), 2, nation(1)); !errors.Is(err, ErrDiffers) {
			t.Error(err)
		}
		if err := n.c.Load(n.clock(), 1, nation(2)); !errors.Is(err, ErrConfig) {
			t.Error(err)
		}
	}
	w.nodes[1].stop()
	w.nodes[0].stop()
	w.nodes[1].start()
	w.file(2, 4000, 2)
	w.nodes[0].start()
	w.uses(t, 2*sec, "the lower rate is in force", 0, 1500)
	w.run(w.now + 5*sec)
	w.uses(t, 0, "and stays", 0, 1500)
	w.nodes[0].stop()
	w.file(2, 2000, 2)
	w.nodes[0].start()
	w.run(w.now + 5*sec)
	w.uses(t, 0, "and so does what is at work", 0, 1500)
	w.file(3, 900, 2)
	w.load(t, 0, 3)
	w.load(t, 1, 3)
	w.uses(t, 2*sec, "the operator has raised it", 450, 450)
	for _, n := range w.nodes {
		if s := n.c.Status(n.clock()); s.Differs != nil {
			t.Errorf("%s still says that configurations differ: %v", n.name, s.Differs)
		}
	}
}

// A peer that rests is heard until its rest is over; one that does not is not.
func TestConfiguratorHearsWhoRests(t *testing.T) {
	w := newRealm(t, 1, 3, 3, ConfiguratorConfig{}, ground{})
	w.begun(3)
	n := w.nodes[0]
	w.cut = islands(0, 1, 2)
	w.run(w.now + sec/2)
	say := func(i int, rest time.Duration) {
		from := w.nodes[i]
		b, _ := from.c.Delta(from.clock(), nil, n.id(), 0, 1300)
		if err := n.c.Merge(crdt.Contact{From: from.id(), Now: n.clock(), Sent: from.clock(), Rest: rest}, b); err != nil {
			t.Fatal(err)
		}
	}
	say(1, 5*sec)
	say(2, 0)
	heard := func() (names []string) {
		for _, f := range n.c.list {
			if n.clock()-f.heard < nearby {
				names = append(names, f.id.Name)
			}
		}
		slices.Sort(names)
		return names
	}
	for _, want := range []struct {
		after time.Duration
		names []string
	}{{0, []string{"n001", "n002"}}, {4 * sec, []string{"n001"}}, {3 * sec, nil}} {
		w.run(w.now + want.after)
		if got := heard(); !slices.Equal(got, want.names) {
			t.Errorf("after %v more it hears %v, want %v", want.after, got, want.names)
		}
		if s := n.c.Status(n.clock()); s.Members[1].Heard < 0 {
			t.Errorf("heard %v ago", s.Members[1].Heard)
		}
	}
}

// Peers are kept awake while something is under way, for a second after it, and no
// longer than ten after the latest news; with Majority always.
func TestConfiguratorKeeps(t *testing.T) {
	w := newRealm(t, 1, 3, 3, ConfiguratorConfig{}, ground{})
	w.begun(3)
	n, to := w.nodes[0], w.nodes[1].id()
	keeps := func(after time.Duration, want bool, what string) {
		t.Helper()
		w.run(w.now + after)
		if got := n.c.Keeps(to); got != want {
			t.Errorf("%s: it keeps: %v", what, got)
		}
	}
	keeps(2*sec, false, "at rest")
	if _, err := n.set(600); err != nil {
		t.Fatal(err)
	}
	w.rests(t, sec, "changed")
	keeps(0, true, "just complete")
	keeps(2*sec, false, "at rest again")
	w.nodes[2].stop()
	if _, err := n.set(500); err != nil { // waits for one that is gone
		t.Fatal(err)
	}
	keeps(5*sec, true, "under way")
	keeps(6*sec, false, "it waits for one who does not come")

	w = newRealm(t, 1, 3, 3, ConfiguratorConfig{OnSilence: escrow.Majority}, ground{})
	w.begun(3)
	n, to = w.nodes[0], w.nodes[1].id()
	keeps(20*sec, true, "leases")
	to.Name = "learner"
	keeps(0, false, "a learner has no lease")
}

// Static fleets have nothing to write, and no other way to change.
func TestConfiguratorStaticRefuses(t *testing.T) {
	w := newStatic(t, 1, 1)
	w.nodes[0].file = 1
	w.begun(1)
	n := w.nodes[0]
	for name, err := range map[string]error{
		"set": second(n.c.Set(0, 1, Change{Reset: true}, "")), "evict": second(n.c.Evict(0, 1, "x", "")),
		"join": n.c.Join(0, 1), "leave": n.c.Leave(0, 1),
	} {
		if !errors.Is(err, ErrMember) || !strings.Contains(err.Error(), "static") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, _, ok := n.c.Write(n.clock(), time.Time{}); ok {
		t.Error("it writes")
	}
}

// customers is a configuration of two members with so many limits, of 22 bytes each.
func customers(limits int) escrow.Configuration {
	c := nation(2)
	c.Number, c.Roster.Number = 2, 2
	c.Limits = map[string]escrow.Limit{}
	for i := range limits {
		c.Limits[fmt.Sprintf("customer%04d", i)] = escrow.Limit{Rate: 1, Burst: 1}
	}
	return c
}

// A configuration that no peer could fetch is refused where it is loaded.
func TestConfiguratorStaticRefusesALargeOne(t *testing.T) {
	w := newStatic(t, 1, 2)
	w.nodes[0].file, w.nodes[1].file = 1, 1
	w.begun(2)
	n := w.nodes[0]
	err := n.c.Load(n.clock(), 2, customers(3000))
	if !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), "Limits and Roster: bytes: 66") {
		t.Errorf("3,000 limits: %v", err)
	}
	if s := n.c.Status(n.clock()); s.Configuration.Number != 1 {
		t.Errorf("number %d was taken in", s.Configuration.Number)
	}
}

// A configuration that just fits reaches the others, whomever it leaves out.
func TestConfiguratorStaticJustFits(t *testing.T) {
	w := newStatic(t, 1, 2)
	c := nation(2)
	c.Number, c.Roster.Number = 1, 1
	for i := range 400 {
		c.Roster.Members = append(c.Roster.Members, escrow.Member{Name: fmt.Sprintf("z%03d%s", i, strings.Repeat("z", 60))})
	}
	w.configurations[1] = c
	w.nodes[0].file, w.nodes[1].file = 1, 1
	w.begun(2)
	w.configurations[2] = customers(2800)
	w.newest = 2
	w.load(t, 0, 2)
	if !w.runUntil(w.now+5*sec, func() bool { return w.nodes[1].c.Status(w.nodes[1].clock()).Configuration.Number == 2 }) {
		w.report()
		t.Fatal("the other one has not heard of it")
	}
	w.load(t, 1, 2)
	w.rests(t, 5*sec, "both have it")
}
