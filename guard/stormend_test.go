// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

// A storm ends by itself although no message comes any more: the sweeper does not rest
// before.
func TestStormEndsWithoutTraffic(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		var up atomic.Bool
		r := newRig(t, Policy{}, Limits{EndsWithInput: true}, func(*rig, context.Context, int) error {
			if up.Load() {
				return nil
			}
			return Unavailable(errDown)
		})
		r.send(0, 12)
		for start := time.Now(); !r.s.State().Storm.Active; time.Sleep(time.Second) {
			if time.Since(start) > 10*time.Minute {
				t.Fatal("no storm in 10 min")
			}
		}
		up.Store(true)
		time.Sleep(3 * time.Minute)
		if st := r.s.State(); st.Storm.Active || st.Breaker.State != breaker.Closed || st.Account.Acked != 12 {
			t.Errorf("3 min after the recovery %d messages are acked; %s, breaker %s", st.Account.Acked, st.Storm.String(), st.Breaker.State)
		}
		r.close()
	})
}
