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
	step    time.Duration // between two ticks, at most
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
	s.packets = append(s.packets, soupPacket{a.id(), b.id(), i, j, a.clock(), p})
	s.now++ // each packet has a stamp of its own
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
			s.now += time.Duration(s.rng.Int64N(int64(s.step)))
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
	switch {
	case full():
		runs = 1000
	case raceEnabled:
		runs = 2
	default:
		t.Log("STORMGUARD_FULL=1 is a hundred times as much")
	}
	rapid.Check(t, func(t *rapid.T) {
		seed := rapid.Uint64().Draw(t, "seed")
		nodes := rapid.IntRange(2, 5).Draw(t, "nodes")
		step := time.Duration(rapid.SampledFrom([]int{1, 5, 20, 60}).Draw(t, "step")) * ms // duels begin when patience ends
		moods := [6]int{
			20, rapid.IntRange(5, 40).Draw(t, "deliver"), rapid.IntRange(2, 20).Draw(t, "tick"), rapid.IntRange(1, 4).Draw(t, "propose"),
			rapid.IntRange(0, 20).Draw(t, "restart"), rapid.IntRange(10, 100).Draw(t, "exchange"),
		}
		rng := rand.New(rand.NewPCG(seed, 2))
		for range runs {
			w := newCountry(t, rng.Uint64(), nodes, nodes, CharterConfig{Gather: ms, Patience: 20 * ms}, terrain{})
			s := &soup{country: w, step: step}
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

// talk has two exchange packets until neither has news for the other.
func (s *soup) talk(i, j int) {
	for range 6 {
		for _, k := range [][2]int{{i, j}, {j, i}} {
			s.write(k[0], k[1])
			s.deliver(len(s.packets) - 1)
		}
	}
	s.check()
}

// One life promised and ended; its successor must not undo that. The proposer that has
// the promise is not among those from whom the successor recovers, and the one
// that would have its vote has the lower ballot.
func TestCharterAbstains(t *testing.T) {
	w := newCountry(t, 1, 5, 5, CharterConfig{}, terrain{})
	s := &soup{country: w}
	for _, n := range s.nodes {
		n.start()
	}
	s.settleAll(3)
	proposeRate(t, s.nodes[4], 400)
	s.write(4, 2)
	s.deliver(len(s.packets) - 1)
	s.write(2, 4)
	s.deliver(len(s.packets) - 1) // 4 has the promises of 4 and 2
	s.nodes[2].stop()
	s.nodes[2].start()
	for _, i := range []int{0, 1, 3} {
		s.talk(2, i)
	}
	if st := s.nodes[2].c.Status(s.nodes[2].clock()); !st.Settled || st.Votes || s.nodes[2].c.votes != 3 {
		t.Fatalf("settled %v, votes from %d", st.Settled, s.nodes[2].c.votes)
	}
	s.write(4, 3)
	s.deliver(len(s.packets) - 1)
	s.write(3, 4)
	s.deliver(len(s.packets) - 1) // and 3: it proposes
	proposeRate(t, s.nodes[0], 100)
	s.talk(0, 1)
	s.talk(0, 2)
	for _, k := range [][2]int{{0, 1}, {1, 0}, {0, 1}, {1, 0}} { // 1 votes, and does not hear what comes of it
		s.write(k[0], k[1])
		s.deliver(len(s.packets) - 1)
	}
	s.check()
	s.talk(4, 3)
	s.talk(4, 1)
	if w.newest != 2 || w.chosen[2].Limit.Rate != 400 {
		t.Fatalf("newest is %d: %+v", w.newest, w.chosen[w.newest].Charter)
	}
	s.settleAll(40)
	if !w.agreed(w.newest) || w.chosen[w.newest].Limit.Rate != 100 || !s.nodes[2].c.votesNow() {
		t.Fatalf("newest %d, %+v; the new life votes: %v", w.newest, w.chosen[w.newest].Limit, s.nodes[2].c.votesNow())
	}
}

// A new life that hears all others takes over the highest promise and the latest
// vote that they know of; hearing all but one, it takes over nothing.
func TestCharterTakesMemoryOver(t *testing.T) {
	w := newCountry(t, 1, 3, 3, CharterConfig{}, terrain{})
	s := &soup{country: w}
	for _, n := range s.nodes {
		n.start()
	}
	s.settleAll(3)
	proposeRate(t, s.nodes[1], 200) // a ballot, and no promises yet
	high := s.nodes[1].c.bid.at
	proposeRate(t, s.nodes[0], 100)
	if low := s.nodes[0].c.bid.at; !low.less(high) {
		t.Fatalf("%v is not below %v", low, high)
	}
	life := s.nodes[2]
	life.stop()
	life.start()
	s.talk(2, 0)
	if life.c.votesNow() {
		t.Fatal("it votes, and has not heard one who is not said to be dead")
	}
	s.write(1, 2)
	s.deliver(len(s.packets) - 1)
	s.write(2, 1)
	s.deliver(len(s.packets) - 1)
	s.write(1, 2)
	s.deliver(len(s.packets) - 1)
	if !life.c.votesNow() || life.c.promised != high {
		t.Fatalf("votes %v, has promised %v, want %v", life.c.votesNow(), life.c.promised, high)
	}
	s.write(0, 2) // the lower ballot
	s.deliver(len(s.packets) - 1)
	if life.c.promised != high {
		t.Fatalf("it has promised %v after %v", life.c.promised, high)
	}
	s.settleAll(60)
	if !w.agreed(w.newest) || w.newest < 2 {
		t.Fatalf("newest %d", w.newest)
	}
}

// What a life said that it had applied does not count for its successor, with who did
// not know the charter then: the successor was told that there is none.
func TestCharterWordOfALifeThatIsOver(t *testing.T) {
	w := newCountry(t, 1, 3, 3, CharterConfig{}, terrain{})
	s := &soup{country: w}
	for _, n := range s.nodes {
		n.start()
	}
	s.settleAll(3)
	one := func(i, j int) {
		s.write(i, j)
		s.deliver(len(s.packets) - 1)
		s.check()
	}
	knows := func(i int) uint64 {
		number, _ := s.nodes[i].c.Number()
		return number
	}
	until := func(what string, done func() bool, step func()) {
		t.Helper()
		for range 20 {
			if done() {
				return
			}
			step()
			s.now += ms
			for _, n := range s.nodes {
				n.c.Tick(n.clock())
			}
		}
		t.Fatal(what)
	}
	first := s.nodes[0]
	proposeRate(t, s.nodes[1], 100)
	until("nothing is chosen", func() bool { return knows(0) == 2 }, func() {
		one(1, 0)
		if knows(0) == 1 {
			one(0, 1)
		}
	})
	until("it is not applied", func() bool { return first.c.Status(first.clock()).Applied == 2 }, func() {})
	one(0, 2) // and 2 has the charter's number only
	if knows(1) != 1 || knows(2) != 1 {
		t.Fatalf("1 knows %d, 2 knows %d", knows(1), knows(2))
	}
	first.stop()
	first.start()
	until("it does not vote again", func() bool { return first.c.votesAgain() }, func() {
		one(2, 0)
		one(1, 0)
		if !first.c.votesAgain() {
			one(0, 2)
			one(0, 1)
		}
	})
	if knows(0) != 1 || first.books.using() == 0 {
		t.Fatalf("it knows %d and uses %v", knows(0), first.books.using())
	}
	until("1 does not learn of it", func() bool { return knows(1) == 2 }, func() { one(0, 1) })
	until("2 does not learn of it", func() bool { return knows(2) == 2 }, func() { one(1, 2); one(2, 1) })
	for range 5 {
		one(1, 2)
		one(2, 1)
		s.now += ms
		s.nodes[1].c.Tick(s.nodes[1].clock())
		s.nodes[2].c.Tick(s.nodes[2].clock())
		s.check()
	}
	s.settleAll(40)
	if !w.agreed(2) {
		t.Error("not agreed in the end")
	}
}

// Who has promised a higher ballot does not vote in a lower one, or its vote would
// count for two decrees.
func TestCharterKeepsPromises(t *testing.T) {
	w := newCountry(t, 1, 3, 3, CharterConfig{}, terrain{})
	s := &soup{country: w}
	for _, n := range s.nodes {
		n.start()
	}
	s.settleAll(3)
	for _, i := range []int{0, 2} { // both have the promise of 1; that of 2 is higher
		proposeRate(t, s.nodes[i], float64(100*(i+1)))
		for _, k := range [][2]int{{i, 1}, {1, i}} {
			s.write(k[0], k[1])
			s.deliver(len(s.packets) - 1)
		}
		if s.nodes[i].c.bid.decree == nil {
			t.Fatalf("%d has not proposed", i)
		}
	}
	s.talk(0, 1)
	if w.newest != 1 {
		t.Fatal("a vote in a ballot that was overtaken")
	}
	s.talk(2, 1)
	if w.newest != 2 || w.chosen[2].Limit.Rate != 300 {
		t.Fatalf("newest is %d", w.newest)
	}
	s.settleAll(40)
	if !w.agreed(w.newest) || w.chosen[w.newest].Limit.Rate != 100 {
		t.Fatalf("newest %d, %+v", w.newest, w.chosen[w.newest].Limit)
	}
}

// Who has accepted an eviction and has not heard that it was chosen confirms nothing
// to the evicted, whom it hears again.
func TestCharterGrantsNothingAfterAccepting(t *testing.T) {
	w := newCountry(t, 1, 5, 5, CharterConfig{OnSilence: limiter.Majority}, terrain{})
	s := &soup{country: w}
	for _, n := range s.nodes {
		n.start()
	}
	s.settleAll(3)
	p := -1 // it proposes to evict 4
	for k := 0; k < 100 && p < 0; k++ {
		s.now += 10 * ms
		for i := range 4 {
			for j := range i {
				s.talk(i, j)
			}
		}
		for i := range 4 {
			if s.nodes[i].c.Tick(s.nodes[i].clock()); p < 0 && s.nodes[i].c.bid.at.round > 0 {
				p = i
			}
		}
	}
	if p < 0 {
		t.Fatal("nobody proposes to evict the silent one")
	}
	others := [2]int{(p + 1) % 4, (p + 2) % 4}
	for range 4 {
		for _, o := range others {
			s.write(p, o)
			s.deliver(len(s.packets) - 1)
		}
		for _, o := range others {
			if w.newest == 1 {
				s.write(o, p)
				s.deliver(len(s.packets) - 1)
			}
		}
		if w.newest == 2 {
			break
		}
	}
	for _, o := range others {
		if known, _ := s.nodes[o].c.Number(); w.newest != 2 || known != 1 || s.nodes[o].c.accepted.digest == 0 {
			t.Fatalf("newest %d, %d knows %d", w.newest, o, known)
		}
	}
	for range 100 {
		s.now += 10 * ms
		for _, o := range others {
			s.write(4, o)
			s.deliver(len(s.packets) - 1)
			s.write(o, 4)
			s.deliver(len(s.packets) - 1)
		}
		s.nodes[4].c.Tick(s.nodes[4].clock())
		s.nodes[p].c.Tick(s.nodes[p].clock())
		if _, complete := s.nodes[p].c.Number(); complete == 2 && s.nodes[4].books.using() > 0 {
			t.Fatal("what was evicted is used, and its process mints")
		}
		s.check()
	}
	if _, complete := s.nodes[p].c.Number(); complete != 2 || s.nodes[4].books.using() != 0 {
		t.Fatalf("complete %d, the evicted uses %v", complete, s.nodes[4].books.using())
	}
}

// Two of which one starts again: it takes over what the other one remembers, which
// starts again after that.
func TestCharterOfTwo(t *testing.T) {
	seeds := uint64(200)
	if raceEnabled {
		seeds = 40
	}
	for seed := range seeds {
		w := newCountry(t, seed, 2, 3, CharterConfig{Gather: ms, Patience: 20 * ms}, terrain{})
		s := &soup{country: w}
		for _, n := range s.nodes {
			n.start() // the third is a guest, and may hear what was chosen
		}
		s.settleAll(3)
		for range 6 {
			k := s.rng.IntN(2)
			proposeRate(t, s.nodes[k], float64(100*(1+s.rng.IntN(30))))
			for range s.rng.IntN(12) {
				i, j := s.rng.IntN(3), s.rng.IntN(3)
				s.write(i, j)
				if n := len(s.packets); n > 0 {
					s.deliver(n - 1)
				}
			}
			n := s.nodes[s.rng.IntN(2)]
			n.stop()
			n.start()
			for range 200 { // until it votes
				if n.c.votesAgain() {
					break
				}
				s.write(1-n.i, n.i)
				s.deliver(len(s.packets) - 1)
				s.write(n.i, 1-n.i)
				s.deliver(len(s.packets) - 1)
			}
			if !n.c.votesAgain() {
				t.Fatalf("seed %d: it does not vote", seed)
			}
		}
		s.settleAll(40)
		if !w.agreed(w.newest) {
			t.Fatalf("seed %d: not agreed on %d", seed, w.newest)
		}
	}
}

func (c *Charters) votesAgain() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mayVote()
}
