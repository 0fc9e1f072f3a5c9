// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package simnet

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/gossip"
)

const (
	us = time.Microsecond
	ms = time.Millisecond
)

// script is a process that does what a test says.
type script struct {
	incarnation int
	wake        time.Duration
	every       time.Duration
	to          []int
	size        int
	got         []arrival
	woken       []time.Duration
	on          func(now time.Duration, ev gossip.Event) (to []int)
}

type arrival struct {
	own  time.Duration
	from netip.AddrPort
	body string
}

func (s *script) Step(now time.Duration, ev gossip.Event, actions []gossip.Action) []gossip.Action {
	to := s.to
	switch ev.Kind {
	case gossip.Packet:
		s.got = append(s.got, arrival{own: now, from: ev.Addr, body: string(ev.Packet)})
		to = nil
	default:
		s.woken = append(s.woken, now)
		s.wake = gossip.Never
		if s.every > 0 {
			s.wake = now + s.every
		}
	}
	if s.on != nil {
		to = s.on(now, ev)
	}
	for _, node := range to {
		body := make([]byte, max(s.size, 8))
		binary.LittleEndian.PutUint64(body, uint64(len(s.woken)))
		actions = append(actions, gossip.Action{Kind: gossip.Send, Addr: Addr(node), Packet: body})
	}
	return actions
}

func (s *script) Wake() time.Duration { return s.wake }

// scripts adds n nodes that do nothing.
func scripts(net *Net, n int) []*script {
	out := make([]*script, n)
	for i := range n {
		net.Add(func(incarnation int, _ *rand.Rand) Process {
			out[i] = &script{incarnation: incarnation, wake: gossip.Never}
			return out[i]
		})
	}
	return out
}

// shout has a node send one packet to another, now.
func shout(net *Net, s *script, node, to int) {
	s.to = []int{to}
	net.Poke(node)
	s.to = nil
}

// storm is a run with everything in it.
func storm(seed uint64) *Net {
	net := New(Config{Seed: seed, Link: Link{
		Base: 500 * us, Jitter: 500 * us, Loss: 0.2, Dup: 0.1, Burst: Burst{Good: 50 * ms, Bad: 5 * ms, Loss: 0.9},
	}})
	for i := range 6 {
		net.Add(func(incarnation int, rng *rand.Rand) Process {
			s := &script{size: 40, wake: gossip.Never}
			if i == 0 {
				s.wake = 0
			}
			s.on = func(now time.Duration, ev gossip.Event) []int {
				if ev.Kind == gossip.Packet && rng.IntN(3) > 0 {
					return nil
				}
				s.wake = now + time.Duration(rng.IntN(3000))*us
				return []int{rng.IntN(6), rng.IntN(6)}
			}
			return s
		})
		net.Drift(i, 50*i-100)
	}
	net.At(100*ms, func() { net.Split([]int{0, 1}, []int{2, 3, 4}) })
	net.At(200*ms, net.Heal)
	net.At(220*ms, func() { net.Cut(0, 1) })
	net.At(300*ms, func() { net.Mend(0, 1); net.Suspend(2, 50*ms); net.Pause(3, 40*ms) })
	net.Flap(4, 20*ms, 30*ms, 400*ms, 600*ms)
	net.At(650*ms, func() { net.Crash(0) })
	net.At(700*ms, func() { net.Restart(0); net.Poke(0) })
	net.Run(time.Second)
	return net
}

// The constant holds for every build: with the race detector, on another day, on
// another machine. Whoever changes what is drawn, or when, changes it knowingly.
func TestSameSeedSameRun(t *testing.T) {
	t.Parallel()
	a, b, c := storm(7), storm(7), storm(8)
	t.Logf("trace %016x, %+v", a.Hash(), a.Stats())
	if a.Hash() != b.Hash() || a.Stats() != b.Stats() {
		t.Errorf("two runs differ: %016x and %016x", a.Hash(), b.Hash())
	}
	if a.Hash() == c.Hash() {
		t.Error("another seed is the same run")
	}
	if want := uint64(0x1f4e73092337c5b9); a.Hash() != want {
		t.Errorf("trace hash %#x, want %#x", a.Hash(), want)
	}
	if st := a.Stats(); st.Delivered < 1000 || st.Lost == 0 || st.Duplicated == 0 || st.Unreceived == 0 {
		t.Errorf("not much happened: %+v", st)
	}
}

