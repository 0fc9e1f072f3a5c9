// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// A Node is the books of one incarnation of one process: for each key its own tokens,
// what it has lent and borrowed, and what it and others need. It has no
// goroutine, timer or clock, and is not safe for concurrent use: a [Set] is.
//
// Its methods take now, from one monotonic clock, the same that the contacts of
// [Node.Merge] speak of. Time only moves forward: a now that is behind an earlier
// one mints nothing and is taken for that earlier one.
type Node struct {
	cfg    Config
	self   crdt.Replica
	config uint32
	alone  bool

	now      time.Duration
	born     time.Duration
	mintAt   time.Duration // nothing is minted before: the later of the two that follow, never while fenced
	wait     time.Duration // for what an earlier incarnation has lent
	lifted   time.Duration // when the last fence that had passed was lifted
	vouchers []bool        // by roster index: has voided what it had from an earlier incarnation
	unsure   int           // how many have not

	terms     []*term // from the last complete one to the newest; never empty
	told      uint64  // complete
	applied   uint64
	overs     int           // rows with more out than their cap
	eras      []era         // the latest last; never empty
	steady    time.Duration // since when a row differs from one that is made anew by what it minted only
	fence     time.Duration
	fenced    bool            // the fence has passed
	silent    map[string]bool // whose share of the rate is taken over
	silentAt  time.Duration   // when somebody else may be silent
	refused   Refused
	hasJoined bool // see joined

	termsTill time.Duration     // until then loans of a configuration that is over may still come
	breaches  map[string]uint64 // see Stats.Broke
	named     int               // rows that are there because a peer named them, and nobody here

	rows  map[string]*row
	queue []*row // a heap by next
	ripe  []*row // may have tokens for their waiters

	peers  map[string]*peer // by name, the latest incarnation
	slots  []*peer          // nil is free
	dying  []*peer
	buried map[string]burial

	changes uint64 // over all peers; only rises
	rosters uint64 // how often it changed who is admitted
	series  uint64
	sweepAt time.Duration
	pruneAt time.Duration
	read    []*row // of the packet that is being merged
	rand    *rand.Rand
}

// A burial is the end of an incarnation.
type burial struct {
	incarnation uint64
	at          time.Duration
}

// NewNode is the node of an incarnation that begins now. cfg must be valid. A node that
// is in a roster with others mints nothing until all of them have written to this
// incarnation, and so have voided what they had from an earlier one, or until whatever an
// earlier incarnation lent has ended on its own, which takes 1.011 s (always, with learners);
// or each restart would add its share of the burst to the fleet's.
func NewNode(self crdt.Replica, cfg Config, now time.Duration) (*Node, error) {
	err := cfg.Validate()
	if self.Name == "" {
		err = errors.Join(err, fmt.Errorf("%w: self: %v has no name", ErrConfig, self))
	}
	if len(cfg.Roster.Members) > 0 && cfg.Fleet == "" && !cfg.Roster.admits(self.Name) {
		err = errors.Join(err, fmt.Errorf("%w: self: %q is not in the roster, which has no learners", ErrConfig, self.Name))
	}
	if err != nil {
		return nil, err
	}
	cfg = cfg.WithDefaults()
	n := &Node{
		cfg: cfg, self: self, config: cfg.fingerprint(), now: now,
		alone: len(cfg.Roster.Members) == 0,
		rows:  map[string]*row{}, peers: map[string]*peer{}, buried: map[string]burial{},
		terms: []*term{newTerm(cfg.Configuration())}, told: cfg.Configuration().Number,
		born: now, wait: now, fence: never,
		sweepAt: never, silentAt: never,
		rand: rand.New(rand.NewPCG(self.Incarnation, mix(uint64(cfg.fingerprint()))^seedOf(self.Name))),
	}
	if !n.alone {
		n.wait = now + writeOff
		n.vouchers = make([]bool, len(cfg.Roster.Members))
		n.unsure = len(n.vouchers)
		if cfg.Fleet != "" || cfg.Roster.Learners {
			n.unsure = -1
		}
		n.vouched(cfg.Roster.index(self.Name))
	}
	n.remint()
	n.lookSilent()
	n.begin(false)
	return n, nil
}

