// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"cmp"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"slices"
	"time"
)

// A Limit is a token bucket: at most Burst + Rate·T admissions in any time T.
type Limit struct {
	// Rate is in tokens per second, in [0.001, 1e9].
	Rate float64
	// Burst is in tokens, in [1, 1000000000].
	Burst int
}

// Config holds the settings that an operator may set from a file, a flag or the
// environment. All nodes of a fleet must have the same Config, or they refuse each other's
// packets. Limit has no default; everything else may be left out.
//
// Limit, Limits and Roster are the initial ones of the fleet. While it runs a
// [Configuration] changes them. A node that starts later still gets the initial ones, or
// with Provisional those that it uses while it waits.
type Config struct {
	// Fleet is the name of a fleet whose configuration changes while it runs; see
	// [Node.Adopt]. Nodes of different fleets refuse each other's packets. With Fleet a node
	// that is not in the roster may start, and mints when a configuration says so.
	// Unset means that Limit, Limits and Roster never change.
	Fleet string

	// Provisional says that the fleet did not decide Limit, Limits and Roster: this node
	// uses them while it waits for a decision. They have configuration number 0, and the
	// first decided configuration has number 1. Nodes with different provisional values do
	// not refuse each other. It needs Fleet, and a fence from the start, see [Node.Mint].
	Provisional bool

	// Limit is the limit of each key that Limits does not name.
	Limit Limit

	// Limits are the limits of single keys.
	Limits map[string]Limit

	// Strategy says how the processes share a limit. Unset means [Escrow].
	Strategy Strategy

	// Roster says who mints. Unset means a single node, which has the whole limit and no
	// peers.
	Roster Roster

	// MaxKeys bounds the known keys; idle keys are forgotten. In [1, 10000000]; unset means
	// 100,000. Above it new keys are refused: nothing is admitted for them. Keys that only
	// peers use fill a quarter of it at most, and an eighth for one peer; 1,024 are always
	// allowed.
	MaxKeys int

	// OnSilence says what happens to the share of a node that is not heard. Unset means
	// [Hold], which keeps the bound.
	OnSilence Silence

	// UntilJoined says what happens to admissions before the node may mint. Unset means
	// [Deny].
	UntilJoined Joining
}

// A Strategy is how the processes of a fleet share a limit.
type Strategy string

const (
	// Escrow is the default: each process mints its share and lends what it does not
	// use. It keeps Burst + Rate·T.
	Escrow Strategy = "escrow"

	// Pooled is optimistic: each process has the whole bucket, and subtracts the use that
	// all processes report. So any process can use the full burst at once. When a process
	// leaves, the others use its part. A crashed process is assumed to use its part, Rate/N,
	// until its name is back or evicted. A learner cannot be evicted: its part is free again
	// after 10 min of silence. Pooled ignores weights, owners and loans. OnSilence must be
	// Hold and UntilJoined Deny.
	//
	// It is not strict. N is the number of processes, R the rate, B the burst, and d the time
	// from a use to its arrival at a peer. The fleet admits more than B + R·T by up to
	//
	//	(N-1)·R·d            while it is busy
	//	(N-1)·(B + R·d)      when all begin at the same instant after a rest
	//	(P-1)·(B + R·150ms)  at each split into P sides; afterwards a silent peer is
	//	                     assumed to use R/N, so the sides share the rate
	//	(P-1)·R·(T-10min)    at a split that lasts for a longer T, if there are learners
	//
	// A process that starts in a split does not know the processes on the other side: it may
	// admit B + R·T by itself. The assumed use of a silent peer is not given back when the
	// peer is heard again.
	Pooled Strategy = "pooled"
)

// A Silence says what happens to the share of a node that is not heard.
type Silence struct {
	// Policy is Hold if unset.
	Policy SilencePolicy
	// After is how long a node must be silent before its share of the rate is taken over.
	// In a large fleet the node's Rest is added, see crdt.Contact. Only with TakeOver, in
	// [1s, 1h]; unset means 5 s.
	After time.Duration
}

// A SilencePolicy is how a node treats nodes that it does not hear.
type SilencePolicy string

