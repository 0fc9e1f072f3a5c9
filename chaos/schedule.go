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
	Kill    Kind = "kill"    // the consumer's process gets SIGKILL, and another is started
	Restart Kind = "restart" // it is stopped in order, and another is started
	Freeze  Kind = "freeze"  // it gets SIGSTOP, and SIGCONT after For
	Outage  Kind = "outage"  // the dependency refuses connections for For
)

// Kinds are all of them.
func Kinds() []Kind { return []Kind{Kill, Restart, Freeze, Outage} }

// A Fault happens once the consumers have made After effects since the last one, so that
// there is work to break whatever the machine's speed.
type Fault struct {
	Kind  Kind `json:"kind"`
	After int  `json:"after"` // effects; 0 to 100000

	// For is how long it lasts, in milliseconds; 1 to 600000, 0 for a Kill or a Restart.
	For int `json:"for_ms,omitempty"`

	// Consumer is which of the schedule's consumers it happens to, from 0; 0 for an Outage.
	Consumer int `json:"consumer,omitempty"`
}

// Lasts is how long the fault lasts.
func (f Fault) Lasts() time.Duration { return time.Duration(f.For) * time.Millisecond }

// A Schedule is what a run does, in its order.
type Schedule struct {
	Seed   uint64  `json:"seed"`
	Faults []Fault `json:"faults"`

	// Consumers are how many run side by side, 1 to 64; unset means 1.
	Consumers int `json:"consumers,omitempty"`
}

const (
	maxFaults    = 100_000
	maxAfter     = 100_000
	maxFor       = 600_000
	maxConsumers = 64
)

// Validate reports everything that is wrong with a schedule at once.
func (s Schedule) Validate() error {
	var all []error
	if n := len(s.Faults); n < 1 || n > maxFaults {
		all = append(all, fmt.Errorf("chaos: schedule: faults: %d are not in [1, %d]", n, maxFaults))
	}
	if s.Consumers < 0 || s.Consumers > maxConsumers {
		all = append(all, fmt.Errorf("chaos: schedule: consumers: %d are not in [1, %d]", s.Consumers, maxConsumers))
	}
	for i, f := range s.Faults {
		least, last := 1, max(s.Consumers, 1)-1
		switch f.Kind {
		case Kill, Restart:
			least = 0
		case Outage:
			last = 0
		case Freeze:
		}
		most := maxFor * least
		switch {
		case !slices.Contains(Kinds(), f.Kind):
			all = append(all, fmt.Errorf("chaos: schedule: fault %d: kind: %.32q is not one of %q", i, f.Kind, Kinds()))
		case f.After < 0 || f.After > maxAfter:
			all = append(all, fmt.Errorf("chaos: schedule: fault %d: after: %d is not in [0, %d]", i, f.After, maxAfter))
		case f.For < least || f.For > most:
			all = append(all, fmt.Errorf("chaos: schedule: fault %d: for_ms: %d is not in [%d, %d] of a %s", i, f.For, least, most, f.Kind))
		case f.Consumer < 0 || f.Consumer > last:
			all = append(all, fmt.Errorf("chaos: schedule: fault %d: consumer: %d is not in [0, %d] of a %s", i, f.Consumer, last, f.Kind))
		}
	}
	return errors.Join(all...)
}

// Crash draws a schedule of so many kills, each of one of the consumers. Each comes after 0
// to most effects; an outage of up to a second stands in front of one in four, a freeze in
// front of one in sixteen, and the kill then comes in its middle.
func Crash(seed uint64, consumers, kills, most int) Schedule {
	random := rand.New(rand.NewPCG(seed, 1))
	s := Schedule{Seed: seed, Consumers: consumers}
	for range kills {
		c := random.IntN(consumers)
		switch n := random.IntN(16); {
		case n < 4:
			s.Faults = append(s.Faults, Fault{Kind: Outage, After: random.IntN(most + 1), For: 100 + random.IntN(900)})
		case n == 4:
			s.Faults = append(s.Faults, Fault{Kind: Freeze, After: random.IntN(most + 1), For: 50 + random.IntN(450), Consumer: c})
		}
		s.Faults = append(s.Faults, Fault{Kind: Kill, After: random.IntN(most + 1), Consumer: c})
	}
	return s
}

// Rolling draws a schedule in which so many consumers are restarted one after the other, in
// so many rounds. Each restart comes after 0 to most effects; an outage of up to a second
// stands in front of one in three, and the restart then comes in its middle.
func Rolling(seed uint64, consumers, rounds, most int) Schedule {
	random := rand.New(rand.NewPCG(seed, 2))
	s := Schedule{Seed: seed, Consumers: consumers}
	for range rounds {
		for _, c := range random.Perm(consumers) {
			if random.IntN(3) == 0 {
				s.Faults = append(s.Faults, Fault{Kind: Outage, After: random.IntN(most + 1), For: 100 + random.IntN(900)})
			}
			s.Faults = append(s.Faults, Fault{Kind: Restart, After: random.IntN(most + 1), Consumer: c})
		}
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
