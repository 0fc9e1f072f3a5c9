// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/internal/escrow"
	"github.com/stormguard-mq/stormguard/internal/gossip"
	"github.com/stormguard-mq/stormguard/internal/gossip/simnet"
)

// A world is one run of one scenario.
type world struct {
	sc       *scenario
	strategy Strategy
	net      *simnet.Net
	names    []string
	numbers  map[string]int
	keys     []string
	members  []*member       // running processes, by node
	store    store           // register of the configuration
	ledgers  []*ledger       // by hot key
	tap      *tap            // nil unless sync delays are measured
	ears     *ears           // nil unless silences are measured
	rotation []int           // order of nodes for the load rotating
	memory   float64         // bytes per node at most, see weigh
	rested   [2]simnet.Stats // at the begin and the end of scenario.rest

	healed    map[[2]int]*missed // changes missed at the latest end of the fault, by sender and receiver
	healedAt  time.Duration      // the latest end of the fault
	converged time.Duration      // longest time from a pair's first packet to its last missed change
	rejoined  time.Duration      // longest time from the end of a fault to the last missed change; Never if one is still missing
}

// missed describes the changes that one node had for another when a fault ended.
type missed struct {
	mark  uint64        // the mark that the receiver must acknowledge
	flows time.Duration // when the first packet after the fault arrived; 0 is not yet
}

// A packet takes linkBase one way, and linkJitter more on average.
const (
	linkBase   = 500 * time.Microsecond
	linkJitter = 500 * time.Microsecond
)

// warmUp is the time at the start that is not judged.
const warmUp = time.Second

func newWorld(sc *scenario, strategy Strategy, seed uint64) *world {
	if sc.pooled {
		strategy = Strict // the row does not depend on how a limit is divided
	}
	w := &world{sc: sc, strategy: strategy, numbers: make(map[string]int)}
	w.store = store{register: new(register.Memory), made: make(map[uint64][]byte)}
	w.net = simnet.New(simnet.Config{Seed: seed, Link: sc.link()})
	for i := range sc.nodes {
		w.names = append(w.names, fmt.Sprintf("n%02d", i))
		w.numbers[w.names[i]] = i
	}
	for k := range max(1, sc.keys) {
		w.keys = append(w.keys, fmt.Sprintf("k%03d", k))
	}
	for range max(1, sc.hot) {
		w.ledgers = append(w.ledgers, newLedger(sc.rate, float64(sc.burstTokens), sc.length, sc.nodes))
	}
	if sc.sync && w.shared() {
		w.tap = newTap(warmUp)
	}
	if sc.maxSilence > 0 && w.shared() {
		w.ears = &ears{heard: make(map[[2]int]hearing)}
	}
	if sc.twin {
		w.names[sc.nodes-1] = w.names[0]
	}
	w.members = make([]*member, sc.nodes)
	w.rotation = rand.New(rand.NewPCG(seed, 1)).Perm(sc.nodes)
	for i := range sc.initial() {
		w.net.Add(w.boot(i))
	}
	return w
}

// link describes the link between any two nodes.
func (sc *scenario) link() simnet.Link {
	return simnet.Link{Base: linkBase, Jitter: linkJitter, Loss: sc.loss, Burst: sc.burst}
}

// run runs the scenario to its end, or until ctx ends or the register fails.
func (w *world) run(ctx context.Context) {
	w.store.ctx = ctx //nolint:fatcontext // nothing nests: a world runs once
	if w.sc.faults != nil {
		w.sc.faults(w)
	}
	w.net.RunUntil(w.sc.length, func() bool { return ctx.Err() != nil || w.store.err != nil })
}

func (w *world) shared() bool { return w.strategy == Strict }

func (w *world) number(name string) int { return w.numbers[name] }

// seeds returns two neighbours of a node. It hears of all others by gossip.
func (w *world) seeds(id int) []int {
	n := w.sc.initial()
	if id >= n {
		return []int{id % n, (id + 1) % n}
	}
	all := []int{(id + 1) % n, (id + n - 1) % n}
	return slices.Compact(slices.DeleteFunc(all, func(s int) bool { return s == id }))
}

