// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/gossip"
	"github.com/stormguard-mq/stormguard/internal/gossip/simnet"
)

const ms = time.Millisecond

// syncDelays runs n nodes that each change at random and returns how long every
// version took to every peer.
func syncDelays(t *testing.T, link simnet.Link, n int, mean time.Duration) []time.Duration {
	f := newFleet(t, 1, link)
	born := map[string][]time.Duration{}
	var delays []time.Duration
	f.onBoot = func(_ int, m *member) {
		m.board.merged = func(key string, was, is uint64) {
			for v := was; v < is; v++ {
				delays = append(delays, f.Now()-born[key][v])
			}
		}
	}
	f.start(n)
	f.meet(t)
	begin := f.Now()
	rng := rand.New(rand.NewPCG(2, 2))
	for node := range n {
		for at := begin; at < begin+8*time.Second; at += time.Duration(rng.ExpFloat64() * float64(mean)) {
			f.At(at, func() {
				key := f.member(node).board.self.String()
				born[key] = append(born[key], f.Now())
				f.add(node)
			})
		}
	}
	f.Run(begin + 9*time.Second)
	want := 0
	for _, b := range born {
		want += len(b) * (n - 1)
	}
	if len(delays) != want {
		t.Fatalf("%d versions were merged, want %d", len(delays), want)
	}
	f.sound(t)
	slices.Sort(delays)
	return delays
}

func quantile(d []time.Duration, q float64) time.Duration {
	return d[min(len(d)-1, int(q*float64(len(d))))]
}

// Change to merged, at each peer, for each version, the wait for the floor
// included. The bound holds for independent loss; bursts take what they take and
// are printed.
func TestSyncDelay(t *testing.T) {
	t.Parallel()
	burst := lan
	burst.Burst = simnet.Burst{Good: 90 * ms, Bad: 10 * ms, Loss: 1}
	for _, c := range []struct {
		name  string
		link  simnet.Link
		nodes int
		mean  time.Duration
		bound time.Duration // of p99; 0 prints only
	}{
		{"no loss, busy", lan, 3, 1 * ms, 11300 * time.Microsecond},
		{"no loss, sparse", lan, 3, 20 * ms, 11300 * time.Microsecond},
		{"35 % loss, busy", lossy(lan, 0.35), 3, 1 * ms, 11300 * time.Microsecond},
		{"35 % loss, sparse", lossy(lan, 0.35), 3, 20 * ms, 11300 * time.Microsecond},
		{"35 % loss, 6 nodes", lossy(lan, 0.35), 6, 10 * ms, 11300 * time.Microsecond},
		{"10 % lost in bursts of 10 ms", burst, 3, 10 * ms, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			d := syncDelays(t, c.link, c.nodes, c.mean)
			p99 := quantile(d, 0.99)
			t.Logf("%d samples: p50 %v, p99 %v, p99.9 %v, max %v", len(d), quantile(d, 0.5), p99, quantile(d, 0.999), d[len(d)-1])
			if c.bound > 0 && p99 > c.bound {
				t.Errorf("p99 is %v, above %v", p99, c.bound)
			}
		})
	}
}

