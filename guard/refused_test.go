// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"testing"
	"time"
)

// A dependency begins to refuse connections while a poison message has failed after a
// proof of life and is not dead-lettered yet. The breaker opens, and when the dependency
// is back the message dies and all else is handled.
func TestSuspectMeetsAnOutage(t *testing.T) {
	for _, order := range []Order{OrderSource, OrderKey, OrderNone} {
		for tries := 1; tries <= 8; tries++ {
			for _, length := range []time.Duration{time.Second, 20 * time.Second, 5 * time.Minute} {
				t.Run(fmt.Sprint(order, tries, length), func(t *testing.T) {
					s := newSim(t, Policy{Order: order})
					const poison, n = 200, 600
					calls, failed := 0, 0
					var from time.Duration
					handler := func(m int) (time.Duration, error) {
						down := from > 0 && s.now < from+length
						if down {
							calls++
							return time.Millisecond, errRefused
						}
						if m == poison {
							if failed++; failed == tries {
								from = s.now + 1
							}
							return time.Millisecond, errBad
						}
						return time.Millisecond, nil
					}
					end := 10*time.Second + length + time.Second + length/10 + 15*time.Second
					s.runKeyed(s.now+end, 7, handler, counter(n, 10*time.Millisecond))
					if len(s.handled) != n-1 || len(s.dead) != 1 || s.dead[0] != poison {
						t.Errorf("handled %d of %d, dead %v, breaker %v", len(s.handled), n-1, s.dead, s.gate.Snapshot(s.now).State)
					}
					if most := 60 + int(length/time.Second)*3; calls > most {
						t.Errorf("%d calls in an outage of %s, more than %d", calls, length, most)
					}
				})
			}
		}
	}
}
