// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/gossip"
	"github.com/stormguard-mq/stormguard/internal/gossip/simnet"
)

const keepAlive = 50 * ms

// sizes are of the fleets. Those that the figures of docs/gossip.md are of are for
// STORMGUARD_FULL: a thousand take minutes and some gigabytes.
func sizes() []int {
	switch {
	case os.Getenv("STORMGUARD_FULL") != "":
		return []int{3, 50, 200, 1000}
	case testing.Short():
		return []int{3, 9}
	}
	return []int{3, 9, 50}
}

// rests is how long a peer may be quiet at most in a fleet of n.
func rests(n int) time.Duration {
	mean := time.Duration(n-1) * keepAlive / 2
	return max(keepAlive, mean*3/2)
}

// restful is a fleet of n in three zones that has met, and rests.
func restful(t *testing.T, seed uint64, link simnet.Link, n int) *fleet {
	t.Helper()
	f := newFleet(t, seed, link)
	f.zone = func(node int) string { return string(rune('a' + node%3)) }
	f.tune = func(_ int, c *gossip.Config) { c.MaxPeers = max(512, n) }
	f.start(n)
	f.meet(t)
	f.Run(f.Now() + rests(n) + time.Second)
	return f
}

// states counts what a node makes of its peers but those in out.
func (f *fleet) states(node int, out ...int) (fresh, deaf, other int) {
	now, _ := f.Clock(node)
	for _, p := range f.member(node).Peers(now, nil) {
		switch {
		case slices.ContainsFunc(out, func(o int) bool { return f.name(o) == p.Name }):
		case p.State != gossip.Fresh:
			other++
		case !p.HearsUs:
			deaf++
		default:
			fresh++
		}
	}
	return fresh, deaf, other
}

// whole tells whether all but those in out hear each other.
func (f *fleet) whole(out ...int) bool {
	for node := range f.Len() {
		if slices.Contains(out, node) {
			continue
		}
		if fresh, _, _ := f.states(node, out...); fresh != f.Len()-len(out)-1 {
			return false
		}
	}
	return true
}

// What an idle process sends does not grow with its fleet.
func TestIdleTraffic(t *testing.T) {
	t.Parallel()
	for _, n := range sizes() {
		f := restful(t, 1, lan, n)
		packets, bytes := make([]int, n), make([]int, n)
		f.OnPacket(func(_ time.Duration, from, _ int, packet []byte) {
			packets[from]++
			bytes[from] += len(packet)
		})
		span := max(10*time.Second, rests(n))
		f.Run(f.Now() + span)
		most, bulk, sum := 0., 0., 0.
		for node := range n {
			most = max(most, float64(packets[node])/span.Seconds())
			bulk = max(bulk, float64(bytes[node])/span.Seconds())
			sum += float64(packets[node]) / span.Seconds() / float64(n)
		}
		t.Logf("%4d nodes: %.1f packets/s each, at most %.1f and %.0f B/s", n, sum, most, bulk)
		if sum > 41 || sum < 35 || most > 48 || bulk > 5000 {
			t.Errorf("%d nodes: %.1f packets/s each, at most %.1f and %.0f B/s", n, sum, most, bulk)
		}
		if !f.whole() {
			t.Errorf("%d nodes: not all hear each other", n)
		}
		f.sound(t)
	}
}

// A change at one process of a fleet at rest reaches all others directly.
func TestChangeInARestingFleet(t *testing.T) {
	t.Parallel()
	for _, n := range sizes() {
		for _, loss := range []float64{0, 0.35} {
			f := restful(t, 2, lossy(lan, loss), n)
			var delays []time.Duration
			changed := f.Now()
			for node := 1; node < n; node++ {
				f.member(node).board.merged = func(string, uint64, uint64) { delays = append(delays, f.Now()-changed) }
			}
			f.add(0)
			f.Run(changed + time.Second)
			slices.Sort(delays)
			if len(delays) != n-1 {
				t.Fatalf("%d nodes, loss %v: %d have it after a second", n, loss, len(delays))
			}
			p99, last := quantile(delays, 0.99), delays[n-2]
			t.Logf("%4d nodes, loss %v: p50 %v, p99 %v, all after %v", n, loss, quantile(delays, 0.5), p99, last)
			if loss == 0 && last > 10*ms || last > 50*ms {
				t.Errorf("%d nodes, loss %v: all have it only after %v", n, loss, last)
			}
		}
	}
}

