// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"errors"
	"time"

	"github.com/stormguard-mq/stormguard/internal/escrow"
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
	"github.com/stormguard-mq/stormguard/internal/gossip"
)

const (
	// refusedFor is how long packets must be refused before this is logged.
	refusedFor = 10 * time.Second
	// refusedOver is how long no packet must be refused until it counts as over. In a large fleet
	// one peer may be heard less than twice in this time.
	refusedOver = time.Minute
)

// refusals follows one section that refuses packets because the settings of processes differ.
type refusals struct {
	count       uint64        // all refused packets at the latest look
	since, last time.Duration // the first and the latest look that found new ones
	on, said    bool
}

// look takes in the section's counts. It tells whether to log that packets are refused, or that this
// is over.
func (r *refusals) look(now time.Duration, s gossip.SectionStats) (begun, over bool) {
	more := s.Refused > r.count && unequal(s.LastError)
	r.count = s.Refused
	switch {
	case more:
		if !r.on {
			r.on, r.since = true, now
		}
		r.last = now
		begun = !r.said && now-r.since >= refusedFor
		r.said = r.said || begun
	case r.on && now-r.last >= refusedOver:
		over = r.said
		r.on, r.said = false, false
	}
	return begun, over
}

// unequal tells whether a packet was refused because of settings that must be equal everywhere.
// Other refusals end by themselves, or are logged elsewhere.
func unequal(err error) bool {
	return errors.Is(err, escrow.ErrSettings) || errors.Is(err, fleetstate.ErrFleet) || errors.Is(err, fleetstate.ErrRoster)
}

// logRefusals logs when a section begins to refuse packets for good, and when that ends.
func (p *Process) logRefusals(now time.Duration) {
	for _, s := range p.node.Stats().Session.Sections {
		r := p.drive.refused[s.Name]
		if r == nil {
			r = &refusals{}
			p.drive.refused[s.Name] = r
		}
		begun, over := r.look(now, s)
		if begun {
			p.log.Warn("fleet: packets of other processes are refused; their settings must be equal",
				"section", s.Name, "error", s.LastError, "help", "docs/fleet.md#settings lists what must be equal in all processes")
		}
		if over {
			p.log.Info("fleet: packets of other processes are not refused any more", "section", s.Name)
		}
	}
}
