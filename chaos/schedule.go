// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"
)

// A Kind is a kind of fault.
type Kind string

// The kinds of faults. A fault of the network is between the consumers and the broker, and
// affects all consumers.
const (
	Kill      Kind = "kill"      // a consumer's process gets SIGKILL, and another is started
	Restart   Kind = "restart"   // a consumer's process stops gracefully, and another is started
	Down      Kind = "down"      // a consumer's process gets SIGKILL, and another is started after For
	Freeze    Kind = "freeze"    // a consumer's process gets SIGSTOP, and SIGCONT after For
	Outage    Kind = "outage"    // the dependency refuses connections for For
	DiskFull  Kind = "disk-full" // the consumers' disk is full for For
	Burn      Kind = "burn"      // all processors are busy for For: one process computes for each
	Loss      Kind = "loss"      // the network loses Percent of the packets for For, each way unless Incoming is set
	Delay     Kind = "delay"     // each read from the network is 100 ms late for For
	Blackhole Kind = "blackhole" // the network carries nothing for For, and no connection breaks
	Reset     Kind = "reset"     // all connections break

	BrokerKill   Kind = "broker-kill"   // the broker gets SIGKILL, and is started again after For
	BrokerFreeze Kind = "broker-freeze" // the broker gets SIGSTOP, and SIGCONT after For
)

// kinds are the limits of each kind: the shortest and longest duration, whether the fault
// hits one consumer, and whether a count must show that it happened.
var kinds = map[Kind]struct {
	least, most  int // limits of Fault.For, in milliseconds
	one, counted bool
}{
	Kill: {one: true}, Restart: {one: true}, Down: {1, maxFor, true, false}, Freeze: {1, maxFor, true, false},
	Outage: {1, maxFor, false, false}, DiskFull: {1, maxFor, false, true}, Burn: {1, maxFor, false, true},
	Loss: {1, maxFor, false, true}, Delay: {1, maxFor, false, true}, Blackhole: {1, maxFor, false, true}, Reset: {counted: true},
	BrokerKill: {1, maxFor, false, false}, BrokerFreeze: {1, maxFor, false, false},
}

// A Fault is one planned fault. It happens when the consumers have made After effects since
// the previous fault. So there is work to break, whatever the machine's speed. A Kill or a
// Restart directly after a fault that still lasts comes in the middle of that fault instead,
// and so does an Outage directly after a DiskFull.
type Fault struct {
	Kind  Kind `json:"kind"`
	After int  `json:"after"` // number of effects, 0 to 100000

	// For is the duration in milliseconds: 1 to 600000, or 0 for a Kill, a Restart or a
	// Reset. A Loss, a Delay or a Blackhole lasts longer if it has not hit anything yet.
	For int `json:"for_ms,omitempty"`

	// Percent is the percentage of lost packets: 1 to 99 for a Loss, 0 for other kinds.
	Percent int `json:"percent,omitempty"`

	// Incoming limits a Loss to the packets that come from the broker.
	Incoming bool `json:"incoming,omitempty"`

	// Consumer is the index of the consumer that the fault hits, from 0. It is 0 for a
	// fault that hits all.
	Consumer int `json:"consumer,omitempty"`
}

// Lasts returns the duration of the fault.
func (f Fault) Lasts() time.Duration { return time.Duration(f.For) * time.Millisecond }

// A Schedule is the list of a run's faults, in order.
type Schedule struct {
	Seed   uint64  `json:"seed"`
	Faults []Fault `json:"faults"`

	// Consumers is the number of consumers that run in parallel, 1 to 64; default 1.
	Consumers int `json:"consumers,omitempty"`

	// Gates are limits that Judge compares with the run; nil for none.
	Gates *Gates `json:"gates,omitempty"`
}

// Gates are limits for messages that are sent during a Loss, a Burn or a Down. A wait is
// the time from sending to the effect.
type Gates struct {
	P99          float64 `json:"p99_ms"`        // during a Loss or a Burn 99 % of the waits are shorter, in milliseconds
	Longest      float64 `json:"longest_ms"`    // during a Down every wait is shorter, in milliseconds
	ErrorPercent float64 `json:"error_percent"` // during each of the three the percentage of failed calls is smaller
}

const (
	maxFaults    = 100_000
	maxAfter     = 100_000
	maxFor       = 600_000
	maxConsumers = 64
)

// Validate reports everything that is wrong with a schedule, all at once.
func (s Schedule) Validate() error {
	var all []error
	if n := len(s.Faults); n < 1 || n > maxFaults {
		all = append(all, fmt.Errorf("chaos: schedule: faults: %d are not in [1, %d]", n, maxFaults))
	}
	if s.Consumers < 0 || s.Consumers > maxConsumers {
		all = append(all, fmt.Errorf("chaos: schedule: consumers: %d are not in [1, %d]", s.Consumers, maxConsumers))
	}
	for i, f := range s.Faults {
		k, known := kinds[f.Kind]
		last, most := 0, 0
		if k.one {
			last = max(s.Consumers, 1) - 1
		}
		if f.Kind == Loss {
			most = 99
		}
		switch {
		case !known:
			all = append(all, fmt.Errorf("chaos: schedule: fault %d: kind: %.32q is not one of %q", i, f.Kind, slices.Sorted(maps.Keys(kinds))))
		case f.After < 0 || f.After > maxAfter:
			all = append(all, fmt.Errorf("chaos: schedule: fault %d: after: %d is not in [0, %d]", i, f.After, maxAfter))
		case f.For < k.least || f.For > k.most:
			all = append(all, fmt.Errorf("chaos: schedule: fault %d: for_ms: %d is not in [%d, %d] of a %s", i, f.For, k.least, k.most, f.Kind))
		case f.Percent < min(most, 1) || f.Percent > most:
			all = append(all, fmt.Errorf("chaos: schedule: fault %d: percent: %d is not in [%d, %d] of a %s", i, f.Percent, min(most, 1), most, f.Kind))
		case f.Incoming && f.Kind != Loss:
			all = append(all, fmt.Errorf("chaos: schedule: fault %d: incoming: true is not in [false] of a %s", i, f.Kind))
		case f.Consumer < 0 || f.Consumer > last:
			all = append(all, fmt.Errorf("chaos: schedule: fault %d: consumer: %d is not in [0, %d] of a %s", i, f.Consumer, last, f.Kind))
		}
	}
	if g := s.Gates; g != nil {
		for _, limit := range []struct {
			name  string
			value float64
		}{{"p99_ms", g.P99}, {"longest_ms", g.Longest}, {"error_percent", g.ErrorPercent}} {
			if !(limit.value > 0) {
				all = append(all, fmt.Errorf("chaos: schedule: gates: %s: %v is not above 0", limit.name, limit.value))
			}
		}
	}
	return errors.Join(all...)
}