// vouched notes that a member holds nothing of an earlier incarnation of this node.
func (n *Node) vouched(index int) {
	if index < 0 || n.unsure <= 0 || n.vouchers[index] {
		return
	}
	n.vouchers[index] = true
	if n.unsure--; n.unsure == 0 {
		n.wait = min(n.wait, n.now)
		n.remint()
	}
}

// remint says from when on to mint.
func (n *Node) remint() {
	n.mintAt = max(n.wait, n.lifted)
	if n.fenced {
		n.mintAt = never
	}
}

// admits tells whether a name may take part.
func (n *Node) admits(name string) bool {
	for _, t := range n.terms {
		if t.admits(name) {
			return true
		}
	}
	return false
}

// Config is what the node was made with, defaults filled in.
func (n *Node) Config() Config { return n.cfg }

// Self is the node's incarnation.
func (n *Node) Self() crdt.Replica { return n.self }

// advance moves time forward, and never back.
func (n *Node) advance(now time.Duration) {
	n.now = max(n.now, now)
	if n.now >= n.fence && !n.fenced {
		n.enclose()
	}
}

// enclose voids all own tokens: the fence has passed.
func (n *Node) enclose() {
	n.joined()
	n.fenced = true
	for i := range n.eras {
		n.eras[i].filled = false
	}
	n.eachRow(func(r *row) {
		r.update(n.now, n.mintAt)
		r.reclaim()
		n.trim(r)
	})
	n.remint()
}

// row is the key's books, opened if need be; nil if there is no room.
func (n *Node) row(key string) *row {
	if r := n.rows[key]; r != nil {
		r.own()
		return r
	}
	if n.alone {
		n.evictSome()
	}
	if len(n.rows) >= n.cfg.MaxKeys {
		return nil
	}
	return n.addRow(key)
}

// addRow opens a key's books; nil if the key is none.
func (n *Node) addRow(key string) *row {
	if !validKey(key) {
		return nil
	}
	r := newRow(n, key)
	n.rows[key] = r
	if !n.alone {
		n.schedule(r, n.now)
	}
	return r
}

// Take admits tokens of a key, all or none, and tells whether it did. A denial
// counts as demand.
func (n *Node) Take(now time.Duration, key string, tokens int) bool {
	n.advance(now)
	r := n.row(key)
	return tokens <= 0 || r != nil && n.take(r, amountOf(tokens))
}

func (n *Node) take(r *row, amount int64) bool {
	r.forecast.asked += amount
	if n.draw(r, amount) {
		n.stir(r)
		return true
	}
	r.sum.Denied = plus(r.sum.Denied, amount)
	if amount > micro {
		// It will be asked for again, and what is gathered must not go back before.
		r.begins(n.now)
		r.want, r.wantUntil = max(r.want, min(amount, r.burst)), n.now+patience
	} else {
		r.lost += amount
	}
	n.stir(r)
	return false
}

// amountOf is tokens in micro-tokens. More than any burst is one more than that.
func amountOf(tokens int) int64 { return int64(min(max(tokens, 0), maxBurst+1)) * micro }

// patience is for how long tokens are gathered for somebody who was denied and
// may ask again.
const patience = 200 * time.Millisecond

// poll is take for somebody who will ask again until it is admitted: to ask
// twice is not twice the demand.
func (n *Node) poll(r *row, amount int64) bool {
	if n.draw(r, amount) {
		if r.want < amount {
			r.forecast.asked += amount
		}
		r.want = max(0, r.want-amount)
		n.stir(r)
		return true
	}
	r.sum.Denied = plus(r.sum.Denied, amount)
	if r.want < amount {
		r.begins(n.now)
		r.forecast.asked += amount
		r.want = amount
	}
	r.wantUntil = n.now + patience
	n.stir(r)
	return false
}

// Demand says that tokens of a key are waited for from now on, until they are
// served or withdrawn; it tells whether the key is known, and if not there is
// nothing to wait for.
func (n *Node) Demand(now time.Duration, key string, tokens int) bool {
	n.advance(now)
	r := n.row(key)
	if r == nil {
		return false
	}
	n.demand(r, amountOf(tokens))
	return true
}

func (n *Node) demand(r *row, amount int64) {
	r.begins(n.now)
	r.forecast.asked += amount
	if r.waiting == 0 {
		r.head = amount
	}
	r.waiting += amount
	n.stir(r)
}

