// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/fleetstate"
)

// What a process says of itself is told when it has changed, as often as the others
// bear, and otherwise often enough not to be forgotten.
func TestSays(t *testing.T) {
	t.Parallel()
	for others, apart := range map[int]time.Duration{2: time.Second, 40: time.Second, 199: 5 * time.Second, 999: 25 * time.Second} {
		for _, changes := range []bool{false, true} {
			var d driver
			told := 0
			s := fleetstate.MemberStatus{Level: 1, Keys: []fleetstate.KeyStatus{{Key: "k", Level: 1}}}
			const span = 10 * time.Minute
			for now := time.Second; now <= span; now += sayEvery {
				s.Unacked, s.SyncDelay = uint64(now), now
				if changes {
					s.Keys = []fleetstate.KeyStatus{{Key: "k", Level: float64(now)}}
				}
				if d.says(now, &s, others) {
					told++
				}
			}
			want := int(span/sayAgain) + 1
			if changes {
				want = int(span / apart)
			}
			if told < want-1 || told > want+1 {
				t.Errorf("%d others, changes %v: told %d times in %v, want %d", others, changes, told, span, want)
			}
		}
	}
}
