// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// stingy is a budget for one permanent failure, which successes hardly refill.
var stingy = dlq.BudgetConfig{PermanentBalance: 1, PermanentEarn: 0.06, Balance: 1, FreeEvery: time.Hour}

// While most of the window waits for credits, a drain that has nothing left to do keeps no
// message away: the port hears that there is room.
func TestDrainBesideMessagesThatWaitForCredits(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, Policy{Order: OrderNone, Window: 16, Budget: stingy}, Limits{}, func(_ *rig, _ context.Context, m int) error {
			if m < 11 {
				return Permanent(errBad)
			}
			return nil
		})
		r.send(0, 11) // one is written
		synctest.Wait()
		if n := r.s.State().Account.RetryWait; n != 10 {
			t.Fatalf("%d messages wait for credits, want 10", n)
		}
		r.s.Pause(0)
		r.send(100, 106) // the window is full
		synctest.Wait()
		if d := r.port.demands; len(d) == 0 || d[len(d)-1] != 0 {
			t.Fatalf("demands %v: the window is full", d)
		}
		r.s.Resume()
		time.Sleep(time.Second)
		synctest.Wait()
		r.port.mu.Lock()
		if d := r.port.demands; d[len(d)-1] == 0 {
			t.Errorf("demands %v: nothing moves, and there is room", d)
		}
		r.port.mu.Unlock()
		if got := r.done(); len(got) != 6 {
			t.Errorf("handled %v", got)
		}
		time.Sleep(r.s.State().Settings.Ramp.For + time.Second)
		if st := r.s.State(); slices.ContainsFunc(st.Holds, func(h Hold) bool { return strings.Contains(h.Detail, "ramp") }) {
			t.Errorf("the drain has no end: %+v", st.Holds)
		}
		r.close()
	})
}