// Every event's time, way and bytes are in the hash.
func TestHashSeesEverything(t *testing.T) {
	t.Parallel()
	run := func(at time.Duration, from, to int, body string) uint64 {
		net := New(Config{})
		net.now = at
		net.trace(from, to, []byte(body))
		return net.Hash()
	}
	base := run(1, 2, 3, "0123456789")
	for name, other := range map[string]uint64{
		"time": run(2, 2, 3, "0123456789"), "sender": run(1, 1, 3, "0123456789"), "receiver": run(1, 2, 4, "0123456789"),
		"first byte": run(1, 2, 3, "1123456789"), "last byte": run(1, 2, 3, "0123456788"),
		"length": run(1, 2, 3, "0123456789\x00"), "way back": run(1, 3, 2, "0123456789"),
	} {
		if other == base {
			t.Errorf("%s is not in the hash", name)
		}
	}
}

func TestLinkStatistics(t *testing.T) {
	t.Parallel()
	const n = 40_000
	run := func(l Link) (delays []time.Duration, st Stats) {
		net := New(Config{Seed: 3, Link: l})
		s := scripts(net, 2)
		for i := range n {
			net.At(time.Duration(i)*100*us, func() { shout(net, s[0], 0, 1) })
		}
		start, _ := net.Clock(1)
		net.Run(n*100*us + time.Second)
		for _, a := range s[1].got {
			k := binary.LittleEndian.Uint64([]byte(a.body)) - 1
			delays = append(delays, a.own-start-time.Duration(k)*100*us)
		}
		return delays, net.Stats()
	}
	near := func(what string, got, want, tol float64) {
		t.Helper()
		if math.Abs(got-want) > tol {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	d, st := run(Link{Base: 500 * us, Jitter: 500 * us})
	sum := time.Duration(0)
	over := 0
	for _, v := range d {
		sum += v
		if v > 1500*us {
			over++
		}
	}
	near("mean delay in ms", float64(sum)/float64(len(d))/1e6, 1, 0.01)
	near("share above 1.5 ms", float64(over)/n, math.Exp(-2), 0.005)
	if slices.Min(d) < 500*us {
		t.Errorf("a packet took %v", slices.Min(d))
	}
	if st.Delivered != n || slices.IsSorted(d) {
		t.Errorf("delivered %d", st.Delivered)
	}
	_, st = run(Link{Loss: 0.35})
	near("loss", float64(st.Lost)/n, 0.35, 0.006)
	d, st = run(Link{Dup: 0.1, Jitter: 200 * us})
	near("duplicates", float64(st.Duplicated)/n, 0.1, 0.004)
	if len(d) != int(st.Sent+st.Duplicated) {
		t.Errorf("%d arrived of %d and %d copies", len(d), st.Sent, st.Duplicated)
	}

	// Bursts: a tenth of the time, in stretches of 10 ms, which are about 10 packets.
	net := New(Config{Seed: 4, Link: Link{Burst: Burst{Good: 90 * ms, Bad: 10 * ms, Loss: 1}}})
	s := scripts(net, 2)
	for i := range n {
		net.At(time.Duration(i)*ms, func() { shout(net, s[0], 0, 1) })
	}
	net.Run(n*ms + time.Second)
	runs, last := 0, uint64(0)
	for _, a := range s[1].got {
		k := binary.LittleEndian.Uint64([]byte(a.body))
		if k != last+1 {
			runs++
		}
		last = k
	}
	lost := float64(net.Stats().Lost)
	near("loss in bursts", lost/n, 0.1, 0.02)
	near("length of a burst", lost/float64(runs), 10.5, 1.5)
}

// A link that was idle while it was bad is good again.
func TestBurstsPassWithTime(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(1, 1))
	bad := 0
	for i := range 2000 {
		w := wire{link: Link{Burst: Burst{Good: 90 * ms, Bad: 10 * ms, Loss: 1}}, bad: true, until: 1}
		if w.loses(time.Duration(i%200+1)*time.Second, rng) {
			bad++
		}
	}
	if bad < 140 || bad > 260 {
		t.Errorf("%d of 2000 links are bad after seconds, want about 200", bad)
	}
}

func TestLinksAreChecked(t *testing.T) {
	t.Parallel()
	net := New(Config{})
	scripts(net, 2)
	bad := Link{Base: -1, Jitter: -1, Loss: 1.1, Dup: math.NaN(), Burst: Burst{Good: 1, Loss: -1}}
	err := bad.validate()
	for _, want := range []string{"Base: -1ns", "Jitter: -1ns", "Loss: 1.1", "Dup: NaN", "Burst.Loss: -1", "Burst: {"} {
		if !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%q is missing in %v", want, err)
		}
	}
	for name, f := range map[string]func(){
		"New": func() { New(Config{Link: bad}) }, "SetLink": func() { net.SetLink(0, 1, bad) }, "SetLinks": func() { net.SetLinks(bad) },
		"Drift": func() { net.Drift(0, 100_001) }, "Flap": func() { net.Flap(0, 0, ms, 0, time.Second) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s did not panic", name)
				}
			}()
			f()
		}()
	}
}