// config returns the limiter's configuration for a node.
func (w *world) config(id int) escrow.Config {
	sc := w.sc
	if w.strategy == Static {
		// Each node has a fixed part of the limit, and sends nothing.
		n := float64(sc.nodes)
		if w.noShare(id) {
			return escrow.Config{Limit: escrow.Limit{Rate: 0.001, Burst: 1}}
		}
		return escrow.Config{Limit: escrow.Limit{Rate: sc.rate / n, Burst: max(1, int(float64(sc.burstTokens)/n))}}
	}
	c := escrow.Config{Limit: escrow.Limit{Rate: sc.rate, Burst: sc.burstTokens}}
	if sc.changes {
		c.Fleet, c.Provisional, c.Roster.Learners = "simulate", true, true
	}
	c.OnSilence = sc.silence
	for i, name := range w.names[:sc.initial()] {
		if sc.twin && i == sc.nodes-1 {
			break
		}
		c.Roster.Members = append(c.Roster.Members, escrow.Member{Name: name, NoShare: w.noShare(i)})
	}
	return c
}

func (w *world) noShare(id int) bool { return slices.Contains(w.sc.shareless, id) }

// batch is the number of tokens that a message takes at a node.
func (w *world) batch(id int) int {
	if w.noShare(id) {
		return max(1, w.sc.batch)
	}
	return 1
}

// draw returns when the next message after t arrives. Arrivals are Poisson at the node's
// rate: exponential steps, drawn again wherever the rate changes.
func (w *world) draw(m *member, t time.Duration) time.Duration {
	for t < w.sc.length {
		rate, until := w.sc.load(w, m.id, t)
		if rate > 0 {
			messages := rate / float64(w.batch(m.id))
			step := -math.Log1p(-m.rng.Float64()) / messages
			if at := t + time.Duration(step*1e9); at < until {
				return at
			}
		}
		t = until
	}
	return gossip.Never
}

// heal ends the fault at the time at. From then on it measures how long it takes until
// every node has all missed changes of each other node. A fault may end several times.
func (w *world) heal(at time.Duration, mend func()) {
	w.net.At(at, func() {
		mend()
		if !w.shared() {
			return
		}
		if len(w.healed) > 0 {
			w.rejoined = gossip.Never // changes of the previous end are still missing
		}
		w.healed, w.healedAt = make(map[[2]int]*missed), at
		for i, m := range w.members {
			for j, other := range w.members {
				if i != j && m != nil && other != nil {
					w.healed[[2]int{i, j}] = &missed{mark: m.limits.Mark(other.self)}
				}
			}
		}
		w.watch(at)
	})
}

// watch checks each millisecond which missed changes have been acknowledged.
func (w *world) watch(healedAt time.Duration) {
	if healedAt != w.healedAt {
		return // the fault has ended again
	}
	now := w.net.Now()
	peers := make([][]gossip.Peer, len(w.members))
	for i, m := range w.members {
		own, _ := w.net.Clock(i)
		peers[i] = m.session.Peers(own, nil)
		for _, p := range peers[i] {
			if d := w.healed[[2]int{w.number(p.Name), i}]; d != nil && d.flows == 0 && p.Heard < now-healedAt {
				d.flows = now - p.Heard
			}
		}
	}
	for i, m := range w.members {
		for _, p := range peers[i] {
			pair := [2]int{i, w.number(p.Name)}
			if d := w.healed[pair]; d != nil && d.flows != 0 && p.HearsUs && m.limits.Mark(p.Replica)-p.Unacked >= d.mark {
				delete(w.healed, pair)
				w.converged, w.rejoined = max(w.converged, now-d.flows), max(w.rejoined, now-healedAt)
			}
		}
	}
	switch {
	case len(w.healed) == 0:
	case now < w.sc.length:
		w.net.At(now+time.Millisecond, func() { w.watch(healedAt) })
	default:
		w.rejoined = gossip.Never
	}
}
