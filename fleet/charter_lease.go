// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/limiter"
)

// With [limiter.Majority] a process mints only under grants. The claim: when a
// charter that evicts X for silence has been chosen at t, X has stopped, or knows of
// it, at t + Lease(1+500 ppm).
//
// X, which knows charter k, mints until the time s + Lease, where a majority G of
// roster k has confirmed what X sent at s or later. Who confirms it knows k, votes
// for k+1, and had accepted nothing for k+1 when the packet came. Some later
// charter evicts X, so k+1 was chosen by a majority A of roster k, at t or before.
// Who is in both G and A is the same life, since no two lives vote for one
// number; so it confirmed what came before it accepted, which X sent before t.
// When X learns k+1, grants count anew, and what it had by the old ones ends
// before t + Lease as well.
//
// Nobody uses the share before Lease·(1+2·500 ppm) + 10 ms by its own clock have
// passed since it learned of a charter that was chosen. A process or machine that
// stands still between a look at the clock and an admission is outside of this.

// drift is how far a clock may run fast or slow, in millionths.
const drift = 500

// fenced is how long after an eviction nobody mints under a lease.
func fenced(lease time.Duration) time.Duration {
	return lease + lease*2*drift/1_000_000 + 10*time.Millisecond
}

// grantTo is the newest stamp of f that we confirm for minting, 0 if there is none.
func (c *Charters) grantTo(f *fellow) time.Duration {
	if c.cfg.OnSilence != limiter.Majority || !c.mayVote() {
		return 0
	}
	if c.accepted.digest != 0 {
		return f.frozen
	}
	return f.sent
}

// takeGrant notes what a row confirms.
func (c *Charters) takeGrant(now time.Duration, f *fellow) {
	if f.row.flags&flagGrant != 0 && c.votesAt(f) && f.row.grant <= now {
		f.grant = max(f.grant, f.row.grant)
	}
}

// leaseLocked says to the books until when they may mint.
func (c *Charters) leaseLocked(now time.Duration) {
	if !c.settled || c.over || c.broken != nil {
		return
	}
	if c.cfg.OnSilence != limiter.Majority {
		if c.until != Unfenced {
			c.until = Unfenced
			c.books.Mint(Unfenced)
		}
		return
	}
	if c.seat < 0 {
		return
	}
	stamps := c.stamps[:0]
	if c.mayVote() && c.accepted.digest == 0 {
		stamps = append(stamps, now)
	}
	for i := range c.seats {
		if f := c.seats[i].fellow; f != nil && f.grant > 0 {
			stamps = append(stamps, f.grant)
		}
	}
	c.stamps = stamps
	if len(stamps) < c.majority() {
		return
	}
	slices.Sort(stamps)
	if until := stamps[len(stamps)-c.majority()] + c.cfg.Lease; until > c.until {
		c.until = until
		c.books.Mint(until)
	}
}
