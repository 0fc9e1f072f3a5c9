// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package crdt

import (
	"sync"
	"time"
)

const (
	// maxAhead bounds how far a stamp may be ahead of the fleet's fastest clock, as seen from
	// ours, and still advance ours. The stamp must be less than maxAhead ahead.
	maxAhead = 50 * time.Millisecond

	// maxOffset is the largest offset of a peer's clock that is corrected. Without this bound
	// any clock would be accepted: a clock that is wrong by an hour would be believed after
	// its first sample.
	maxOffset = 500 * time.Millisecond
)

// A Clock is a hybrid logical clock after Kulkarni, Demirbas et al., "Logical Physical
// Clocks" (OPODIS 2014). Its stamps rise at each replica and stay close to the wall clock. A
// stamp is higher than all stamps that were observed before it.
//
// # The 50 ms rule
//
// A single stamp far ahead must not pull all clocks forward. The rule is
// |physical − system| < 50 ms. It cannot hold for raw stamps: if clocks are right within
// ±87 ms, two healthy ones may be 174 ms apart, and the slow one would refuse all stamps of
// the fast one. So the rule applies after correction by the estimated offset. A stamp carries
// the fastest clock that its sender has observed, not only the sender's own. So a stamp is
// allowed if
//
//	physical < our wall clock + lead + maxAhead
//
// where lead is the largest offset of any peer, at least 0. Offsets above maxOffset do not
// count, and neither do peers for which [Clock.Ignore] was called. There is no lower bound: an
// older stamp advances nothing, and elements are mostly older than 50 ms.
//
// A stamp that breaks the rule, or comes from a peer without an offset sample, does not
// advance the clock and is counted. It still orders its element, unchanged: replicas that
// dropped or changed it would diverge. The price: our next stamp is not above it. So an
// element with a stamp from a clock that is wrong by an hour wins against ours for an hour.
//
// So a Clock is never more than maxOffset + maxAhead ahead of its wall clock, unless the wall
// clock was set back. If all peers break the rule, our own clock is wrong.
//
// It is safe for concurrent use. The wall clock is read outside the lock. The zero value is
// not usable; see [NewClock].
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

// NewClock makes a clock from a wall clock: [time.Now], or the clock of a test.
func NewClock(now func() time.Time) *Clock {
	return &Clock{now: now, peers: make(map[Replica]*peerClock)}
}

func millis(t time.Time) uint64 { return uint64(max(0, t.UnixMilli())) }

// Now returns a stamp above all stamps that Now has returned and Observe has accepted.
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

// Observe advances the clock to a stamp that a peer sent. Call it for each packet with the
// sender's own Now, not with the stamps of the elements in the packet. It returns false if
// the stamp breaks the rule, or is above our clock and the peer has no offset sample. Then the
// clock does not change, and the violation is counted.
func (c *Clock) Observe(from Replica, s Stamp) bool {
	wall := millis(c.now())
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.Compare(c.last) <= 0 {
		return true
	}
	p := c.peer(from)
	if p.ignored { // the peer is heard again
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

// Sample adds one exchange with a peer to the estimate of its offset, and returns whether
// the exchange was used; see offsetEstimator.Add. sent and heard should come from the wall
// clock of [NewClock], with their monotonic reading. The cost is a walk over the peers.
func (c *Clock) Sample(peer Replica, sent, received, replied, heard time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.peer(peer)
	used := p.Add(sent, received, replied, heard)
	p.ignored = false
	c.setLead()
	return used
}

// Offset returns how far the peer's clock is ahead of ours; false before the first sample.
func (c *Clock) Offset(peer Replica) (time.Duration, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p := c.peers[peer]; p != nil {
		return p.Offset()
	}
	return 0, false
}

// Violations returns how many of the peer's stamps broke the rule.
func (c *Clock) Violations(peer Replica) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p := c.peers[peer]; p != nil {
		return p.violations
	}
	return 0
}

// Ignore leaves the offset of a peer that is not heard out of lead, until a sample of the peer
// comes, or a stamp of it above our clock. Otherwise our clock might follow stamps that are as far ahead as a clock
// that is gone.
func (c *Clock) Ignore(peer Replica) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p := c.peers[peer]; p != nil && !p.ignored {
		p.ignored = true
		c.setLead()
	}
}

// Forget drops the state of a peer that is gone. Without this call the clock remembers every
// incarnation that it ever heard.
func (c *Clock) Forget(peer Replica) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.peers, peer)
	c.setLead()
}

// peer returns the state of a peer, and makes it if there is none. The caller holds c.mu.
func (c *Clock) peer(r Replica) *peerClock {
	p := c.peers[r]
	if p == nil {
		p = &peerClock{}
		c.peers[r.kept()] = p
	}
	return p
}

// setLead computes lead anew. The caller holds c.mu.
func (c *Clock) setLead() {
	c.lead = 0
	for _, p := range c.peers {
		if off, ok := p.Offset(); ok && off <= maxOffset && !p.ignored {
			c.lead = max(c.lead, off)
		}
	}
}
