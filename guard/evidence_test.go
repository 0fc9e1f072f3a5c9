// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// Adjacent poison messages of unknown errors are passed within 2 s and half a second
// each, in any order, and nothing else is dead-lettered.
func TestAdjacentPoison(t *testing.T) {
	for _, order := range []Order{OrderSource, OrderKey, OrderNone} {
		for _, breaker := range []bool{true, false} {
			for _, n := range []int{1, 2, 3, 5, 8, 20, 64} {
				t.Run(fmt.Sprint(order, breaker, n), func(t *testing.T) {
					s := newSim(t, Policy{Order: order, NoBreaker: !breaker})
					var passed time.Duration
					first := 200
					start := time.Duration(0)
					s.runKeyed(s.now+10*time.Minute, 100, func(m int) (time.Duration, error) {
						if m >= first && m < first+n {
							if start == 0 {
								start = s.now
							}
							return 2 * time.Millisecond, errBad
						}
						if m == first+n && passed == 0 {
							passed = s.now - start
						}
						return 2 * time.Millisecond, nil
					}, counter(1000, 10*time.Millisecond))
					slices.Sort(s.dead)
					if len(s.dead) != n || s.dead[0] != first || s.dead[n-1] != first+n-1 || len(s.handled) != 1000-n {
						t.Errorf("handled %d, dead %v", len(s.handled), s.dead)
					}
					if limit := 2*time.Second + time.Duration(n)*500*time.Millisecond; passed > limit {
						t.Errorf("passed in %v, limit %v", passed, limit)
					}
					t.Logf("passed in %v; %d calls, overtaken %d", passed, s.calls, s.tally.Overtaken)
				})
			}
		}
	}
}

// Poison that is the last of an idle source goes when one message comes and succeeds,
// though some of it was never tried.
func TestAdjacentPoisonIdle(t *testing.T) {
	const first, wait = 50, 30 * time.Second
	for _, order := range []Order{OrderSource, OrderKey, OrderNone} {
		for _, n := range []int{20, 64} {
			t.Run(fmt.Sprint(order, n), func(t *testing.T) {
				s := newSim(t, Policy{Order: order})
				sent, from, quiet := 0, s.now, time.Duration(0)
				s.runKeyed(s.now+2*time.Minute, 16, func(m int) (time.Duration, error) {
					if m >= first && m < first+n {
						return 2 * time.Millisecond, errBad
					}
					return 2 * time.Millisecond, nil
				}, func(now time.Duration) (int, bool) {
					switch {
					case sent < first && now >= from+time.Duration(sent)*100*time.Millisecond, sent >= first && sent < first+n:
						quiet = now + wait
					case sent == first+n && now >= quiet:
					default:
						return 0, false
					}
					sent++
					return sent - 1, true
				})
				slices.Sort(s.dead)
				if len(s.dead) != n || s.dead[0] != first || s.dead[n-1] != first+n-1 || len(s.handled) != first+1 {
					t.Errorf("handled %d, dead %v", len(s.handled), s.dead)
				}
			})
		}
	}
}
