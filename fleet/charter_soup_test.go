// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"math/rand/v2"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/crdt"
	"github.com/stormguard-mq/stormguard/limiter"
)

// soup is a network in which every packet that was ever sent may still arrive, in any
// order, and the adversary says when anything happens.
type soup struct {
	*country
	packets []soupPacket
	sent    time.Duration
}

type soupPacket struct {
	from, to crdt.Replica
	i, j     int
	sent     time.Duration
	b        []byte
}

// write has i write to j; the packet may arrive at any time.
func (s *soup) write(i, j int) {
	a, b := s.nodes[i], s.nodes[j]
	if i == j || !a.alive || !b.alive {
		return
	}
	p, _ := a.c.Delta(a.clock(), nil, b.id(), 0, 1300)
	s.sent++ // each packet has a stamp of its own
	s.packets = append(s.packets, soupPacket{a.id(), b.id(), i, j, a.clock() + s.sent, p})
}

func (s *soup) deliver(k int) {
	p := s.packets[k]
	if n := s.nodes[p.j]; n.alive && n.id() == p.to && s.nodes[p.i].life == p.from.Incarnation {
		if err := n.c.Merge(crdt.Contact{From: p.from, Now: n.clock(), Sent: p.sent}, p.b); err != nil {
			s.t.Fatal(err)
		}
	}
}

// settleAll delivers everything to everybody a few times.
func (s *soup) settleAll(rounds int) {
	for range rounds {
		for i := range s.nodes {
			for j := range s.nodes {
				s.write(i, j)
			}
		}
		for k := range s.packets {
			s.deliver(k)
		}
		s.packets = s.packets[:0]
		s.now += 20 * ms
		for _, n := range s.nodes {
			if n.alive {
				n.c.Tick(n.clock())
			}
		}
		s.check()
	}
}

// cook lets the adversary act; the weights are its mood.
func (s *soup) cook(steps int, moods [6]int) {
	total := 0
	for _, m := range moods {
		total += m
	}
	for range steps {
		n := s.nodes[s.rng.IntN(len(s.nodes))]
		draw, what := s.rng.IntN(total), 0
		for draw >= moods[what] {
			draw -= moods[what]
			what++
		}
		switch what {
		case 0:
			s.write(n.i, s.rng.IntN(len(s.nodes)))
		case 1:
			if k := len(s.packets); k > 0 { // rather a new one, but any
				d := s.rng.IntN(min(k, 1+s.rng.IntN(200)))
				s.deliver(k - 1 - d)
			}
		case 2:
			s.now += time.Duration(s.rng.Int64N(int64(2 * ms)))
			if n.alive {
				n.c.Tick(n.clock())
			}
		case 3:
			if n.alive {
				_, _ = n.c.Propose(n.clock(), Change{Limit: &limiter.Limit{Rate: float64(100 + s.rng.IntN(1000)), Burst: 1_000_000}})
			}
		case 4:
			if s.rng.IntN(20) == 0 && s.remember(n) {
				n.stop()
				n.start()
				s.events = s.events[:0]
			}
		case 5: // an exchange
			m := s.nodes[s.rng.IntN(len(s.nodes))]
			s.write(n.i, m.i)
			if k := len(s.packets); k > 0 {
				s.deliver(k - 1)
			}
		}
		if k := len(s.packets); k > 2000 {
			s.packets = s.packets[k-1000:]
		}
		s.check()
	}
}

// Whatever arrives when, and whoever starts again, one charter is chosen per number,
// and shares are never more than the whole.
func TestCharterSoup(t *testing.T) {
	runs := 10
	if full() {
		runs = 1000
	} else {
		t.Log("STORMGUARD_FULL=1 is a hundred times as much")
	}
	rapid.Check(t, func(t *rapid.T) {
		seed := rapid.Uint64().Draw(t, "seed")
		nodes := rapid.IntRange(2, 5).Draw(t, "nodes")
		moods := [6]int{
			20, rapid.IntRange(5, 40).Draw(t, "deliver"), rapid.IntRange(2, 20).Draw(t, "tick"), rapid.IntRange(1, 4).Draw(t, "propose"),
			rapid.IntRange(0, 20).Draw(t, "restart"), rapid.IntRange(10, 100).Draw(t, "exchange"),
		}
		rng := rand.New(rand.NewPCG(seed, 2))
		for range runs {
			w := newCountry(t, rng.Uint64(), nodes, nodes, CharterConfig{Gather: ms, Patience: 40 * ms}, terrain{})
			s := &soup{country: w}
			for _, n := range s.nodes {
				n.start()
			}
			s.settleAll(3)
			s.cook(3000, moods)
			if s.newest == 1 {
				continue
			}
			s.settleAll(40)
		}
	})
}
