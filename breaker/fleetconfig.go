// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package breaker

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// FleetConfig is how the processes of a fleet decide together about breakers, whatever
// carries their votes. The zero value is valid and means the documented defaults. All
// processes of a fleet need the same Quorum and Successes. Other fields may differ.
type FleetConfig struct {
	// Quorum is the share of the roster that must agree to open a scope for the
	// whole fleet, and to close it. In (0, 1]; unset means 0.5. At least two processes
	// must agree, unless the roster has only one.
	//
	// Too low: a minority with a broken path stops everyone; at 0.1, five processes of
	// fifty do. Too high: the fleet never opens a scope that few processes consume, and
	// each of them uses its own breaker alone. At 0.5 or below, both halves of an even
	// split can decide, each for itself. After the split the later decision holds for all.
	Quorum float64

	// Successes is how many probes of a round must succeed before the scope closes, over
	// all processes. A quorum of processes must agree, too. In [1, 1000]; unset means 10,
	// as in Config.
	Successes int

	// Base and Cap are the backoff of open periods, as in Config: the period of level n
	// lasts min(Cap, Base·2^(n-1)). Base is in [1ms, 1h]; unset means 100 ms. Cap is in
	// [Base, 24h]; unset means 30 s, or Base if that is more. Cap also limits a period
	// that another process announces.
	Base, Cap time.Duration

	// Lease is how long a probe may stay out, by the clock of its own process. A probe
	// that is not settled within Lease has failed. If its process is silent, another
	// process probes. In [10ms, 1h]; unset means 45 s.
	//
	// Lease must be longer than a call of a healthy handler. Otherwise no probe of that
	// handler succeeds. Once rounds have ended like this for 2·Lease + 4·Turn, each breaker
	// decides alone. A breaker whose Slow is longer than Lease has no part in the fleet and
	// decides alone; a warning says so. A guard's Slow is by default the handler's Timeout,
	// but at most 40 s.
	Lease time.Duration

	// Turn is how long the other processes wait for the process whose turn it is to
	// announce its probe. In [4·Settle, 1h]; unset means 2 s, or 4·Settle if that is more.
	Turn time.Duration

	// Settle is how long a process waits before it takes a turn, after it has met the
	// fleet or got a message to probe with. In [200ms, 1m]; unset means 500 ms.
	//
	// No two processes probe at once while news takes less than Settle/2 between any two
	// processes that hear each other. Ticks of a process must be closer together than
	// Settle: a process whose tick comes later stood still, and waits for Settle again.
	Settle time.Duration

	// Silent is how long a process may be silent before it no longer counts. In
	// [100ms, 10m]; unset means 5 s. A large fleet sends less often: the time that a
	// process rests is added, see crdt.Contact.
	Silent time.Duration

	// Start is how long after its own start a process waits for the fleet's state of a
	// scope that it takes over. In [1ms, 1m]; unset means 1 s.
	Start time.Duration

	// Keep is how long a vote is remembered after its process fell silent or gave the
	// scope up, or after it became a vote that nothing is wrong. In [Silent, 24h]; unset
	// means 10 min.
	Keep time.Duration

	// Scopes is how many scopes are remembered, scopes of other processes included. In
	// [1, 1000000]; unset means 10000. Votes is how many votes are remembered, over all
	// scopes. In [1, 10000000]; unset means 100000. Each takes about 300 bytes.
	Scopes, Votes int
}

// WithDefaults returns c with every unset field replaced by its default.
func (c FleetConfig) WithDefaults() FleetConfig {
	def(&c.Quorum, 0.5)
	def(&c.Successes, 10)
	def(&c.Base, 100*time.Millisecond)
	def(&c.Cap, max(30*time.Second, c.Base))
	def(&c.Lease, 45*time.Second)
	def(&c.Settle, 500*time.Millisecond)
	def(&c.Turn, max(2*time.Second, 4*c.Settle))
	def(&c.Silent, 5*time.Second)
	def(&c.Start, time.Second)
	def(&c.Keep, max(10*time.Minute, c.Silent))
	def(&c.Scopes, 10_000)
	def(&c.Votes, 100_000)
	return c
}

// Validate reports all wrong fields of c in one error: each field, its value and the
// allowed range. Unset fields are judged as their defaults.
func (c FleetConfig) Validate() error {
	var w checks
	c = c.WithDefaults()
	if !(c.Quorum > 0 && c.Quorum <= 1) {
		w.bad("Quorum", c.Quorum, "(0, 1]")
	}
	w.count("Successes", c.Successes, 1, 1000)
	w.span("Base", c.Base, time.Millisecond, time.Hour)
	w.span("Cap", c.Cap, max(c.Base, time.Millisecond), 24*time.Hour)
	w.span("Lease", c.Lease, 10*time.Millisecond, time.Hour)
	w.span("Settle", c.Settle, 200*time.Millisecond, time.Minute)
	w.span("Turn", c.Turn, 4*c.Settle, time.Hour)
	w.span("Silent", c.Silent, 100*time.Millisecond, 10*time.Minute)
	w.span("Start", c.Start, time.Millisecond, time.Minute)
	w.span("Keep", c.Keep, c.Silent, 24*time.Hour)
	w.count("Scopes", c.Scopes, 1, 1e6)
	w.count("Votes", c.Votes, 1, 1e7)
	return errors.Join(w...)
}

// Roster has the names of the processes that may vote. Of two rosters the one with the
// higher number is later. A roster lists all processes of the fleet, heard or not, so that
// the smaller side of a split knows that it is one.
type Roster struct {
	Number uint64
	Names  []string // in any order
}

const (
	maxRoster     = 4096 // bounds the cost of counting votes
	maxRosterName = 128
)

// Validate reports all errors of r in one error: no names or more than 4096, an empty name,
// a repeated name, or a name longer than 128 bytes.
func (r Roster) Validate() error {
	var w checks
	w.count("Roster: names", len(r.Names), 1, maxRoster)
	sorted := slices.Sorted(slices.Values(r.Names))
	for i, n := range sorted {
		if len(n) < 1 || len(n) > maxRosterName {
			w.bad("Roster: length of a name", len(n), fmt.Sprintf("[1, %d]", maxRosterName))
		}
		if i > 0 && sorted[i-1] == n {
			w.bad("Roster: name", fmt.Sprintf("%q, twice", n), "a set")
		}
	}
	return errors.Join(w...)
}
