// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"fmt"
	"hash/fnv"
	"maps"
	"math"
	"slices"
	"time"
)

// A Configuration is a decision of a fleet: the limits, and who mints how much of them. A
// fleet begins with [Config.Configuration], and each change is a new, whole configuration.
// The limiter does not decide. Its caller hands it decisions with [Node.Adopt] and
// [Node.Complete].
type Configuration struct {
	// Number is 1 for the initial configuration, and one more with each change. Two
	// different configurations with one number are a mistake, which is refused.
	Number uint64

	// Limit and Limits are as in [Config]. A key that Limits no longer names has Limit.
	Limit  Limit
	Limits map[string]Limit

	// Roster says who mints.
	Roster Roster

	// Resets counts how often all buckets were filled up. A node that adopts a configuration
	// with a higher count fills all keys that it knows, once.
	Resets uint64
}

// Configuration returns the initial configuration. It has number 1, or 0 if c is
// Provisional.
func (c Config) Configuration() Configuration {
	number := uint64(1)
	if c.Provisional {
		number = 0
	}
	return Configuration{Number: number, Limit: c.Limit, Limits: maps.Clone(c.Limits), Roster: c.Roster}
}

// validate reports all faults of c.
func (c Configuration) validate() error {
	err := Config{Limit: c.Limit, Limits: c.Limits, Roster: c.Roster, OnSilence: Silence{Policy: Majority}}.Validate()
	if c.Number == 0 {
		err = fmt.Errorf("%w: Configuration.Number is 0: want 1 or more", ErrConfig)
	}
	return err
}

// digest is a hash that differs for two configurations with one number.
func (c Configuration) digest() uint32 {
	h := fnv.New32a()
	_, _ = fmt.Fprint(h, c.Number, c.Resets, Config{Limit: c.Limit, Limits: c.Limits, Roster: c.Roster}.fingerprint())
	return h.Sum32()
}

func (c Configuration) limit(key string) Limit {
	if l, ok := c.Limits[key]; ok {
		return l
	}
	return c.Limit
}

// A term is a configuration in force at a node.
type term struct {
	Configuration
	code uint32 // digest of the configuration
	hole bool   // the node skipped earlier configurations, and does not know this one to be complete

	weights map[string]int64 // of the roster's members
	sum     int64            // of weights
	least   int64            // smallest weight above 0
	present int64            // sum of the weights of this node and all members that are not silent
}

func newTerm(c Configuration) *term {
	t := &term{Configuration: c, code: c.digest(), weights: make(map[string]int64, len(c.Roster.Members))}
	t.Limits = maps.Clone(c.Limits)
	t.Roster.Members = slices.Clone(c.Roster.Members)
	for _, m := range t.Roster.Members {
		t.weights[m.Name] = m.Weighs()
	}
	t.sum, t.least = c.Roster.weights()
	t.present = t.sum
	return t
}

func (t *term) admits(name string) bool {
	_, ok := t.weights[name]
	return ok || t.Roster.Learners
}

// owned tells whether each key with the limit has one owner node.
func (t *term) owned(l Limit) bool {
	return len(t.Roster.Members) > 1 && part(int64(l.Burst)*micro, t.least, t.sum) < minSpread
}

// owner returns the name of a key's owner in this term; empty if the limit is spread.
func (t *term) owner(key string) string {
	if !t.owned(t.limit(key)) {
		return ""
	}
	return t.Roster.Members[t.Roster.rendezvous(key)].Name
}

// share returns a name's part of a limit, in micro-tokens and nano-tokens per second. owner
// is the key's owner, empty if the limit is spread. The caller must still lower the rate by
// the drift of clocks.
func (t *term) share(name string, l Limit, owner string) (burst, rate int64) {
	w, sum, present := t.weights[name], t.sum, t.present
	switch {
	case len(t.Roster.Members) == 0, owner == name:
		w, sum, present = 1, 1, 1
	case owner != "":
		w = 0
	}
	return part(int64(l.Burst)*micro, w, sum), part(int64(l.Rate*1e9), w, max(present, w))
}

