// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/escrow"
)

// An Applier is driven by a [Configurator]: it is the limiter of this process.
//
// Of every limit, a process uses the smallest share that it has in any configuration from the last
// complete one to the newest adopted one. So it shrinks at once, and grows when all members that
// shrank have done so. The shares in use are never more than the whole.
//
// The methods are called under the lock of the Configurator, and must not call it.
type Applier interface {
	// Adopt takes in a configuration: a smaller share counts at once, a larger one waits for
	// Complete. Numbers rise. A number may be skipped when the ones before it are complete. An
	// error says that the applier cannot keep the configuration; then the process mints no more.
	Adopt(now time.Duration, c escrow.Configuration) error

	// Complete says that all members whose share shrank up to number have applied it.
	Complete(now time.Duration, number uint64)

	// Applied returns the highest configuration that this process keeps within: all its loans and
	// levels are below its smaller share.
	Applied() uint64

	// Mint allows minting until an instant of the own clock; [Unfenced] sets no end. The applier
	// mints nothing before the first call.
	Mint(until time.Duration)
}

// Unfenced is the instant of [Applier.Mint] that never comes.
const Unfenced = time.Duration(math.MaxInt64)

const (
	// fewPending is how many configurations may wait for members to apply them before only
	// evictions are accepted. At maxPending nothing is accepted.
	fewPending = 64
	maxPending = 96

	maxRequests = 64  // undecided requests of this process
	maxOutcomes = 256 // remembered outcomes

	activeTick  = 5 * time.Millisecond
	idleTick    = 50 * time.Millisecond
	pullTimeout = 100 * time.Millisecond
	nearby      = time.Second // how long after it was heard a process counts as present
)

const (
	maxMembers = 1024
	maxLimits  = 4096
)

// checkConfiguration returns all that is wrong with a configuration: for the limiter, and for the
// document.
func checkConfiguration(c escrow.Configuration) error {
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
	err := escrow.Config{Limit: c.Limit, Limits: c.Limits, Roster: c.Roster}.Validate()
	return errors.Join(append(w, err)...)
}

// normal returns c as documents have it: members by name, with explicit weights.
func normal(c escrow.Configuration) escrow.Configuration {
	c.Roster.Members = slices.Clone(c.Roster.Members)
	for i := range c.Roster.Members {
		c.Roster.Members[i].Weight = int(c.Roster.Members[i].Weighs())
	}
	slices.SortFunc(c.Roster.Members, byName)
	return c
}

// A Change has an operator's changes. Unset fields change nothing.
type Change struct {
	// Limit is the new limit of each key that has no limit of its own.
	Limit *escrow.Limit
	// Limits are new limits of single keys. nil removes a key's own limit, so that Limit counts.
	Limits map[string]*escrow.Limit
	// Weights are new weights of members. A member with weight 0 only borrows.
	Weights map[string]int
	// Reset fills all buckets once. The fleet may then admit up to Burst more.
	Reset bool
}

// release is the eviction of a name, or its leave.
type release struct {
	number uint64        // the configuration without the name
	from   time.Duration // when its share is free
}

// A DiffersError says which peer has a different configuration of a number.
type DiffersError struct {
	Number       uint64
	Peer         crdt.Replica
	Ours, Theirs uint64 // digests
}

func (e *DiffersError) Error() string {
	return fmt.Sprintf("%v: number %d of %v is %016x, ours is %016x", ErrDiffers, e.Number, e.Peer, e.Theirs, e.Ours)
}

// Unwrap makes errors.Is(err, ErrDiffers) hold.
func (e *DiffersError) Unwrap() error { return ErrDiffers }

// apply returns the changed configuration. A reset sets the count of resets to resets, so a
// repeated reset happens once.
func (ch *Change) apply(to escrow.Configuration, resets uint64) (escrow.Configuration, error) {
	var w checks
	if ch.Limit != nil {
		to.Limit = *ch.Limit
	}
	if len(ch.Limits) > 0 {
		to.Limits = maps.Clone(to.Limits)
		if to.Limits == nil {
			to.Limits = map[string]escrow.Limit{}
		}
		for k, l := range ch.Limits {
			if l == nil {
				delete(to.Limits, k)
			} else {
				to.Limits[k] = *l
			}
		}
	}
	if len(ch.Weights) > 0 {
		to.Roster.Members = slices.Clone(to.Roster.Members)
		for _, name := range slices.Sorted(maps.Keys(ch.Weights)) {
			i := memberIndex(to.Roster.Members, name)
			if i < 0 {
				w = append(w, fmt.Errorf("%w: Weights: %q is none", ErrMember, name))
				continue
			}
			m := &to.Roster.Members[i]
			m.Weight, m.NoShare = ch.Weights[name], ch.Weights[name] == 0
		}
	}
	if ch.Reset {
		to.Resets = max(to.Resets, resets)
	}
	if err := checkConfiguration(to); err != nil {
		w = append(w, fmt.Errorf("%w: %w", ErrConfig, err))
	}
	return to, errors.Join(w...)
}

func byName(a, b escrow.Member) int { return cmp.Compare(a.Name, b.Name) }

// memberIndex is the index of a name in a sorted roster, -1 if it is not there.
func memberIndex(members []escrow.Member, name string) int {
	i, ok := slices.BinarySearchFunc(members, name, func(m escrow.Member, name string) int {
		return strings.Compare(m.Name, name)
	})
	if !ok {
		return -1
	}
	return i
}

// drift is how much faster or slower a clock may run, in millionths.
const drift = 500

// fenced is how long after an eviction a member may still mint under a lease.
func fenced(lease time.Duration) time.Duration {
	return lease + lease*2*drift/1_000_000 + 10*time.Millisecond
}

type eviction struct {
	name   string
	silent bool // evicted for silence, not by an operator
}
