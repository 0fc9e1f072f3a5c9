// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package simnet

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/stormguard-mq/stormguard/internal/gossip"
)

const (
	never    = time.Duration(math.MaxInt64)
	maxNodes = 1 << 16

	// socketBuffer is the most packets that the socket of a stopped process keeps. Later packets
	// are lost, as in a kernel's buffer.
	socketBuffer = 256
)

// Config is the initial state of a net. The zero value is valid.
type Config struct {
	Seed uint64 // seed of everything random

	// Link is the link between two nodes for which [Net.SetLink] was not called.
	Link Link

	// Epoch is the wall time at the start, in nanoseconds since 1970. It is metadata only; 0 means
	// the start of 2026.
	Epoch int64
}

const start2026 = 1_767_225_600_000_000_000

// Boot makes the process of a node's n-th incarnation, counted from 1. rng is that
// incarnation's own, seeded from the net's seed.
type Boot func(incarnation int, rng *rand.Rand) Process

// Net is a network, the machines on it, and time. It runs in the goroutine that calls Run and
// starts none; it is not safe for concurrent use.
//
// A run is a pure function of the seed, the processes and the schedule. At one instant, scheduled
// functions come first, then packets, then wakes. Functions come in the order in which they were
// scheduled, packets in the order in which they were sent, wakes by node.
type Net struct {
	rng   *rand.Rand
	seed  uint64
	link  Link
	epoch int64
	now   time.Duration
	hash  uint64

	nodes  []*node
	wires  [][]wire // [from][to]
	groups []int32  // by node; packets pass within one group
	timers timers
	flying flights
	seq    uint64
	bufs   [][]byte
	free   []int32 // unused indexes of bufs
	plan   flights // functions that At scheduled; buf is an index into tasks
	tasks  []func()
	idle   []int32 // unused indexes of tasks

	actions  []gossip.Action
	onPacket func(at time.Duration, from, to int, packet []byte)
	stats    Stats
}

type node struct {
	boot        Boot
	process     Process // nil while down
	incarnation int
	clock       clock
	stopped     int      // suspensions and pauses that have not ended
	paused      int      // pauses that have not ended
	inbox       []flight // packets that came in while the process was stopped
}

// Stats are counts of packets since the net began.
type Stats struct {
	Sent, Delivered, Duplicated uint64
	Lost                        uint64 // by links, cuts and splits
	// Unreceived counts packets to nodes that are down, paused or full, packets in the socket of a
	// suspended process that crashed, and packets to an address of no node.
	Unreceived uint64
	Bytes      uint64 // bytes delivered
	Largest    int    // bytes of the largest packet sent
	Wakes      uint64
}

// New returns an empty net at true time 0. It panics if c.Link is invalid.
func New(c Config) *Net {
	check(c.Link)
	if c.Epoch == 0 {
		c.Epoch = start2026
	}
	return &Net{
		rng:   rand.New(rand.NewPCG(c.Seed, 0)),
		seed:  c.Seed,
		link:  c.Link,
		epoch: c.Epoch,
		hash:  14695981039346656037,
	}
}

func check(l Link) {
	if err := l.validate(); err != nil {
		panic(err)
	}
}

// Add adds a machine, starts its first incarnation, and returns its number. Nodes are numbered from
// 0. The monotonic clock of an incarnation begins at a random value within an hour.
func (n *Net) Add(boot Boot) int {
	id := len(n.nodes)
	if id == maxNodes {
		panic(fmt.Sprintf("simnet: more than %d nodes", maxNodes))
	}
	for from := range n.wires {
		n.wires[from] = append(n.wires[from], wire{link: n.link})
	}
	row := make([]wire, id+1)
	for to := range row {
		row[to].link = n.link
	}
	n.wires = append(n.wires, row)
	n.groups = append(n.groups, 0)
	n.timers.grow()
	nd := &node{boot: boot}
	nd.clock.wall = time.Duration(n.epoch)
	nd.clock.restart(n.now)
	n.nodes = append(n.nodes, nd)
	n.start(id)
	return id
}

