// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package simnet_test

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/gossip"
	"github.com/stormguard-mq/stormguard/internal/gossip/simnet"
)

// Three sessions that know only the first of them meet, are split for a minute
// and a half, and meet again.
func Example() {
	net := simnet.New(simnet.Config{
		Seed: 1,
		Link: simnet.Link{Base: 500 * time.Microsecond, Jitter: 500 * time.Microsecond, Loss: 0.05},
	})
	for i := range 3 {
		net.Add(func(incarnation int, rng *rand.Rand) simnet.Process {
			s, err := gossip.New(gossip.Config{
				Self: crdt.Replica{Name: fmt.Sprint("node-", i), Incarnation: uint64(incarnation)},
			}, gossip.WithRand(rng.Float64))
			if err != nil {
				panic(err)
			}
			return simnet.Member(s, simnet.Addr(0))
		})
	}
	report := func(when string) {
		now, _ := net.Clock(1)
		st := net.Process(1).(interface {
			Stats(now time.Duration) gossip.Stats
		}).Stats(now)
		fmt.Printf("%s: node-1 hears %d\n", when, st.Fresh)
	}
	net.At(10*time.Second, func() { report("together"); net.Split([]int{0}, []int{1}, []int{2}) })
	net.At(100*time.Second, func() { report("apart"); net.Heal() })
	net.Run(106 * time.Second)
	report("after")
	// Output:
	// together: node-1 hears 2
	// apart: node-1 hears 0
	// after: node-1 hears 2
}