func TestCutsAndSplits(t *testing.T) {
	t.Parallel()
	net := New(Config{})
	s := scripts(net, 5)
	reach := func() string {
		var b strings.Builder
		for from := range 4 {
			for to := range 4 {
				before := len(s[to].got)
				shout(net, s[from], from, to)
				net.Run(net.Now() + ms)
				if len(s[to].got) > before {
					fmt.Fprintf(&b, "%d%d ", from, to)
				}
			}
		}
		return strings.TrimSpace(b.String())
	}
	for _, c := range []struct {
		name string
		do   func()
		want string
	}{
		{"one way", func() { net.Cut(0, 1) }, "00 02 03 10 11 12 13 20 21 22 23 30 31 32 33"},
		{"cut and split", func() { net.Split([]int{0, 1}, []int{2, 3}) }, "00 10 11 22 23 32 33"},
		{"a cut outlives new links", func() { net.SetLinks(Link{}); net.SetLink(0, 1, Link{}) }, "00 10 11 22 23 32 33"},
		{"mended", func() { net.Mend(0, 1) }, "00 01 10 11 22 23 32 33"},
		{"another split", func() { net.Split([]int{1}) }, "00 02 03 11 20 22 23 30 32 33"},
		{"isolated", func() { net.Isolate(2) }, "00 01 03 10 11 13 22 30 31 33"},
		{"healed", net.Heal, "00 01 02 03 10 11 12 13 20 21 22 23 30 31 32 33"},
	} {
		c.do()
		if got := reach(); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

func TestFlap(t *testing.T) {
	t.Parallel()
	net := New(Config{})
	s := scripts(net, 2)
	net.Flap(1, 2*time.Second, time.Second, 10*time.Second, 17*time.Second)
	var up []int
	for sec := range 20 {
		net.At(time.Duration(sec)*time.Second+500*ms, func() {
			before := len(s[1].got)
			shout(net, s[0], 0, 1)
			net.At(net.Now()+ms, func() {
				if len(s[1].got) > before {
					up = append(up, sec)
				}
			})
		})
	}
	net.Run(20 * time.Second)
	if want := []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 17, 18, 19}; !slices.Equal(up, want) {
		t.Errorf("up in seconds %v, want %v", up, want)
	}
}

func TestCrashAndRestart(t *testing.T) {
	t.Parallel()
	net := New(Config{Seed: 9, Link: Link{Base: 10 * ms}})
	s := scripts(net, 2)
	old := s[1]
	old.every = ms
	net.Poke(1)
	before, _ := net.Clock(1)
	net.Run(5 * ms)
	shout(net, s[0], 0, 1) // arrives at 15 ms
	net.At(6*ms, func() { net.Crash(1) })
	net.Run(40 * ms)
	if net.Process(1) != nil || len(old.got) != 0 || len(old.woken) != 6 {
		t.Errorf("a crashed process got %d packets and woke %d times", len(old.got), len(old.woken))
	}
	if net.Stats().Unreceived != 1 {
		t.Errorf("stats %+v", net.Stats())
	}
	net.Poke(1)
	net.Suspend(1, ms)
	shout(net, s[0], 0, 1)
	net.Restart(1)
	if s[1] == old || s[1].incarnation != 2 {
		t.Errorf("incarnation %d", s[1].incarnation)
	}
	after, _ := net.Clock(1)
	if after == before || after-before == 40*ms {
		t.Errorf("the clock went on from the first incarnation: %v, %v", before, after)
	}
	net.Run(60 * ms)
	if len(s[1].got) != 1 {
		t.Errorf("the new incarnation got %d packets, want the one that was on its way", len(s[1].got))
	}
}

func TestSuspend(t *testing.T) {
	t.Parallel()
	net := New(Config{})
	s := scripts(net, 2)
	s[1].every = 10 * ms
	net.Poke(1)
	own, wall := net.Clock(1)
	net.At(25*ms, func() { net.Suspend(1, 100*ms); net.Suspend(1, 50*ms) })
	for i := range 300 {
		net.At(30*ms+time.Duration(i)*100*us, func() { shout(net, s[0], 0, 1) })
	}
	net.Run(124 * ms)
	if len(s[1].got) != 0 || len(s[1].woken) != 3 {
		t.Errorf("a stopped process got %d packets and woke %d times", len(s[1].got), len(s[1].woken))
	}
	net.Run(126 * ms)
	if len(s[1].got) != socketBuffer || net.Stats().Unreceived != 300-socketBuffer {
		t.Errorf("got %d packets, %d were lost", len(s[1].got), net.Stats().Unreceived)
	}
	if got := s[1].got[0].own - own; got != 125*ms {
		t.Errorf("the clock read %v at the end, want 125ms", got)
	}
	if n := len(s[1].woken); n != 4 || s[1].woken[3]-own != 125*ms {
		t.Errorf("woke %d times", n)
	}
	if o, w := net.Clock(1); o-own != 126*ms || w-wall != int64(126*ms) {
		t.Errorf("the clocks went on by %v and %v", o-own, w-wall)
	}
}

func TestPauseStopsTheClocks(t *testing.T) {
	t.Parallel()
	net := New(Config{})
	s := scripts(net, 2)
	s[1].every = 10 * ms
	net.Poke(1)
	own, wall := net.Clock(1)
	net.At(25*ms, func() { net.Pause(1, 100*ms) })
	net.At(50*ms, func() { shout(net, s[0], 0, 1); net.Drift(1, 1000); net.Poke(1) })
	net.Run(120 * ms)
	if o, w := net.Clock(1); o-own != 25*ms || w-wall != int64(25*ms) {
		t.Errorf("the clocks of a paused machine went on by %v and %v", o-own, time.Duration(w-wall))
	}
	net.Run(225 * ms)
	if o, w := net.Clock(1); o-own != 125*ms+100*us || w-wall != int64(125*ms+100*us) {
		t.Errorf("afterwards they are at %v and %v", o-own, time.Duration(w-wall))
	}
	if len(s[1].got) != 0 {
		t.Error("a paused machine received a packet")
	}
	// Woken at own 0, 10, 20, then 30 … 120 ms.
	if n := len(s[1].woken); n != 13 {
		t.Errorf("woke %d times, want 13", n)
	}
	net.Pause(1, time.Second)
	net.Restart(1)
	o1, _ := net.Clock(1)
	net.Run(net.Now() + 2*time.Second)
	if o2, _ := net.Clock(1); o2-o1 != 2*time.Second+2*ms {
		t.Errorf("after a restart in the middle of a pause the clock went on by %v", o2-o1)
	}
}

// Of two pauses that overlap, the last to end starts the clocks again, whichever began first.
func TestPausesOverlap(t *testing.T) {
	t.Parallel()
	for name, pauses := range map[string][2]time.Duration{"the second ends last": {20 * ms, 60 * ms}, "the first ends last": {70 * ms, 10 * ms}} {
		net := New(Config{})
		scripts(net, 1)
		own, wall := net.Clock(0)
		net.At(10*ms, func() { net.Pause(0, pauses[0]) })
		net.At(20*ms, func() { net.Pause(0, pauses[1]) })
		net.At(50*ms, func() { net.Suspend(0, 10*ms) })
		net.Run(80 * ms)
		if o, w := net.Clock(0); o-own != 10*ms || w-wall != int64(10*ms) {
			t.Errorf("%s: at its end the clocks went on by %v and %v", name, o-own, time.Duration(w-wall))
		}
		net.Run(100 * ms)
		if o, w := net.Clock(0); o-own != 30*ms || w-wall != int64(30*ms) {
			t.Errorf("%s: afterwards they went on by %v and %v", name, o-own, time.Duration(w-wall))
		}
	}
}

func TestWallSteps(t *testing.T) {
	t.Parallel()
	net := New(Config{Epoch: 1000})
	scripts(net, 1)
	own, wall := net.Clock(0)
	if wall != 1000 {
		t.Errorf("epoch %d", wall)
	}
	net.StepWall(0, -87*ms)
	net.Run(ms)
	net.Drift(0, -200)
	net.Run(ms + time.Second)
	o, w := net.Clock(0)
	if o-own != ms+time.Second-200*us || w-wall != int64(ms+time.Second-200*us-87*ms) {
		t.Errorf("went on by %v and %v", o-own, time.Duration(w-wall))
	}
}

// What happens at one instant happens in one order.
func TestOrderAtOneInstant(t *testing.T) {
	t.Parallel()
	net := New(Config{Link: Link{Base: ms}})
	s := scripts(net, 3)
	var log []string
	for i, p := range s {
		p.on = func(_ time.Duration, ev gossip.Event) []int {
			if ev.Kind == gossip.Packet {
				log = append(log, fmt.Sprintf("packet %s to %d", ev.Addr.Addr(), i))
				return nil
			}
			log = append(log, fmt.Sprintf("wake %d", i))
			return p.to
		}
	}
	for i := 2; i >= 0; i-- {
		own, _ := net.Clock(i)
		s[i].wake = own + ms
		net.arm(i)
	}
	shout(net, s[2], 2, 0)
	shout(net, s[1], 1, 0)
	s[1].wake, s[2].wake = net.nodes[1].clock.at(ms), net.nodes[2].clock.at(ms)
	net.arm(1)
	net.arm(2)
	net.At(ms, func() { log = append(log, "first") })
	net.At(ms, func() { log = append(log, "second"); net.At(0, func() { log = append(log, "third") }) })
	log = nil
	net.Run(ms)
	s[0].wake = gossip.Never
	want := []string{"first", "second", "third", "packet 10.0.0.2 to 0", "packet 10.0.0.1 to 0", "wake 0", "wake 1", "wake 2"}
	if !slices.Equal(log, want) {
		t.Errorf("%q, want %q", log, want)
	}
}

func TestAddresses(t *testing.T) {
	t.Parallel()
	net := New(Config{})
	scripts(net, 300)
	for _, id := range []int{0, 1, 255, 256, 299} {
		if got, ok := net.node(Addr(id)); !ok || got != id {
			t.Errorf("node %d is %d, %v", id, got, ok)
		}
	}
	for _, a := range []string{"10.0.1.44:7946", "10.1.0.0:7946", "11.0.0.0:7946", "10.0.0.0:7947", "[::1]:7946"} {
		if id, ok := net.node(netip.MustParseAddrPort(a)); ok {
			t.Errorf("%s is node %d", a, id)
		}
	}
}

func TestRunUntil(t *testing.T) {
	t.Parallel()
	net := New(Config{})
	n := 0
	for i := range 10 {
		net.At(time.Duration(i)*ms, func() { n++ })
	}
	if !net.RunUntil(time.Second, func() bool { return n == 4 }) || net.Now() != 3*ms {
		t.Errorf("stopped at %v after %d", net.Now(), n)
	}
	if !net.RunUntil(time.Second, func() bool { return n == 4 }) || net.Now() != 3*ms {
		t.Errorf("went on to %v though it was done", net.Now())
	}
	if net.RunUntil(5*ms, func() bool { return n == 20 }) || net.Now() != 5*ms || n != 6 {
		t.Errorf("stopped at %v after %d", net.Now(), n)
	}
}

// The heap is a sorted list that is fast.
func TestFlightsAreInOrder(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var h flights
		var model []flight
		for i := range rapid.IntRange(1, 200).Draw(t, "n") {
			if len(model) > 0 && rapid.IntRange(0, 2).Draw(t, "pop") == 0 {
				if got := h.pop(); got != model[0] {
					t.Fatalf("%+v, want %+v", got, model[0])
				}
				model = model[1:]
				continue
			}
			f := flight{at: time.Duration(rapid.IntRange(0, 9).Draw(t, "at")), seq: uint64(i)}
			h.push(f)
			model = append(model, f)
			slices.SortFunc(model, func(a, b flight) int {
				if a.before(&b) {
					return -1
				}
				return 1
			})
		}
	})
}

