// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/stormguard-mq/stormguard/internal/escrow"
)

// acquaintance is what a session remembers of a peer.
type acquaintance struct {
	incarnation uint64
	acked       uint64 // of ours, by it
	upto        uint64 // of its, by us
	sentAt      time.Duration
	sent        bool
	owes        bool
}

func rateOf(c *escrow.Configuration, name string) float64 {
	sum := int64(0)
	for _, m := range c.Roster.Members {
		sum += m.Weighs()
	}
	for _, m := range c.Roster.Members {
		if m.Name == name {
			return c.Limit.Rate * float64(m.Weighs()) / float64(sum)
		}
	}
	return 0
}

var errRefused = errors.New("refused")

// nation is an initial configuration of n names, each of weight 1.
func nation(n int) escrow.Configuration {
	c := escrow.Configuration{Limit: escrow.Limit{Rate: 1000, Burst: 1_000_000}}
	c.Roster.Learners = true
	for i := range n {
		c.Roster.Members = append(c.Roster.Members, escrow.Member{Name: fmt.Sprintf("n%03d", i)})
	}
	return c
}

// span is how long the mischief lasts.
func span(d time.Duration) time.Duration {
	if raceEnabled {
		return d / 3
	}
	return d
}

const most = 1<<64 - 1

// full asks for the sizes that take minutes.
func full() bool { return os.Getenv("STORMGUARD_FULL") == "1" }