// Addr returns a node's address, which is the same in every incarnation.
func Addr(node int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(node >> 8), byte(node)}), 7946)
}

// node returns the node at an address, if there is one.
func (n *Net) node(a netip.AddrPort) (int, bool) {
	if !a.Addr().Is4() || a.Port() != 7946 {
		return 0, false
	}
	b := a.Addr().As4()
	id := int(b[2])<<8 | int(b[3])
	return id, b[0] == 10 && b[1] == 0 && id < len(n.nodes)
}

// Now is the true time since the net began.
func (n *Net) Now() time.Duration { return n.now }

// Clock returns a node's own monotonic reading, and its wall clock in
// nanoseconds since 1970.
func (n *Net) Clock(node int) (own time.Duration, wall int64) {
	c := &n.nodes[node].clock
	return c.at(n.now), c.wallAt(n.now)
}

// Process returns the process on a node, or nil while the node is down.
func (n *Net) Process(node int) Process { return n.nodes[node].process }

// Len returns how many nodes there are.
func (n *Net) Len() int { return len(n.nodes) }

// Stats returns the counts so far.
func (n *Net) Stats() Stats { return n.stats }

// Hash is the trace hash of every event so far: its time, sender, receiver and bytes. It is FNV-1a
// over 64-bit words. Two runs with the same hash were the same run.
func (n *Net) Hash() uint64 { return n.hash }

// OnPacket has f called with every packet when it is sent, before its loss and delay are drawn. f
// must not keep the packet. A later call replaces f; nil removes it.
func (n *Net) OnPacket(f func(at time.Duration, from, to int, packet []byte)) { n.onPacket = f }

// At has f called at true time t, before packets and wakes of that instant. An instant in the past
// means now. f may do anything to the net except run it.
func (n *Net) At(t time.Duration, f func()) {
	var task int32
	if k := len(n.idle); k > 0 {
		task = n.idle[k-1]
		n.idle = n.idle[:k-1]
		n.tasks[task] = f
	} else {
		task = int32(len(n.tasks))
		n.tasks = append(n.tasks, f)
	}
	n.seq++
	n.plan.push(flight{at: max(t, n.now), seq: n.seq, buf: task})
}

// Run lets time pass until true time t, events at t included.
func (n *Net) Run(t time.Duration) {
	n.RunUntil(t, func() bool { return false })
}

// RunUntil lets time pass until true time t, or until done returns true. done is called before the
// first and after every event. RunUntil reports whether done returned true.
func (n *Net) RunUntil(t time.Duration, done func() bool) bool {
	for !done() {
		if !n.step(t) {
			n.now = max(n.now, t)
			return false
		}
	}
	return true
}

// step lets the next event happen, if it is not after limit.
func (n *Net) step(limit time.Duration) bool {
	id, wake := n.timers.next()
	packet := never
	if len(n.flying) > 0 {
		packet = n.flying[0].at
	}
	planned := never
	if len(n.plan) > 0 {
		planned = n.plan[0].at
	}
	switch t := min(wake, packet, planned); {
	case t > limit || t == never:
		return false
	case planned == t:
		n.now = t
		task := n.plan.pop().buf
		do := n.tasks[task]
		n.tasks[task] = nil
		n.idle = append(n.idle, task)
		do()
	case packet == t:
		n.now = t
		n.arrive(n.flying.pop())
	default:
		n.now = t
		n.wake(int(id))
	}
	return true
}

// Poke steps a node's process with [gossip.Wake] now, as a driver does when a
// section has changed. It does nothing to a node that is down or stopped.
func (n *Net) Poke(node int) {
	if n.runs(node) {
		n.wake(node)
	}
}

func (n *Net) runs(node int) bool {
	return n.nodes[node].process != nil && n.nodes[node].stopped == 0
}

