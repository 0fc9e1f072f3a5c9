// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package storm

import "time"

// Saved is the state of the detector of a held source, for the next detector. The next
// detector's clock must continue this detector's clock.
type Saved struct {
	Active bool          `json:"active,omitempty"`
	Since  time.Duration `json:"since,omitempty"`
	Failed uint64        `json:"failed"`           // failed outcomes of the rate
	OK     uint64        `json:"ok"`               // other outcomes of the rate
	Probes bool          `json:"probes,omitempty"` // the rate is of probes
}

// Save returns the state for the next detector. It returns false if there is nothing to save:
// the breaker is closed, or no rate is known.
func (d *Detector) Save() (Saved, bool) {
	return Saved{d.active, d.since, d.last.failed, d.last.outcomes() - d.last.failed, d.lastProbe}, d.frozen && d.last.outcomes() > 0
}

// Restore sets the saved state of a source whose breaker is still not closed. A storm goes
// on, and the rate stands until a probe gives a newer one.
func (d *Detector) Restore(now time.Duration, s Saved) {
	if d.cfg.Off || s.Failed+s.OK == 0 {
		return
	}
	d.Freeze(now)
	d.last, d.lastProbe = tally{failed: s.Failed, ok: s.OK}, s.Probes
	d.active, d.since = s.Active, min(s.Since, now)
}
