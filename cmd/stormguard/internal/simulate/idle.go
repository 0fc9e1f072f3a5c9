// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"fmt"
	"time"
)

// A rest is a span without load, and the limits of each node's packets in this span. The
// packets of membership are not simulated, and not counted: see docs/gossip.md.
type rest struct {
	from, to   time.Duration
	maxPackets float64 // per node and second; 0 is not measured
	maxBytes   float64 // per node and second
}

// idle has a rest, and then all load at one node. Sync delays are measured by the node's
// requests to the others.
func idle(nodes int) scenario {
	const keepAlive = 50 * time.Millisecond
	mean := keepAlive * time.Duration(nodes-1) / 2 // mean time between two packets of a pair
	r := rest{from: 2*time.Second + 2*mean, maxPackets: 50, maxBytes: 8000}
	r.to = r.from + max(window, 2*mean)
	begin := r.to + 100*time.Millisecond
	sc := base(fmt.Sprintf("idle-%d", nodes), nodes, after(begin, only(0)))
	sc.rest, sc.burstTokens = r, max(500, 10*nodes)
	sc.sync, sc.maxSync = true, 11300*time.Microsecond
	sc.from, sc.to = begin, begin+200*time.Millisecond
	sc.length = sc.to
	sc.maxError = 100 // the load only makes changes, and is too short to be judged
	sc.faults = func(w *world) {
		w.net.At(r.from, func() { w.rested[0] = w.net.Stats() })
		w.net.At(r.to, func() { w.rested[1] = w.net.Stats() })
	}
	return sc
}

// sent returns the packets and bytes that a node sent per second of the rest.
func (w *world) sent() (packets, bytes float64) {
	r := w.sc.rest
	per := float64(w.sc.nodes) * (r.to - r.from).Seconds()
	return float64(w.rested[1].Sent-w.rested[0].Sent) / per, float64(w.rested[1].Bytes-w.rested[0].Bytes) / per
}