// Replicas are equal again within a second of the first packet that comes
// through, and the first comes through within the 5 s of a try.
func TestConvergesAfterFaults(t *testing.T) {
	t.Parallel()
	const from, until = 10 * time.Second, 100 * time.Second // and all have met before
	rough := lan
	rough.Dup, rough.Jitter = 0.1, 5*ms
	for _, c := range []struct {
		name  string
		link  simnet.Link
		nodes int
		seeds int
		fault func(f *fleet)
		apart func(from, to int) bool // who are apart at the end of the fault
	}{
		{"none", lan, 3, 1, func(*fleet) {}, nil},
		{"35 % loss, copies, reordering", lossy(rough, 0.35), 5, 1, func(*fleet) {}, nil},
		{"split 1+2", lan, 3, 10, func(f *fleet) {
			f.At(from, func() { f.Split([]int{0}, []int{1, 2}) })
			f.At(until, f.Heal)
		}, func(from, to int) bool { return (from == 0) != (to == 0) }},
		{"split 1+1+1", lan, 3, 10, func(f *fleet) {
			f.At(from, func() { f.Split([]int{0}, []int{1}, []int{2}) })
			f.At(until, f.Heal)
		}, func(from, to int) bool { return from != to }},
		{"split 1+2 with 35 % loss", lossy(rough, 0.35), 3, 10, func(f *fleet) {
			f.At(from, func() { f.Split([]int{0}, []int{1, 2}) })
			f.At(until, f.Heal)
		}, func(from, to int) bool { return (from == 0) != (to == 0) }},
		{"one-way cut, two nodes", lan, 2, 10, func(f *fleet) {
			f.At(from, func() { f.Cut(0, 1) })
			f.At(until, func() { f.Mend(0, 1) })
		}, func(from, to int) bool { return from == 0 && to == 1 }},
		{"one-way cut, three nodes", lan, 3, 1, func(f *fleet) {
			f.At(from, func() { f.Cut(0, 1) })
			f.At(until, func() { f.Mend(0, 1) })
		}, nil},
		{"2 s flaps", lan, 3, 1, func(f *fleet) { f.Flap(1, 2*time.Second, 2*time.Second, from, until) }, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var first, rest time.Duration // the longest waits for a packet, and from there
			for seed := range c.seeds {
				f := newFleet(t, uint64(seed), c.link)
				f.forward = true
				crossed := until
				f.onBoot = func(to int, m *member) {
					m.arrived = func(from int) {
						if crossed == 0 && c.apart(from, to) {
							crossed = f.Now()
						}
					}
				}
				f.start(c.nodes)
				f.meet(t)
				f.churn(rand.New(rand.NewPCG(6, 6)), 200*ms, f.Now(), until)
				c.fault(f)
				f.Run(until - ms)
				if c.apart != nil && f.equal() {
					t.Fatal("the fault did nothing")
				}
				f.Run(until)
				if c.apart != nil {
					crossed = 0
				}
				if !f.RunUntil(until+10*time.Second, f.equal) {
					t.Fatalf("seed %d: not equal 10s after the fault: %v", seed, f.member(0).board.values())
				}
				first, rest = max(first, crossed-until), max(rest, f.Now()-crossed)
				f.sound(t)
			}
			t.Logf("worst of %d: the first packet arrived after %v, all were equal %v later", c.seeds, first, rest)
			if first > 5*time.Second || rest > time.Second {
				t.Errorf("the first packet arrived after %v, all were equal %v later", first, rest)
			}
		})
	}
}

// A node that crashes and starts again is a new incarnation everywhere: the old one is
// gone, once, and the new one gets everything, its own old rows included.
func TestCrashAndRestart(t *testing.T) {
	t.Parallel()
	for _, loss := range []float64{0, 0.35} {
		f := newFleet(t, 11, lossy(lan, loss))
		f.forward = true
		f.seeds = func(node int) []int { return []int{(node + 1) % 3} }
		f.start(3)
		f.meet(t)
		f.churn(rand.New(rand.NewPCG(1, 1)), 5*ms, f.Now(), f.Now()+6*time.Second)
		begin := f.Now()
		for i := range 3 {
			at := begin + time.Duration(i)*2*time.Second
			f.At(at+500*ms, func() { f.Crash(i) })
			f.At(at+1500*ms, func() { f.Restart(i) })
		}
		f.Run(begin + 6*time.Second)
		if !f.RunUntil(f.Now()+time.Second, f.equal) {
			t.Fatalf("loss %v: not equal a second after the last change", loss)
		}
		for node := range 3 {
			// Each node's present incarnation lived through the crashes of the nodes after it.
			var want []crdt.Replica
			for other := node + 1; other < 3; other++ {
				want = append(want, crdt.Replica{Name: f.name(other), Incarnation: 1})
			}
			if got := f.member(node).board.gone; !slices.Equal(got, want) {
				t.Errorf("loss %v: node %d saw %v go, want %v", loss, node, got, want)
			}
		}
		f.sound(t)
	}
}

// Knowing one is enough: a chain of 50 becomes a mesh, and each of an idle mesh sends
// two packets in a keep-alive, and some more for those that are lost.
func TestDiscoveryAndIdleCost(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 3, lossy(lan, 0.05))
	f.seeds = func(node int) []int { return []int{max(0, node-1)} }
	f.zone = func(node int) string { return string(rune('a' + node%3)) }
	f.start(50)
	f.meet(t)
	t.Logf("a chain of 50 is a mesh after %v", f.Now())
	if f.Now() > 10*time.Second {
		t.Errorf("it took %v", f.Now())
	}
	f.Run(f.Now() + 3*time.Second)
	before := f.Net.Stats()
	f.Run(f.Now() + 2*time.Second)
	after := f.Net.Stats()
	sent := after.Sent - before.Sent
	t.Logf("idle: %d packets of %d bytes on average in 2s", sent, (after.Bytes-before.Bytes)/(after.Delivered-before.Delivered))
	if want := uint64(50 * 2 * 40); sent < want*95/100 || sent > want*150/100 {
		t.Errorf("%d packets in 2s, want about %d", sent, want)
	}
	// Peers of the own zone stand first.
	now, _ := f.Clock(7)
	for i, p := range f.member(7).Peers(now, nil) {
		if near := p.Zone == "b"; near != (i < 16) {
			t.Errorf("peer %d of a node in zone b is in zone %s", i, p.Zone)
		}
	}
	f.sound(t)
}

