// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"runtime"
	"testing"
	"testing/synctest"
	"time"
)

// The failures of a message that waits cost a stack, and a few words for each of the
// others, not a stack each.
func TestFailureHistoryIsSmall(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		var deep func(int)
		deep = func(n int) {
			if n == 0 {
				panic("no such order")
			}
			deep(n - 1)
		}
		r := newRig(t, Policy{Order: OrderNone, NoBreaker: true, Retry: Retry{Attempts: 1000, Base: time.Second, Max: time.Second}}, Limits{},
			func(*rig, context.Context, int) error { deep(60); return nil })
		heap := func() int64 {
			synctest.Wait()
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			return int64(m.HeapAlloc)
		}
		before := heap()
		n := 100
		if Brief { // each fails sixty times
			n = 20
		}
		r.send(0, n)
		time.Sleep(time.Minute)
		each := (heap() - before) / int64(n)
		t.Logf("%d B for each message", each)
		if each > 24<<10 {
			t.Errorf("%d B for each message", each)
		}
		r.close()
	})
}
