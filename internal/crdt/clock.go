// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import (
	"sync"
	"time"
)

const (
	// maxAhead is how far a stamp may be ahead of the fleet's fastest clock, as
	// seen from ours, and still advance ours; it must be less.
	maxAhead = 50 * time.Millisecond

	// maxOffset is how far a peer's clock may be off ours and still be corrected
	// for. Without it the correction would make any clock right: one that is
	// wrong by an hour would be believed after its first sample.
	maxOffset = 500 * time.Millisecond
)

// A Clock is a hybrid logical clock after Kulkarni, Demirbas et al., "Logical
// Physical Clocks" (OPODIS 2014): its stamps rise at each replica, stay close to
// the wall clock, and a stamp taken after another was observed is higher.
//
// # The 50 ms rule
//
// A stamp far ahead must not drag every clock after it. The rule is
// |physical − system| < 50 ms, and it cannot hold for raw stamps: with clocks
// that are right within ±87 ms, two healthy ones are 174 ms apart, and the slow
// one would refuse all that the fast one says. So it applies after correction by
// the estimated offset; and since a stamp carries the fastest clock that its
// sender has observed, not only the sender's own, what is allowed is
//
//	physical < our wall clock + lead + maxAhead
//
// where lead is the largest offset of any peer, at least 0, leaving out those
// beyond maxOffset and those of peers that [Clock.Ignore] was told of. The rule has no
// lower side: an older stamp advances nothing, and elements are mostly older than 50 ms.
//
// A stamp that breaks the rule, or comes from a peer without an offset sample,
// does not advance the clock and is counted. It still orders its element,
// verbatim: replicas that dropped or changed it would come to differ. What is
// lost is that our next stamp is above it, so an element with a stamp from a
// clock that is wrong by an hour wins against ours for an hour.
//
// So a Clock is never more than maxOffset + maxAhead ahead of its wall clock,
// unless that was set back. When all peers break the rule, ours is the clock
// that is wrong.
//
// It is safe for concurrent use. The wall clock is read outside the lock. The
// zero value is not usable; see [NewClock].
type Clock struct {
	now func() time.Time

	mu    sync.Mutex
	last  Stamp
	lead  time.Duration
	peers map[Replica]*peerClock
}

type peerClock struct {
	offsetEstimator
	violations uint64
	ignored    bool // its offset does not count for lead
}

// NewClock makes a clock over a wall clock: [time.Now], or a test's.
func NewClock(now func() time.Time) *Clock {
	return &Clock{now: now, peers: make(map[Replica]*peerClock)}
}

func millis(t time.Time) uint64 { return uint64(max(0, t.UnixMilli())) }

// Now is a stamp above all that Now returned and all that Observe accepted.
func (c *Clock) Now() Stamp {
	wall := millis(c.now())
	c.mu.Lock()
	defer c.mu.Unlock()
	if wall > c.last.Physical {
		c.last = Stamp{Physical: wall}
	} else {
		c.last = c.last.next()
	}
	return c.last
}

// Observe takes note of a stamp that a peer sent: of each packet the sender's
// own Now, rather than those of the elements in it. It reports false when the
// stamp broke the rule; then the clock is as before and the violation counted.
func (c *Clock) Observe(from Replica, s Stamp) bool {
	wall := millis(c.now())
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.Compare(c.last) <= 0 {
		return true
	}
	p := c.peer(from)
	if p.ignored { // it is back
		p.ignored = false
		c.setLead()
	}
	_, sampled := p.Offset()
	if !sampled || s.Physical >= wall+uint64((c.lead+maxAhead).Milliseconds()) {
		p.violations++
		return false
	}
	c.last = s
	return true
}

// Sample takes one exchange with a peer for its offset, as
// offsetEstimator.Add does, and reports whether it was used. sent and heard
// should come from the wall clock of [NewClock], with their monotonic reading.
// It costs a walk over the peers.
func (c *Clock) Sample(peer Replica, sent, received, replied, heard time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.peer(peer)
	used := p.Add(sent, received, replied, heard)
	p.ignored = false
	c.setLead()
	return used
}

// Offset is how far the peer's clock is ahead of ours; false before the first
// sample.
func (c *Clock) Offset(peer Replica) (time.Duration, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p := c.peers[peer]; p != nil {
		return p.Offset()
	}
	return 0, false
}

// Violations is how many of the peer's stamps broke the rule.
func (c *Clock) Violations(peer Replica) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p := c.peers[peer]; p != nil {
		return p.violations
	}
	return 0
}

// Ignore leaves the offset of a peer that is not heard out of lead, until a stamp or
// a sample of it comes: ours might follow stamps that are as far ahead as a clock
// that is there no more.
func (c *Clock) Ignore(peer Replica) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p := c.peers[peer]; p != nil && !p.ignored {
		p.ignored = true
		c.setLead()
	}
}

// Forget drops what is known of a peer that is gone. Whoever gossips calls it,
// or the clock remembers every incarnation that it ever heard.
func (c *Clock) Forget(peer Replica) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.peers, peer)
	c.setLead()
}

// peer needs c.mu.
func (c *Clock) peer(r Replica) *peerClock {
	p := c.peers[r]
	if p == nil {
		p = &peerClock{}
		c.peers[r.kept()] = p
	}
	return p
}

// setLead needs c.mu.
func (c *Clock) setLead() {
	c.lead = 0
	for _, p := range c.peers {
		if off, ok := p.Offset(); ok && off <= maxOffset && !p.ignored {
			c.lead = max(c.lead, off)
		}
	}
}
