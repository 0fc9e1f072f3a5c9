// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/limiter"
)

// Books are what a [Charters] drives: the limiter of this process.
//
// A process uses, of every limit, the smallest share that it has in any charter
// from the last complete one to the newest that it adopted. So it shrinks at once
// and grows when all who shrank have done so, and the shares in use are never more
// than the whole.
//
// The methods are called under the lock of the Charters, and must not call it.
type Books interface {
	// Adopt takes in a charter: a share that is less is less at once, one that is
	// more waits for Complete. Numbers rise, and one may be left out when the ones before it
	// are complete. An error says that the books cannot keep it; then the process
	// mints no more.
	Adopt(now time.Duration, c limiter.Charter) error

	// Complete says that all whose share shrank up to number have applied it.
	Complete(now time.Duration, number uint64)

	// Applied is the highest charter that this process keeps within: all its loans
	// and levels are below its smaller share.
	Applied() uint64

	// Mint allows to mint until an instant of the own clock; [Unfenced] is for ever.
	// The books mint nothing before the first call.
	Mint(until time.Duration)
}

// Unfenced is the instant of [Books.Mint] that never comes.
const Unfenced = time.Duration(math.MaxInt64)

// CharterConfig is what an operator may set from a file, a flag or the
// environment. Fleet and Founding must be set, and be the same in all processes,
// as must OnSilence and Lease: processes that differ refuse each other.
type CharterConfig struct {
	// Fleet names the fleet, in 1 to 128 bytes. A fleet that is founded anew, for
	// want of a majority that remembers, needs a new name.
	Fleet string

	// Founding is charter 1. Number may be left out; the roster needs a member.
	Founding limiter.Charter

	// OnSilence says what becomes of the share of a silent member; unset is
	// [limiter.Hold]. With [limiter.Majority] each process mints only while a majority
	// of the roster confirms, within Lease, that it may, and who is silent is evicted.
	// The price: who hears no majority stops, so a lone or minority side admits
	// nothing, and of two neither goes on alone. A process whose clock stands still
	// while it runs on is not caught. [limiter.TakeOver] is no agreement: charters
	// change as with Hold.
	OnSilence limiter.SilencePolicy

	// UnstableNames says that a process that is gone does not come back under its
	// name, as in a Kubernetes Deployment. limiter.Hold is refused then: each crash would
	// strand a share for ever.
	UnstableNames bool

	// Lease is for how long a process mints after it sent the packet that a
	// majority confirmed, with limiter.Majority. In [50ms, 1m]; unset means 400 ms. A few
	// keep-alives of the gossip must fit in.
	Lease time.Duration

	// Silent is after which silence a member is evicted, with limiter.Majority. In
	// (Lease, 10m]; unset means 500 ms, or a quarter above Lease if that is more.
	Silent time.Duration

	// Gather is how long requests are gathered for one charter. In [1ms, 10s];
	// unset means 50 ms. What an operator proposes does not wait for it.
	Gather time.Duration

	// Patience is how long a proposer waits for answers before it tries again, and
	// how long the others leave it to the one before them. In [10ms, 1m]; unset
	// means 250 ms.
	Patience time.Duration
}

// WithDefaults returns c with every unset field replaced by its default.
func (c CharterConfig) WithDefaults() CharterConfig {
	def(&c.Lease, 400*time.Millisecond)
	def(&c.Silent, max(500*time.Millisecond, c.Lease+c.Lease/4))
	def(&c.Gather, 50*time.Millisecond)
	def(&c.Patience, 250*time.Millisecond)
	def(&c.Founding.Number, 1)
	def(&c.OnSilence, limiter.Hold)
	return c
}

// Validate reports everything that is wrong with c at once, as an error that is
// [ErrConfig], or nil. Unset fields are judged as their defaults.
func (c CharterConfig) Validate() error {
	var w checks
	c = c.WithDefaults()
	if len(c.Fleet) < 1 || len(c.Fleet) > maxName {
		w.bad("Fleet", fmt.Sprintf("%q", c.Fleet), fmt.Sprintf("[1, %d] bytes", maxName))
	}
	if c.OnSilence != limiter.Hold && c.OnSilence != limiter.Majority && c.OnSilence != limiter.TakeOver {
		w.bad("OnSilence", fmt.Sprintf("%q", c.OnSilence), "{hold, majority, takeover}")
	}
	if c.UnstableNames && c.OnSilence == limiter.Hold {
		w.bad("OnSilence", c.OnSilence, "{majority, takeover} with UnstableNames: what crashes would strand its share for ever")
	}
	w.span("Lease", c.Lease, 50*time.Millisecond, time.Minute)
	w.span("Silent", c.Silent, c.Lease+1, 10*time.Minute)
	w.span("Gather", c.Gather, time.Millisecond, 10*time.Second)
	w.span("Patience", c.Patience, 10*time.Millisecond, time.Minute)
	if c.Founding.Number != 1 {
		w.bad("Founding.Number", c.Founding.Number, "[1, 1]")
	}
	if err := checkCharter(c.Founding); err != nil {
		w = append(w, fmt.Errorf("%w: Founding: %w", ErrConfig, err))
	}
	return errors.Join(w...)
}

const (
	maxMembers = 1024
	maxLimits  = 4096
	// maxDecree bounds a charter in bytes: the longest names and keys that there is
	// room for.
	maxDecree = 1 << 20
)

// checkCharter says all that is wrong with a charter, by the limiter's word and by
// what can travel.
func checkCharter(c limiter.Charter) error {
	var w checks
	if n := len(c.Roster.Members); n < 1 || n > maxMembers {
		w.count("Roster.Members", n, maxMembers)
	}
	if n := len(c.Limits); n > maxLimits {
		w.bad("Limits", n, fmt.Sprintf("[0, %d] keys", maxLimits))
	}
	for _, m := range c.Roster.Members {
		if len(m.Name) > maxName {
			w.bad("Roster: length of a name", len(m.Name), fmt.Sprintf("[1, %d]", maxName))
		}
	}
	err := limiter.Config{Limit: c.Limit, Limits: c.Limits, Roster: c.Roster}.Validate()
	return errors.Join(append(w, err)...)
}

// normal is c as it travels: members by name, weights said.
func normal(c limiter.Charter) limiter.Charter {
	c.Roster.Members = slices.Clone(c.Roster.Members)
	for i := range c.Roster.Members {
		c.Roster.Members[i].Weight = int(c.Roster.Members[i].Weighs())
	}
	slices.SortFunc(c.Roster.Members, byName)
	return c
}

// A Change is what an operator wants changed. What is unset stays as it is.
type Change struct {
	// Limit is that of each key that has no limit of its own.
	Limit *limiter.Limit
	// Limits are those of single keys; nil takes one away, so that Limit holds.
	Limits map[string]*limiter.Limit
	// Weights are those of members; 0 makes one that only borrows.
	Weights map[string]int
	// Reset fills all buckets up, once: up to Burst more is admitted.
	Reset bool
}