// Crash returns a random schedule of kills, each of one random consumer. Each kill comes
// after 0 to most effects. One in four comes in the middle of an outage of up to a second,
// and one in sixteen in the middle of a freeze.
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

// Rolling returns a random schedule in which all consumers are restarted one after the
// other, in a number of rounds. Each restart comes after 0 to most effects. One in three
// comes in the middle of an outage of up to a second.
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

// Network returns a random schedule of faults of the network: in turn a loss of 5 to 35 %,
// a delay, a blackhole, each of one to two seconds, and a reset. Each comes after 1 to most
// effects. A kill of a random consumer follows one in four. It comes in the middle of the
// fault, or 0 to most effects after a reset.
func Network(seed uint64, consumers, faults, most int) Schedule {
	random := rand.New(rand.NewPCG(seed, 3))
	s := Schedule{Seed: seed, Consumers: consumers}
	for i := range faults {
		f := Fault{Kind: []Kind{Loss, Delay, Blackhole, Reset}[i%4], After: 1 + random.IntN(most)}
		if f.Kind != Reset {
			f.For = 1000 + random.IntN(1000)
		}
		if f.Kind == Loss {
			f.Percent = 5 + random.IntN(31)
		}
		s.Faults = append(s.Faults, f)
		if random.IntN(4) == 0 {
			s.Faults = append(s.Faults, Fault{Kind: Kill, After: random.IntN(most + 1), Consumer: random.IntN(consumers)})
		}
	}
	return s
}

// Broker returns a random schedule of faults of the broker: in turn a kill, after which the
// broker is away for up to three seconds, and a freeze of up to fifteen seconds. Each comes
// after 1 to most effects. In the middle of one in four, a random consumer is killed.
func Broker(seed uint64, consumers, faults, most int) Schedule {
	random := rand.New(rand.NewPCG(seed, 4))
	s := Schedule{Seed: seed, Consumers: consumers}
	for i := range faults {
		f := Fault{Kind: BrokerKill, After: 1 + random.IntN(most), For: 1 + random.IntN(3000)}
		if i%2 == 1 {
			f.Kind, f.For = BrokerFreeze, 500+random.IntN(14_500)
		}
		s.Faults = append(s.Faults, f)
		if random.IntN(4) == 0 {
			s.Faults = append(s.Faults, Fault{Kind: Kill, Consumer: random.IntN(consumers)})
		}
	}
	return s
}

// Disk returns a random schedule in which the consumers' disk is full a number of times,
// for one to four seconds. Each comes after 1 to most effects. In the middle of each comes,
// in turn, an outage, the kill of a random consumer, both, and neither. If both, the kill
// comes in the middle of the outage, while the disk is still full.
func Disk(seed uint64, consumers, faults, most int) Schedule {
	random := rand.New(rand.NewPCG(seed, 5))
	s := Schedule{Seed: seed, Consumers: consumers}
	for i := range faults {
		full := 1000 + random.IntN(3000)
		s.Faults = append(s.Faults, Fault{Kind: DiskFull, After: 1 + random.IntN(most), For: full})
		switch i % 4 {
		case 0: // the outage may end after the disk has room again
			s.Faults = append(s.Faults, Fault{Kind: Outage, For: 100 + random.IntN(full)})
		case 2: // the middle of the outage comes while the disk is full
			s.Faults = append(s.Faults, Fault{Kind: Outage, For: 100 + random.IntN(full/2)})
		}
		if i%4 == 1 || i%4 == 2 {
			s.Faults = append(s.Faults, Fault{Kind: Kill, Consumer: random.IntN(consumers)})
		}
	}
	return s
}

// Stages returns a schedule of three stages, with quiet effects before each: the network
// loses 5 % of the packets that come from the broker, then the first consumer is down, then
// the processors burn. The gates are a p99 of 350 ms; a longest wait of 20 s, or of half of
// down if that is less; and 0.02 % of errors.
func Stages(seed uint64, consumers, quiet int, loss, down, burn time.Duration) Schedule {
	return Schedule{
		Seed: seed, Consumers: consumers, Gates: &Gates{P99: 350, Longest: min(20_000, float64(down.Milliseconds())/2), ErrorPercent: 0.02},
		Faults: []Fault{
			{Kind: Loss, After: quiet, For: int(loss.Milliseconds()), Percent: 5, Incoming: true},
			{Kind: Down, After: quiet, For: int(down.Milliseconds())},
			{Kind: Burn, After: quiet, For: int(burn.Milliseconds())},
		},
	}
}

// Count returns the number of planned faults of a kind.
func (s Schedule) Count(k Kind) (n int) {
	for _, f := range s.Faults {
		if f.Kind == k {
			n++
		}
	}
	return n
}