// Serve admits tokens that are waited for since [Node.Demand], all or none.
func (n *Node) Serve(now time.Duration, key string, tokens int) bool {
	n.advance(now)
	r := n.rows[key]
	return r != nil && n.serve(r, amountOf(tokens))
}

func (n *Node) serve(r *row, amount int64) bool {
	if !n.draw(r, amount) {
		r.head = amount
		n.stir(r)
		return false
	}
	r.waiting = max(0, r.waiting-amount)
	return true
}

// Withdraw says that tokens are not waited for any more.
func (n *Node) Withdraw(now time.Duration, key string, tokens int) {
	n.advance(now)
	if r := n.rows[key]; r != nil {
		r.waiting = max(0, r.waiting-amountOf(tokens))
	}
}

// draw spends tokens if they are all there.
func (n *Node) draw(r *row, amount int64) bool {
	r.mint(n.now, n.mintAt)
	if r.spendable() < amount {
		r.reclaim()
	}
	if r.held > 0 {
		n.expire(r)
	}
	if r.spendable() < amount {
		return n.admitOpen(r, amount)
	}
	r.spend(amount)
	r.spentAt = n.now
	return true
}

// admitOpen takes from a bucket of the node's own what is not there, before the
// node may mint for the first time.
func (n *Node) admitOpen(r *row, amount int64) bool {
	if n.cfg.UntilJoined != Open || n.joined() {
		return false
	}
	t := n.newest()
	burst, rate := t.share(n.self.Name, t.limit(r.name), r.owner)
	if !r.opened {
		r.opened, r.openAt, r.open = true, n.now, burst
	}
	r.open = min(burst, r.open+int64(min(float64(rate)/1e3*(n.now-r.openAt).Seconds(), float64(burst))))
	r.openAt = n.now
	if r.open < amount {
		return false
	}
	r.open -= amount
	r.sum.Open = plus(r.sum.Open, amount)
	return true
}

// joined tells whether the node may mint, or could once.
func (n *Node) joined() bool {
	n.hasJoined = n.hasJoined || n.now >= n.mintAt
	return n.hasJoined
}

// after is d later than now, and never at the latest.
func after(now, d time.Duration) time.Duration {
	if d > never-now {
		return never
	}
	return now + d
}

// stir makes sure that the row's next step comes in time: now, if it rested.
func (n *Node) stir(r *row) {
	if n.alone {
		if r.waiting > 0 {
			n.schedule(r, after(n.now, r.until(min(r.head, r.cap))))
		}
		return
	}
	if at := max(r.last+r.pace, n.now); at < r.next {
		n.schedule(r, at)
	}
}

// Tick does what is due, and returns when it wants to be called next; never is
// the largest Duration. It may be called at any time, and [Node.Wake] asked after
// any call.
func (n *Node) Tick(now time.Duration) (next time.Duration) {
	n.advance(now)
	if n.now >= n.sweepAt {
		n.sweep()
	}
	if n.now >= n.silentAt && n.lookSilent() {
		n.eachRow(n.reshare)
	}
	for len(n.queue) > 0 && n.queue[0].next <= n.now {
		n.step(n.queue[0])
	}
	return n.Wake()
}

// Wake is when the node wants its next [Node.Tick].
func (n *Node) Wake() time.Duration {
	at := min(n.sweepAt, n.silentAt)
	if !n.fenced {
		at = min(at, n.fence)
	}
	if len(n.queue) > 0 {
		at = min(at, n.queue[0].next)
	}
	return at
}

// A View is what one node knows of a key at an instant. It is for people and
// metrics: what remains of the fleet's tokens nobody knows.
type View struct {
	Level   int64 // own tokens, in micro-tokens as everything here
	Cap     int64 // this node's part of the burst
	Lent    int64 // given to others and not accounted for
	Held    int64 // borrowed and not spent
	Waiting int64
	Owner   string // where a small limit lives; empty if it is spread
	Sums    Sums
}

// View looks at a key; ok says whether the node knows it.
func (n *Node) View(now time.Duration, key string) (v View, ok bool) {
	n.advance(now)
	r := n.rows[key]
	if r == nil {
		return v, false
	}
	r.update(n.now, n.mintAt)
	return View{Level: r.level, Cap: r.cap, Lent: r.lent, Held: r.held, Waiting: r.waiting, Owner: r.owner, Sums: r.sum}, true
}

// Keys is how many keys the node knows.
func (n *Node) Keys() int { return len(n.rows) }
