// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// check is what must hold after every event; the text is constant, so that
// failures shrink.
func (f *fleet) check() error {
	for _, s := range f.nodes {
		if s.alive {
			s.advance(s.clock(f.now)) // or a lease looks as if it were still on
		}
	}
	total, spent := int64(0), f.spent
	for _, s := range f.nodes {
		if !s.alive {
			continue
		}
		r := s.rows["k"]
		if old := s.counted; old != nil && old != r { // evicted
			f.spent += old.sum.Own + old.sum.Borrowed
			spent += old.sum.Own + old.sum.Borrowed
		}
		if s.counted = r; r == nil {
			continue
		}
		spent += r.sum.Own + r.sum.Borrowed
		if r.level < 0 || r.lent < 0 || r.held < 0 || r.granted < 0 || r.granted > r.level {
			return errors.New("negative books")
		}
		if !r.overCap && r.level+r.lent > r.cap {
			return errors.New("level and loans exceed the cap")
		}
		if r.sum.Minted+r.sum.Back+r.sum.Refilled != r.level+r.sum.Own+r.sum.Lent+r.sum.Trimmed {
			return errors.New("own tokens do not tie up")
		}
		if r.sum.Got != r.sum.Borrowed+r.sum.Returned+r.sum.Voided+r.held {
			return errors.New("loans do not tie up")
		}
		total += r.level + r.lent
		lent, held := int64(0), int64(0)
		for _, e := range r.entries {
			if e == nil {
				continue
			}
			lent += e.lent.open()
			held += e.held()
			if e.lent.open() < 0 || e.held() < 0 {
				return errors.New("more used and returned than lent")
			}
			if e.held() == 0 || !s.leased(e.peer) {
				continue
			}
			lender := f.nodes[f.indexOf(e.peer.id.Name)]
			if !lender.alive || lender.incarnation != e.peer.id.Incarnation {
				total += e.held() // nobody else counts it
				continue
			}
			its := lender.rows["k"]
			if its == nil || its.with(lender.peerOf(s)) == nil {
				return errors.New("a spendable loan that its lender does not know")
			}
			if l := its.with(lender.peerOf(s)).lent; l.series != e.borrowed.series || l.open() < e.held() {
				return errors.New("a spendable loan that does not fill its lender's cap")
			}
		}
		if lent != r.lent || held != r.held {
			return errors.New("a row does not sum up its pairs")
		}
	}
	if total > int64(f.limit.Burst)*micro {
		return errors.New("more tokens than the burst")
	}
	if spent != int64(f.admitted)*micro {
		return errors.New("spent and admitted differ")
	}
	if f.over > 1e-6 {
		return errors.New("admitted more than burst and rate allow")
	}
	return nil
}

func (f *fleet) indexOf(name string) (i int) {
	_, _ = fmt.Sscanf(name, "n%d", &i)
	return i
}

// peerOf is what s keeps of another node's present incarnation, or of any that it has
// not buried yet.
func (s *simNode) peerOf(other *simNode) *peer {
	if p := s.Node.peers[other.self.Name]; p != nil && p.id == other.self {
		return p
	}
	for _, p := range s.ending {
		if p.id == other.self {
			return p
		}
	}
	return &peer{slot: 1 << 20}
}

// disturb gives the fleet a network, whole at first, and returns what changes it: how
// it loses, doubles and delays, one way of one link that is cut, all links healed.
func (f *fleet) disturb() func(t *rapid.T, what string, node int) {
	cut := make([][]bool, len(f.nodes))
	for i := range cut {
		cut[i] = make([]bool, len(f.nodes))
	}
	f.down = func(_ time.Duration, a, b int) bool { return cut[a][b] }
	return func(t *rapid.T, what string, node int) {
		switch what {
		case "net":
			f.loss = rapid.SampledFrom([]float64{0, .1, .35, .9}).Draw(t, "loss")
			f.dup = rapid.SampledFrom([]float64{0, .2}).Draw(t, "dup")
			f.slow = rapid.SampledFrom([]time.Duration{0, 5 * ms, 500 * ms}).Draw(t, "slow")
		case "cut":
			cut[node][rapid.IntRange(0, len(f.nodes)-1).Draw(t, "to")] = true
		case "heal":
			for i := range cut {
				clear(cut[i])
			}
		}
	}
}

