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
