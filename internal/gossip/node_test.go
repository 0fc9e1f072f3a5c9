// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/gossip"
)

// shared is a board behind a lock, which says when it has changed.
type shared struct {
	mu     sync.Mutex
	board  *board
	notify func()
	seen   func(name string, is uint64)
}

func newShared(self crdt.Replica) *shared {
	s := &shared{board: newBoard(self)}
	s.board.merged = func(name string, _, is uint64) {
		if s.seen != nil {
			s.seen(name, is)
		}
	}
	return s
}

func (s *shared) OnChange(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.notify = f
}

func (s *shared) add() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.board.add()
	if s.notify != nil {
		s.notify()
	}
}

func (s *shared) values() map[string]uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.board.values()
}

func (s *shared) gone() []crdt.Replica {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]crdt.Replica(nil), s.board.gone...)
}

func (s *shared) Mark(to crdt.Replica) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.board.Mark(to)
}

func (s *shared) Delta(now time.Duration, b []byte, to crdt.Replica, since uint64, room int) ([]byte, uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.board.Delta(now, b, to, since, room)
}

func (s *shared) Merge(c crdt.Contact, b []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.board.Merge(c, b)
}

func (s *shared) Gone(now time.Duration, peer crdt.Replica) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.board.Gone(now, peer)
}

// live is a node of a test, with its section.
type live struct {
	*gossip.Node

	self    crdt.Replica
	section *shared
	links   *links
}

// links loses, delays and cuts what a node sends.
type links struct {
	mu    sync.Mutex
	loss  float64
	delay time.Duration
	cut   func(to netip.AddrPort) bool
}

func (l *links) set(f func(l *links)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f(l)
}

func (l *links) Packet(to netip.AddrPort) (time.Duration, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut != nil && l.cut(to) {
		return 0, true
	}
	return l.delay, rand.Float64() < l.loss
}

var errCut = errors.New("cut off by the test")

func (l *links) Dial(to netip.AddrPort) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut != nil && l.cut(to) {
		return errCut
	}
	return nil
}

var incarnations sync.Map // names to incarnations

