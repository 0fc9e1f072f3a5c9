// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/circuit"
	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// bottle is a packet that may arrive when and as often as it likes.
type bottle struct {
	c crdt.Contact
	b []byte
}

// writers lets three processes have a random history and returns what they
// said at various moments.
func writers(t *rapid.T) (packets []bottle, names []string) {
	names = []string{"a", "b", "c", "x", "y"}
	r := Roster{Number: 1, Names: names}
	now := sec
	var vs []*Verdicts
	for _, n := range names[:3] {
		v, err := NewVerdicts(now, Config{Successes: 2}, crdt.Replica{Name: n, Incarnation: 1}, r)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range []string{"s", "t"} {
			if _, err := v.Adopt(now, s); err != nil {
				t.Fatal(err)
			}
		}
		vs = append(vs, v)
	}
	gen := uint64(1)
	say := func(i int, to crdt.Replica) bottle {
		b, _ := vs[i].Delta(now, nil, to, 0, 1<<16)
		return bottle{crdt.Contact{From: vs[i].self, Sent: now, Echo: now}, b}
	}
	for range rapid.IntRange(1, 40).Draw(t, "steps") {
		now += rapid.SampledFrom([]time.Duration{ms, 100 * ms, sec, 8 * sec}).Draw(t, "pause")
		i := rapid.IntRange(0, 2).Draw(t, "who")
		s := rapid.SampledFrom([]string{"s", "t"}).Draw(t, "scope")
		gen += 2
		snap := breaker.Snapshot{Generation: gen, State: breaker.Open, Cause: "run", BackoffLevel: rapid.IntRange(1, 9).Draw(t, "level")}
		switch rapid.IntRange(0, 7).Draw(t, "step") {
		case 0, 1:
			vs[i].Observe(now, s, snap)
		case 2:
			snap.State = breaker.Closed
			vs[i].Observe(now, s, snap)
		case 3:
			snap.Held = true
			trial := circuit.TrialPassed + circuit.Trial(rapid.IntRange(0, 3).Draw(t, "failed")/3)
			vs[i].m.Observe(now, s, circuit.Snapshot{Snapshot: snap, Trial: trial})
		case 4:
			vs[i].Want(now, s, rapid.Bool().Draw(t, "want"))
		case 5:
			vs[i].Tick(now)
		case 6:
			vs[i].Leave(now, s)
			if rapid.Bool().Draw(t, "back") {
				_, _ = vs[i].Adopt(now, s)
			}
		case 7:
			j := rapid.IntRange(0, 2).Draw(t, "whom")
			if p := say(i, vs[j].self); i != j {
				p.c.Now = now
				if err := vs[j].Merge(p.c, p.b); err != nil {
					t.Fatal(err)
				}
			}
		}
		packets = append(packets, say(i, crdt.Replica{Name: "x", Incarnation: 1}))
	}
	return packets, names
}

// What a process knows after some packets does not depend on their order or on
// how often each came.
func TestMergeOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		packets, names := writers(t)
		end := packets[len(packets)-1].c.Sent + sec
		fill := func(self string, order []bottle, echo bool) *Verdicts {
			v, err := NewVerdicts(0, Config{Successes: 2}, crdt.Replica{Name: self, Incarnation: 1}, Roster{Number: 1, Names: names})
			if err != nil {
				t.Fatal(err)
			}
			was := make(map[string]Position)
			for _, p := range order {
				p.c.Now = end
				if !echo {
					p.c.Echo = 0
				} else {
					p.c.Echo = end
				}
				if err := v.Merge(p.c, p.b); err != nil {
					t.Fatal(err)
				}
				for _, s := range v.Scopes() {
					is := v.Status(end, s).Position
					if is.Compare(was[s]) < 0 {
						t.Fatalf("%s went from %v back to %v", s, was[s], is)
					}
					was[s] = is
				}
			}
			return v
		}
		shuffled := rapid.Permutation(append(slices.Clone(packets), packets...)).Draw(t, "order")

		// Cut off from a quorum nothing is decided, so all must be equal.
		a, b := fill("x", packets, false), fill("y", shuffled, false)
		same(t, a, b, end)

		// Otherwise a vote that was taken back may have made a quorum before. That
		// decision is a fact, and one exchange spreads it.
		c, d := fill("x", packets, true), fill("y", shuffled, true)
		for range 2 {
			p, _ := c.Delta(end, nil, d.self, 0, 1<<16)
			q, _ := d.Delta(end, nil, c.self, 0, 1<<16)
			if d.Merge(crdt.Contact{From: c.self, Now: end, Sent: end, Echo: end}, p) != nil ||
				c.Merge(crdt.Contact{From: d.self, Now: end, Sent: end, Echo: end}, q) != nil {
				t.Fatal("refused")
			}
		}
		same(t, c, d, end)
		for _, s := range a.Scopes() {
			if c.Status(end, s).Compare(a.Status(end, s).Position) < 0 {
				t.Fatalf("%s: connected it knows less", s)
			}
		}
	})
}

