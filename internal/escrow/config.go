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

// Config is what an operator may set from a file, a flag or the environment.
// All nodes of a fleet must have the same, or they refuse each other's packets.
// Limit has no default; everything else may be left out.
//
// Limit, Limits and Roster are those with which the fleet began. While it runs they
// change by a [Configuration], and a node that starts later is still given the first
// ones, or those that it is to have while it waits (Provisional).
type Config struct {
	// Fleet is the name of a fleet whose configuration changes while it runs; see
	// [Node.Adopt]. Nodes of different fleets refuse each other's packets. A node
	// that is not in the roster may start then, and mints when a configuration says so.
	// Unset means that Limit, Limits and Roster stay what they are.
	Fleet string

	// Provisional says that Limit, Limits and Roster are no decision of the fleet, but
	// what this node has while it waits for one: its configuration is number 0, and the first
	// decided one is number 1. Nodes with different ones do not refuse each other. It
	// needs Fleet, and a fence from the start, see [Node.Mint].
	Provisional bool

	// Limit is that of each key that Limits does not name.
	Limit Limit

	// Limits are those of keys that have their own.
	Limits map[string]Limit

	// Strategy says how the processes share a limit. Unset means [Escrow].
	Strategy Strategy

	// Roster says who mints. Unset means that there is one node, which has it all
	// and hears nobody.
	Roster Roster

	// MaxKeys bounds the keys that are known at a time; a key that lies idle is
	// forgotten. In [1, 10000000]; unset means 100,000. Above it new keys are
	// refused: nothing is admitted for them. Keys that only peers use are a quarter of
	// it at most, and an eighth for one peer, or 1,024 if that is more.
	MaxKeys int

	// OnSilence says what becomes of the share of a node that is not heard. Unset
	// means that it is held for that node, which keeps the bound.
	OnSilence Silence

	// UntilJoined says what becomes of admissions before the node may mint. Unset
	// means that they are denied.
	UntilJoined Joining
}

// A Strategy is how the processes of a fleet share a limit.
type Strategy string

const (
	// Escrow is the default: each process mints its share and lends what it does not
	// use. It keeps Burst + Rate·T.
	Escrow Strategy = "escrow"

	// Pooled is optimistic: each process has the whole bucket, and takes from it what
	// all of them say that they have used. The full burst is to be had anywhere at once,
	// and the others use the part of one that leaves. One that crashes is assumed to use
	// its part, Rate/N, until its name is back or evicted. A learner cannot be evicted: its
	// part is free again after 10 min of silence. Weights, owners and loans mean
	// nothing to it. OnSilence must be Hold and UntilJoined Deny.
	//
	// It is not strict. With N processes, rate R, burst B, and d from a use to its
	// arrival at a peer, the fleet admits more than B + R·T by up to
	//
	//	(N-1)·R·d            while it is busy
	//	(N-1)·(B + R·d)      when all begin at the same instant after a rest
	//	(P-1)·(B + R·150ms)  at each split into P sides; afterwards a peer that is not
	//	                     heard is assumed to use R/N, so the sides share the rate
	//	(P-1)·R·(T-10min)    at a split that lasts for a longer T, if there are learners
	//
	// A process that starts in a split knows of nobody on the other side: it may admit
	// B + R·T by itself. What a peer was assumed to use is not given back when it is
	// heard again.
	Pooled Strategy = "pooled"
)

// A Silence is what becomes of the share of a node that is not heard.
type Silence struct {
	// Policy is Hold if unset.
	Policy SilencePolicy
	// After is how long a node must be silent before its share of the rate is taken
	// over. In a large fleet what it rests is added, see crdt.Contact. In [1s, 1h], with
	// TakeOver only; unset means 5 s there.
	After time.Duration
}

// A SilencePolicy is what is done about nodes that are not heard.
type SilencePolicy string

const (
	// Hold is the default: the share waits for its name. It keeps the bound, and is
	// refused for rosters whose names are [Roster.Unstable].
	Hold SilencePolicy = "hold"

	// Majority means that who agrees on configurations gives the share to others, when
	// most of the roster has agreed that the node is fenced. The limiter's part is the
	// fence, [Node.Mint].
	Majority SilencePolicy = "majority"

	// TakeOver means that every node that neither hears another nor finds its own
	// packets answered for After mints for it: its weight over the sum of the weights
	// of all that it hears and itself, of the whole rate, until the first packet that
	// it hears of any of them. Caps stay, so it brings no burst, and small limits stay
	// at their owners.
	//
	// It is not strict. P sides of a split admit up to (P-1)·(Burst + Rate·(T-After))
	// more, each time that the network flaps. T is the longest time for which two nodes
	// take in nothing of each other. With internal/gossip that is the split and 0.1 s more;
	// after a split of 10 s or longer, up to 5.1 s more, and after one of an hour 50 s,
	// since lost peers are tried every 1 to 5 s, and later ten times as rarely.
	TakeOver SilencePolicy = "takeover"
)

// A Joining is what becomes of admissions before a node may mint: until whatever an
// earlier incarnation has lent is over, and until a fence that stood from the start is
// lifted.
type Joining string

const (
	// Deny is the default: what cannot be borrowed is denied. It fails closed.
	Deny Joining = "deny"

	// Open admits from a bucket of the node's own meanwhile, as large as its share
	// in the newest configuration that it knows. It fails open: each start of a process
	// admits up to its share of Burst + Rate·T more, where T is how long it takes
	// until it may mint. Who has no share yet is denied, and who waits for loans or the
	// own mint goes on waiting.
	Open Joining = "open"
)

// MaxKey is the longest key, in bytes. Longer ones are refused.
const MaxKey = 128

// micro is a token in the unit of all books.
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

// Validate reports everything that is wrong with c at once, as an error that is
// [ErrConfig], or nil. Unset fields are judged as their defaults.
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

// Warnings names what is allowed and will not work well, one sentence each;
// package fleet logs them.
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

// fingerprint is of what all nodes must agree on.
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