// Whatever the network and the processes do, no token is spent twice.
func TestNeverTooMuch(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 5).Draw(t, "nodes")
		limit := rapid.SampledFrom([]Limit{{1000, 50}, {1000, 400}, {20, 5}, {100, 3}}).Draw(t, "limit")
		cfg := Config{Limit: limit}
		for i := range n - rapid.IntRange(0, 1).Draw(t, "outsiders") {
			cfg.Roster.Members = append(cfg.Roster.Members, Member{Name: fmt.Sprintf("n%02d", i), Weight: rapid.IntRange(1, 3).Draw(t, "weight")})
		}
		cfg.Roster.Learners = len(cfg.Roster.Members) < n || rapid.Bool().Draw(t, "learners")
		f := newFleetOf(silent{}, n, cfg, rapid.Uint64().Draw(t, "seed"))
		for _, s := range f.nodes {
			s.ppm = float64(rapid.IntRange(-drift, drift).Draw(t, "ppm"))
		}
		var err error
		f.probe = func() {
			if err == nil {
				err = f.check()
			}
		}
		var old []*event
		f.keep = func(e *event) {
			if len(old) < 64 {
				old = append(old, e)
			} else if f.rand.IntN(50) == 0 {
				old[f.rand.IntN(64)] = e
			}
		}
		network := f.disturb()
		hot := 0
		steps := rapid.IntRange(3, 25).Draw(t, "steps")
		for range steps {
			node := rapid.IntRange(0, n-1).Draw(t, "node")
			s := f.nodes[node]
			switch what := rapid.SampledFrom([]string{"pass", "net", "cut", "heal", "crash", "hot", "replay", "wait", "stale", "rest", "gone", "gather"}).Draw(t, "what"); what {
			case "net", "cut", "heal":
				network(t, what, node)
			case "crash":
				if s.alive {
					f.crash(node)
				}
				f.at(f.now+time.Duration(rapid.IntRange(0, 1500).Draw(t, "down"))*ms, func() {
					if !s.alive {
						f.start(node)
					}
				})
			case "hot":
				hot = node
			case "replay":
				for _, e := range old {
					again := *e
					again.at = f.now + time.Duration(f.rand.Int64N(int64(100*ms)))
					again.data = append([]byte(nil), e.data...)
					f.post(&again)
				}
			case "wait":
				if s.alive {
					f.wait(node)
				}
			case "stale":
				if s.alive {
					if r := s.rows["k"]; r != nil {
						s.Node.advance(s.clock(f.now))
						r.mint(s.Node.now, s.mintAt)
						minted := r.sum.Minted
						if s.Take(0, "k", limit.Burst) {
							for range limit.Burst {
								f.admit(node)
							}
						}
						if r.sum.Minted != minted {
							t.Fatal("a stale now mints")
						}
					}
				}
			case "gather":
				if s.alive {
					s.advance(s.clock(f.now))
					s.demand(f.key(s), int64(limit.Burst)*micro) // and never served
				}
			case "rest":
				f.pass(f.now + 4*time.Second)
			case "gone":
				other := rapid.IntRange(0, n-1).Draw(t, "other")
				if s.alive && other != node && !f.nodes[other].alive {
					s.Gone(s.clock(f.now), f.nodes[other].self)
				}
			}
			f.run(f.now+time.Duration(rapid.IntRange(1, 1500).Draw(t, "ms"))*ms, 1.5*limit.Rate, func(time.Duration) int {
				if f.rand.IntN(4) > 0 {
					return hot
				}
				return f.rand.IntN(n)
			})
			if err != nil {
				t.Fatal(err)
			}
		}
	})
}

// silent is a testing.TB for a fleet that rapid owns.
type silent struct{ testing.TB }

func (silent) Fatal(args ...any) { panic(fmt.Sprint(args...)) }
