// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"slices"
	"testing"

	"github.com/stormguard-mq/stormguard/internal/escrow"
)

// majorityOfFive is a settled fleet of which nothing but what the test hands over
// arrives any more, and of which nobody reads the register.
func majorityOfFive(t *testing.T) *realm {
	w := newRealm(t, 1, 5, 5, ConfiguratorConfig{OnSilence: escrow.Majority}, ground{})
	w.begun(5)
	w.cut = func(a, b int) bool { return true }
	w.events = w.events[:0]
	return w
}

// talk has a packet go from one to another, now.
func (w *realm) talk(from, to int) {
	a, b := w.nodes[from], w.nodes[to]
	p, upto := a.c.Delta(a.clock(), nil, b.id(), a.peers[to].acked, 1300)
	b.receive(from, a.id(), a.clock(), p, upto, a.peers[to].upto)
	w.events = w.events[:0]
	w.check()
}

func (w *realm) tickAll() {
	for _, n := range w.nodes {
		n.c.Tick(n.clock())
	}
	w.check()
}

// Who has frozen a member confirms nothing to it any more, though it hears it again:
// the eviction may be written meanwhile, and nobody who hears the evicted know of it.
func TestConfiguratorFrozenGetsNoGrants(t *testing.T) {
	w := majorityOfFive(t)
	writer, x := w.nodes[0], w.nodes[4]
	for range 60 { // 4 hears nobody for 600 ms, and nobody hears it
		w.now += 10 * ms
		for i := range 4 {
			for j := range 4 {
				if i != j {
					w.talk(i, j)
				}
			}
		}
		w.tickAll()
	}
	if !writer.c.frozen[x.name] || x.applier.using() != 0 {
		t.Fatalf("frozen %v, it uses %v", writer.c.frozen, x.applier.using())
	}
	w.now += 500 * ms // and nobody else writes first
	writer.c.Tick(writer.clock())
	for i := 1; i < 4; i++ {
		w.talk(i, 0)
	}
	w.now += 2 * sec
	for i := 1; i < 4; i++ {
		w.talk(i, 0)
	}
	number, document, ok := writer.c.Write(writer.clock(), wallOf(w))
	if !ok || !slices.Contains(must(readDocument(document)).newest().evicted, eviction{x.name, true}) {
		t.Fatalf("it does not evict: %v", ok)
	}
	writer.c.Wrote(writer.clock(), number, Written) // and only it knows
	for range 200 {
		w.now += 5 * ms
		for i := 1; i < 4; i++ {
			w.talk(4, i)
			w.talk(i, 4)
			w.talk(i, 0)
		}
		w.tickAll()
		if x.applier.using() > 0 {
			t.Fatal("the evicted mints by the grants of those who had frozen it")
		}
	}
	if _, complete := writer.c.Number(); complete == number {
		t.Fatal("complete, and nobody else knows")
	}
}

// An incarnation that is not listed confirms nothing, and no eviction counts its word.
func TestConfiguratorUnlistedIncarnation(t *testing.T) {
	w := majorityOfFive(t)
	for _, i := range []int{1, 2, 3} {
		n := w.nodes[i]
		n.stop()
		n.start()
		n.hand(w.reg.number, w.reg.document)
	}
	w.events = w.events[:0]
	x := w.nodes[4]
	for range 120 {
		w.now += 10 * ms
		for i := range 4 {
			for j := range 4 {
				if i != j {
					w.talk(i, j)
				}
			}
		}
		w.talk(4, 1)
		w.talk(1, 4)
		w.talk(4, 2)
		w.talk(2, 4)
		w.talk(4, 3)
		w.talk(3, 4)
		w.tickAll()
	}
	if x.applier.using() != 0 {
		t.Fatal("it mints by the grants of incarnations that are not listed")
	}
	if !w.nodes[0].c.frozen[x.name] || w.nodes[0].c.evictableLocked(x.name) {
		t.Fatalf("frozen: %v, and enough have", w.nodes[0].c.frozen)
	}
	n := w.nodes[0]
	_, document, ok := n.c.Write(n.clock(), wallOf(w))
	if !ok {
		t.Fatal("nobody admits the new incarnations")
	}
	if d := must(readDocument(document)); len(d.incarnations) != 5 || d.incarnations[1].incarnation != w.nodes[1].incarnation || len(d.newest().evicted) > 0 {
		t.Fatalf("%+v", d.incarnations)
	}
}

// Who is out of the fleet never mints again: not by a lease, not when the register is back, and not
// when a configuration is loaded.
func TestConfiguratorEnds(t *testing.T) {
	idle := func(w *realm, n *subject, what string) {
		t.Helper()
		for range 20 {
			if used := n.applier.using(); used != 0 {
				t.Fatalf("%s: it uses %v", what, used)
			}
			w.run(w.now + 100*ms)
		}
	}
	for _, policy := range []escrow.SilencePolicy{escrow.Hold, escrow.Majority} {
		w := newRealm(t, 1, 3, 3, ConfiguratorConfig{OnSilence: policy}, ground{})
		w.begun(3)
		n := w.nodes[1]
		n.c.End(n.clock())
		idle(w, n, string(policy))
	}

	// It ends before it knows whether it may mint.
	w := newRealm(t, 1, 3, 3, ConfiguratorConfig{}, ground{})
	w.begun(3)
	away := true
	w.reg.away = func(int) bool { return away }
	w.nodes[2].stop() // so that the others' reports are not enough
	n := w.nodes[1]
	n.stop()
	n.start()
	w.run(w.now + 900*ms)
	if s := n.c.Status(n.clock()); s.Away == nil || s.Configuration.Number != 1 || s.Settled {
		t.Fatalf("%+v", s)
	}
	n.c.End(n.clock())
	away = false
	idle(w, n, "the register is back")
	if s := n.c.Status(n.clock()); s.Away != nil {
		t.Fatalf("it has not read the register: %v", s.Away)
	}

	w = newStatic(t, 1, 2)
	w.nodes[0].file, w.nodes[1].file = 1, 1
	w.begun(2)
	n = w.nodes[1]
	n.stop()
	n.file = 0
	n.start()
	w.run(w.now + 100*ms)
	n.c.End(n.clock())
	w.load(t, 1, 1)
	idle(w, n, "loaded")
}