func (n *Net) wake(id int) {
	n.stats.Wakes++
	n.trace(id, id, nil)
	n.run(id, gossip.Event{Kind: gossip.Wake})
}

// run steps a process, sends its packets and moves its timer.
func (n *Net) run(id int, ev gossip.Event) {
	nd := n.nodes[id]
	ev.Wall = nd.clock.wallAt(n.now)
	n.actions = nd.process.Step(nd.clock.at(n.now), ev, n.actions[:0])
	for i := range n.actions {
		if a := &n.actions[i]; a.Kind == gossip.Send {
			n.send(id, a.Addr, a.Packet)
		}
	}
	n.arm(id)
}

func (n *Net) arm(id int) {
	nd := n.nodes[id]
	at := never
	if n.runs(id) {
		if own := nd.process.Wake(); own != gossip.Never {
			at = nd.clock.when(n.now, own)
		}
	}
	n.timers.set(int32(id), at)
}

func (n *Net) send(from int, addr netip.AddrPort, packet []byte) {
	n.stats.Sent++
	n.stats.Largest = max(n.stats.Largest, len(packet))
	to, ok := n.node(addr)
	if !ok {
		n.stats.Unreceived++
		return
	}
	if n.onPacket != nil {
		n.onPacket(n.now, from, to, packet)
	}
	w := &n.wires[from][to]
	if w.cut || n.groups[from] != n.groups[to] || w.loses(n.now, n.rng) {
		n.stats.Lost++
		return
	}
	n.fly(from, to, w, packet)
	if w.link.Dup > 0 && n.rng.Float64() < w.link.Dup {
		n.stats.Duplicated++
		n.fly(from, to, w, packet)
	}
}

func (n *Net) fly(from, to int, w *wire, packet []byte) {
	var buf int32
	if k := len(n.free); k > 0 {
		buf = n.free[k-1]
		n.free = n.free[:k-1]
	} else {
		buf = int32(len(n.bufs))
		n.bufs = append(n.bufs, nil)
	}
	n.bufs[buf] = append(n.bufs[buf][:0], packet...)
	n.seq++
	n.flying.push(flight{
		at: n.now + w.delay(n.rng), seq: n.seq, buf: buf, from: int32(from), to: int32(to),
	})
}

func (n *Net) arrive(f flight) {
	nd := n.nodes[f.to]
	switch {
	case nd.process == nil, nd.clock.halted, nd.stopped > 0 && len(nd.inbox) == socketBuffer:
		n.stats.Unreceived++
		n.free = append(n.free, f.buf)
	case nd.stopped > 0:
		nd.inbox = append(nd.inbox, f)
	default:
		n.deliver(f)
	}
}

func (n *Net) deliver(f flight) {
	packet := n.bufs[f.buf]
	n.stats.Delivered++
	n.stats.Bytes += uint64(len(packet))
	n.trace(int(f.from), int(f.to), packet)
	n.run(int(f.to), gossip.Event{Kind: gossip.Packet, Addr: Addr(int(f.from)), Packet: packet})
	n.free = append(n.free, f.buf)
}

// trace mixes an event into the hash. The shift carries high bits down, which FNV's multiplication
// alone never does.
func (n *Net) trace(from, to int, packet []byte) {
	const prime = 1099511628211
	h := n.hash
	mix := func(w uint64) {
		h = (h ^ w) * prime
		h ^= h >> 32
	}
	mix(uint64(n.now))
	mix(uint64(from)<<32 | uint64(to))
	mix(uint64(len(packet)))
	for len(packet) >= 8 {
		mix(binary.LittleEndian.Uint64(packet))
		packet = packet[8:]
	}
	if len(packet) > 0 {
		var last [8]byte
		copy(last[:], packet)
		mix(binary.LittleEndian.Uint64(last[:]))
	}
	n.hash = h
}
