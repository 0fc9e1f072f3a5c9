// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/crdt"
	"github.com/stormguard-mq/stormguard/crdt/gossip"
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

var lives sync.Map // names to incarnations

// begin starts a node on the loopback, which is closed with the test.
func begin(t testing.TB, network, name string, seeds []string, tune func(*gossip.NodeConfig), opts ...gossip.Option) *live {
	t.Helper()
	inc, _ := lives.LoadOrStore(t.Name()+name, new(uint64))
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
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
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
		eventually(t, 10*time.Second, "it is back as another life", func() bool { return whole(a, b, again) })
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

	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	fmt.Println("pod-0 leaves:", nodes[0].Leave(ctx))
	fmt.Println("gone at pod-1:", sections[1].gone()[0].Name)
	_ = nodes[1].Close()
	// Output:
	// pod-1 has what pod-0 wrote
	// pod-0 leaves: <nil>
	// gone at pod-1: pod-0
}