const (
	// Hold is the default: the share stays unused until its name is back. It keeps the
	// bound. It is refused for rosters whose names are [Roster.Unstable].
	Hold SilencePolicy = "hold"

	// Majority means that the fleet's configuration gives the share to others, once most of
	// the roster has agreed that the node is fenced. The limiter only has the fence,
	// [Node.Mint].
	Majority SilencePolicy = "majority"

	// TakeOver means that every node mints for silent members. A member is silent if for the
	// time After no packet from it came, not even a refused one, and it answered no packet of
	// the node. The node then mints this part of the whole rate: its own weight over the sum
	// of the weights of itself and of all members that are not silent. The first packet from a
	// silent member ends that for its weight. Caps do not change, so TakeOver adds no burst,
	// and small limits stay at their owners.
	//
	// It is not strict. Each time the network flaps, P sides of a split admit up to
	// (P-1)·(Burst + Rate·(T-After)) more. T is the longest time for which two nodes receive no
	// packet of each other. With internal/gossip that is 0.1 s longer than the split, but up
	// to 5.1 s longer after a split of 10 s or more, and up to 50 s longer after one of an
	// hour. The reason: lost peers are tried every 1 to 5 s, and later ten times as rarely.
	TakeOver SilencePolicy = "takeover"
)

// A Joining says what happens to admissions before a node may mint: until the loans of an
// earlier incarnation are over, and until a fence that was set from the start is lifted.
type Joining string

const (
	// Deny is the default: only borrowed tokens are admitted. It fails closed.
	Deny Joining = "deny"

	// Open fails open: meanwhile the node admits from an extra bucket, as large as its share
	// in the newest configuration that it knows. Each start of a process admits up to its
	// share of Burst + Rate·T more, where T is the time until it may mint. A node without a
	// share denies. A Wait that the bucket cannot admit at once waits for loans or minting.
	Open Joining = "open"
)

// MaxKey is the length of the longest key, in bytes. Longer keys are refused.
const MaxKey = 128

// micro is one token in micro-tokens, the unit of all amounts.
const micro = 1_000_000

const maxBurst = 1_000_000_000

// WithDefaults returns c with every unset field replaced by its default.
func (c Config) WithDefaults() Config {
	c.Strategy = cmp.Or(c.Strategy, Escrow)
	c.MaxKeys = cmp.Or(c.MaxKeys, 100_000)
	c.OnSilence.Policy = cmp.Or(c.OnSilence.Policy, Hold)
	if c.OnSilence.Policy == TakeOver {
		c.OnSilence.After = cmp.Or(c.OnSilence.After, 5*time.Second)
	}
	c.UntilJoined = cmp.Or(c.UntilJoined, Deny)
	return c
}

// Validate checks all fields, and returns nil or one error that is [ErrConfig] and names
// all faults. Unset fields are checked as their defaults.
func (c Config) Validate() error {
	var wrong []error
	bad := func(field string, value any, want string) {
		wrong = append(wrong, fmt.Errorf("%w: %s: %v is not in %s", ErrConfig, field, value, want))
	}
	limit := func(field string, l Limit) {
		if !(l.Rate >= 0.001 && l.Rate <= 1e9) {
			bad(field+".Rate", l.Rate, "[0.001, 1e+09] tokens per second")
		}
		if l.Burst < 1 || l.Burst > maxBurst {
			bad(field+".Burst", l.Burst, "[1, 1000000000] tokens")
		}
	}
	c = c.WithDefaults()
	limit("Limit", c.Limit)
	for _, key := range sorted(c.Limits) {
		if !validKey(key) {
			bad(fmt.Sprintf("Limits[%.20q]", key), len(key), fmt.Sprintf("[1, %d] bytes", MaxKey))
		}
		limit(fmt.Sprintf("Limits[%.20q]", key), c.Limits[key])
	}
	if c.MaxKeys < 1 || c.MaxKeys > 1e7 {
		bad("MaxKeys", c.MaxKeys, "[1, 10000000]")
	}
	if n := len(c.Roster.Members); n > 1024 {
		bad("Roster.Members", n, "[0, 1024] members")
	}
	seen := map[string]bool{}
	for i, m := range c.Roster.Members {
		if m.Name == "" || seen[m.Name] {
			bad(fmt.Sprintf("Roster.Members[%d].Name", i), fmt.Sprintf("%q", m.Name), "names that are not empty and not twice")
		}
		seen[m.Name] = true
		if m.Weight < 0 || m.Weight > 1e6 || m.NoShare && m.Weight != 0 {
			bad(fmt.Sprintf("Roster.Members[%d].Weight", i), m.Weight, "[0, 1000000], 0 with NoShare")
		}
	}
	if sum, _ := c.Roster.weights(); len(c.Roster.Members) > 0 && sum <= 0 {
		bad("Roster.Members", sum, "[1, …], the sum of weights: somebody must mint")
	}
	switch s := c.OnSilence; s.Policy {
	case Hold, Majority:
		if s.After != 0 {
			bad("OnSilence.After", s.After, "{0}, for it is of TakeOver alone")
		}
		if s.Policy == Hold && c.Roster.Unstable && len(c.Roster.Members) > 1 {
			bad("OnSilence.Policy", s.Policy, "{majority, takeover}: the roster's names are unstable, and what is held for one that does not come back is lost")
		}
	case TakeOver:
		if s.After < time.Second || s.After > time.Hour {
			bad("OnSilence.After", s.After, "[1s, 1h]")
		}
	default:
		bad("OnSilence.Policy", fmt.Sprintf("%q", s.Policy), "{hold, majority, takeover}")
	}
	if c.Provisional && c.Fleet == "" {
		bad("Provisional", c.Provisional, "{false} without Fleet")
	}
	c.checkStrategy(bad)
	if c.UntilJoined != Deny && c.UntilJoined != Open {
		bad("UntilJoined", fmt.Sprintf("%q", c.UntilJoined), "{deny, open}")
	}
	return errors.Join(wrong...)
}

