// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// A notary agrees on configurations for a simulated fleet, knows everything and makes no
// mistake: a configuration is complete when all who lose by it have applied it.
type notary struct {
	f         *fleet
	chain     []Configuration // by number, from 1
	complete  uint64
	allow     float64            // tokens that resets may have added
	fills     map[uint64]float64 // by Resets: of these, what this one may have
	confirmed []bool             // by node: its incarnation was told what is complete
	count     [4]int             // configurations, completions, trims, resets
}

func newNotary(f *fleet) *notary {
	a := &notary{f: f, chain: []Configuration{{}, f.cfg.Configuration()}, complete: 1, confirmed: make([]bool, len(f.nodes)), fills: make(map[uint64]float64)}
	for i := range a.confirmed {
		a.confirmed[i] = true // the first members
	}
	return a
}

func (a *notary) newest() Configuration { return a.chain[len(a.chain)-1] }

func (a *notary) add(c Configuration) {
	c.Number = uint64(len(a.chain))
	a.chain = append(a.chain, c)
	a.count[0]++
}

// fill takes note of a reset by which buckets are filled up to the burst of a configuration.
// That is the configuration of the reset, or, for who skips it, a later one, whose burst may
// be larger.
func (a *notary) fill(c Configuration) {
	burst := float64(c.limit("k").Burst)
	a.allow += max(0, burst-a.fills[c.Resets])
	a.fills[c.Resets] = max(burst, a.fills[c.Resets])
}

func (a *notary) tell(i int, number uint64) error {
	s := a.f.nodes[i]
	if c := a.chain[number]; c.Resets > s.newest().Resets {
		a.fill(c)
	}
	err := s.Adopt(s.clock(a.f.now), a.chain[number])
	a.f.settleNode(i)
	return err
}

// finish completes what can be completed.
func (a *notary) finish() {
	for number := a.complete + 1; number < uint64(len(a.chain)); number++ {
		for _, name := range Losers(a.chain[number-1], a.chain[number]) {
			s := a.f.nodes[a.f.indexOf(name)]
			if s.alive {
				s.advance(s.clock(a.f.now))
			}
			if !s.alive || s.Applied() < number {
				return
			}
		}
		a.complete = number
		a.count[1]++
		a.f.bound.refill(a.f.now)
		l := a.chain[number].limit("k")
		a.f.limit, a.f.bound.rate, a.f.bound.burst = l, l.Rate, float64(l.Burst)
		a.f.bound.level = min(a.f.bound.level, a.f.bound.burst)
	}
}

// told tells a node what is complete.
func (a *notary) told(i int) {
	s := a.f.nodes[i]
	s.Complete(s.clock(a.f.now), a.complete)
	a.f.settleNode(i)
}

// confirm gives a new incarnation what it needs to mint.
func (a *notary) confirm(i int) {
	_ = a.tell(i, a.complete)
	a.told(i)
	a.confirmed[i] = true
	s := a.f.nodes[i]
	s.advance(s.clock(a.f.now))
	s.Mint(never)
	a.f.settleNode(i)
}

// check is what must hold after every event: nobody uses more than it has in the
// newest configuration that is complete.
func (a *notary) check() error {
	t := newTerm(a.chain[a.complete])
	for i, s := range a.f.nodes {
		if !s.alive {
			continue
		}
		if s.fenced {
			if r := s.rows["k"]; r != nil && r.level != 0 {
				return errors.New("own tokens behind a fence")
			}
			continue
		}
		if !a.confirmed[i] {
			return errors.New("an incarnation that nobody has confirmed mints")
		}
		r := &row{name: "k"}
		s.measure(r)
		burst, rate := t.share(s.self.Name, t.limit("k"), t.owner("k"))
		if r.cap > burst || r.rate > uint64(part(rate, 1e6, 1e6+drift)) {
			return errors.New("more is used than the newest complete configuration gives")
		}
	}
	a.f.over -= a.allow
	err := a.f.check()
	a.f.over += a.allow
	return err
}

