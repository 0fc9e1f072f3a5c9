// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// A Kind of fault.
type Kind string

// The kinds.
const (
	Kill   Kind = "kill"   // the consumer's process gets SIGKILL, and another is started
	Freeze Kind = "freeze" // it gets SIGSTOP, and SIGCONT after For
	Outage Kind = "outage" // the dependency refuses connections for For
)

// Kinds are all of them.
func Kinds() []Kind { return []Kind{Kill, Freeze, Outage} }

// A Fault happens once the consumer has made After effects since the last one, so that
// there is work to break whatever the machine's speed.
type Fault struct {
	Kind  Kind `json:"kind"`
	After int  `json:"after"` // effects; 0 to 100000

	// For is how long it lasts, in milliseconds; 1 to 600000, 0 for a Kill.
	For int `json:"for_ms,omitempty"`
}

// Lasts is how long the fault lasts.
func (f Fault) Lasts() time.Duration { return time.Duration(f.For) * time.Millisecond }

// A Schedule is what a run does, in its order.
type Schedule struct {
	Seed   uint64  `json:"seed"`
	Faults []Fault `json:"faults"`
}

const (
	maxFaults = 100_000
	maxAfter  = 100_000
	maxFor    = 600_000
)

// Validate reports everything that is wrong with a schedule at once.
func (s Schedule) Validate() error {
	var all []error
	if n := len(s.Faults); n < 1 || n > maxFaults {
		all = append(all, fmt.Errorf("chaos: schedule: faults: %d are not in [1, %d]", n, maxFaults))
	}
	for i, f := range s.Faults {
		least := 1
		if f.Kind == Kill {
			least = 0
		}
		most := maxFor * least
		switch {
		case !slices.Contains(Kinds(), f.Kind):
			all = append(all, fmt.Errorf("chaos: schedule: fault %d: kind: %.32q is not one of %q", i, f.Kind, Kinds()))
		case f.After < 0 || f.After > maxAfter:
			all = append(all, fmt.Errorf("chaos: schedule: fault %d: after: %d is not in [0, %d]", i, f.After, maxAfter))
		case f.For < least || f.For > most:
			all = append(all, fmt.Errorf("chaos: schedule: fault %d: for_ms: %d is not in [%d, %d] of a %s", i, f.For, least, most, f.Kind))
		}
	}
	return errors.Join(all...)
}

// Crash draws a schedule of so many kills. Each comes after 0 to most effects; an outage of
// up to a second stands in front of one in four, a freeze in front of one in sixteen, and
// the kill then comes in its middle.
func Crash(seed uint64, kills, most int) Schedule {
	random := rand.New(rand.NewPCG(seed, 1))
	s := Schedule{Seed: seed}
	for range kills {
		switch n := random.IntN(16); {
		case n < 4:
			s.Faults = append(s.Faults, Fault{Kind: Outage, After: random.IntN(most + 1), For: 100 + random.IntN(900)})
		case n == 4:
			s.Faults = append(s.Faults, Fault{Kind: Freeze, After: random.IntN(most + 1), For: 50 + random.IntN(450)})
		}
		s.Faults = append(s.Faults, Fault{Kind: Kill, After: random.IntN(most + 1)})
	}
	return s
}

// Count is how many faults of a kind are planned.
func (s Schedule) Count(k Kind) (n int) {
	for _, f := range s.Faults {
		if f.Kind == k {
			n++
		}
	}
	return n
}
