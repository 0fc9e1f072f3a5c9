// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/escrow"
)

// The register is away: everybody keeps its share, and one that starts again mints by
// its peers' word. All that start again at once wait for the register.
func TestConfiguratorRegisterAway(t *testing.T) {
	w := newRealm(t, 1, 3, 3, ConfiguratorConfig{}, ground{})
	w.begun(3)
	if _, err := w.nodes[0].set(600); err != nil {
		t.Fatal(err)
	}
	w.rests(t, sec, "set")
	w.reg.away = func(int) bool { return true }
	n := w.nodes[1]
	n.stop()
	n.start()
	w.run(w.now + 900*ms)
	if s := n.c.Status(n.clock()); n.applier.using() != 0 || !errors.Is(s.Away, errAway) || s.Configuration.Number != 2 {
		w.report()
		t.Fatal("it mints, or knows nothing")
	}
	if !w.runUntil(w.now+sec, func() bool { return n.applier.using() == 200 }) {
		w.report()
		t.Fatal("it does not mint by its peers' word")
	}
	if number, document, ok := n.c.Write(n.clock(), time.Time{}); ok {
		t.Fatalf("it would write %d: %x", number, document)
	}
	for _, n := range w.nodes {
		n.stop()
	}
	for _, n := range w.nodes {
		n.start()
	}
	w.run(w.now + 5*sec)
	if _, complete := n.c.Number(); complete != 0 || n.applier.using() != 0 {
		t.Fatal("it goes by nothing")
	}
	w.reg.away = func(int) bool { return false }
	w.rests(t, sec, "the register is back")
	if n.applier.using() != 200 {
		t.Fatalf("it uses %v", n.applier.using())
	}
}

// A register that comes back with a number that is over is away until it has the newest.
func TestConfiguratorRegisterWentBack(t *testing.T) {
	w := newRealm(t, 1, 3, 3, ConfiguratorConfig{}, ground{})
	w.begun(3)
	older := w.reg.document
	if _, err := w.nodes[0].set(600); err != nil {
		t.Fatal(err)
	}
	w.rests(t, sec, "set")
	n := w.nodes[1]
	n.c.Away(n.clock(), errAway)
	for number, document := range [][]byte{nil, older} {
		if err := n.c.Read(n.clock(), uint64(number), document); err != nil {
			t.Fatal(err)
		}
		if s := n.c.Status(n.clock()); !errors.Is(s.Away, errAway) || s.Configuration.Number != 2 || n.applier.using() != 200 {
			t.Fatalf("number %d, where 2 is known: away %v, %d", number, s.Away, s.Configuration.Number)
		}
	}
	if err := n.c.Read(n.clock(), 2, w.reg.document); err != nil || n.c.Status(n.clock()).Away != nil {
		t.Fatalf("the newest: %v, %v", err, n.c.Status(n.clock()).Away)
	}
}

// A process that starts over a register that lost its newest document writes no other one by
// that number where it hears of it.
func TestConfiguratorRegisterLostTheNewest(t *testing.T) {
	for seed := range uint64(80) { // of which six would
		w := newRealm(t, seed, 3, 3, ConfiguratorConfig{OnSilence: escrow.Majority}, ground{})
		w.begun(3)
		number, document := w.reg.number, w.reg.document
		if _, err := w.nodes[0].set(600); err != nil {
			t.Fatal(err)
		}
		w.rests(t, sec, "set")
		newest := w.reg.number
		w.reg.number, w.reg.document = number, document
		n := w.nodes[1]
		n.stop()
		n.start()
		w.run(w.now + 5*sec) // which fails on two documents of one number
		if known, _ := n.c.Number(); known != newest {
			t.Fatalf("seed %d: it knows %d, the others %d", seed, known, newest)
		}
	}
}

// What does not fit into a document is not composed again at each step.
func TestConfiguratorFull(t *testing.T) {
	w := newRealm(t, 1, 3, 4, ConfiguratorConfig{}, ground{})
	w.cfg.Initial.Limits = map[string]escrow.Limit{}
	for i := range 1705 {
		w.cfg.Initial.Limits[fmt.Sprintf("key-%022d", i)] = escrow.Limit{Rate: 10, Burst: 10}
	}
	w.begun(3)
	n := w.nodes[3]
	n.weight = 1
	n.start()
	w.run(w.now + 2*sec)
	for _, n := range w.nodes[:3] {
		if s := n.c.Status(n.clock()); !errors.Is(s.Full, ErrBusy) || n.c.retryAt < n.clock()-activeTick {
			t.Fatalf("full: %v; it tries again since %v", s.Full, n.clock()-n.c.retryAt)
		}
	}
}