// One that dies, or is cut off, is silent to all within its rest and 20 keep-alives,
// and heard again within 6 s of its return. Nobody else is ever taken for silent or
// deaf, also where a third of all packets is lost.
func TestDeathInARestingFleet(t *testing.T) {
	t.Parallel()
	for _, n := range sizes() {
		for _, loss := range []float64{0, 0.35} {
			for what, do := range map[string]func(f *fleet){
				"dies":       func(f *fleet) { f.Crash(1) },
				"is cut off": func(f *fleet) { f.Isolate(1) },
			} {
				if n > 50 && (loss > 0) == (what == "dies") {
					continue // one of each takes long enough
				}
				f := restful(t, 3, lossy(lan, loss), n)
				do(f)
				gone := f.Now()
				known := time.Duration(0)
				for f.Now() < gone+rests(n)+21*keepAlive {
					f.Run(f.Now() + max(50*ms, rests(n)/20))
					silent := true
					for node := range n {
						if node == 1 {
							continue
						}
						if _, deaf, other := f.states(node, 1); deaf+other != 0 {
							t.Fatalf("%d nodes, loss %v, 1 %s: %v later, of those that live %d do not hear %d, and it does not hear %d", n, loss, what, f.Now()-gone, deaf, node, other)
						}
						silent = silent && f.fresh(node) == n-2
					}
					if silent && known == 0 {
						known = f.Now() - gone
					}
				}
				if known == 0 {
					t.Errorf("%d nodes, loss %v, 1 %s: not known to all after %v", n, loss, what, f.Now()-gone)
				}
				f.Heal()
				if f.member(1) == nil {
					f.Restart(1)
				}
				back := f.Now()
				if !f.RunUntil(back+6*time.Second+rests(n), f.every(50*ms, func() bool { return f.whole() })) {
					fresh, deaf, other := f.states(1)
					t.Errorf("%d nodes, loss %v, 1 %s: 6 s and a rest after its return it hears %d, %d do not hear it, %d are not heard", n, loss, what, fresh, deaf, other)
				}
				t.Logf("%4d nodes, loss %v, 1 %s: known to all after %v, back after %v", n, loss, what, known, f.Now()-back)
				f.sound(t)
			}
		}
	}
}

// every asks what is dear to ask only so often.
func (f *fleet) every(d time.Duration, ask func() bool) func() bool {
	at := f.Now()
	return func() bool {
		if f.Now() < at {
			return false
		}
		at = f.Now() + d
		return ask()
	}
}

// Who has something for a peer that died need not wait for its rest to be over.
func TestAChangeFindsTheDead(t *testing.T) {
	t.Parallel()
	f := restful(t, 4, lan, 30)
	f.Crash(1)
	f.add(0)
	f.Run(f.Now() + 20*keepAlive + ms)
	now, _ := f.Clock(0)
	for _, p := range f.member(0).Peers(now, nil) {
		if want := p.Name != f.name(1); (p.State == gossip.Fresh) != want || p.HearsUs != want {
			t.Errorf("%s is %v, hears us %v", p.Name, p.State, p.HearsUs)
		}
	}
	// And it does not pay to send it more than keep-alives at their slow pace.
	sent := 0
	f.OnPacket(func(_ time.Duration, from, to int, _ []byte) {
		if from == 0 && to == 1 {
			sent++
		}
	})
	f.Run(f.Now() + 5*time.Second)
	if sent < 4 || sent > 12 {
		t.Errorf("%d packets in 5s to one that is dead", sent)
	}
}

// One that hears nothing, but is heard, is known to be deaf within our rest and 20
// keep-alives, costs slow keep-alives, and has all that it missed soon after.
func TestDeafInARestingFleet(t *testing.T) {
	t.Parallel()
	f := restful(t, 5, lan, 30)
	f.Cut(0, 1)
	f.Run(f.Now() + 2*rests(30) + 22*keepAlive)
	if _, deaf, other := f.states(0); deaf != 1 || other != 0 {
		t.Fatalf("%d are deaf, %d not heard", deaf, other)
	}
	sent := 0
	f.OnPacket(func(_ time.Duration, from, to int, _ []byte) {
		if from == 0 && to == 1 {
			sent++
		}
	})
	f.add(0)
	f.Run(f.Now() + 2*time.Second)
	if sent > 50 {
		t.Errorf("%d packets in 2s to one that is deaf", sent)
	}
	f.Mend(0, 1)
	mended := f.Now()
	if !f.RunUntil(mended+2*time.Second, f.equal) {
		t.Error("it still lacks the change 2s after it hears again")
	}
}

// Some join and some leave, a fifth of the fleet, and all hear all.
func TestChurnInARestingFleet(t *testing.T) {
	t.Parallel()
	n := min(sizes()[2], 50)
	f := restful(t, 6, lossy(lan, 0.05), n)
	rng := rand.New(rand.NewPCG(6, 6))
	var out []int
	for i := range n / 5 {
		gone := 1 + 5*i + rng.IntN(4)
		out = append(out, gone)
		if i%2 == 0 {
			f.At(f.Now()+time.Duration(i)*100*ms, func() { f.leave(gone) })
		} else {
			f.At(f.Now()+time.Duration(i)*100*ms, func() { f.Crash(gone) })
		}
		f.At(f.Now()+time.Duration(i)*100*ms+50*ms, func() { f.start(1) })
	}
	end := f.Now() + time.Duration(n/5)*100*ms
	f.Run(end)
	if !f.RunUntil(end+2*time.Second, f.every(50*ms, func() bool { return f.whole(out...) })) {
		fresh, deaf, other := f.states(0, out...)
		t.Errorf("node 0 hears %d of %d, %d do not hear it, %d are not heard", fresh, f.Len()-len(out)-1, deaf, other)
	}
	t.Logf("%d of %d have gone and as many come: all hear all after %v", len(out), n, f.Now()-end)
	f.add(0)
	f.Run(f.Now() + rests(n) + 21*keepAlive) // and those that died are known
	for node := range f.Len() {
		if !slices.Contains(out, node) && f.fresh(node) != f.Len()-len(out)-1 {
			t.Errorf("node %d hears %d, want %d", node, f.fresh(node), f.Len()-len(out)-1)
		}
	}
}

