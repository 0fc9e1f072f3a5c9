// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"testing"
	"time"
)

// A retry and a probe of a handler are counted while they run.
func TestCallsCountWhenTheyBegin(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		calls, block := 0, make(chan struct{})
		r := newRig(t, Policy{NoTimeout: true}, Limits{}, func(*rig, context.Context, int) error {
			if calls++; calls == 1 {
				return errDown
			}
			<-block
			return nil
		})
		counted := func(retries, probes uint64) {
			t.Helper()
			time.Sleep(2 * time.Second)
			if a, n := r.check(), r.s.State().Tally; a.Processing != 1 || n.Retries != retries || n.Probes != probes {
				t.Errorf("%+v, %+v", a, n)
			}
		}
		r.send(0, 1)
		counted(1, 0)
		block <- struct{}{}
		if err := r.s.ForceOpen(time.Second); err != nil {
			t.Fatal(err)
		}
		r.send(1, 2)
		counted(1, 1)
		close(block)
		r.close()
	})
}
