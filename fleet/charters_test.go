// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/limiter"
)

func proposeRate(t testing.TB, n *citizen, rate float64) uint64 {
	t.Helper()
	ticket, err := n.c.Propose(n.clock(), Change{Limit: &limiter.Limit{Rate: rate, Burst: 1_000_000}})
	if err != nil {
		t.Fatal(err)
	}
	n.poke()
	return ticket
}

// A rate change, a join, a leave and an eviction in a whole network.
func TestCharterChanges(t *testing.T) {
	for _, nodes := range []int{1, 2, 3, 9, 50} {
		w := newCountry(t, 1, nodes, nodes+1, CharterConfig{}, terrain{lag: 5 * ms})
		w.founded(nodes)
		start := w.now
		took := func(what string, number uint64, limit time.Duration) {
			t.Helper()
			if !w.runUntil(start+limit, func() bool { return w.agreed(number) }) {
				t.Fatalf("%d nodes: %s: not after %v; newest is %d", nodes, what, limit, w.newest)
			}
			t.Logf("%3d nodes: %s: known and complete everywhere after %v", nodes, what, w.now-start)
			start = w.now
		}
		ticket := proposeRate(t, w.nodes[nodes/2], 500)
		took("rate", 2, sec)
		if n, ok := w.nodes[nodes/2].c.Outcome(ticket); n != 2 || !ok {
			t.Fatalf("outcome %d, %v", n, ok)
		}
		joiner := w.nodes[nodes]
		joiner.start()
		if err := joiner.c.Join(joiner.clock(), 1); err != nil {
			t.Fatal(err)
		}
		took("join", 3, 2*sec)
		if got, want := joiner.books.using(), 500/float64(nodes+1); got != want {
			t.Fatalf("the newcomer uses %v, not %v", got, want)
		}
		if err := w.nodes[0].c.Leave(w.nodes[0].clock(), w.nodes[0].clock()+5*sec); err != nil {
			t.Fatal(err)
		}
		w.nodes[0].poke()
		took("leave", 4, 2*sec)
		if done, err := w.nodes[0].c.Left(w.nodes[0].clock()); !done || err != nil || w.nodes[0].books.using() != 0 {
			t.Fatalf("left: %v, %v, %v", done, err, w.nodes[0].books.using())
		}
		w.nodes[0].stop()
		if nodes < 3 {
			continue // of two, nobody can evict the other
		}
		w.nodes[1].stop()
		w.run(w.now + 100*ms)
		start = w.now
		if _, err := w.nodes[2].c.Evict(w.nodes[2].clock(), w.nodes[1].name); err != nil {
			t.Fatal(err)
		}
		w.nodes[2].poke()
		took("evict", 5, 2*sec)
		if got, want := joiner.books.using(), 500/float64(nodes-1); got != want {
			t.Fatalf("the newcomer uses %v, not %v", got, want)
		}
	}
}

// figures are how long changes take in fleets of several sizes.
func TestCharterFigures(t *testing.T) {
	sizes := []int{3, 9, 50}
	if full() {
		sizes = append(sizes, 500)
	} else {
		t.Log("STORMGUARD_FULL=1 adds 500 nodes")
	}
	for _, nodes := range sizes {
		o := terrain{lag: 5 * ms, rarely: true}
		if nodes > 100 {
			o.keep = 200 * ms
		}
		w := newCountry(t, 7, nodes, nodes+1, CharterConfig{}, o)
		w.founded(nodes)
		t.Logf("%d nodes: founded after %v", nodes, w.now)
		took := func(what string, number uint64) {
			t.Helper()
			start, packets, bytes, chosen := w.now, w.packets, w.bytes, time.Duration(0)
			ok := w.runUntil(start+3*sec, func() bool {
				if chosen == 0 && w.newest >= number {
					chosen = w.now - start
				}
				return w.agreed(number)
			})
			if !ok || chosen > sec {
				t.Fatalf("%d nodes: %s: chosen after %v, complete: %v", nodes, what, chosen, ok)
			}
			t.Logf("%d nodes: %s: chosen after %v, known and complete everywhere after %v; %d packets, %d bytes", nodes, what, chosen.Round(ms), (w.now - start).Round(ms), w.packets-packets, w.bytes-bytes)
		}
		proposeRate(t, w.nodes[nodes/2], 500)
		took("rate", 2)
		joiner := w.nodes[nodes]
		joiner.start()
		w.run(w.now + 300*ms)
		if err := joiner.c.Join(joiner.clock(), 1); err != nil {
			t.Fatal(err)
		}
		joiner.poke()
		took("join", 3)
		if err := joiner.c.Leave(joiner.clock(), joiner.clock()+5*sec); err != nil {
			t.Fatal(err)
		}
		joiner.poke()
		took("leave", 4)
		joiner.stop()
		w.nodes[0].stop()
		w.run(w.now + 100*ms)
		if _, err := w.nodes[1].c.Evict(w.nodes[1].clock(), w.nodes[0].name); err != nil {
			t.Fatal(err)
		}
		w.nodes[1].poke()
		took("evict", 5)
	}
}

// Many processes ask for a share within a second, of three founders.
func TestCharterJoinStorm(t *testing.T) {
	joiners := 50
	if full() {
		joiners = 500
	} else {
		t.Log("STORMGUARD_FULL=1 has 500 join")
	}
	o := terrain{lag: 5 * ms, rarely: true}
	if joiners > 100 {
		o.keep = 200 * ms
	}
	w := newCountry(t, 3, 3, 3+joiners, CharterConfig{}, o)
	w.founded(3)
	begin := w.now
	for _, n := range w.nodes[3:] {
		n.rejoin = true
		w.at(begin+time.Duration(w.rng.Int64N(int64(sec))), n.start)
	}
	w.run(begin + sec)
	if !w.runUntil(begin+5*sec, func() bool {
		return w.newest > 1 && len(w.chosen[w.newest].Roster.Members) == 3+joiners && w.agreed(w.newest)
	}) {
		for _, n := range w.nodes[:5] {
			s := n.c.Status(n.clock())
			t.Logf("%s knows %d complete %d members %d votes %v lacking %d", n.name, s.Charter.Number, s.Complete, len(s.Members), s.Votes, len(s.Lacking))
		}
		t.Fatalf("%d charters, the newest with %d members, after 5 s", w.newest, len(w.chosen[w.newest].Roster.Members))
	}
	t.Logf("%d joined in %d charters; all minted %v after the first began, %v after the last; %d packets, %d MB", joiners, w.newest-1, (w.now - begin).Round(ms), (w.now - begin - sec).Round(ms), w.packets, w.bytes>>20)
	if most := uint64(joiners/10 + 8); w.newest-1 > most {
		t.Errorf("%d charters for %d joiners", w.newest-1, joiners)
	}
}