// Losers returns the names whose part of some limit's rate or burst is smaller in to than
// in from, or that no longer own some small limit. to is complete when these names keep
// within it, as [Node.Applied] says. The order is that of from's roster.
func Losers(from, to Configuration) []string {
	a, b := newTerm(from), newTerm(to)
	keys := maps.Clone(a.Limits)
	if keys == nil {
		keys = map[string]Limit{}
	}
	maps.Copy(keys, b.Limits)
	owners := map[string][2]string{}
	for key := range keys {
		owners[key] = [2]string{a.owner(key), b.owner(key)}
	}
	less := func(name string, la, lb Limit, ownerA, ownerB string) bool {
		burstA, rateA := a.share(name, la, ownerA)
		burstB, rateB := b.share(name, lb, ownerB)
		return burstB < burstA || rateB < rateA
	}
	minting, newcomer := 0, false
	for name, w := range b.weights {
		if w > 0 {
			minting++
			newcomer = newcomer || a.weights[name] == 0
		}
	}
	ownedA, ownedB := a.owned(a.Limit), b.owned(b.Limit)
	// All keys without their own limit have Limit. If they have owners, one key that the
	// name owns stands for all.
	unnamed := func(name string) bool {
		ownerA, ownerB := "", ""
		switch {
		case a.weights[name] == 0:
			return false
		case ownedA:
			ownerA = name
		}
		if ownedB {
			ownerB = name
			if b.weights[name] == 0 || ownedA && newcomer || !ownedA && minting > 1 {
				return true // some key changes its owner
			}
		}
		return less(name, a.Limit, b.Limit, ownerA, ownerB)
	}
	var names []string
	for _, m := range from.Roster.Members {
		lost := unnamed(m.Name)
		for key, owner := range owners {
			lost = lost || less(m.Name, a.limit(key), b.limit(key), owner[0], owner[1])
		}
		if lost {
			names = append(names, m.Name)
		}
	}
	return names
}

// Nodes change configurations without messages between them, by this rule: of every limit a
// node uses its smallest share in all configurations from the last complete one to the
// newest that it has adopted. When a configuration is complete, every node whose share
// shrank keeps within it. So at every instant each node uses at most its share in the newest
// configuration that is complete anywhere. All nodes together use at most the whole limit.

// newest is the latest configuration that was adopted.
func (n *Node) newest() *term { return n.terms[len(n.terms)-1] }

// Configuration returns the newest configuration that the node has adopted.
func (n *Node) Configuration() Configuration {
	c := n.newest().Configuration
	c.Limits = maps.Clone(c.Limits)
	c.Roster.Members = slices.Clone(c.Roster.Members)
	return c
}

// Completed returns the highest number passed to [Node.Complete].
func (n *Node) Completed() uint64 { return n.told }

// Adopt puts a configuration into force. A smaller share takes effect at once: tokens above
// the new cap are lost, and pools are emptied. Loans above the cap stay out, for they may be
// spent. Their leases are not renewed, so they end after 1.011 s. A larger share takes
// effect when the configuration is complete. An older configuration, or the same again,
// changes nothing.
//
// Configurations may be skipped. The node does not know what it lost in them, so it uses
// nothing until the adopted one is complete. A configuration with more Resets fills every
// key that the node knows, once, up to the cap that the key then has. If the node skipped
// the configuration with the reset, a later limit decides that cap.
//
// The error is [ErrConfig], or another error if a different configuration has the number;
// then nothing has changed. The cost is a few microseconds for each known key.
func (n *Node) Adopt(now time.Duration, c Configuration) error {
	n.advance(now)
	last := n.newest()
	if c.Number <= last.Number && c.Number > 0 {
		for _, t := range n.terms {
			if t.Number == c.Number && t.code != c.digest() {
				n.refused.Mismatch++
				return fmt.Errorf("%w: configuration %d is another", errMismatch, c.Number)
			}
		}
		return nil
	}
	if err := c.validate(); err != nil {
		return err
	}
	n.Applied() // notes the configuration that was in force until now
	if (len(c.Roster.Members) == 0) != n.single {
		return fmt.Errorf("%w: configuration %d: %d members: who is alone stays so, and no other becomes it", ErrConfig, c.Number, len(c.Roster.Members))
	}
	t := newTerm(c)
	// A hole ends only when this configuration is complete. That the skipped ones are complete
	// is not enough: this node may have completed them itself, by applying this one.
	t.hole = c.Number > last.Number+1
	n.terms = append(n.terms, t)
	if !n.single && n.now < n.born+writeOff {
		// Loans of an earlier incarnation may be held by members of a roster that this node
		// did not ask.
		n.wait, n.unvoided = n.born+writeOff, -1
		n.remint()
	}
	n.settleTerms()
	n.reshareAll()
	n.begin(c.Resets > last.Resets && n.fillUp())
	return nil
}

