// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/gossip"
	"github.com/stormguard-mq/stormguard/internal/gossip/simnet"
)

// board is a section: a counter for every incarnation, which only that incarnation raises.
// With forward it passes on what it hears of others, so that replicas converge
// that do not hear each other.
type board struct {
	self    crdt.Replica
	key     string // of self
	forward bool
	rows    []row // by when they changed here, oldest first
	seq     uint64
	gone    []crdt.Replica
	since   map[crdt.Replica]uint64 // of the latest Delta
	backs   int                     // how often a mark went back
	pad     int                     // bytes added to each row
	merged  func(name string, was, is uint64)
	refuse  error
	marks   int // calls of Mark
}

type row struct {
	key   string
	value uint64
	ver   uint64
}

func newBoard(self crdt.Replica) *board {
	return &board{self: self, key: self.String(), since: map[crdt.Replica]uint64{}}
}

func (b *board) set(key string, value uint64) {
	b.seq++
	b.rows = append(slices.DeleteFunc(b.rows, func(r row) bool { return r.key == key }), row{key, value, b.seq})
}

func (b *board) get(key string) uint64 {
	for _, r := range b.rows {
		if r.key == key {
			return r.value
		}
	}
	return 0
}

func (b *board) add() { b.set(b.key, b.get(b.key)+1) }

func (b *board) values() map[string]uint64 {
	m := map[string]uint64{}
	for _, r := range b.rows {
		m[r.key] = r.value
	}
	return m
}

func (b *board) tells(r row) bool { return b.forward || r.key == b.key }

func (b *board) Mark(crdt.Replica) uint64 {
	b.marks++
	for _, r := range slices.Backward(b.rows) {
		if b.tells(r) {
			return r.ver
		}
	}
	return 0
}

// Counted is that of a [gossip.Counter].
func (b *board) Counted() uint64 { return b.seq }

// rejoining is a board that goes on under a higher incarnation.
type rejoining struct{ *board }

func (r rejoining) Rejoin(_ time.Duration, self crdt.Replica) {
	b := r.board
	old := b.get(b.key)
	b.self, b.key = self, self.String()
	clear(b.since)
	b.set(b.key, old)
}

// uncounted is a section of which nobody knows whether it has changed.
type uncounted struct{ gossip.Section }

func (b *board) Delta(_ time.Duration, dst []byte, to crdt.Replica, since uint64, room int) ([]byte, uint64) {
	if since < b.since[to] {
		b.backs++
	}
	b.since[to] = since
	start, upto := len(dst), since
	for _, r := range b.rows {
		if r.ver <= since || !b.tells(r) {
			continue
		}
		if len(dst)-start+1+len(r.key)+10+b.pad > room {
			return dst, upto
		}
		dst = append(dst, byte(len(r.key)))
		dst = append(dst, r.key...)
		dst = binary.AppendUvarint(dst, r.value)
		dst = append(dst, make([]byte, b.pad)...)
		upto = r.ver
	}
	return dst, upto
}

var errRow = errors.New("board: malformed row")

func (b *board) Merge(c crdt.Contact, p []byte) error {
	if b.refuse != nil {
		return b.refuse
	}
	for len(p) > 0 {
		n := int(p[0])
		if len(p) < 1+n {
			return errRow
		}
		key := string(p[1 : 1+n])
		value, k := binary.Uvarint(p[1+n:])
		if k <= 0 || len(p) < 1+n+k+b.pad {
			return errRow
		}
		p = p[1+n+k+b.pad:]
		if was := b.get(key); value > was {
			b.set(key, value)
			if b.merged != nil {
				b.merged(key, was, value)
			}
		}
	}
	return nil
}

func (b *board) Gone(_ time.Duration, peer crdt.Replica) { b.gone = append(b.gone, peer) }

// member is a process with one board.
type member struct {
	*gossip.Session
	proc    simnet.Process // the session, with its seeds
	board   *board
	over    *gossip.Action
	arrived func(from int)
	leave   bool // with the next wake
}

func (m *member) Step(now time.Duration, ev gossip.Event, actions []gossip.Action) []gossip.Action {
	if ev.Kind == gossip.Packet && m.arrived != nil {
		m.arrived(int(ev.Addr.Addr().As4()[3]))
	}
	if m.leave && ev.Kind == gossip.Wake {
		m.leave, ev.Kind = false, gossip.Leave
	}
	n := len(actions)
	actions = m.proc.Step(now, ev, actions)
	for _, a := range actions[n:] {
		if a.Kind != gossip.Send && a.Kind != gossip.Rejoined {
			m.over = &a
		}
	}
	return actions
}

func (m *member) Wake() time.Duration { return m.proc.Wake() }

