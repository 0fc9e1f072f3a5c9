// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package breaker

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// FleetConfig is how the processes of a fleet decide, whatever carries it.
// The zero value is valid and means the documented defaults. All processes of a
// fleet need the same Quorum and Successes; they may differ in the rest.
type FleetConfig struct {
	// Quorum is the share of the roster that must agree to open a scope for the
	// whole fleet, and to close it. In (0, 1]; unset means 0.5. At least
	// two must, unless there is only one.
	//
	// Low, a part of the fleet whose own path is broken stops the rest: at 0.1
	// five bad processes of fifty do. High, a scope that few processes consume
	// is never opened for the fleet, and each of them goes by its own breaker.
	// At 0.5 or below, both halves of an even split can decide, each for
	// itself; after it the later decision holds for all.
	Quorum float64

	// Successes is how many probes of a round must succeed before the scope
	// closes, from as many processes as make a quorum. In [1, 1000]; unset means
	// 10, as for a breaker by itself.
	Successes int

	// Base and Cap are the backoff of open periods, as of a breaker: the one at
	// level n lasts min(Cap, Base·2^(n-1)). Base in [1ms, 1h], unset means
	// 100 ms; Cap in [Base, 24h], unset means 30 s, or Base if that is more. Cap
	// also bounds a period that another process names.
	Base, Cap time.Duration

	// Lease is how long a probe may stay out, by its own process's clock. One
	// that is not settled by then has failed; and when nothing is heard of the
	// process, the slot passes on. In [10ms, 1h]; unset means 45 s. It must be more
	// than a call of a healthy handler takes. Else no probe of that handler passes, and
	// each breaker goes by itself once rounds have ended so for twice a lease and four
	// turns. A breaker whose Slow is more has no part in the fleet and goes by itself,
	// with a warning. A guard's Slow is by default the handler's Timeout, but at most
	// 40 s.
	Lease time.Duration

	// Turn is how long the others wait for the process whose turn it is to
	// announce its probe. In [4·Settle, 1h]; unset means 2 s, or 4·Settle if that
	// is more.
	Turn time.Duration

	// Settle is how long a process that has just met the fleet, or has just got
	// something to probe with, waits before it takes a turn. In [200ms, 1m]; unset
	// means 500 ms. While news takes less than half of it between any two
	// processes that hear each other, no two of them probe at once. Ticks must be
	// closer together: a later one is a standstill, and who stood still settles anew.
	Settle time.Duration

	// Silent is the silence after which a process no longer counts. In a large fleet
	// what it rests is added, see crdt.Contact. In [100ms, 10m]; unset means 5 s.
	Silent time.Duration

	// Start is how long after its own start a process waits to be told about
	// a scope it takes over. In [1ms, 1m]; unset means 1 s.
	Start time.Duration

	// Keep is how long a vote is remembered after its process fell silent or gave
	// the scope up, or after it became one of nothing wrong. In [Silent, 24h];
	// unset means 10 min.
	Keep time.Duration

	// Scopes is how many scopes are remembered, those of other processes
	// included, and Votes how many votes over all of them. In [1, 1000000] and
	// [1, 10000000]; unset means 10000 and 100000. About 300 bytes each.
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

// Validate reports everything that is wrong with c at once: each field, its value and
// the allowed range. Unset fields are judged as their defaults.
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

// Roster is who may vote, by name. It is numbered: of two rosters the higher
// number is the later. It says who belongs to the fleet, whether they are heard
// or not, so that a lone side of a split knows that it is one.
type Roster struct {
	Number uint64
	Names  []string // in any order
}

const (
	maxRoster     = 4096 // bounds what one vote costs to count
	maxRosterName = 128
)

// Validate reports everything that is wrong with r at once: no name or more than 4096,
// an empty or repeated one, or one longer than 128 bytes.
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
