// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/limiter"
)

// A handle of package limiter is what a source takes for one.
func TestLimiterIsALimiter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, err := limiter.Local(limiter.Limit{Rate: 100, Burst: 2})
		if err != nil {
			t.Fatal(err)
		}
		var admit guard.Limiter = l
		admitted, start := 0, time.Now()
		for time.Since(start) < time.Second {
			wait := admit.Admit(0)
			if wait == 0 {
				admitted++
				continue
			}
			if wait > 10*time.Millisecond+time.Microsecond {
				t.Fatalf("told to wait %v for a token of 10ms", wait)
			}
			time.Sleep(wait)
		}
		if admitted < 101 || admitted > 102 {
			t.Errorf("%d admitted in 1s at 100/s with a burst of 2", admitted)
		}
	})
}