// Whatever the network and the processes do, and however configurations come and go:
// the shares in use are never more than the whole, and no token is spent twice.
func TestNeverTooMuchWhileConfigurationsChange(t *testing.T) {
	var seen [4]int
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 5).Draw(t, "nodes")
		limits := rapid.SampledFrom([]Limit{{1000, 50}, {1000, 400}, {300, 120}, {20, 5}, {100, 3}})
		members := func() (r Roster) {
			for i := range n {
				if w := rapid.IntRange(-1, 3).Draw(t, "weight"); w > 0 || i == n-1 && len(r.Members) == 0 {
					r.Members = append(r.Members, Member{Name: fmt.Sprintf("n%02d", i), Weight: max(w, 1)})
				}
			}
			return r
		}
		cfg := Config{Fleet: "f", Limit: limits.Draw(t, "limit"), Roster: members()}
		cfg.Roster.Learners = rapid.Bool().Draw(t, "learners")
		f := newFleetOf(silent{}, n, cfg, rapid.Uint64().Draw(t, "seed"))
		for _, s := range f.nodes {
			s.ppm = float64(rapid.IntRange(-drift, drift).Draw(t, "ppm"))
		}
		a := newNotary(f)
		defer func() {
			for i, x := range a.count {
				seen[i] += x
			}
		}()
		var err error
		f.probe = func() {
			if err == nil {
				err = a.check()
			}
		}
		network := f.disturb()
		hot := 0
		serial := rapid.Bool().Draw(t, "serial")
		steps := rapid.IntRange(3, 30).Draw(t, "steps")
		for range steps {
			node := rapid.IntRange(0, n-1).Draw(t, "node")
			s := f.nodes[node]
			switch what := rapid.SampledFrom([]string{
				"configuration", "configuration", "tell", "tell", "tell all", "tell all", "complete", "complete", "told", "fence",
				"reset", "net", "cut", "heal", "crash", "hot", "wait", "gather", "rest",
			}).Draw(t, "what"); what {
			case "configuration":
				c := a.newest()
				if serial && c.Number > a.complete {
					break
				}
				switch rapid.IntRange(0, 2).Draw(t, "change") {
				case 0:
					c.Limit = limits.Draw(t, "limit")
				case 1:
					c.Limits = nil
					if rapid.Bool().Draw(t, "own") {
						c.Limits = map[string]Limit{"k": limits.Draw(t, "limit")}
					}
				case 2:
					learners := c.Roster.Learners
					c.Roster = members()
					c.Roster.Learners = learners
				}
				a.add(c)
			case "tell":
				if at := s.newest().Number; s.alive && at < a.newest().Number {
					if e := a.tell(node, rapid.Uint64Range(at+1, a.newest().Number).Draw(t, "number")); e != nil {
						t.Fatal(e)
					}
				}
			case "tell all":
				for i, s := range f.nodes {
					if s.alive {
						if e := a.tell(i, a.newest().Number); e != nil {
							t.Fatal(e)
						}
					}
				}
			case "complete":
				if a.finish(); rapid.Bool().Draw(t, "all") {
					for i, s := range f.nodes {
						if s.alive {
							a.told(i)
						}
					}
				}
			case "told":
				if s.alive {
					a.told(node)
				}
			case "fence":
				if s.alive && a.confirmed[node] {
					s.advance(s.clock(f.now))
					if s.fence == never {
						s.Mint(s.Node.now + time.Duration(rapid.IntRange(-5, 1000).Draw(t, "fence"))*ms)
					} else {
						s.Mint(never)
					}
					f.settleNode(node)
				}
			case "reset":
				c := a.newest()
				if serial && c.Number > a.complete {
					break
				}
				c.Resets++
				a.add(c)
				a.fill(c)
				a.count[3]++
			case "net", "cut", "heal":
				network(t, what, node)
			case "crash":
				if s.alive {
					f.crash(node)
				}
				f.at(f.now+time.Duration(rapid.IntRange(0, 1500).Draw(t, "down"))*ms, func() {
					if s.alive {
						return
					}
					f.start(node)
					a.confirmed[node] = false
					s.Mint(0)
					incarnation := s.incarnation
					f.at(f.now+time.Duration(f.rand.IntN(1500))*ms, func() {
						if s.alive && s.incarnation == incarnation {
							a.confirm(node)
						}
					})
				})
			case "hot":
				hot = node
			case "wait":
				if s.alive {
					f.wait(node)
				}
			case "gather":
				if s.alive {
					s.advance(s.clock(f.now))
					r := f.key(s)
					s.demand(r, r.burst) // and never served
				}
			case "rest":
				f.pass(f.now + 4*time.Second)
			}
			f.run(f.now+time.Duration(rapid.IntRange(1, 1500).Draw(t, "ms"))*ms, 1.5*f.limit.Rate, func(time.Duration) int {
				if f.rand.IntN(4) > 0 {
					return hot
				}
				return f.rand.IntN(n)
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		for _, s := range f.nodes {
			if r := s.rows["k"]; s.alive && r != nil && r.sum.Trimmed > 0 {
				a.count[2]++
			}
		}
	})
	t.Logf("configurations, completions, trims, resets: %v", seen)
	if !raceEnabled && slices.Contains(seen[:], 0) { // ten draws may well be without a reset
		t.Errorf("nothing was tried of something: %v", seen)
	}
}