// Many processes ask for a share within a second.
func TestConfiguratorJoinStorm(t *testing.T) {
	joiners := 50
	o := ground{lag: 5 * ms, rarely: true}
	if full() {
		joiners = 500
		o.keep = 200 * ms
	} else {
		t.Log("STORMGUARD_FULL=1 has 500 join")
	}
	w := newRealm(t, 3, 3, 3+joiners, ConfiguratorConfig{}, o)
	w.begun(3)
	begin := w.now
	for _, n := range w.nodes[3:] {
		n.weight = 1
		w.at(begin+time.Duration(w.rng.Int64N(int64(sec))), n.start)
	}
	w.run(begin + sec)
	before := w.reg.writes
	if !w.runUntil(begin+5*sec, func() bool { return w.members() == 3+joiners && w.rested() }) {
		w.report()
		t.Fatal("not all have joined")
	}
	t.Logf("%d joined by %d writes, and %d conflicts; all mint %v after the last; %d bytes", joiners, w.reg.number-1, w.reg.writes-int(w.reg.number), w.now-begin-sec, len(w.reg.document))
	if most := joiners/10 + 20; w.reg.writes > most {
		t.Errorf("%d writes for %d joiners, %d in the first second", w.reg.writes, joiners, before)
	}
}

// Behind a member that does not apply anything only so much is written, and the error
// names it. Its eviction goes on.
func TestConfiguratorPendingBound(t *testing.T) {
	w := newRealm(t, 1, 3, 3, ConfiguratorConfig{}, ground{})
	w.begun(3)
	w.nodes[2].stop()
	n := w.nodes[0]
	rate, made := 900.0, 0
	for ; ; rate-- {
		ticket, err := n.set(rate)
		if err != nil {
			t.Fatal(err)
		}
		_, err = w.outcome(t, n, ticket, sec)
		if errors.Is(err, ErrBusy) {
			if !strings.Contains(err.Error(), `"n002"`) {
				t.Errorf("it does not name who lacks: %v", err)
			}
			break
		}
		if made++; err != nil || made > fewPending {
			t.Fatalf("%d made: %v", made, err)
		}
	}
	if made != fewPending {
		t.Errorf("%d were made, the bound is %d", made, fewPending)
	}
	number, _ := n.c.Number()
	ticket, err := n.c.Evict(n.clock(), number, "n002", "ann")
	if err != nil {
		t.Fatal(err)
	}
	n.poke()
	if _, err := w.outcome(t, n, ticket, sec); err != nil {
		t.Fatal(err)
	}
	w.rests(t, sec, "evicted")
}

// A member that an operator left no share, and that is evicted while it runs, comes back
// without one.
func TestConfiguratorEvictedWithoutAShare(t *testing.T) {
	w := newRealm(t, 1, 3, 3, ConfiguratorConfig{Weight: 1}, ground{})
	w.begun(3)
	n := w.nodes[0]
	done := func(ticket uint64, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		n.poke()
		if _, err := w.outcome(t, n, ticket, sec); err != nil {
			t.Fatal(err)
		}
	}
	weight := func() int64 {
		d, err := readDocument(w.reg.document)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range d.newest().Roster.Members {
			if m.Name == "n001" {
				return m.Weighs()
			}
		}
		return -1
	}
	number, _ := n.c.Number()
	done(n.c.Set(n.clock(), number, Change{Weights: map[string]int{"n001": 0}}, "ann"))
	w.rests(t, sec, "set")
	if weight() != 0 {
		t.Fatalf("its weight is %d", weight())
	}
	number, _ = n.c.Number()
	done(n.c.Evict(n.clock(), number, "n001", "ann"))
	if !w.runUntil(w.now+5*sec, func() bool { return weight() >= 0 && w.rested() }) || weight() != 0 {
		w.report()
		t.Errorf("its weight is %d", weight())
	}
	if using := w.nodes[1].applier.using(); using != 0 {
		t.Errorf("it uses %v", using)
	}
}