func same(t *rapid.T, a, b *Verdicts, now time.Duration) {
	if !slices.Equal(a.Scopes(), b.Scopes()) {
		t.Fatalf("scopes %v and %v", a.Scopes(), b.Scopes())
	}
	for _, s := range a.Scopes() {
		x, y := a.Status(now, s), b.Status(now, s)
		if x.State != y.State || !slices.Equal(x.Votes, y.Votes) {
			t.Fatalf("%s:\n%+v\n%+v", s, x, y)
		}
	}
}

// Anything may happen for a while: cuts, losses, crashes, hangs, outages. A
// process's view never goes back; once the sides of a split have known of it for
// as long as it takes, no two probes are out on one of them; and when all is well
// every breaker closes within a bound.
func TestAnything(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		o := options{
			nodes: rapid.IntRange(1, 7).Draw(rt, "nodes"),
			rate:  rapid.SampledFrom([]int{2, 20}).Draw(rt, "rate"),
			loss:  rapid.SampledFrom([]float64{0, 0.1, 0.35}).Draw(rt, "loss"),
			dup:   rapid.SampledFrom([]float64{0, 0.2}).Draw(rt, "dup"),
			delay: rapid.SampledFrom([]time.Duration{ms, 20 * ms, 80 * ms}).Draw(rt, "delay"),
			cfg: Config{
				Cap: 3 * sec, Lease: 3 * sec, Settle: 1500 * ms, Turn: 6 * sec,
				Quorum: rapid.SampledFrom([]float64{0.1, 0.5, 0.7}).Draw(rt, "quorum"),
			},
			brk: breaker.Config{Cap: 3 * sec, Lease: 3 * sec, Slow: 2 * sec},
		}
		w := newWorld(t, rapid.Uint64().Draw(rt, "seed"), o)
		w.watch(func(n *node, was, is State) {
			if is.Compare(was.Position) < 0 {
				rt.Fatalf("%s went from %v back to %v", n.name, was.Position, is.Position)
			}
		})
		for range rapid.IntRange(1, 8).Draw(rt, "phases") {
			n := w.nodes[rapid.IntRange(0, o.nodes-1).Draw(rt, "node")]
			switch rapid.SampledFrom([]string{"cut", "heal", "down", "up", "crash", "start", "freeze", "break", "idle"}).Draw(rt, "what") {
			case "cut":
				of := make([]int, o.nodes)
				for i := range of {
					of[i] = rapid.IntRange(0, 2).Draw(rt, "island")
				}
				w.cut, w.stirred = islands(of...), w.now
			case "heal":
				w.cut, w.stirred = whole, w.now
			case "down":
				w.down = true
			case "up":
				w.down = false
			case "crash":
				if n.alive {
					n.crash()
				}
			case "start":
				if !n.alive {
					n.start()
				}
			case "freeze":
				n.frozen = !n.frozen
				n.busy = n.busy && n.frozen
			case "break":
				n.broken = !n.broken
			case "idle":
				n.idle = !n.idle
			}
			w.run(rapid.SampledFrom([]time.Duration{100 * ms, sec, 6 * sec, 20 * sec}).Draw(rt, "for"))
		}
		w.cut, w.down, w.stirred = whole, false, w.now
		for _, n := range w.nodes {
			if !n.alive {
				n.start()
			}
			if n.frozen {
				n.frozen, n.busy = false, false
			}
			n.broken, n.idle = false, false
		}
		for began := w.now; !w.closed() || w.status(0).Open(); w.run(50 * ms) {
			if w.now-began > time.Minute {
				rt.Fatalf("not closed a minute after all was well: %+v", w.status(0))
			}
		}
		w.run(5 * sec)
		if !w.closed() {
			rt.Fatal("opened again though all is well")
		}
		for i := range w.nodes {
			if s := w.status(i); s.State != w.status(0).State || s.Open() {
				rt.Fatalf("node %d is at %v, node 0 at %v", i, s.State, w.status(0).State)
			}
		}
		if w.overlaps > 0 {
			rt.Fatalf("%d probes began while another was out in reach", w.overlaps)
		}
	})
}
