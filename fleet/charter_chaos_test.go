// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"os"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/limiter"
)

// remembers tells whether a majority of a charter's roster votes without n.
func (w *country) remembers(number uint64, without *citizen) bool {
	d, voters := w.chosen[number], 0
	for _, m := range d.Roster.Members {
		for _, o := range w.nodes {
			if o != without && o.alive && o.name == m.Name && o.c.votesNow() {
				voters++
			}
		}
	}
	return voters > len(d.Roster.Members)/2
}

// remember tells whether enough members keep their memory if n loses its own: the
// assumption under which charters are agreed. What a part of the fleet does not know
// yet is decided by the roster that it knows.
func (w *country) remember(n *citizen) bool {
	founders := 0
	for _, o := range w.nodes {
		if o.alive && o != n {
			known, _ := o.c.Number()
			if !w.remembers(known, n) {
				return false
			}
			if seatOf(w.chosen[1].Roster.Members, o.name) >= 0 && (known > 1 || o.c.votesNow()) {
				founders++
			}
		}
	}
	return founders > len(w.chosen[1].Roster.Members)/2 && w.remembers(w.newest, n)
}

func (w *country) living() []*citizen {
	return slices.DeleteFunc(slices.Clone(w.nodes), func(n *citizen) bool { return !n.alive })
}

// mischief does one thing to the fleet.
func (w *country) mischief() {
	n := w.nodes[w.rng.IntN(len(w.nodes))]
	split := func(k int) {
		side := make([]int, len(w.nodes))
		for i := range side {
			side[i] = w.rng.IntN(k)
		}
		w.cut = islands(side...)
	}
	switch k := w.rng.IntN(20); k {
	case 0, 1:
		split(2)
	case 2:
		split(3)
	case 3: // one way, each by itself
		cut := map[[2]int]bool{}
		for range len(w.nodes) {
			cut[[2]int{w.rng.IntN(len(w.nodes)), w.rng.IntN(len(w.nodes))}] = true
		}
		w.cut = func(a, b int) bool { return cut[[2]int{a, b}] }
	case 4, 5, 6:
		w.cut = whole
	case 7:
		w.loss = 0.6 * w.rng.Float64()
	case 8, 9:
		switch {
		case !n.alive:
			n.restart()
		case w.remember(n):
			n.stop()
			if w.rng.IntN(2) == 0 {
				epoch := n.epoch
				w.at(w.now+time.Duration(w.rng.Int64N(int64(100*ms))), func() {
					if n.epoch == epoch {
						n.restart()
					}
				})
			}
		}
	case 10, 11, 12:
		if n.alive {
			_ = n.c.Join(n.clock(), 1+w.rng.IntN(3))
			n.poke()
		} else {
			n.restart()
		}
	case 13:
		if n.alive && w.rng.IntN(2) == 0 {
			_ = n.c.Leave(n.clock(), n.clock()+sec)
			n.poke()
		}
	case 14:
		for _, dead := range w.nodes { // an operator's word: dead, and not back before it is told
			if by := n; !dead.alive && by.alive {
				if _, err := by.c.Evict(by.clock(), dead.name); err == nil {
					dead.barred = true
					by.poke()
					break
				}
			}
		}
	case 15:
		if n.alive {
			_, _ = n.c.Propose(n.clock(), Change{Weights: map[string]int{w.nodes[w.rng.IntN(len(w.nodes))].name: 1 + w.rng.IntN(4)}})
			n.poke()
		}
	default: // duels
		for range 1 + w.rng.IntN(3) {
			if n := w.nodes[w.rng.IntN(len(w.nodes))]; n.alive {
				_, _ = n.c.Propose(n.clock(), Change{Reset: k == 19, Limit: &limiter.Limit{Rate: float64(100 * (1 + w.rng.IntN(20))), Burst: 1_000_000}})
				n.poke()
			}
		}
	}
	// Who has left or was evicted ends, and comes back as another life.
	for _, n := range w.living() {
		left, _ := n.c.Left(n.clock())
		if (left || n.c.Status(n.clock()).Evicted) && w.remember(n) {
			n.stop()
			n.restart()
		}
	}
}