// fleet is a net of members that join through node 0.
type fleet struct {
	*simnet.Net
	forward bool
	plain   bool // sections do not count
	rejoins bool // sections go on under a higher incarnation
	zone    func(node int) string
	name    func(node int) string
	inc     func(node, incarnation int) uint64
	tune    func(node int, c *gossip.Config)
	seeds   func(node int) []int
	onBoot  func(node int, m *member)
	wrap    func(node int, b *board) gossip.Section
}

func newFleet(t rapid.TB, seed uint64, link simnet.Link) *fleet {
	if t, ok := t.(*testing.T); ok && gossip.RaceEnabled {
		t.Skip("it has one goroutine: run without -race")
	}
	return &fleet{
		Net:   simnet.New(simnet.Config{Seed: seed, Link: link}),
		zone:  func(int) string { return "a" },
		name:  func(node int) string { return fmt.Sprintf("n%02d", node) },
		inc:   func(_, incarnation int) uint64 { return uint64(incarnation) },
		seeds: func(int) []int { return []int{0} },
	}
}

func (f *fleet) start(n int) *fleet {
	for range n {
		node := f.Len()
		f.Add(func(incarnation int, rng *rand.Rand) simnet.Process {
			cfg := gossip.Config{
				Cluster: "test",
				Self:    crdt.Replica{Name: f.name(node), Incarnation: f.inc(node, incarnation)},
				Zone:    f.zone(node),
			}
			if f.tune != nil {
				f.tune(node, &cfg)
			}
			m := &member{board: newBoard(cfg.Self)}
			m.board.forward = f.forward
			var err error
			section := gossip.Section(m.board)
			switch {
			case f.plain:
				section = uncounted{section}
			case f.rejoins:
				section = rejoining{m.board}
			case f.wrap != nil:
				section = f.wrap(node, m.board)
			}
			m.Session, err = gossip.New(cfg, gossip.WithSection("board", section), gossip.WithRand(rng.Float64))
			if err != nil {
				panic(err)
			}
			var seeds []netip.AddrPort
			for _, seed := range f.seeds(node) {
				seeds = append(seeds, simnet.Addr(seed))
			}
			m.proc = simnet.Member(m.Session, seeds...)
			if f.onBoot != nil {
				f.onBoot(node, m)
			}
			return m
		})
	}
	return f
}

func (f *fleet) member(node int) *member {
	m, _ := f.Process(node).(*member)
	return m
}

// leave has a node say that its incarnation is over.
func (f *fleet) leave(node int) {
	f.member(node).leave = true
	f.Poke(node)
}

func (f *fleet) add(node int) {
	if m := f.member(node); m != nil {
		m.board.add()
		f.Poke(node)
	}
}

// churn has every node count, at random instants of the given mean distance.
func (f *fleet) churn(rng *rand.Rand, mean, from, until time.Duration) {
	for node := range f.Len() {
		for t := from; ; {
			t += time.Duration(rng.ExpFloat64() * float64(mean))
			if t >= until {
				break
			}
			f.At(t, func() { f.add(node) })
		}
	}
}

func (f *fleet) equal() bool {
	var first map[string]uint64
	for node := range f.Len() {
		m := f.member(node)
		if m == nil {
			continue
		}
		if v := m.board.values(); first == nil {
			first = v
		} else if !maps.Equal(first, v) {
			return false
		}
	}
	return true
}

func (f *fleet) fresh(node int) int {
	now, _ := f.Clock(node)
	return f.member(node).Stats(now).Fresh
}

// meet lets time pass until all know each other.
func (f *fleet) meet(t *testing.T) {
	t.Helper()
	all := func() bool {
		for node := range f.Len() {
			if f.fresh(node) != f.Len()-1 {
				return false
			}
		}
		return true
	}
	end := f.Now() + 30*time.Second
	for f.Now() < end && !all() {
		f.Run(f.Now() + 50*time.Millisecond)
	}
	if !all() {
		t.Fatalf("after 30s node 0 hears %d of %d", f.fresh(0), f.Len()-1)
	}
}

// sound fails if a packet was too large or a mark went back.
func (f *fleet) sound(t interface {
	Helper()
	Errorf(string, ...any)
}) {
	t.Helper()
	if n := f.Net.Stats().Largest; n > gossip.MaxPacket {
		t.Errorf("a packet has %d bytes", n)
	}
	for node := range f.Len() {
		if m := f.member(node); m != nil && m.board.backs > 0 {
			t.Errorf("node %d: a mark went back %d times", node, m.board.backs)
		}
	}
}

// lan is the model of the project's figures: an availability zone, or two.
var lan = simnet.Link{Base: 500 * time.Microsecond, Jitter: 500 * time.Microsecond}

func lossy(l simnet.Link, loss float64) simnet.Link {
	l.Loss = loss
	return l
}