func (c Config) checkStrategy(bad func(field string, value any, want string)) {
	switch c.Strategy {
	case Escrow:
	case Pooled:
		if c.OnSilence.Policy == Majority || c.OnSilence.Policy == TakeOver {
			bad("OnSilence.Policy", fmt.Sprintf("%q", c.OnSilence.Policy), "{hold}, for with Strategy pooled nobody has a share")
		}
		if c.UntilJoined == Open {
			bad("UntilJoined", fmt.Sprintf("%q", c.UntilJoined), "{deny}, with Strategy pooled")
		}
	default:
		bad("Strategy", fmt.Sprintf("%q", c.Strategy), "{escrow, pooled}")
	}
}

// Warnings describes valid settings that will not work well, one sentence each. Package
// fleet logs them.
func (c Config) Warnings() []string {
	if len(c.Roster.Members) <= 1 || c.Strategy == Pooled {
		return nil
	}
	var all []string
	check := func(field string, l Limit) {
		if burst := float64(l.Burst) / l.Rate; burst < controlLoop.Seconds() {
			all = append(all, fmt.Sprintf("%s.Burst: %d tokens are %v of Rate, and a token lent is out for up to %v: the fleet may reach less than Rate; want %.0f or more",
				field, l.Burst, time.Duration(burst*1e9).Round(time.Microsecond), controlLoop, math.Ceil(l.Rate*controlLoop.Seconds())))
		}
	}
	check("Limit", c.Limit)
	for _, key := range sorted(c.Limits) {
		check(fmt.Sprintf("Limits[%.20q]", key), c.Limits[key])
	}
	return all
}

func sorted(m map[string]Limit) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

func validKey(key string) bool { return key != "" && len(key) <= MaxKey }

// fingerprint is a hash of the settings that all nodes must have in common.
func (c Config) fingerprint() uint32 {
	h := fnv.New32a()
	if c.Provisional {
		c = Config{Fleet: c.Fleet, Strategy: c.Strategy, OnSilence: c.OnSilence}
	}
	_, _ = fmt.Fprint(h, c.Limit, c.Roster.Number, c.Roster.Learners)
	members := slices.Clone(c.Roster.Members)
	slices.SortFunc(members, func(a, b Member) int { return cmp.Compare(a.Name, b.Name) })
	for _, m := range members {
		_, _ = fmt.Fprintf(h, "%q%d", m.Name, m.Weighs())
	}
	for _, key := range sorted(c.Limits) {
		_, _ = fmt.Fprintf(h, "%q%v", key, c.Limits[key])
	}
	if c.Strategy == Pooled {
		_, _ = fmt.Fprint(h, "pooled")
	}
	if c.Roster.Unstable {
		_, _ = fmt.Fprint(h, "unstable")
	}
	if c.Fleet != "" {
		_, _ = fmt.Fprintf(h, "fleet%q", c.Fleet)
	}
	if s := c.OnSilence; s.Policy != Hold && s.Policy != "" {
		_, _ = fmt.Fprint(h, s.Policy, s.After)
	}
	return h.Sum32()
}
