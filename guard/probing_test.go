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

// While probes succeed the workers of a source probe beside each other, without a message
// that arrives or a lease that ends to wake them.
func TestWorkersProbeTogether(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		var running, most atomic.Int64
		r := newRig(t, Policy{Order: OrderKey, Workers: 8, Ramp: Ramp{Off: true}}, Limits{}, func(*rig, context.Context, int) error {
			most.Store(max(most.Load(), running.Add(1)))
			defer running.Add(-1)
			time.Sleep(time.Second)
			return nil
		})
		if err := r.s.ForceOpen(time.Second); err != nil {
			t.Fatal(err)
		}
		r.send(0, 100)
		began := time.Now()
		for r.s.State().Breaker.State != breaker.Closed {
			time.Sleep(10 * time.Millisecond)
		}
		t.Logf("%d at a time, closed after %v", most.Load(), time.Since(began))
		if n := most.Load(); n < 4 {
			t.Errorf("%d probe at a time", n)
		}
		time.Sleep(time.Minute)
		r.check()
		r.close()
	})
}