// keeper is a board that needs some peers.
type keeper struct {
	*board
	needs func(name string) bool
}

func (k keeper) Keeps(to crdt.Replica) bool { return k.needs(to.Name) }

// A pair of which one side needs the other goes at the full pace, both ways, and no
// other; when that is over both rest again.
func TestKeeper(t *testing.T) {
	t.Parallel()
	const n = 20
	needs := false
	f := newFleet(t, 7, lan)
	f.wrap = func(node int, b *board) gossip.Section {
		return keeper{b, func(name string) bool { return needs && node == 0 && name == f.name(1) }}
	}
	f.start(n)
	f.meet(t)
	sent := map[[2]int]int{}
	f.OnPacket(func(_ time.Duration, from, to int, _ []byte) { sent[[2]int{from, to}]++ })
	count := func() (there, back, most int) {
		clear(sent)
		f.Run(f.Now() + 10*time.Second)
		for pair, n := range sent {
			if pair != [2]int{0, 1} && pair != [2]int{1, 0} {
				most = max(most, n)
			}
		}
		return sent[[2]int{0, 1}], sent[[2]int{1, 0}], most
	}
	f.Run(f.Now() + rests(n))
	needs = true
	f.member(0).board.seq++ // it counts when that begins
	clear(sent)
	f.Poke(0)
	f.Run(f.Now() + 200*ms)
	if sent[[2]int{0, 1}] < 3 || sent[[2]int{1, 0}] < 3 {
		t.Errorf("in 200ms %d and %d packets of a pair that has begun to need each other", sent[[2]int{0, 1}], sent[[2]int{1, 0}])
	}
	if there, back, most := count(); there < 195 || there > 205 || back < 195 || back > 205 || most > 40 {
		t.Errorf("in 10s %d and %d packets of a pair that needs each other, and up to %d of others", there, back, most)
	}
	// And who needs a peer knows of its death as in a fleet of three.
	f.Crash(1)
	f.Run(f.Now() + 20*keepAlive + ms)
	if fresh, _, other := f.states(0); fresh != n-2 || other != 1 {
		t.Errorf("%d are fresh, %d silent", fresh, other)
	}
	f.Restart(1)
	f.Run(f.Now() + 3*time.Second)
	needs = false
	f.Run(f.Now() + rests(n))
	if there, back, most := count(); there > 40 || back > 40 || most > 40 {
		t.Errorf("in 10s %d and %d packets of a pair that needs nothing, and up to %d of others", there, back, most)
	}
	f.sound(t)
}

// What a section is told of a peer: how long it may be quiet, and that it hears us.
func TestContactOfARestingPeer(t *testing.T) {
	t.Parallel()
	for _, n := range []int{3, 25} {
		f := newFleet(t, 8, lan)
		contacts, resting := 0, 0
		f.wrap = func(node int, b *board) gossip.Section {
			return listener{b, func(c crdt.Contact) {
				if f.Now() < 5*time.Second {
					return
				}
				contacts++
				if c.Rest > 0 {
					resting++
				}
				most := rests(n) - keepAlive
				if n == 3 {
					most = 0
				}
				if c.Rest < 0 || c.Rest > most || c.Hears < c.Echo || c.Hears > c.Now || c.Now-c.Hears > rests(n)+2*keepAlive {
					t.Errorf("%d nodes: node %d: %s rests for %v, echo %v, hears as of %v, now %v", n, node, c.From, c.Rest, c.Echo, c.Hears, c.Now)
				}
			}}
		}
		f.start(n)
		f.meet(t)
		f.Run(15 * time.Second)
		if contacts < 300 || resting > 0 != (n > 3) || n > 3 && resting < contacts*9/10 {
			t.Errorf("%d nodes: %d contacts, %d of them resting", n, contacts, resting)
		}
	}
}

// listener hears of each contact, since it has something in each packet.
type listener struct {
	*board
	heard func(c crdt.Contact)
}

func (l listener) Delta(now time.Duration, b []byte, to crdt.Replica, since uint64, room int) ([]byte, uint64) {
	b, upto := l.board.Delta(now, append(b, 0), to, since, room-1)
	return b, upto
}

func (l listener) Merge(c crdt.Contact, b []byte) error {
	l.heard(c)
	if len(b) == 0 {
		return fmt.Errorf("nothing from %v", c.From)
	}
	return l.board.Merge(c, b[1:])
}
