// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"runtime"
	"strings"
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
		if RaceEnabled { // each fails sixty times
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

// What is kept of failures takes room in the window, and gives it back.
func TestFailureHistoryTakesRoom(t *testing.T) {
	const text = 1000
	bad := errors.New(strings.Repeat("x", text))
	s := newSim(t, Policy{Order: OrderNone, NoBreaker: true, WindowBytes: 100 * text, Retry: Retry{Base: time.Second}})
	from, sent, most := s.now, 0, 0
	s.run(s.now+time.Hour, func(int) (time.Duration, error) {
		if s.now > from+30*time.Second {
			return time.Millisecond, nil
		}
		return time.Millisecond, bad
	}, func(now time.Duration) (int, bool) {
		if err := recount(s.machine, now); err != nil {
			t.Fatal(err)
		}
		if now < from+30*time.Second {
			most = max(most, s.unsettled())
		}
		if sent == 500 || now < from+time.Duration(sent)*20*time.Millisecond {
			return 0, false
		}
		sent++
		return sent - 1, true
	})
	if most > 100 || most < 20 || len(s.handled) != 500 || s.bytes != 0 {
		t.Errorf("%d messages at once, %d handled, %d bytes are left", most, len(s.handled), s.bytes)
	}
}
