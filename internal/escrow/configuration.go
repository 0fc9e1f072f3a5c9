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

// A Configuration is what a fleet has decided: the limits and who mints how much of
// them. A fleet begins with one, [Config.Configuration], and each change is a whole new
// one. Who decides, and how, is not the limiter's business; it is told with
// [Node.Adopt] and [Node.Complete].
type Configuration struct {
	// Number is 1 for the initial configuration, and one more with each change. Two
	// configurations of one number are a mistake that is refused.
	Number uint64

	// Limit and Limits are those of [Config]. A key that Limits names no more has
	// Limit.
	Limit  Limit
	Limits map[string]Limit

	// Roster says who mints.
	Roster Roster

	// Resets is how often all buckets were filled up. A node that adopts a configuration
	// with more than it has seen fills all that it knows, once.
	Resets uint64
}

// Configuration is the initial one, of number 1; or of number 0 if c is Provisional.
func (c Config) Configuration() Configuration {
	number := uint64(1)
	if c.Provisional {
		number = 0
	}
	return Configuration{Number: number, Limit: c.Limit, Limits: maps.Clone(c.Limits), Roster: c.Roster}
}

// validate reports everything that is wrong with c.
func (c Configuration) validate() error {
	err := Config{Limit: c.Limit, Limits: c.Limits, Roster: c.Roster, OnSilence: Silence{Policy: Majority}}.Validate()
	if c.Number == 0 {
		err = fmt.Errorf("%w: Configuration.Number is 0: want 1 or more", ErrConfig)
	}
	return err
}

// digest tells two configurations of one number apart.
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

// A term is a configuration at a node, while it counts.
type term struct {
	Configuration
	code uint32 // its digest
	hole bool   // configurations before it were skipped, and it is not known to be complete

	weights map[string]int64 // of its roster's members
	sum     int64
	least   int64 // weight that is a share at all
	present int64 // sum of the weights of this node and of all that are not silent
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

// owned tells whether keys with that limit live on one node each.
func (t *term) owned(l Limit) bool {
	return len(t.Roster.Members) > 1 && part(int64(l.Burst)*micro, t.least, t.sum) < minSpread
}

// owner is where a key lives in this term; empty if it is spread.
func (t *term) owner(key string) string {
	if !t.owned(t.limit(key)) {
		return ""
	}
	return t.Roster.Members[t.Roster.rendezvous(key)].Name
}

// share is what a name has of a limit, in micro-tokens and nano-tokens per second,
// if the key is spread, or if that is its owner. The rate is still to be lowered by
// what clocks may be off.
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

// Losers are the names that have less of some limit in to than in from, of its
// rate or of its burst, or from which some small limit's owner moves away. Only
// these must keep within to, as [Node.Applied] says, before it is complete. In the
// order of from's roster.
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
	// All keys that have no limit of their own have Limit. Where they live at owners,
	// one that is the name's stands for all.
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
				return true // the owner of some key is another
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

// The rule by which nodes change configurations without telling each other: of every
// limit a node uses the smallest share that it has in any configuration from the last
// complete one to the newest it has adopted. When a configuration is complete, everybody
// who had more before keeps within it. So at every instant each uses no more than
// it has in the newest configuration that is complete anywhere, and all together no more
// than the whole.

// newest is the latest configuration that was adopted.
func (n *Node) newest() *term { return n.terms[len(n.terms)-1] }

// Configuration is the newest that the node has adopted.
func (n *Node) Configuration() Configuration {
	c := n.newest().Configuration
	c.Limits = maps.Clone(c.Limits)
	c.Roster.Members = slices.Clone(c.Roster.Members)
	return c
}

// Completed is the highest number that the node was told to be complete.
func (n *Node) Completed() uint64 { return n.told }

// Adopt takes in a configuration. What shrinks does so at once: tokens above the new cap
// are lost, a pool is emptied. What is lent above it stays lent, for it may be
// spent; its leases are not renewed, so that it is over after 1.011 s. What grows
// does when the configuration is complete. An older configuration, or the same again, changes
// nothing.
//
// Configurations may be skipped. Of those the node does not know what it lost, so it uses
// nothing until the one that it adopted is complete. A configuration with more Resets
// fills every key that the node knows, once, up to the cap that it then has. If the reset was
// skipped, a later limit decides that cap.
//
// The error is [ErrConfig], or another one if another configuration has that number;
// then nothing has changed. It costs a few microseconds for each key that is known.
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
	n.Applied() // of what was until now
	if (len(c.Roster.Members) == 0) != n.alone {
		return fmt.Errorf("%w: configuration %d: %d members: who is alone stays so, and no other becomes it", ErrConfig, c.Number, len(c.Roster.Members))
	}
	t := newTerm(c)
	// That the skipped ones are complete would not close the hole: by applying this
	// one the node may have completed them itself.
	t.hole = c.Number > last.Number+1
	n.terms = append(n.terms, t)
	if !n.alone && n.now < n.born+writeOff {
		// Who may hold loans of an earlier incarnation is in a roster that was not asked.
		n.wait, n.unsure = n.born+writeOff, -1
		n.remint()
	}
	n.settleTerms()
	n.reshareAll()
	n.begin(c.Resets > last.Resets && n.fillUp())
	return nil
}