// begin starts a node on the loopback, which is closed with the test.
func begin(t testing.TB, network, name string, seeds []string, tune func(*gossip.NodeConfig), opts ...gossip.Option) *live {
	t.Helper()
	inc, _ := incarnations.LoadOrStore(t.Name()+name, new(uint64))
	*inc.(*uint64)++
	l := &live{self: crdt.Replica{Name: name, Incarnation: *inc.(*uint64)}, links: &links{}}
	l.section = newShared(l.self)
	cfg := gossip.NodeConfig{
		Config:  gossip.Config{Cluster: "test", Self: l.self, Zone: "a"},
		Bind:    "127.0.0.1:0",
		Network: network,
		Seeds:   seeds,
	}
	if tune != nil {
		tune(&cfg)
	}
	opts = append([]gossip.Option{gossip.WithSection("board", l.section), gossip.WithFaults(l.links)}, opts...)
	var err error
	if l.Node, err = gossip.Start(cfg, opts...); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func (l *live) seed() []string { return []string{l.Addr().String()} }

// eventually waits for what sockets and other goroutines bring about.
func eventually(t testing.TB, within time.Duration, what string, ok func() bool) {
	t.Helper()
	within = max(within, time.Minute) // a busy machine has time
	deadline := time.Now().Add(within)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", within, what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func agreed(nodes ...*live) bool {
	for _, n := range nodes[1:] {
		if !maps.Equal(n.section.values(), nodes[0].section.values()) {
			return false
		}
	}
	return true
}

func (l *live) hears(names ...string) bool {
	fresh := map[string]bool{}
	for _, p := range l.Peers() {
		if p.State == gossip.Fresh && p.HearsUs {
			fresh[p.Name] = true
		}
	}
	for _, n := range names {
		if !fresh[n] {
			return false
		}
	}
	return len(fresh) == len(names)
}

func whole(nodes ...*live) bool {
	for _, n := range nodes {
		var others []string
		for _, o := range nodes {
			if o != n {
				others = append(others, o.self.Name)
			}
		}
		if !n.hears(others...) {
			return false
		}
	}
	return true
}

func networks(t *testing.T, f func(t *testing.T, network string)) {
	for _, network := range []string{gossip.UDP, gossip.TCP} {
		t.Run(network, func(t *testing.T) { f(t, network) })
	}
}

func TestNodesConverge(t *testing.T) {
	networks(t, func(t *testing.T, network string) {
		a := begin(t, network, "a", nil, nil)
		b := begin(t, network, "b", a.seed(), nil)
		c := begin(t, network, "c", a.seed(), nil)
		nodes := []*live{a, b, c}
		eventually(t, 10*time.Second, "all hear each other", func() bool { return whole(nodes...) })
		for range 100 {
			for _, n := range nodes {
				n.section.add()
			}
			time.Sleep(time.Millisecond)
		}
		eventually(t, 10*time.Second, "equal", func() bool {
			return agreed(nodes...) && len(a.section.values()) == 3 && a.section.values()[c.self.String()] == 100
		})
		eventually(t, 10*time.Second, "membership knows all", func() bool {
			return len(a.Members()) == 3 && len(b.Members()) == 3 && len(c.Members()) == 3
		})
		for _, n := range nodes {
			if st := n.Stats(); st.Session.Refused[gossip.Malformed] != 0 || st.Refused != (gossip.NodeStats{}).Refused {
				t.Errorf("%s refused %v, the session %v", n.self, st.Refused, st.Session.Refused)
			}
		}
	})
}

func TestLeaveTellsAll(t *testing.T) {
	networks(t, func(t *testing.T, network string) {
		a := begin(t, network, "a", nil, nil)
		b := begin(t, network, "b", a.seed(), nil)
		c := begin(t, network, "c", a.seed(), nil)
		eventually(t, 10*time.Second, "all hear each other", func() bool { return whole(a, b, c) })
		c.section.add()
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := c.Leave(ctx); err != nil {
			t.Fatal(err)
		}
		for _, n := range []*live{a, b} {
			if gone := n.section.gone(); len(gone) != 1 || gone[0] != c.self {
				t.Errorf("%s was told that %v are gone", n.self, gone)
			}
			if n.section.values()[c.self.String()] != 1 {
				t.Errorf("%s does not have the last change", n.self)
			}
		}
		if !errors.Is(c.Err(), gossip.ErrClosed) {
			t.Errorf("error %v", c.Err())
		}
		again := begin(t, network, "c", a.seed(), nil)
		eventually(t, 10*time.Second, "it is back as another incarnation", func() bool { return whole(a, b, again) })
	})
}

func ExampleStart() {
	clock := gossip.Clock()
	var nodes [2]*gossip.Node
	var sections [2]*shared
	for i := range nodes {
		self := crdt.Replica{Name: fmt.Sprint("pod-", i), Incarnation: uint64(time.Now().UnixNano())}
		sections[i] = newShared(self)
		cfg := gossip.NodeConfig{Config: gossip.Config{Cluster: "orders", Self: self}, Bind: "127.0.0.1:0"}
		if i > 0 {
			cfg.Seeds = []string{nodes[0].Addr().String()}
		}
		var err error
		nodes[i], err = gossip.Start(cfg, gossip.WithSection("board", sections[i]), gossip.WithClock(clock))
		if err != nil {
			panic(err)
		}
	}
	sections[0].add()
	for len(sections[1].values()) == 0 {
		time.Sleep(time.Millisecond)
	}
	fmt.Println("pod-1 has what pod-0 wrote")

	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	fmt.Println("pod-0 leaves:", nodes[0].Leave(ctx))
	fmt.Println("gone at pod-1:", sections[1].gone()[0].Name)
	_ = nodes[1].Close()
	// Output:
	// pod-1 has what pod-0 wrote
	// pod-0 leaves: <nil>
	// gone at pod-1: pod-0
}

func key(b byte) []byte {
	k := make([]byte, gossip.KeySize)
	for i := range k {
		k[i] = b
	}
	return k
}

func ring(t testing.TB, keys ...byte) *gossip.Keyring {
	t.Helper()
	var all [][]byte
	for _, k := range keys {
		all = append(all, key(k))
	}
	r, err := gossip.NewKeyring(all...)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// The same name comes back at another port, before anybody has noticed that its
// last incarnation is over.
func TestNodeComesBackAtAnotherPort(t *testing.T) {
	networks(t, func(t *testing.T, network string) {
		a := begin(t, network, "a", nil, nil)
		b := begin(t, network, "b", a.seed(), nil)
		c := begin(t, network, "c", a.seed(), nil)
		eventually(t, 10*time.Second, "all hear each other", func() bool { return whole(a, b, c) })
		c.section.add()
		eventually(t, 5*time.Second, "its change is there", func() bool { return agreed(a, b, c) })
		_ = c.Close()
		again := begin(t, network, "c", b.seed(), nil)
		if again.Addr() == c.Addr() {
			t.Fatalf("it has its old address %v", c.Addr())
		}
		eventually(t, 10*time.Second, "all hear the new incarnation", func() bool { return whole(a, b, again) })
		again.section.add()
		eventually(t, 5*time.Second, "its change is there", func() bool {
			return a.section.values()[again.self.String()] == 1 && b.section.values()[again.self.String()] == 1
		})
		for _, n := range []*live{a, b} {
			if gone := n.section.gone(); len(gone) != 1 || gone[0] != c.self {
				t.Errorf("%s was told that %v are gone", n.self, gone)
			}
		}
		eventually(t, 15*time.Second, "membership has the new incarnation and not the old one", func() bool {
			m := a.Members()
			for _, x := range m {
				if x.Replica == c.self {
					return false
				}
			}
			return len(m) == 3
		})
	})
}

// Keys are changed while everybody writes, and nobody notices.
func TestKeyRotation(t *testing.T) {
	networks(t, func(t *testing.T, network string) {
		var rings []*gossip.Keyring
		var nodes []*live
		var seeds []string
		for _, name := range []string{"a", "b", "c"} {
			r := ring(t, 1)
			n := begin(t, network, name, seeds, nil, gossip.WithKeyring(r))
			rings, nodes, seeds = append(rings, r), append(nodes, n), nodes0(nodes, n)
		}
		eventually(t, 10*time.Second, "all hear each other", func() bool { return whole(nodes...) })
		stop := make(chan struct{})
		var wg sync.WaitGroup
		for _, n := range nodes {
			wg.Go(func() {
				for {
					select {
					case <-stop:
						return
					case <-time.After(time.Millisecond):
						n.section.add()
					}
				}
			})
		}
		// What is written from now on comes after all that was sent before, with the key of then.
		traffic := func(name string) {
			t.Helper()
			for _, n := range nodes {
				self := n.self.String()
				next := n.section.values()[self] + 1
				eventually(t, 5*time.Second, name+": the others have what it wrote since", func() bool {
					for _, o := range nodes {
						if o.section.values()[self] < next {
							return false
						}
					}
					return true
				})
			}
		}
		step := func(name string, f func(r *gossip.Keyring) error) {
			t.Helper()
			for _, r := range rings {
				if err := f(r); err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				time.Sleep(30 * time.Millisecond) // traffic between one process's change and the next one's
				traffic(name)
				eventually(t, 5*time.Second, name+": all hear each other", func() bool { return whole(nodes...) })
			}
		}
		for next := byte(2); next < 5; next++ {
			step("add", func(r *gossip.Keyring) error { return r.Add(key(next)) })
			step("use", func(r *gossip.Keyring) error { return r.Use(key(next)) })
			step("remove", func(r *gossip.Keyring) error { return r.Remove(key(next - 1)) })
		}
		close(stop)
		wg.Wait()
		eventually(t, 5*time.Second, "equal", func() bool { return agreed(nodes...) })
		for _, n := range nodes {
			st := n.Stats()
			if st.Refused[gossip.DropUnauthenticated] != 0 || len(st.Keys) != 1 {
				t.Errorf("%s: refused %v, keys %v", n.self, st.Refused, st.Keys)
			}
		}
		late := begin(t, network, "d", nodes[0].seed(), nil, gossip.WithKeyring(ring(t, 1)))
		eventually(t, 5*time.Second, "who has the old key only is refused", func() bool {
			return nodes[0].Stats().Refused[gossip.DropUnauthenticated] > 0
		})
		if len(late.Peers()) != 0 || len(late.Members()) != 1 {
			t.Errorf("who has the old key hears %v", late.Peers())
		}
	})
}

func nodes0(nodes []*live, n *live) []string {
	if len(nodes) > 0 {
		n = nodes[0]
	}
	return n.seed()
}

// A cut long enough for the session to lose and membership to bury the others
// heals by itself.
func TestCutHeals(t *testing.T) {
	networks(t, func(t *testing.T, network string) {
		fast := func(c *gossip.NodeConfig) { c.KeepAlive = 10 * time.Millisecond } // lost after 2 s
		a := begin(t, network, "a", nil, fast)
		b := begin(t, network, "b", a.seed(), fast)
		c := begin(t, network, "c", a.seed(), fast)
		nodes := []*live{a, b, c}
		eventually(t, 10*time.Second, "all hear each other", func() bool { return whole(nodes...) })
		eventually(t, 10*time.Second, "membership knows all", func() bool { return len(c.Members()) == 3 && len(a.Members()) == 3 })
		cut := c.Addr()
		for _, n := range []*live{a, b} {
			n.links.set(func(l *links) { l.cut = func(to netip.AddrPort) bool { return to == cut } })
		}
		c.links.set(func(l *links) { l.cut = func(netip.AddrPort) bool { return true } })
		eventually(t, 20*time.Second, "membership and sessions have lost each other", func() bool {
			return len(c.Members()) == 1 && len(a.Members()) == 2 && len(b.Members()) == 2 && whole(a, b) && c.hears()
		})
		for _, n := range nodes {
			n.section.add()
		}
		for _, n := range nodes {
			n.links.set(func(l *links) { l.cut = nil })
		}
		eventually(t, 10*time.Second, "all hear each other again", func() bool { return whole(nodes...) })
		eventually(t, time.Second, "equal", func() bool { return agreed(nodes...) })
		eventually(t, 10*time.Second, "membership knows all again", func() bool {
			return len(a.Members()) == 3 && len(b.Members()) == 3 && len(c.Members()) == 3
		})
	})
}

// Loss and delay are what the session is made for.
func TestLossAndDelay(t *testing.T) {
	networks(t, func(t *testing.T, network string) {
		a := begin(t, network, "a", nil, nil)
		b := begin(t, network, "b", a.seed(), nil)
		for _, n := range []*live{a, b} {
			n.links.set(func(l *links) { l.loss, l.delay = 0.35, time.Millisecond })
		}
		eventually(t, 20*time.Second, "they hear each other", func() bool { return whole(a, b) })
		for range 200 {
			a.section.add()
			b.section.add()
			time.Sleep(time.Millisecond)
		}
		eventually(t, 5*time.Second, "equal", func() bool { return agreed(a, b) && len(a.section.values()) == 2 })
	})
}

// Another cluster, another key and no key are strangers.
func TestStrangers(t *testing.T) {
	networks(t, func(t *testing.T, network string) {
		a := begin(t, network, "a", nil, nil)
		keyed := begin(t, network, "k", nil, nil, gossip.WithKeyring(ring(t, 1)))
		other := begin(t, network, "o", append(a.seed(), keyed.seed()...), func(c *gossip.NodeConfig) { c.Cluster = "other" })
		wrong := begin(t, network, "w", append(a.seed(), keyed.seed()...), nil, gossip.WithKeyring(ring(t, 2)))
		plain := begin(t, network, "p", keyed.seed(), nil)
		eventually(t, 10*time.Second, "all strangers were refused", func() bool {
			sa, sk := a.Stats(), keyed.Stats()
			return sa.Refused[gossip.DropUnauthenticated] > 0 && sk.Refused[gossip.DropUnauthenticated] > 2 &&
				sa.Refused[gossip.DropCluster]+sa.Session.Refused[gossip.Cluster] > 0
		})
		for _, n := range []*live{a, keyed, other, wrong, plain} {
			if len(n.Peers()) != 0 || len(n.Members()) != 1 {
				t.Errorf("%s knows %v, %v", n.self, n.Peers(), n.Members())
			}
		}
	})
}

// A flood of nonsense costs nothing but its own count.
func TestGarbageFlood(t *testing.T) {
	for _, opts := range [][]gossip.Option{nil, {gossip.WithKeyring(ring(t, 1))}} {
		a := begin(t, gossip.UDP, "a", nil, nil, opts...)
		b := begin(t, gossip.UDP, "b", a.seed(), nil, opts...)
		eventually(t, 10*time.Second, "they hear each other", func() bool { return whole(a, b) })
		out, err := net.Dial("udp", a.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		rng := rand.New(rand.NewPCG(1, 1))
		junk := make([]byte, 2000)
		for i := range 20_000 {
			for j := range junk[:64] {
				junk[j] = byte(rng.Uint32())
			}
			switch i % 4 { // most of it looks like something
			case 0:
				junk[0] = 0xC1
			case 1:
				copy(junk, []byte{0xD1, 0xE5, 0x71, 0xD0, 0xAF, byte(rng.IntN(16))}) // of this cluster, to memberlist
			case 2:
				junk[0] = 0xE1
			}
			_, _ = out.Write(junk[:rng.IntN(len(junk))])
			if i%1000 == 0 {
				if c, err := net.Dial("tcp", a.Addr().String()); err == nil {
					frame := append([]byte{0xA2, 3, 232, 0xD2, 0xE5, 0x71, 0xD0, 0xAF}, make([]byte, 13)...)
					frame = append(frame, byte(rng.IntN(16)))
					_, _ = c.Write(append(frame, junk...)) // of this cluster, to memberlist
					_ = c.Close()
				}
				if c, err := net.Dial("tcp", a.Addr().String()); err == nil {
					junk[0] = byte(0xA1 + i/1000%3)
					_, _ = c.Write(junk)
					_ = c.Close()
				}
				a.section.add()
			}
		}
		_ = out.Close()
		b.section.add()
		eventually(t, 5*time.Second, "equal", func() bool { return agreed(a, b) && len(b.section.values()) == 2 })
		st := a.Stats()
		if len(a.Peers()) != 1 || st.Refused[gossip.DropTooLarge] == 0 || st.Refused[gossip.DropUnauthenticated]+st.Refused[gossip.DropMalformed] == 0 {
			t.Errorf("%d peers, refused %v", len(a.Peers()), st.Refused)
		}
	}
}

// Nothing survives Close, whatever goes on while it is called; and nothing waits
// for a node that has ended.
func TestCloseDuringEverything(t *testing.T) {
	networks(t, func(t *testing.T, network string) {
		for round := range 8 {
			keys := ring(t, 1)
			a := begin(t, network, fmt.Sprint("a", round), nil, nil, gossip.WithKeyring(keys))
			b := begin(t, network, fmt.Sprint("b", round), a.seed(), nil, gossip.WithKeyring(keys))
			if round%2 == 1 {
				eventually(t, 10*time.Second, "they hear each other", func() bool { return whole(a, b) })
			}
			stop := make(chan struct{})
			var wg sync.WaitGroup
			for _, f := range []func(){
				a.section.add, b.section.add,
				func() { a.Stats() }, func() { a.Peers() }, func() { a.Members() },
				func() { _ = keys.Add(key(2)) }, func() { _ = keys.Remove(key(2)) }, a.Kick,
			} {
				wg.Go(func() {
					for {
						select {
						case <-stop:
							return
						default:
							f()
							time.Sleep(100 * time.Microsecond)
						}
					}
				})
			}
			time.Sleep(time.Duration(rand.IntN(30)) * time.Millisecond)
			for range 3 {
				wg.Go(func() { _ = a.Close() })
			}
			if round%3 == 0 {
				wg.Go(func() {
					ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
					defer cancel()
					_ = a.Leave(ctx)
				})
			}
			<-a.Done()
			sent := a.Stats().PacketsOut
			time.Sleep(20 * time.Millisecond) // calls go on, and nothing leaves any more
			if now := a.Stats().PacketsOut; now != sent {
				t.Errorf("%d packets were sent after Close", now-sent)
			}
			close(stop)
			wg.Wait()
			_ = b.Close()
			if err := a.Close(); err != nil || !errors.Is(a.Err(), gossip.ErrClosed) {
				t.Errorf("%v, %v", err, a.Err())
			}
		}
	})
}

// The later incarnation of a name stays, the earlier one ends by itself.
func TestDisplacedNodeEnds(t *testing.T) {
	a := begin(t, gossip.UDP, "a", nil, nil)
	first := begin(t, gossip.UDP, "x", a.seed(), nil)
	eventually(t, 10*time.Second, "they hear each other", func() bool { return whole(a, first) })
	second := begin(t, gossip.UDP, "x", a.seed(), nil)
	select {
	case <-first.Done():
	case <-time.After(time.Minute):
		t.Fatal("two incarnations of one name")
	}
	if !errors.Is(first.Err(), gossip.ErrDisplaced) {
		t.Errorf("%v", first.Err())
	}
	if err := first.Leave(context.Background()); !errors.Is(err, gossip.ErrDisplaced) {
		t.Errorf("leave: %v", err)
	}
	eventually(t, 10*time.Second, "the second is heard", func() bool { return whole(a, second) })
}

// Who cannot be told is not waited for longer than the context says.
func TestLeaveEndsWithItsContext(t *testing.T) {
	a := begin(t, gossip.UDP, "a", nil, func(c *gossip.NodeConfig) { c.KeepAlive = time.Second })
	b := begin(t, gossip.UDP, "b", a.seed(), func(c *gossip.NodeConfig) { c.KeepAlive = time.Second })
	eventually(t, 10*time.Second, "they hear each other", func() bool { return whole(a, b) })
	a.links.set(func(l *links) { l.cut = func(netip.AddrPort) bool { return true } })
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	begin := time.Now()
	err := a.Leave(ctx)
	if !errors.Is(err, gossip.ErrUnacknowledged) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
	if took := time.Since(begin); took > 30*time.Second { // a busy machine ends it late
		t.Errorf("after %v", took)
	}
	select {
	case <-a.Done():
	default:
		t.Error("it is not closed")
	}
}

// Without a key only loopback is listened on, unless somebody says that it is wanted.
// The error names the field, the value and the line that makes a key.
func TestOpenOnlyWithKey(t *testing.T) {
	keyed := []gossip.Option{gossip.WithKeyring(ring(t, 1))}
	for _, c := range []struct {
		bind     string
		insecure bool
		opts     []gossip.Option
		refused  bool
	}{
		{bind: "127.0.0.1:0"}, {bind: "127.1.2.3:0"}, {bind: "[::1]:0"}, {bind: "[::ffff:127.0.0.1]:0"},
		{bind: ":0", refused: true}, {bind: "0.0.0.0:0", refused: true}, {bind: "[::]:0", refused: true}, {bind: "192.0.2.1:0", refused: true},
		{bind: ":0", insecure: true}, {bind: ":0", opts: keyed},
	} {
		cfg := gossip.NodeConfig{
			Config: gossip.Config{Cluster: "test", Self: crdt.Replica{Name: "a", Incarnation: 1}},
			Bind:   c.bind, Insecure: c.insecure,
		}
		n, err := gossip.Start(cfg, c.opts...)
		if err == nil {
			_ = n.Close()
		}
		switch {
		case !c.refused && err != nil && !strings.Contains(err.Error(), "listen"):
			t.Errorf("%+v: %v", c, err)
		case c.refused && (!errors.Is(err, gossip.ErrConfig) || !strings.Contains(err.Error(), fmt.Sprintf("Bind: %q", c.bind)) ||
			!strings.Contains(err.Error(), "stormguard fleet keygen")):
			t.Errorf("%+v: %v", c, err)
		}
	}
	if bind := (gossip.NodeConfig{}).WithDefaults().Bind; bind != "127.0.0.1:7946" {
		t.Errorf("the default is %q", bind)
	}
}

// All addresses of the host, and names instead of addresses.
func TestBindToAllAddresses(t *testing.T) {
	networks(t, func(t *testing.T, network string) {
		all := func(c *gossip.NodeConfig) { c.Bind, c.Insecure = ":0", true }
		a := begin(t, network, "a", nil, all)
		port := a.Addr().Port()
		b := begin(t, network, "b", []string{fmt.Sprint("localhost:", port)}, all)
		c := begin(t, network, "c", []string{fmt.Sprint("[::1]:", port)}, all)
		eventually(t, 15*time.Second, "all hear each other", func() bool { return whole(a, b, c) })
	})
}

// A change leaves with the floor and does not wait for a keep-alive, whatever else
// comes in between.
func TestChangeIsPrompt(t *testing.T) {
	networks(t, func(t *testing.T, network string) {
		slow := func(c *gossip.NodeConfig) { c.KeepAlive = 5 * time.Second }
		a := begin(t, network, "a", nil, slow)
		b := begin(t, network, "b", a.seed(), slow)
		c := begin(t, network, "c", a.seed(), slow)
		nodes := []*live{a, b, c}
		eventually(t, 20*time.Second, "all hear each other", func() bool { return whole(nodes...) })
		for i := range 150 {
			nodes[i%3].section.add()
			if i%2 == 0 {
				nodes[(i+1)%3].section.add() // so that acknowledgements cross
			}
			begin := time.Now()
			eventually(t, 4*time.Second, "equal", func() bool { return agreed(nodes...) })
			if took := time.Since(begin); took > 4*time.Second { // of 150 some would wait longer for a keep-alive
				t.Errorf("change %d took %v", i, took)
			}
		}
	})
}

// What does not fit into a packet travels in several, and sealing them does not
// make them too large.
func TestLargeStateIsSealed(t *testing.T) {
	networks(t, func(t *testing.T, network string) {
		keys := gossip.WithKeyring(ring(t, 1))
		a := begin(t, network, "a", nil, nil, keys)
		for i := range 500 {
			a.section.mu.Lock()
			a.section.board.forward = true
			a.section.board.set(fmt.Sprintf("row-%060d", i), uint64(i+1))
			a.section.mu.Unlock()
		}
		b := begin(t, network, "b", a.seed(), nil, keys)
		eventually(t, 20*time.Second, "all of it is there", func() bool { return len(b.section.values()) == 500 })
		st, before := a.Stats(), b.Stats()
		if st.BytesOut < 30_000 || before.Refused != (gossip.NodeStats{}).Refused {
			t.Errorf("%d bytes were sent, refused %v", st.BytesOut, before.Refused)
		}
		if largest := st.BytesOut / max(st.PacketsOut, 1); largest > gossip.MaxPacket {
			t.Errorf("packets have %d bytes on average", largest)
		}
	})
}

func TestKickAllocatesNothing(t *testing.T) {
	a := begin(t, gossip.UDP, "a", nil, nil)
	if n := testing.AllocsPerRun(10_000, a.Kick); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

// blackBox is discovery that can be changed.
type blackBox struct {
	mu    sync.Mutex
	addrs []netip.AddrPort
	err   error
}

func (b *blackBox) Addrs(context.Context) ([]netip.AddrPort, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.addrs, b.err
}

// Discovery that finds a process late is asked again, and its error is seen.
func TestDiscoveryIsAskedAgain(t *testing.T) {
	d := &blackBox{err: errCut}
	a := begin(t, gossip.UDP, "a", nil, nil)
	b := begin(t, gossip.UDP, "b", nil, nil, gossip.WithDiscovery(d))
	eventually(t, 5*time.Second, "the error is seen", func() bool { return errors.Is(b.Stats().Discovery, errCut) })
	d.mu.Lock()
	d.addrs, d.err = []netip.AddrPort{a.Addr(), b.Addr(), {}}, nil
	d.mu.Unlock()
	eventually(t, 10*time.Second, "they hear each other", func() bool { return whole(a, b) })
	eventually(t, 10*time.Second, "the error is over", func() bool { return b.Stats().Discovery == nil })
}

func BenchmarkKick(b *testing.B) {
	a := begin(b, gossip.UDP, "a", nil, nil)
	b.ReportAllocs()
	for b.Loop() {
		a.Kick()
	}
}
