// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"errors"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/internal/escrow"
)

// asked is a request of an operator.
type asked struct {
	n      *subject
	epoch  int
	ticket uint64
	rate   float64 // 0 is no change of the rate
	upon   uint64
	number uint64
	done   bool
	err    error
	at     time.Duration
}

// rampage is a realm in which everything goes wrong for a while.
type rampage struct {
	*realm

	asks []*asked
	part bool // the register may be away for some, and there for others
}

// follow notes the outcomes. The law: what failed never happens, and what happened is
// what was asked for.
func (w *rampage) follow() {
	for _, a := range w.asks {
		if !a.done && a.n.alive && a.n.epoch == a.epoch {
			if a.number, a.done, a.err = a.n.c.Outcome(a.ticket); a.done && a.err == nil && a.number != a.upon+1 {
				w.t.Fatalf("asked upon %d, made as %d", a.upon, a.number)
			}
		}
		if a.rate == 0 || !a.done || errors.Is(a.err, ErrUnknown) {
			continue
		}
		made := false
		for number, b := range w.reg.history {
			if d, err := readDocument(b); err == nil && number >= a.upon && d.newest().Limit.Rate == a.rate && (number == 1 || w.rateOf(number-1) != a.rate) {
				made = true
				if a.err == nil && number != a.number {
					w.t.Fatalf("said to be number %d, and is %d", a.number, number)
				}
			}
		}
		if made != (a.err == nil) {
			w.t.Fatalf("%v: a request upon %d: the outcome is %d, %v, and it was made: %v", w.now, a.upon, a.number, a.err, made)
		}
	}
}

func (w *rampage) rateOf(number uint64) float64 {
	d, err := readDocument(w.reg.history[number])
	if err != nil {
		w.t.Fatal(err)
	}
	return d.newest().Limit.Rate
}

func (w *rampage) mischief() {
	n := w.nodes[w.rng.IntN(len(w.nodes))]
	switch w.rng.IntN(14) {
	case 0:
		if n.alive {
			n.stop()
		} else {
			n.start()
		}
	case 1:
		side := make([]int, len(w.nodes))
		for i := range side {
			side[i] = w.rng.IntN(2)
		}
		w.cut = islands(side...)
	case 2, 3:
		w.cut = whole
	case 4:
		w.loss = w.rng.Float64() / 2
	case 5:
		if !w.part {
			w.reg.away = func(int) bool { return true }
			break
		}
		lost := make([]bool, len(w.nodes))
		for i := range lost {
			lost[i] = w.rng.IntN(2) == 0
		}
		w.reg.away = func(i int) bool { return lost[i] }
	case 6, 7:
		w.reg.away = func(int) bool { return false }
	case 8:
		w.reg.lossy, w.reg.late = w.rng.Float64()/2, w.rng.Float64()/2
	case 9:
		if n.alive && n.c.Leave(n.clock(), n.clock()+5*sec) == nil {
			n.poke()
		}
	case 10:
		if n.alive && n.c.Join(n.clock(), 1+w.rng.IntN(3)) == nil {
			n.poke()
		}
	case 11:
		if n.alive && len(w.asks) > 0 { // an operator gives up
			a := w.asks[w.rng.IntN(len(w.asks))]
			if a.n.alive && a.n.epoch == a.epoch {
				a.n.c.Cancel(a.n.clock(), a.ticket)
				a.n.poke()
			}
		}
	default:
		if !n.alive {
			break
		}
		number, _ := n.c.Number()
		rate := float64(100 + len(w.asks)) // each its own
		if ticket, err := n.set(rate); err == nil {
			w.asks = append(w.asks, &asked{n: n, epoch: n.epoch, ticket: ticket, rate: rate, upon: number, at: w.now})
		} else if !errors.Is(err, ErrConflict) && !errors.Is(err, ErrBusy) {
			w.t.Fatal(err)
		}
	}
}

// riot lets everything go wrong, and then nothing. The law at rest: within a stated
// time everybody has its share.
func riot(t *rapid.T, members, nodes int, policy escrow.SilencePolicy, o ground, long time.Duration) *rampage {
	w := &rampage{realm: newRealm(t, rapid.Uint64().Draw(t, "seed"), members, nodes, ConfiguratorConfig{OnSilence: policy, Patience: 100 * ms}, o)}
	w.part = rapid.Bool().Draw(t, "part")
	for i, n := range w.nodes {
		n.weight = 1
		if i < members || w.rng.IntN(2) == 0 {
			n.start()
		}
	}
	for end := w.now + long; w.now < end; {
		w.run(w.now + time.Duration(w.rng.Int64N(int64(120*ms))))
		w.follow()
		w.mischief()
	}
	w.cut, w.loss = whole, 0
	w.reg.away, w.reg.lossy, w.reg.late = func(int) bool { return false }, 0, 0
	for _, n := range w.nodes {
		if n.alive && n.c.Status(n.clock()).Leaving {
			n.stop() // it would leave for ever
		}
		if !n.alive {
			n.start()
		}
	}
	last := w.now
	if !w.runUntil(last+atRest, func() bool { return w.rested() && len(w.nodes) == w.members() }) {
		w.report()
		t.Fatalf("%v: %v after the last fault not all have their shares", w.now, atRest)
	}
	w.run(w.now + 2*sec) // writes that are late arrive
	w.follow()
	if !w.runUntil(w.now+atRest, w.rested) {
		w.report()
		t.Fatal("not at rest after late writes")
	}
	for _, a := range w.asks {
		if !a.done && a.n.epoch == a.epoch {
			t.Fatalf("a request upon %d of %v has no outcome", a.upon, a.at)
		}
	}
	return w
}

// atRest is after which time without faults everybody has its share.
const atRest = 6 * sec

// members is how many the newest roster has.
func (w *realm) members() int {
	d, err := readDocument(w.reg.document)
	if err != nil {
		return 0
	}
	return len(d.newest().Roster.Members)
}

func drawGround(t *rapid.T) ground {
	return ground{
		loss:  rapid.SampledFrom([]float64{0, 0.1, 0.35}).Draw(t, "loss"),
		dup:   rapid.SampledFrom([]float64{0, 0.3}).Draw(t, "dup"),
		delay: time.Duration(rapid.IntRange(1, 20).Draw(t, "delay")) * ms,
		lag:   time.Duration(rapid.IntRange(0, 300).Draw(t, "lag")) * ms,
		keep:  20 * ms,
		room:  rapid.SampledFrom([]int{512, 1300}).Draw(t, "room"),
	}
}

// Whatever the network, the register, operators and crashes do: one document for a
// number, no more in use than the whole, no request that failed is made, and after the
// last fault everybody has its share.
func TestConfiguratorChaosHold(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		members := rapid.IntRange(1, 5).Draw(t, "members")
		riot(t, members, members+rapid.IntRange(0, 3).Draw(t, "more"), escrow.Hold, drawGround(t), span(4*sec))
	})
}

// The same where members are evicted for silence, rightly or not.
func TestConfiguratorChaosMajority(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		members := rapid.IntRange(3, 5).Draw(t, "members")
		o := drawGround(t)
		o.drift = 500e-6
		riot(t, members, members+rapid.IntRange(0, 3).Draw(t, "more"), escrow.Majority, o, span(6*sec))
	})
}