// Complete says that every node whose share shrank, up to the configuration with that
// number, now keeps within it. Shares that had to wait for that grow now.
func (n *Node) Complete(now time.Duration, number uint64) {
	n.advance(now)
	if number <= n.told {
		return
	}
	n.told = number
	if n.settleTerms() {
		n.reshareAll()
		n.begin(false)
	}
}

// Applied returns the number of the highest configuration within which the node keeps; 0 is
// none yet. Two conditions make a node keep within it. For every key its own tokens and loans
// are within the smallest share in force. And no loan of an earlier incarnation can be left.
func (n *Node) Applied() uint64 {
	if n.overCapRows == 0 && (n.single || n.now >= n.wait) {
		n.applied = n.newest().Number
	}
	return n.applied
}

// settleTerms forgets configurations that are no longer in force, and tells whether a share
// may have grown.
func (n *Node) settleTerms() (grown bool) {
	for len(n.terms) > 1 && n.terms[1].Number <= n.told {
		n.terms = slices.Delete(n.terms, 0, 1)
		grown = true
	}
	for _, t := range n.terms {
		if t.hole && t.Number <= n.told {
			t.hole, grown = false, true
		}
	}
	if grown {
		n.steady = n.now
	}
	return grown
}

// An era is a time in which the same configurations were in force. An unused key has no row.
// When the key is used again, recall computes its level from one era to the next.
type era struct {
	from   time.Duration
	terms  []*term // copies from the start of the era, with no member silent
	filled bool    // the era began with a reset, and no fence has passed since
}

// mostEras bounds the eras that are remembered. A key starts with nothing before the first.
const mostEras = 16

// begin starts an era.
func (n *Node) begin(filled bool) {
	e := era{from: n.now, filled: filled}
	for _, t := range n.terms {
		was := *t
		was.present = was.sum
		e.terms = append(e.terms, &was)
	}
	n.eras = append(slices.Delete(n.eras, 0, max(0, len(n.eras)+1-mostEras)), e)
}

// recall gives a new row the level of a row that existed in all eras and was never used. The
// cost is a look at each era, while the latest era is too short to fill the bucket.
func (n *Node) recall(r *row) {
	if from := n.eras[len(n.eras)-1].from; n.now-from >= r.until(r.cap) {
		r.mintedAt = from // the latest era alone fills the bucket
		return
	}
	for i := range n.eras {
		e := &n.eras[i]
		if i > 0 {
			r.mint(e.from, n.mintAt)
		}
		if i == len(n.eras)-1 {
			n.measure(r)
		} else {
			r.share(n, e.terms)
		}
		r.mintedAt = max(r.mintedAt, e.from)
		n.trim(r)
		if more := r.cap - r.level; e.filled && more > 0 {
			r.level += more
			r.sum.Refilled = plus(r.sum.Refilled, more)
		}
	}
}

// reshareAll applies a change of terms to all peers and rows. The order is fixed, so that a
// run can be repeated.
func (n *Node) reshareAll() {
	n.membershipVersion++
	n.termsTill = n.now + writeOff
	for _, p := range n.slots {
		if p == nil || p.gone {
			continue
		}
		p.share = n.newest().weights[p.id.Name]
		switch {
		case n.admits(p.id.Name):
			p.leaving, p.detached = never, false
		case p.leaving == never:
			p.leaving = n.now
			n.watch()
		}
	}
	n.lookSilent()
	n.eachRow(n.reshare)
}

// eachRow calls f for all rows, in the order of their names.
func (n *Node) eachRow(f func(*row)) {
	for _, name := range slices.Sorted(maps.Keys(n.rows)) {
		f(n.rows[name])
	}
}