// Nothing is forgotten in a split, whatever its length, and hearsay of the dead
// does not go round.
func TestNobodyIsForgotten(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 4, lan)
	f.start(6)
	f.meet(t)
	begin := f.Now()
	f.Split([]int{0, 1}, []int{2, 3}, []int{4, 5}) // only one side has the seed
	f.Run(begin + 10*time.Minute)
	for node := range 6 {
		if n := f.fresh(node); n != 1 {
			t.Errorf("node %d hears %d in the split", node, n)
		}
	}
	f.Heal()
	healed := f.Now()
	f.meet(t)
	t.Logf("whole again after %v", f.Now()-healed)
	if f.Now()-healed > 6*time.Second {
		t.Errorf("whole again only after %v", f.Now()-healed)
	}
}

// Of two processes with one name the later incarnation stays, wherever they join.
func TestOneNameTwice(t *testing.T) {
	t.Parallel()
	for _, apart := range []bool{false, true} {
		f := newFleet(t, 21, lossy(lan, 0.2))
		f.name = func(node int) string { return []string{"a", "b", "twin", "twin"}[node] }
		f.inc = func(node, _ int) uint64 { return uint64(node + 1) }
		f.start(4)
		if apart {
			// They never hear each other; who knows both has to say.
			f.Cut(2, 3)
			f.Cut(3, 2)
		}
		f.Run(5 * time.Second)
		if o := f.member(2).over; o == nil || o.By.Incarnation != 4 {
			t.Errorf("apart %v: the earlier incarnation was not displaced: %+v", apart, o)
		}
		if o := f.member(3).over; o != nil {
			t.Errorf("apart %v: the later incarnation was displaced: %+v", apart, o)
		}
		if f.fresh(0) != 2 || f.fresh(1) != 2 || f.fresh(3) != 2 {
			t.Errorf("apart %v: they hear %d, %d, %d", apart, f.fresh(0), f.fresh(1), f.fresh(3))
		}
	}
}

// A process whose wall clock is an hour behind that of its earlier incarnation, or
// ahead, is back within a second, also under loss and after a half of the fleet forgot.
func TestClockSteps(t *testing.T) {
	t.Parallel()
	for seed := range uint64(20) {
		f := newFleet(t, seed, lossy(lan, 0.35))
		f.rejoins = true
		start := time.Unix(1.8e9, 0)
		steps := []time.Duration{0, -time.Hour, time.Hour, 0, -time.Hour}
		f.inc = func(node, incarnation int) uint64 {
			wall := start.Add(time.Duration(incarnation) * time.Second)
			if node == 3 {
				wall = wall.Add(steps[incarnation-1])
			}
			return gossip.NewIncarnation(wall, uint64(node)<<8+uint64(incarnation))
		}
		f.start(4)
		f.meet(t)
		for range len(steps) - 1 {
			f.Crash(3)
			f.Run(f.Now() + 500*time.Millisecond)
			f.Restart(3)
			if seed%2 == 1 { // who starts at the same time knows nothing of the earlier one
				f.Crash(1)
				f.Restart(1)
			}
			f.Run(f.Now() + time.Second)
			if o := f.member(3).over; o != nil || f.fresh(3) != 3 || f.fresh(0) != 3 || f.fresh(2) != 3 {
				t.Fatalf("seed %d: out %+v; they hear %d, %d, %d, %d", seed, o, f.fresh(0), f.fresh(1), f.fresh(2), f.fresh(3))
			}
			f.Run(f.Now() + 2*time.Second)
		}
	}
}

