// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package storm

import "time"

// Saved is what the detector of a source on hold leaves to the next one, whose clock goes
// on where this one's would be.
type Saved struct {
	Active bool          `json:"active,omitempty"`
	Since  time.Duration `json:"since,omitempty"`
	Failed uint64        `json:"failed"` // the rate: of those outcomes
	OK     uint64        `json:"ok"`
	Probes bool          `json:"probes,omitempty"` // that were probes
}

// Save is what the next detector has to know, and false if that is nothing: the breaker
// is closed, or no rate is known.
func (d *Detector) Save() (Saved, bool) {
	return Saved{d.active, d.since, d.last.failed, d.last.outcomes() - d.last.failed, d.lastProbe}, d.frozen && d.last.outcomes() > 0
}

// Restore takes up what was saved, of a source whose breaker is still not closed: a storm
// goes on, and the rate stands until a probe gives a newer one.
func (d *Detector) Restore(now time.Duration, s Saved) {
	if d.cfg.Off || s.Failed+s.OK == 0 {
		return
	}
	d.Freeze(now)
	d.last, d.lastProbe = tally{failed: s.Failed, ok: s.OK}, s.Probes
	d.active, d.since = s.Active, min(s.Since, now)
}
