// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip_test

import (
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/internal/gossip"
)

// Two who lose a third of all packets have met within a second of their start, with
// every seed: so much may be asked of a fleet from then on. Both try, and nobody
// tells one of the other; with four tries each one seed in 4,500 failed.
func TestMeetWithinASecond(t *testing.T) {
	t.Parallel()
	seeds := uint64(20_000)
	if gossip.RaceEnabled {
		seeds = 2_000
	}
	for seed := range seeds {
		f := newFleet(t, seed, lossy(lan, 0.35))
		f.seeds = func(node int) []int { return []int{1 - node} }
		f.start(2)
		f.Run(time.Second)
		for node := range 2 {
			own, _ := f.Clock(node)
			if peers := f.member(node).Peers(own, nil); len(peers) != 1 || !peers[0].HearsUs {
				t.Errorf("seed %d: node %d has met nobody after a second", seed, node)
			}
		}
	}
}
