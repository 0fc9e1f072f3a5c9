// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package simnet

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// A fault happens when its method is called; a schedule calls it from within At. Packets that are
// already on their way still arrive after a Cut or Split.

// SetLink sets one way between two nodes.
func (n *Net) SetLink(from, to int, l Link) {
	check(l)
	n.wires[from][to] = wire{link: l, cut: n.wires[from][to].cut}
}

// SetLinks sets all links, also of nodes that are added later.
func (n *Net) SetLinks(l Link) {
	check(l)
	n.link = l
	for from := range n.wires {
		for to := range n.wires[from] {
			n.wires[from][to] = wire{link: l, cut: n.wires[from][to].cut}
		}
	}
}

// Cut loses all packets one way, until Mend.
func (n *Net) Cut(from, to int) { n.wires[from][to].cut = true }

// Mend ends a Cut.
func (n *Net) Mend(from, to int) { n.wires[from][to].cut = false }

// Split parts the nodes into groups that do not reach each other. Nodes that are not named, and
// nodes that are added later, are one more group. It replaces an earlier split.
func (n *Net) Split(groups ...[]int) {
	clear(n.groups)
	for g, nodes := range groups {
		for _, node := range nodes {
			n.groups[node] = int32(g + 1)
		}
	}
}

// Heal ends a split. Cuts stay.
func (n *Net) Heal() { clear(n.groups) }

// Isolate parts one node from all others, which still reach each other. It replaces an earlier
// split, and Heal ends it.
func (n *Net) Isolate(node int) { n.Split([]int{node}) }

// Flap isolates a node from true time from until true time until: down, then up, repeatedly. Each
// turn heals every split.
func (n *Net) Flap(node int, down, up, from, until time.Duration) {
	if down <= 0 || up <= 0 {
		panic(fmt.Sprintf("simnet: flap: %v down and %v up are not both above 0s", down, up))
	}
	for t := from; t < until; t += down + up {
		n.At(t, func() { n.Isolate(node) })
		n.At(min(t+down, until), n.Heal)
	}
}

// Crash ends a node's process at once. Packets on their way to the node are lost if it is still
// down when they arrive.
func (n *Net) Crash(node int) {
	nd := n.nodes[node]
	nd.process = nil
	n.drop(nd)
	n.arm(node)
}

// Restart crashes the running process of a node and starts its next incarnation. Its monotonic
// clock begins anew. Its rate error and wall clock stay those of the machine. It ends Suspend and
// Pause.
func (n *Net) Restart(node int) {
	nd := n.nodes[node]
	nd.process = nil
	n.drop(nd)
	nd.stopped, nd.paused = 0, 0
	if nd.clock.halted {
		nd.clock.restart(n.now)
		nd.clock.halted = false
	}
	n.start(node)
}

func (n *Net) drop(nd *node) {
	for _, f := range nd.inbox {
		n.stats.Unreceived++
		n.free = append(n.free, f.buf)
	}
	nd.inbox = nd.inbox[:0]
}

func (n *Net) start(id int) {
	nd := n.nodes[id]
	nd.incarnation++
	nd.clock.restart(n.now)
	rng := rand.New(rand.NewPCG(n.seed, uint64(id+1)<<32|uint64(nd.incarnation)))
	nd.clock.mono = time.Duration(rng.Int64N(int64(time.Hour)))
	nd.process = nd.boot(nd.incarnation, rng)
	n.arm(id)
}

// Suspend stops a node's process but not its clock, as SIGSTOP does: packets wait in its socket,
// the first 256 of them. After d the process goes on. If suspensions overlap, it goes on when the
// last one ends.
func (n *Net) Suspend(node int, d time.Duration) { n.stop(node, d, false) }

// Pause stops a whole machine with its clocks, as a hypervisor does. Incoming packets are lost, and
// afterwards both clocks are late by d. Pauses that overlap end with the last of them.
func (n *Net) Pause(node int, d time.Duration) { n.stop(node, d, true) }

func (n *Net) stop(node int, d time.Duration, clocks bool) {
	nd := n.nodes[node]
	incarnation := nd.incarnation
	if nd.process == nil {
		return
	}
	nd.stopped++
	if clocks {
		nd.clock.restart(n.now)
		nd.clock.halted = true
		nd.paused++
	}
	n.arm(node)
	n.At(n.now+d, func() {
		if nd.incarnation != incarnation || nd.process == nil {
			return // a restart let it go on
		}
		if clocks {
			nd.paused--
			nd.clock.restart(n.now)
			nd.clock.halted = nd.paused > 0
		}
		nd.stopped--
		if nd.stopped > 0 {
			return
		}
		waiting := slices.Clone(nd.inbox)
		nd.inbox = nd.inbox[:0]
		for _, f := range waiting {
			n.deliver(f)
		}
		n.arm(node)
	})
}

// Drift sets how many parts per million a node's clocks run fast, or slow if
// negative. It panics beyond ±100,000.
func (n *Net) Drift(node int, ppm int) {
	if ppm < -maxRate || ppm > maxRate {
		panic(fmt.Sprintf("simnet: drift: %d ppm is not in [%d, %d]", ppm, -maxRate, maxRate))
	}
	c := &n.nodes[node].clock
	c.restart(n.now)
	c.ppm = int64(ppm)
	n.arm(node)
}

// StepWall moves a node's wall clock. Its monotonic clock does not change.
func (n *Net) StepWall(node int, by time.Duration) {
	n.nodes[node].clock.wall += by
}