func TestTimersHaveOneEntryPerNode(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var h timers
		nodes := rapid.IntRange(1, 20).Draw(t, "nodes")
		model := make([]time.Duration, nodes)
		for i := range nodes {
			h.grow()
			model[i] = never
		}
		for range rapid.IntRange(1, 300).Draw(t, "moves") {
			node := rapid.IntRange(0, nodes-1).Draw(t, "node")
			at := time.Duration(rapid.IntRange(0, 20).Draw(t, "at"))
			if at == 20 {
				at = never
			}
			h.set(int32(node), at)
			model[node] = at
			first := 0
			for i := range model {
				if model[i] < model[first] {
					first = i
				}
			}
			if got, when := h.next(); int(got) != first || when != model[first] {
				t.Fatalf("node %d at %v, want %d at %v", got, when, first, model[first])
			}
			if len(h.heap) != nodes {
				t.Fatalf("%d entries for %d nodes", len(h.heap), nodes)
			}
		}
	})
}

// A clock never goes back, and wakes are at the first instant that is not early.
func TestClock(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		c := clock{mono: time.Duration(rapid.Int64Range(0, int64(time.Hour)).Draw(t, "origin"))}
		now, last := time.Duration(0), c.mono
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			now += time.Duration(rapid.Int64Range(0, int64(24*time.Hour)).Draw(t, "dt"))
			if got := c.at(now); got < last {
				t.Fatalf("went back from %v to %v", last, got)
			}
			last = c.at(now)
			wall := c.wallAt(now)
			if rapid.Bool().Draw(t, "change") {
				c.restart(now)
				c.ppm = rapid.Int64Range(-maxRate, maxRate).Draw(t, "ppm")
				if c.at(now) != last || c.wallAt(now) != wall {
					t.Fatal("a new rate moved the clock")
				}
			}
			own := last + time.Duration(rapid.Int64Range(-10, int64(48*time.Hour)).Draw(t, "own"))
			at := c.when(now, own)
			if at < now || c.at(at) < own || at > now && c.at(at-1) >= own {
				t.Fatalf("%v is read at %v, not first at %v", own, c.at(at), at)
			}
		}
	})
}

