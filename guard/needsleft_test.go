// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"testing"
	"time"
)

// endsAsked is a source that ends right after it was asked what it needs.
type endsAsked struct{ controls }

func (s endsAsked) needs(now time.Duration) (all [needCount]need) {
	s.controls.(*Source[int]).g.unregister("s", s)
	all[needsReturn] = need{what: wantsReturn, since: max(now, 1), messages: 1}
	return all
}

// A source that ends while it is asked what it needs is forgotten.
func TestNeedsOfASourceThatEnds(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, Policy{}, Limits{}, ok)
		s := endsAsked{r.s}
		r.g.mu.Lock()
		r.g.sources["s"] = s
		r.g.sortLocked()
		r.g.mu.Unlock()
		r.g.journal.askNeeds(r.g.now())
		r.g.journal.mu.Lock()
		if n := len(r.g.journal.wants); n > 0 {
			t.Errorf("%d sources that have ended are kept", n)
		}
		r.g.journal.mu.Unlock()
		r.s.End(t.Context(), ReasonShutdown)
		r.close()
	})
}