// Of two processes with one name that run at the same time one ends, whichever clock is
// ahead: that which started first, when it was known already.
func TestOneNameTwiceWithClocks(t *testing.T) {
	t.Parallel()
	for seed := range uint64(20) {
		for _, ahead := range []time.Duration{-time.Hour, 0, time.Hour} {
			for _, wait := range []time.Duration{0, 3 * time.Second} {
				f := newFleet(t, seed, lossy(lan, 0.2))
				f.rejoins = true
				f.name = func(node int) string { return []string{"a", "b", "twin", "twin"}[node] }
				f.inc = func(node, _ int) uint64 {
					wall := time.Unix(1.8e9, 0)
					if node == 3 {
						wall = wall.Add(ahead)
					}
					return gossip.NewIncarnation(wall, uint64(node))
				}
				f.start(3)
				f.Run(f.Now() + wait)
				f.start(1)
				f.Run(f.Now() + 5*time.Second)
				first, second := f.member(2).over, f.member(3).over
				if (first == nil) == (second == nil) || wait > 0 && first == nil {
					t.Errorf("seed %d, %v ahead, after %v: out %+v and %+v", seed, ahead, wait, first, second)
				}
				if f.fresh(0) != 2 || f.fresh(1) != 2 {
					t.Errorf("seed %d, %v ahead, after %v: they hear %d and %d", seed, ahead, wait, f.fresh(0), f.fresh(1))
				}
			}
		}
	}
}

// What one packet cannot hold takes several, oldest first, also under loss.
func TestStateLargerThanPackets(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 31, lossy(lan, 0.35))
	f.onBoot = func(node int, m *member) {
		m.board.pad, m.board.forward = 100, true
		if node == 0 {
			for i := range 300 {
				m.board.set(fmt.Sprintf("row-%03d", i), uint64(i+1))
			}
		}
	}
	f.start(2)
	if !f.RunUntil(20*time.Second, func() bool { return len(f.member(1).board.rows) == 300 }) {
		t.Fatalf("%d of 300 rows after 20s", len(f.member(1).board.rows))
	}
	t.Logf("36 KB took %v, joining included", f.Now())
	if f.Now() > 2*time.Second {
		t.Errorf("36 KB took %v", f.Now())
	}
	f.sound(t)
}

// A section that refuses is told again later, at the pace of keep-alives, and
// nothing of it is lost.
func TestSectionThatRefusesForAWhile(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 32, lan)
	f.start(2)
	f.meet(t)
	f.member(1).board.refuse = errors.New("not now")
	f.add(0)
	before := f.Net.Stats().Sent
	f.Run(f.Now() + 10*time.Second)
	if sent := f.Net.Stats().Sent - before; sent > 2*2*200+10 {
		t.Errorf("%d packets in 10s for a change that is refused", sent)
	}
	now, _ := f.Clock(0)
	if st := f.member(0).Stats(now); st.Unacked != 1 || st.UnackedAge < 9*time.Second {
		t.Errorf("unacked %d for %v", st.Unacked, st.UnackedAge)
	}
	f.member(1).board.refuse = nil
	f.Run(f.Now() + 100*ms)
	if !f.equal() {
		now, _ = f.Clock(1)
		t.Errorf("never taken in: %+v", f.member(1).Stats(now).Sections)
	}
}

// A peer that hears nothing is not sent to at the floor.
func TestDeafPeerCostsKeepAlives(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 33, lan)
	f.start(2)
	f.meet(t)
	f.Cut(0, 1)
	f.churn(rand.New(rand.NewPCG(1, 1)), ms, f.Now(), f.Now()+20*time.Second)
	f.Run(f.Now() + 2*time.Second)
	sent := 0
	f.OnPacket(func(_ time.Duration, from, _ int, _ []byte) {
		if from == 0 {
			sent++
		}
	})
	f.Run(f.Now() + 5*time.Second)
	// One per keep-alive, and one for each of node 1's, who is owed an answer.
	if sent > 2*100+10 {
		t.Errorf("%d packets in 5s to a peer that hears nothing", sent)
	}
	now, _ := f.Clock(0)
	if p := f.member(0).Peers(now, nil)[0]; p.State != gossip.Fresh || p.HearsUs {
		t.Errorf("state %v, hears us %v", p.State, p.HearsUs)
	}
}

// Offsets of wall clocks are right to within half the round trip.
func TestOffsets(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 34, lan)
	f.start(3)
	offs := []time.Duration{0, 87 * ms, -87 * ms}
	for node, off := range offs {
		f.StepWall(node, off)
	}
	f.Run(3 * time.Second)
	for node := range 3 {
		now, _ := f.Clock(node)
		for _, p := range f.member(node).Peers(now, nil) {
			other := int(p.Name[2] - '0')
			want := offs[other] - offs[node]
			if !p.HasOffset || (p.Offset-want).Abs() > p.RTT/2 || p.RTT < ms || p.RTT > 3*ms {
				t.Errorf("node %d: %s is %v ahead (%v), want %v, rtt %v", node, p.Name, p.Offset, p.HasOffset, want, p.RTT)
			}
		}
	}
}