// reshare gives a row its share anew.
func (n *Node) reshare(r *row) {
	r.update(n.now, n.mintAt)
	r.reclaim()
	owner, here := r.owner, r.here
	n.measure(r)
	if r.owner != owner || r.here != here {
		// The key needs other peers now.
		r.granted, r.drawing = 0, false
		for _, e := range r.entries {
			if e != nil && e.need != 0 {
				e.need, e.dirty = 0, true
			}
		}
	}
	r.want = min(r.want, r.burst)
	n.trim(r)
	n.pin(r)
	n.stir(r)
}

// measure gives a row its present limit and share.
func (n *Node) measure(r *row) { r.share(n, n.terms) }

// share gives a row the smallest limit and the smallest share in all terms.
func (r *row) share(n *Node, terms []*term) {
	t := terms[len(terms)-1]
	r.owner = t.owner(r.name)
	r.here = r.owner != "" && r.owner == n.self.Name
	burst, rate, most := int64(maxBurst)*micro, math.Inf(1), int64(maxBurst)*micro
	nanos := int64(maxValue)
	for i, t := range terms {
		owner := r.owner
		if i < len(terms)-1 {
			owner = t.owner(r.name)
		}
		l := t.limit(r.name)
		c, m := t.share(n.self.Name, l, owner)
		if t.hole {
			c, m = 0, 0
		}
		most, nanos = min(most, c), min(nanos, m)
		burst, rate = min(burst, int64(l.Burst)*micro), min(rate, l.Rate)
	}
	r.burst, r.cap = burst, most
	if n.single {
		r.rate = uint64(nanos)
	} else {
		// Every clock may be off by drift. Even the fastest clock must not mint more than the
		// rate.
		r.rate = uint64(part(nanos, 1e6, 1e6+drift))
	}
	r.full = rate * micro
	tokens := float64(burst / micro)
	r.pace = max(time.Duration(min(tokens/(10*rate)*1e9, float64(maxPace))), minPace)
	r.fill = time.Duration(min(tokens/rate, 3600) * 1e9)
	r.ahead = max(minWindow, 2*r.pace).Seconds()
}

// trim drops own tokens that do not fit into the cap beside the loans, or all behind a fence.
// The row's pool is empty.
func (n *Node) trim(r *row) {
	room := max(0, r.cap-r.lent)
	if n.fenced {
		room = 0
	}
	if lost := r.level - room; lost > 0 {
		r.level = room
		r.sum.Trimmed = plus(r.sum.Trimmed, lost)
		r.granted = min(r.granted, r.level)
	}
}

// pin notes whether a row has lent more than its cap. If so, the leases of its borrowers
// are not renewed.
func (n *Node) pin(r *row) {
	over := r.lent > r.cap
	if over == r.overCap {
		return
	}
	r.overCap = over
	if over {
		n.overCapRows++
	} else {
		n.overCapRows--
	}
	for _, e := range r.entries {
		if e != nil {
			e.pin(over && e.lent.open() > 0)
		}
	}
}

// fillUp fills all rows up to their caps. It returns false, and does nothing, if the node
// may not mint.
func (n *Node) fillUp() bool {
	if n.fenced || n.now < n.mintAt {
		return false
	}
	n.steady = n.now
	n.eachRow(func(r *row) {
		if more := r.cap - r.lent - r.level; more > 0 {
			r.level += more
			r.sum.Refilled = plus(r.sum.Refilled, more)
			n.ripen(r)
		}
	})
	return true
}

// Mint sets a fence at a time of the node's own clock. Before it the node works as usual.
// From then on its own tokens are void, also those in pools, and it mints nothing, lends
// nothing and renews no lease. Its loans stay out, and it may spend borrowed tokens. The
// largest Duration, the default, is no fence.
//
// A later fence, set in time, only replaces the earlier one. If the earlier fence has
// passed, minting begins anew with nothing, from now. While the process or its machine is
// paused, the node does not see the fence pass: each pool may keep its tokens, at most 64
// and at most a quarter of the cap.
func (n *Node) Mint(until time.Duration) {
	n.fence = until
	switch {
	case until <= n.now:
		n.passFence()
	case n.fenced:
		n.fenced, n.lifted, n.steady = false, n.now, n.now
		n.remint()
	}
}
