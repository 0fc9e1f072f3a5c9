// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/internal/escrow"
)

// With [escrow.Majority] a process mints only under grants. The claim: if a document that evicts X
// for silence is written at t, then X has stopped, or knows of the document, at t + Lease(1+500
// ppm).
//
// The rules:
//
//   - A document lists, for each name, the one incarnation that may confirm. A new incarnation has
//     itself admitted by a write.
//   - An incarnation confirms under document k if it knows k and k lists it.
//   - X mints until s + Lease, if a majority of roster k has confirmed, under k, what X sent at s
//     or later.
//   - An incarnation that has not heard X for Silent freezes X: it confirms nothing of X any more
//     until it knows a newer document.
//   - A document number e may evict X only if, of the roster of each stage that the document
//     carries, a majority knows e-1 and has frozen X.
//   - A stage is complete, so that later documents do not carry it, only when a majority of the
//     roster before it knows of it.
//
// The proof. Let X know k < e. There are two cases. If a stage after k was complete at t, a
// majority of roster k knew of a later one before t, and confirmed nothing under k from then on.
// Otherwise roster k is one of those of which a majority had frozen X, or knew of a later document,
// before t.
//
// In both cases any majority that confirms under k has a name in common with that one, which is not
// X. It is the same incarnation, since k lists one of each name, and an incarnation that starts
// later reads what was written before, or is not listed. So it confirmed what X had sent before t.
// When X learns k+1, grants count anew, and what it had by the old ones ends before t + Lease as
// well.
//
// No member uses the share until Lease·(1+2·500 ppm) + 10 ms have passed by its own clock since it
// learned of the document. The claim does not cover a process or machine that stands still between
// a look at the clock and an admission.
//
// A process that froze X and hears X again asks for a newer document, which may change nothing. A
// process that cannot reach the register freezes no member: while the register is away, nothing
// changes.

// mayConfirm tells whether this incarnation confirms leases under the newest document.
func (c *Configurator) mayConfirm() bool {
	if c.cfg.OnSilence != escrow.Majority || c.selfIndex < 0 || c.leaving || !c.settled {
		return false
	}
	at, ok := c.doc.incarnationOf(c.self.Name)
	return ok && at == c.self.Incarnation
}

// unlisted tells whether this incarnation needs a document that lists it.
func (c *Configurator) unlisted() bool {
	return c.cfg.OnSilence == escrow.Majority && c.selfIndex >= 0 && c.settled && !c.leaving && !c.mayConfirm()
}

// grantTo returns the newest stamp of f that we confirm for minting, 0 if there is none.
func (c *Configurator) grantTo(f *confPeer) time.Duration {
	if !c.mayConfirm() || f.rosterIndex < 0 {
		return 0
	}
	if c.frozen[f.id.Name] {
		return f.frozen
	}
	return f.sent
}

// takeGrant notes the stamp that the row of f confirms.
func (c *Configurator) takeGrant(now time.Duration, f *confPeer) {
	if f.row.flags&confGrant == 0 || f.rosterIndex < 0 || f.row.grant > now {
		return
	}
	if at, ok := c.doc.incarnationOf(f.id.Name); ok && at == f.id.Incarnation {
		f.grant = max(f.grant, f.row.grant)
	}
}

// leaseLocked tells the applier until when it may mint.
func (c *Configurator) leaseLocked(now time.Duration) {
	if !c.settled || c.broken != nil || c.over {
		return
	}
	if c.cfg.OnSilence != escrow.Majority {
		if c.until != Unfenced {
			c.until = Unfenced
			c.applier.Mint(Unfenced)
		}
		return
	}
	if c.selfIndex < 0 {
		return
	}
	stamps := c.stamps[:0]
	if c.mayConfirm() {
		stamps = append(stamps, now)
	}
	for i := range c.voters {
		if f := c.voters[i].confPeer; f != nil && f.grant > 0 {
			stamps = append(stamps, f.grant)
		}
	}
	c.stamps = stamps
	need := len(c.voters)/2 + 1
	if len(stamps) < need {
		return
	}
	slices.Sort(stamps)
	if until := stamps[len(stamps)-need] + c.cfg.Lease; until > c.until {
		c.until = until
		c.applier.Mint(until)
	}
}

// silentLocked tells whether a member is silent.
func (c *Configurator) silentLocked(now time.Duration, s *confMember) bool {
	if s.name == c.self.Name {
		return false
	}
	since := max(s.since, c.start)
	if s.confPeer != nil {
		since = max(since, s.heard)
	}
	return now-since >= c.cfg.Silent
}

// freezeLocked freezes the silent members.
func (c *Configurator) freezeLocked(now time.Duration) {
	if !c.mayConfirm() || c.away != nil {
		return
	}
	for i := range c.voters {
		if s := &c.voters[i]; len(c.frozen) < maxFrozen && !c.frozen[s.name] && c.silentLocked(now, s) {
			c.frozen[s.name] = true
			if s.confPeer != nil {
				s.confPeer.frozen = s.sent
			}
			c.tellAll()
		}
	}
}

// thawsLocked tells whether a member is heard that this process froze.
func (c *Configurator) thawsLocked(now time.Duration) bool {
	for name := range c.frozen {
		if f := c.peers[name]; f != nil && f.met && now-f.heard < c.cfg.Silent/2 {
			return true
		}
	}
	return false
}

// evictableLocked tells whether enough members have frozen a name to evict it.
func (c *Configurator) evictableLocked(name string) bool {
	if !c.frozen[name] || !c.mayConfirm() {
		return false
	}
	voter := memberIndex(c.doc.newest().Roster.Members, name)
	for _, l := range c.chain {
		n := 0
		for _, m := range l.Roster.Members {
			if m.Name == c.self.Name {
				n++
			} else if f := c.peers[m.Name]; f != nil && f.row.known == c.known() && slices.Contains(f.row.frozen, voter) {
				if at, ok := c.doc.incarnationOf(m.Name); ok && at == f.id.Incarnation {
					n++
				}
			}
		}
		if n < majorityOf(l.Roster.Members) {
			return false
		}
	}
	return true
}

// spreadLocked tells whether enough members of a roster know of a number. With escrow.Majority that
// is a majority. In a static fleet it is all that are heard: no member may grow while another has a
// different configuration of that number.
func (c *Configurator) spreadLocked(now time.Duration, members []escrow.Member, number uint64) bool {
	n := 0
	for _, m := range members {
		f := c.peers[m.Name]
		switch {
		case !c.cfg.Static:
			if m.Name == c.self.Name && c.known() >= number || c.knew[m.Name] >= number {
				n++
			}
		case f != nil && now-f.heard < nearby && f.row.known < number && c.gone[m.Name].number < number:
			return false
		}
	}
	return c.cfg.Static || n >= majorityOf(members)
}