// One fleet, one seed, one trace.
func TestFleetReplays(t *testing.T) {
	if gossip.RaceEnabled {
		t.Skip("it has one goroutine: run without -race")
	}
	t.Parallel()
	run := func() (uint64, string) {
		f := newFleet(t, 77, lossy(lan, 0.1))
		f.forward = true
		f.zone = func(node int) string { return string(rune('a' + node%3)) }
		f.start(9)
		f.churn(rand.New(rand.NewPCG(1, 1)), 10*ms, 0, 5*time.Second)
		f.Flap(3, 300*ms, 200*ms, time.Second, 3*time.Second)
		f.At(2*time.Second, func() { f.Crash(5) })
		f.At(3*time.Second, func() { f.Restart(5) })
		f.Run(6 * time.Second)
		now, _ := f.Clock(1)
		return f.Hash(), fmt.Sprintf("%+v", f.member(1).Stats(now))
	}
	h1, s1 := run()
	h2, s2 := run()
	t.Logf("trace %016x", h1)
	if h1 != h2 || s1 != s2 {
		t.Errorf("two runs differ: %016x and %016x\n%s\n%s", h1, h2, s1, s2)
	}
}

// Whatever happens, in whatever order: once it stops, all are equal; a mark never
// goes back; no packet is too large.
func TestAnyFaults(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		link := simnet.Link{
			Base:   time.Duration(rapid.IntRange(0, 5000).Draw(t, "base µs")) * time.Microsecond,
			Jitter: time.Duration(rapid.IntRange(0, 20000).Draw(t, "jitter µs")) * time.Microsecond,
			Loss:   float64(rapid.IntRange(0, 90).Draw(t, "loss %")) / 100,
			Dup:    float64(rapid.IntRange(0, 30).Draw(t, "dup %")) / 100,
		}
		if rapid.Bool().Draw(t, "bursts") {
			link.Burst = simnet.Burst{Good: 200 * ms, Bad: 50 * ms, Loss: 1}
		}
		f := newFleet(t, rapid.Uint64().Draw(t, "seed"), link)
		f.forward = true
		n := rapid.IntRange(2, 5).Draw(t, "nodes")
		pad := rapid.IntRange(0, 600).Draw(t, "pad")
		f.onBoot = func(_ int, m *member) { m.board.pad = pad }
		f.start(n)
		f.churn(rand.New(rand.NewPCG(1, 1)), 30*ms, 0, 10*time.Second)
		node := func() int { return rapid.IntRange(0, n-1).Draw(t, "node") }
		for range rapid.IntRange(0, 12).Draw(t, "faults") {
			at := time.Duration(rapid.IntRange(0, 10_000).Draw(t, "at ms")) * ms
			long := time.Duration(rapid.IntRange(1, 6000).Draw(t, "for ms")) * ms
			a, b := node(), node()
			switch rapid.IntRange(0, 8).Draw(t, "kind") {
			case 0:
				f.At(at, func() { f.Cut(a, b) })
			case 1:
				f.At(at, func() { f.Split([]int{a}, []int{b}) })
			case 2:
				f.At(at, func() { f.Isolate(a) })
			case 3:
				f.Flap(a, long, long/2+1, at, 10*time.Second)
			case 4:
				f.At(at, func() { f.Crash(a) })
				f.At(at+long, func() {
					if f.member(a) == nil {
						f.Restart(a)
					}
				})
			case 5:
				f.At(at, func() { f.Restart(a) })
			case 6:
				f.At(at, func() { f.Suspend(a, long) })
			case 7:
				f.At(at, func() { f.Pause(a, long) })
			default:
				ppm := rapid.IntRange(-500, 500).Draw(t, "ppm")
				f.At(at, func() { f.Drift(a, ppm); f.StepWall(a, -long) })
			}
		}
		f.Run(17 * time.Second) // the longest fault ends before
		f.Heal()
		for a := range n {
			for b := range n {
				f.Mend(a, b)
			}
			if f.member(a) == nil {
				f.Restart(a)
			}
		}
		f.SetLinks(lan)
		for range 20 { // equality is dear to ask for
			f.Run(f.Now() + 500*ms)
			if f.equal() {
				break
			}
		}
		if !f.equal() {
			t.Fatal("not equal 10s after the last fault")
		}
		f.sound(t)
		for i := range n {
			now, _ := f.Clock(i)
			if st := f.member(i).Stats(now); st.Refused[gossip.Malformed] != 0 || st.Refused[gossip.Introduction] != 0 {
				t.Fatalf("node %d took a healthy packet for a broken one: %v", i, st.Refused)
			}
		}
	})
}
