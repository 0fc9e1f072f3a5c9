// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// peers are the other processes. A process counts while both directions work: we heard it, and it
// reports that it heard us, each within silent plus its announced rest. Hearing alone would let a
// process that nobody hears decide with votes that are about to be others'.
type peers struct {
	silent time.Duration
	m      map[string]*peer
}

type peer struct {
	incarnation uint64
	sent        time.Duration // the latest Sent; a packet that is not above it is a repetition
	heard       time.Duration // when it was heard
	echo        time.Duration // the latest instant at which it is known to hear us
	rest        time.Duration // how much later than a keep-alive its next packet may come
	known       bool          // echo is set
	live        bool          // it counted at the latest look

	// floor is a version: all that the peer wrote up to it has reached us. So a vote of this
	// incarnation that is not later and not here was forgotten for good reason.
	floor uint64
}

// hear takes in a contact, and returns the peer in its newest known incarnation. It ignores
// contacts that are repeated, overtaken or of an earlier incarnation.
func (ps *peers) hear(c crdt.Contact) *peer {
	p := ps.m[c.From.Name]
	if p == nil || p.incarnation < c.From.Incarnation {
		p = &peer{incarnation: c.From.Incarnation, sent: c.Sent - 1}
		ps.m[c.From.Name] = p
	}
	if p.incarnation > c.From.Incarnation || c.Sent <= p.sent {
		return p
	}
	p.sent = c.Sent
	p.heard, p.rest = max(p.heard, c.Now), c.Rest
	if hears := max(c.Echo, c.Hears); c.Echo > 0 && (!p.known || hears > p.echo) {
		p.echo, p.known = hears, true
	}
	return p
}

func (ps *peers) live(now time.Duration, p *peer) bool { return p.within(now, ps.silent) }

// within tells whether both directions worked within span plus the peer's rest.
func (p *peer) within(now, span time.Duration) bool {
	return p != nil && p.known && now-p.heard-p.rest <= span && now-p.echo-p.rest <= span
}

func (ps *peers) gone(r crdt.Replica) {
	if p := ps.m[r.Name]; p != nil && p.incarnation <= r.Incarnation {
		delete(ps.m, r.Name)
	}
}