// restart starts a process that is down, unless an operator has evicted it and the
// fleet does not know yet.
func (n *citizen) restart() {
	if n.barred && seatOf(n.w.chosen[n.w.newest].Roster.Members, n.name) >= 0 {
		return
	}
	n.barred = false
	n.start()
}

// chaos lets a fleet live through mischief, and judges that it then works.
func chaos(t rapid.TB, seed uint64, founders, nodes int, policy limiter.SilencePolicy, o terrain, long time.Duration) *country {
	w := newCountry(t, seed, founders, nodes, CharterConfig{OnSilence: policy}, o)
	w.founded(founders)
	for _, n := range w.nodes[founders:] {
		if w.rng.IntN(2) == 0 {
			n.start()
		}
	}
	for end := w.now + long; w.now < end; {
		w.run(w.now + time.Duration(w.rng.Int64N(int64(120*ms))))
		w.mischief()
	}
	w.cut, w.loss = whole, 0
	for range 2 { // who was evicted after that
		for _, n := range w.nodes {
			if !n.alive {
				n.restart()
			}
		}
		w.run(w.now + 3*sec)
	}
	for _, n := range w.nodes {
		if n.barred = false; !n.alive { // the request died with who made it
			n.start()
		}
	}
	w.run(w.now + sec)
	known := uint64(0)
	for _, n := range w.nodes {
		k, _ := n.c.Number()
		known = max(known, k)
	}
	if !w.remembers(known, nil) {
		return w // a majority lost its memory: nothing more is decided, and nothing wrong
	}
	w.rested++
	if !w.runUntil(w.now+10*sec, func() bool {
		return w.agreed(w.newest) && !slices.ContainsFunc(w.nodes, func(n *citizen) bool {
			s := n.c.Status(n.clock())
			return s.Requests > 0 || s.Leaving && s.Member && len(s.Members) > 1 || !s.Settled && !s.Evicted
		})
	}) {
		for _, n := range w.nodes {
			s := n.c.Status(n.clock())
			t.Logf("%s#%d: knows %d, complete %d, applied %d, votes %v from %d, settled %v, member %v, over %v, leaving %v, requests %d, lacking %v", n.name, n.life,
				s.Charter.Number, s.Complete, s.Applied, s.Votes, n.c.votes, s.Settled, s.Member, s.Evicted, s.Leaving, s.Requests, s.Lacking)
		}
		t.Fatalf("%v: 12 s after the last fault the fleet has not come to rest; newest %d", w.now, w.newest)
	}
	return w
}

func drawTerrain(t *rapid.T) terrain {
	return terrain{
		loss:  rapid.SampledFrom([]float64{0, 0.1, 0.35}).Draw(t, "loss"),
		dup:   rapid.SampledFrom([]float64{0, 0.3}).Draw(t, "dup"),
		delay: time.Duration(rapid.IntRange(1, 20).Draw(t, "delay")) * ms,
		lag:   time.Duration(rapid.IntRange(0, 300).Draw(t, "lag")) * ms,
		keep:  20 * ms,
		room:  rapid.SampledFrom([]int{512, 1300}).Draw(t, "room"),
	}
}

// Nothing that the network or crashes do has two charters chosen for one number,
// nor more in use than the limit, with stable names and no wrong eviction.
func TestCharterChaosHold(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		founders := rapid.IntRange(1, 5).Draw(t, "founders")
		nodes := founders + rapid.IntRange(0, 3).Draw(t, "more")
		chaos(t, rapid.Uint64().Draw(t, "seed"), founders, nodes, limiter.Hold, drawTerrain(t), 4*sec)
	})
}

// The same where members are evicted for silence, rightly or not.
func TestCharterChaosMajority(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		founders := rapid.IntRange(3, 5).Draw(t, "founders")
		nodes := founders + rapid.IntRange(0, 3).Draw(t, "more")
		o := drawTerrain(t)
		o.drift = 500e-6
		chaos(t, rapid.Uint64().Draw(t, "seed"), founders, nodes, limiter.Majority, o, 6*sec)
	})
}

func full() bool { return os.Getenv("STORMGUARD_FULL") == "1" }
