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

// A Node is the state of one incarnation of one process: for each key its own tokens,
// its loans in both directions, and the needs of itself and its peers. It has no
// goroutine, timer or clock, and is not safe for concurrent use: a [Set] is.
//
// Its methods take now, from one monotonic clock. The contacts of [Node.Merge] use the
// same clock. Time only moves forward: a now before an earlier one counts as the earlier
// one, and mints nothing.
type Node struct {
	cfg    Config
	self   crdt.Replica
	config uint32 // fingerprint of cfg
	single bool   // without peers: the initial roster is empty

	now      time.Duration
	born     time.Duration
	mintAt   time.Duration // start of minting: the later of wait and lifted; never while fenced
	wait     time.Duration // when no loan of an earlier incarnation can be left
	lifted   time.Duration // when the latest passed fence was lifted
	voided   []bool        // by roster index: the member has voided an earlier incarnation's loans
	unvoided int           // members without a voucher; -1 if vouchers do not count

	terms       []*term         // from the last complete configuration to the newest; never empty
	told        uint64          // number of the last complete configuration, see Complete
	applied     uint64          // see Applied
	overCapRows int             // rows that have lent more than their cap
	eras        []era           // the latest last; never empty
	steady      time.Duration   // since then a row differs from a new row by minting only
	fence       time.Duration   // see Mint; never is no fence
	fenced      bool            // the fence has passed
	silent      map[string]bool // members whose share of the rate is taken over
	silentAt    time.Duration   // when another member may become silent
	refused     Refused
	hasJoined   bool // see joined

	termsTill time.Duration     // until then loans of a past configuration may still arrive
	breaches  map[string]uint64 // see Stats.Broke
	named     int               // rows that exist only because a peer named them

	rows  map[string]*row // by key
	queue []*row          // a heap by row.next
	ripe  []*row          // rows that may have tokens for their waiters

	peers  map[string]*peer            // by name, the latest incarnation
	slots  []*peer                     // nil is free
	ending []*peer                     // incarnations that are over and still have loans
	ended  map[string]endedIncarnation // by name, the latest incarnation that is over
	cameAt map[string]time.Duration    // by member, with TakeOver: when its latest packet came, plus the contact's Rest

	changes           uint64 // counts changes over all peers; only rises
	membershipVersion uint64 // counts changes of who is admitted, and of this node's incarnation
	series            uint64 // the latest number of a series of loans
	sweepAt           time.Duration
	pruneAt           time.Duration
	read              []*row // scratch: rows of the packet that Merge reads
	rand              *rand.Rand
}

// An endedIncarnation records an incarnation that is over.
type endedIncarnation struct {
	incarnation uint64
	at          time.Duration
}

// NewNode makes the node of an incarnation that begins now. cfg must be valid.
//
// In a roster with others the node does not mint at once: otherwise each restart would add
// its share of the burst to the fleet's. It waits until every member has written to this
// incarnation, and so has voided loans from an earlier one. It waits 1.011 s at most: then
// those loans have ended on their own. With Config.Fleet or learners it always waits 1.011 s.
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
		single: len(cfg.Roster.Members) == 0,
		rows:   map[string]*row{}, peers: map[string]*peer{}, ended: map[string]endedIncarnation{},
		terms: []*term{newTerm(cfg.Configuration())}, told: cfg.Configuration().Number,
		born: now, wait: now, fence: never,
		sweepAt: never, silentAt: never, cameAt: map[string]time.Duration{},
		rand: rand.New(rand.NewPCG(self.Incarnation, mix(uint64(cfg.fingerprint()))^seedOf(self.Name))),
	}
	if !n.single {
		n.wait = now + writeOff
		n.voided = make([]bool, len(cfg.Roster.Members))
		n.unvoided = len(n.voided)
		if cfg.Fleet != "" || cfg.Roster.Learners {
			n.unvoided = -1
		}
		n.memberVoided(cfg.Roster.index(self.Name))
	}
	n.remint()
	n.lookSilent()
	n.begin(false)
	return n, nil
}

// memberVoided notes that a member holds no loans of an earlier incarnation of this node.
func (n *Node) memberVoided(index int) {
	if index < 0 || n.unvoided <= 0 || n.voided[index] {
		return
	}
	n.voided[index] = true
	if n.unvoided--; n.unvoided == 0 {
		n.wait = min(n.wait, n.now)
		n.remint()
	}
}

// remint finds mintAt anew.
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

// Config returns the node's first configuration, with defaults filled in.
func (n *Node) Config() Config { return n.cfg }