// Complete says that everybody whose share shrank up to the configuration of that number
// keeps within it, in this order: what had to wait grows now.
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

// Applied is the highest configuration within which the node keeps: of every key its own
// tokens and what it has lent are no more than the smallest share that counts, and
// no earlier incarnation of it has lent anything. 0 is none yet.
func (n *Node) Applied() uint64 {
	if n.overs == 0 && (n.alone || n.now >= n.wait) {
		n.applied = n.newest().Number
	}
	return n.applied
}

// settleTerms forgets configurations that do not count any more, and tells whether
// something may have grown.
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

// An era is a time in which the same configurations counted. A key that is not used has no row.
// When it is used again, its level is worked out from one era to the next: see recall.
type era struct {
	from   time.Duration
	terms  []*term // as they were, and nobody silent
	filled bool    // it began with a reset, and no fence has passed since
}

// mostEras bounds how many are remembered. Before the first of them a key had nothing.
const mostEras = 16

// begin is the beginning of an era.
func (n *Node) begin(filled bool) {
	e := era{from: n.now, filled: filled}
	for _, t := range n.terms {
		was := *t
		was.present = was.sum
		e.terms = append(e.terms, &was)
	}
	n.eras = append(slices.Delete(n.eras, 0, max(0, len(n.eras)+1-mostEras)), e)
}

// recall gives a new row what it would have, had it been there in all eras, without being used.
// It costs a look at each era while the latest one is too short to fill the bucket.
func (n *Node) recall(r *row) {
	if from := n.eras[len(n.eras)-1].from; n.now-from >= r.until(r.cap) {
		r.mintedAt = from // it is full, whatever was before
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

// reshareAll does what a change of terms does to all rows and peers. In order, so
// that a run can be repeated.
func (n *Node) reshareAll() {
	n.rosters++
	n.termsTill = n.now + writeOff
	for _, p := range n.slots {
		if p == nil || p.gone {
			continue
		}
		p.share = n.newest().weights[p.id.Name]
		switch {
		case n.admits(p.id.Name):
			p.leaving, p.parted = never, false
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
		// Others are needed now.
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

// measure gives a row its limit and its share of now.
func (n *Node) measure(r *row) { r.share(n, n.terms) }

// share gives a row its limit and its share: of each the smallest in all terms.
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
	if n.alone {
		r.rate = uint64(nanos)
	} else {
		// Every clock may be off by drift: what is minted by the fastest of them is
		// still no more than the rate.
		r.rate = uint64(part(nanos, 1e6, 1e6+drift))
	}
	r.full = rate * micro
	tokens := float64(burst / micro)
	r.pace = max(time.Duration(min(tokens/(10*rate)*1e9, float64(maxPace))), minPace)
	r.fill = time.Duration(min(tokens/rate, 3600) * 1e9)
	r.ahead = max(minWindow, 2*r.pace).Seconds()
}

// trim takes from the level what is above the cap. The row's pool is empty.
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

// pin notes whether a row has more out than its cap. Then the leases of who has it
// are not renewed.
func (n *Node) pin(r *row) {
	over := r.lent > r.cap
	if over == r.over {
		return
	}
	r.over = over
	if over {
		n.overs++
	} else {
		n.overs--
	}
	for _, e := range r.entries {
		if e != nil {
			e.pin(over && e.lent.open() > 0)
		}
	}
}

// fillUp fills all rows up to their caps, and tells whether it may.
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

// Mint is a fence: until then, on the node's own clock, it mints and spends as
// ever; from then on its own tokens are void, also those in pools, it mints
// nothing, lends nothing and renews no lease. What it has lent stays out, and what
// it has borrowed may be spent. The largest Duration is no fence, and the default.
//
// A later fence that comes in time changes nothing else; after a fence has passed
// minting begins anew with nothing, from now. Time that passes unseen, while the
// process or its machine stands still, may leave in each pool what it had: at
// most 64 tokens and a quarter of the cap.
func (n *Node) Mint(until time.Duration) {
	n.fence = until
	switch {
	case until <= n.now:
		n.enclose()
	case n.fenced:
		n.fenced, n.lifted, n.steady = false, n.now, n.now
		n.remint()
	}
}