func TestRate(t *testing.T) {
	t.Parallel()
	for _, ppm := range []int64{-200, 0, 200, 100_000} {
		c := clock{ppm: ppm}
		if got, want := c.at(1000*time.Second)-1000*time.Second, time.Duration(ppm)*ms; got != want {
			t.Errorf("%d ppm: ahead by %v, want %v", ppm, got, want)
		}
	}
	c := clock{halted: true}
	if c.when(5, 1) != never {
		t.Error("a paused machine wakes")
	}
}

// Every seed is asked at the first step, on the node's own clock, and what came
// with that step is not lost.
func TestMember(t *testing.T) {
	t.Parallel()
	net := New(Config{Seed: 5})
	s := scripts(net, 3)
	net.Add(func(int, *rand.Rand) Process {
		session, err := gossip.New(gossip.Config{Self: crdt.Replica{Name: "m", Incarnation: 1}})
		if err != nil {
			t.Fatal(err)
		}
		return Member(session, Addr(0), Addr(2))
	})
	net.Run(0)
	if len(s[0].got) != 1 || len(s[1].got) != 0 || len(s[2].got) != 1 || s[0].got[0].body != s[2].got[0].body {
		t.Errorf("asked %d, %d, %d times", len(s[0].got), len(s[1].got), len(s[2].got))
	}
	net.Run(20 * ms)
	if got := net.Stats().Sent; got != 2 {
		t.Errorf("%d packets in 20ms, want 2", got)
	}
	net.Run(50 * ms)
	if got := net.Stats().Sent; got != 4 {
		t.Errorf("%d packets in 50ms, want 4", got)
	}
}