// Self is the node's incarnation.
func (n *Node) Self() crdt.Replica { return n.self }

// advance moves time forward, and never back.
func (n *Node) advance(now time.Duration) {
	n.now = max(n.now, now)
	if n.now >= n.fence && !n.fenced {
		n.passFence()
	}
}

// passFence voids all own tokens, since the fence has passed.
func (n *Node) passFence() {
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

// row returns the key's row, and makes it if there is none; nil if there is no room.
func (n *Node) row(key string) *row {
	if r := n.rows[key]; r != nil {
		r.own()
		return r
	}
	if n.single {
		n.evictSome()
	}
	if len(n.rows) >= n.cfg.MaxKeys {
		return nil
	}
	return n.addRow(key)
}

// addRow makes a row for a key; nil if the key is not valid.
func (n *Node) addRow(key string) *row {
	if !validKey(key) {
		return nil
	}
	r := newRow(n, key)
	n.rows[key] = r
	if !n.single {
		n.schedule(r, n.now)
	}
	return r
}

// Take admits all or none of the tokens of a key, and tells whether it admitted them. A
// denial counts as demand.
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
		// The caller may ask again. Until then gathered tokens must not go back.
		r.begins(n.now)
		r.want, r.wantUntil = max(r.want, min(amount, r.burst)), n.now+patience
	} else {
		r.lost += amount
	}
	n.stir(r)
	return false
}

// amountOf converts tokens to micro-tokens. Above maxBurst it returns maxBurst + 1 tokens.
func amountOf(tokens int) int64 { return int64(min(max(tokens, 0), maxBurst+1)) * micro }

// patience is how long the node gathers tokens for a denied caller who may ask again.
const patience = 200 * time.Millisecond

// poll is take for a caller who asks again until it is admitted. Asking twice does not
// count as twice the demand.
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

// Demand adds a waiter for tokens of a key. It waits until [Node.Serve] or
// [Node.Withdraw]. Demand returns false if there is no room for the key: then nothing
// waits.
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

// Serve admits all or none of the tokens of a waiter that [Node.Demand] added.
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

// Withdraw takes out a waiter that [Node.Demand] added.
func (n *Node) Withdraw(now time.Duration, key string, tokens int) {
	n.advance(now)
	if r := n.rows[key]; r != nil {
		r.waiting = max(0, r.waiting-amountOf(tokens))
	}
}

// draw spends an amount if the row has all of it.
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

// admitOpen admits from the node's fail-open bucket, before the node may mint for the
// first time.
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

// joined tells whether the node may mint, or could mint at some time before.
func (n *Node) joined() bool {
	n.hasJoined = n.hasJoined || n.now >= n.mintAt
	return n.hasJoined
}

// after returns now + d, at most never.
func after(now, d time.Duration) time.Duration {
	if d > never-now {
		return never
	}
	return now + d
}

// stir schedules the row's next step: now, if the row rested for longer than its pace.
func (n *Node) stir(r *row) {
	if n.single {
		if r.waiting > 0 {
			n.schedule(r, after(n.now, r.until(min(r.head, r.cap))))
		}
		return
	}
	if at := max(r.last+r.pace, n.now); at < r.next {
		n.schedule(r, at)
	}
}

// Tick runs the steps that are due, and returns when it wants to be called next. The
// largest Duration means never. Tick may be called at any time.
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

// Wake returns when the node wants its next [Node.Tick]. Any other call may change it.
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

// A View is the state of a key at one node, for people and metrics. No node knows how many
// tokens are left in the whole fleet. Amounts are micro-tokens.
type View struct {
	Level   int64  // own tokens
	Cap     int64  // this node's part of the burst
	Lent    int64  // lent, not yet reported as used or returned
	Held    int64  // borrowed and not spent
	Waiting int64  // sum of the amounts of all waiters
	Owner   string // name of a small limit's owner; empty if the limit is spread
	Sums    Sums
}

// View returns the state of a key; ok is false if the node does not know the key.
func (n *Node) View(now time.Duration, key string) (v View, ok bool) {
	n.advance(now)
	r := n.rows[key]
	if r == nil {
		return v, false
	}
	r.update(n.now, n.mintAt)
	return View{Level: r.level, Cap: r.cap, Lent: r.lent, Held: r.held, Waiting: r.waiting, Owner: r.owner, Sums: r.sum}, true
}

// Keys returns how many keys the node knows.
func (n *Node) Keys() int { return len(n.rows) }
