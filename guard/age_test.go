// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// A message is as old as its call in hand says, on the closed path and once that
// has failed, however long the source rested before.
func TestAgeCountsFromTheCall(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		slow := false
		r := newRig(t, Policy{}, Limits{}, func(_ *rig, _ context.Context, m int) error {
			switch {
			case m == 1:
				time.Sleep(50 * time.Millisecond)
			case slow:
				time.Sleep(40 * time.Second) // heeds no context
			}
			if m >= 3 {
				return errDown
			}
			return nil
		})
		age := func(what string, processing int, want time.Duration) {
			t.Helper()
			synctest.Wait()
			st := r.s.State()
			if st.Account.Processing != processing || st.OldestAge > want || st.OldestAge < want-2*tick {
				t.Errorf("%s: age %v, want %v; %+v", what, st.OldestAge, want, st.Account)
			}
		}
		r.send(0, 1)
		time.Sleep(time.Hour)
		age("at rest", 0, 0)

		r.send(1, 2)
		age("begun", 1, 0)
		time.Sleep(time.Hour)
		slow = true
		r.send(2, 3)
		time.Sleep(30 * time.Second)
		age("in hand", 1, 30*time.Second)
		time.Sleep(15 * time.Second)
		age("done", 0, 0)

		r.send(3, 4)
		time.Sleep(20 * time.Second)
		r.s.Pause(0) // it is not called again
		time.Sleep(25 * time.Second)
		age("failed", 0, 45*time.Second)
		r.cancel()
		r.close()
	})
	bubble(t, "at once", func(t *testing.T) {
		r := newRig(t, Policy{}, Limits{}, func(_ *rig, _ context.Context, m int) error {
			if m == 0 {
				return nil
			}
			return errDown
		})
		r.send(0, 1)
		time.Sleep(time.Hour)
		r.send(1, 2)
		synctest.Wait()
		r.s.Pause(0)
		time.Sleep(time.Second)
		if st := r.s.State(); st.Account.Unsettled() != 1 || st.OldestAge != time.Second {
			t.Errorf("age %v, want 1s; %+v", st.OldestAge, st.Account)
		}
		r.cancel()
		r.close()
	})
}
