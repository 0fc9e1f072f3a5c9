// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

// pooledSilent is after which silence a peer is assumed to use its part of the rate:
// three keep-alives.
const pooledSilent = 150 * time.Millisecond

// pooledLearner is after which silence that ends for a learner, which nobody can evict. The
// value is that of breaker.FleetConfig.Keep: a cut that lasts longer is rare.
const pooledLearner = 10 * time.Minute

// pooled is the limits of one process in the optimistic strategy: every process has
// the whole bucket, and takes from it what all of them say that they have used. What
// each has used is a grow-only counter with one writer (Shapiro et al., Conflict-free
// replicated data types, 2011), so packets may be lost, repeated and overtake each
// other. [Pooled] says what it does not promise.
//
// While others are denied and less than half of the bucket is there, a process keeps
// to 98 % of its max-min fair part, by what each was asked for lately. Else the one
// whose clock is fastest would have it all.
//
// It runs no goroutine, and is safe for concurrent use. A decision takes a lock and
// reads the clock.
type pooled struct {
	cfg    Config
	config uint32
	clock  func() time.Duration

	mu      sync.Mutex
	self    crdt.Replica
	over    bool
	closed  chan struct{} // closed with over
	now     time.Duration
	rows    map[string]*pooledRow
	changes crdt.Changes[*pooledRow]
	series  uint64
	peers   map[string]*pooledPeer // by name, the latest incarnation
	present float64                // the part of the fleet that is heard, this process included
	demands []float64              // scratch
	lookAt  time.Duration          // when it is counted again
	fence   time.Duration          // nothing is admitted from then on
	resets  uint64                 // of the configuration in force
	pruneAt time.Duration
	changed func()
}

// A pooledPeer is what is known of one incarnation of another process.
type pooledPeer struct {
	incarnation uint64
	heard       time.Duration
	out         bool // the roster has its name no more: nothing is assumed of it when it is silent
	used        map[string]*pooledUse
}

// A pooledUse is what a peer has used of one key.
type pooledUse struct {
	series   uint64
	used     int64 // micro-tokens of the series, as heard
	asked    int64
	at       time.Duration
	rate     float64       // that was asked for lately, micro-tokens per second
	starving time.Duration // until then it counts as being denied
}

// A pooledHandle is the handle of one key of a pooled. It is safe for
// concurrent use.
type pooledHandle struct {
	set *pooled
	key string
	row *pooledRow // guarded by set.mu; of an earlier incarnation of the key, or nil, until it is used
}

// A pooledRow is one key's books. Amounts are micro-tokens.
type pooledRow struct {
	key    string
	rate   float64 // per second
	burst  int64
	level  float64 // below zero is debt, down to -burst
	at     time.Duration
	series uint64 // of used: a key that was forgotten begins anew
	used   int64  // by this process, what was given back included
	out    int64  // of it, that may be given back
	credit int64  // given back: it is admitted once more, and not told again
	asked  int64  // of it, denied or not
	usedAt time.Duration
	change crdt.Change[*pooledRow]
	dead   bool // forgotten

	turn     chan struct{} // of the waiter that is next; who waits queues for it
	waiting  int
	deniedAt time.Duration
	toldAt   time.Duration // that it is denied

	fair     float64 // this process's part while others are denied, per second; 0 is no part
	fairLeft float64 // of it
	fairAt   time.Duration
	fairLook time.Duration // when the part is computed again
}

const (
	pooledIdle  = 10 * time.Second       // a key is forgotten after
	starvingFor = 100 * time.Millisecond // a denial is remembered for
	starvedTell = 40 * time.Millisecond  // and told again after
	lookEvery   = 10 * time.Millisecond  // who is heard, and who is denied, is looked at every
	longAgo     = -time.Hour
	fairSlack   = 0.98                  // of its part a process keeps to, while less than half of the bucket is there
	fairBurst   = 20 * time.Millisecond // of a part may be used at once
	rateOver    = 100 * time.Millisecond
	fenceAsk    = 20 * time.Millisecond // behind a fence waiters ask again after
)

// newPooled is the pooled limits of an incarnation that begins now. cfg was validated.
func newPooled(self crdt.Replica, cfg Config, clock func() time.Duration) *pooled {
	p := &pooled{
		cfg: cfg.WithDefaults(), self: self, config: cfg.fingerprint(), clock: clock, closed: make(chan struct{}),
		rows: map[string]*pooledRow{}, peers: map[string]*pooledPeer{}, present: 1, fence: never,
	}
	p.now = p.clock()
	return p
}

// Key is a handle of a key. It does not fail: a key that is too long, or one too
// many, is denied everything.
func (p *pooled) Key(key string) *pooledHandle { return &pooledHandle{set: p, key: key} }

// rowLocked is the key's books, opened if need be; nil if there is no room.
func (p *pooled) rowLocked(key string) *pooledRow {
	if r := p.rows[key]; r != nil || !validKey(key) {
		return r
	}
	if len(p.rows) >= p.cfg.MaxKeys && p.now >= p.pruneAt {
		p.pruneAt = p.now + pruneEvery
		p.forgetLocked()
	}
	if len(p.rows) >= p.cfg.MaxKeys {
		return nil
	}
	limit := p.limit(key)
	p.series++
	r := &pooledRow{
		key: key, rate: limit.Rate * micro, burst: int64(limit.Burst) * micro, series: p.series,
		at: p.now, fairAt: p.now, usedAt: p.now, deniedAt: longAgo, toldAt: longAgo,
		turn: make(chan struct{}, 1),
	}
	r.level, r.change.Of = float64(r.burst), r
	p.rows[key] = r
	return r
}

func (p *pooled) limit(key string) Limit {
	if l, ok := p.cfg.Limits[key]; ok {
		return l
	}
	return p.cfg.Limit
}

// adopt takes in the limits of a configuration. What is there of a limit stays there, as far
// as the burst goes.
func (p *pooled) adopt(c Configuration) {
	p.lockAt(p.clock())
	defer p.mu.Unlock()
	p.cfg.Limit, p.cfg.Limits = c.Limit, maps.Clone(c.Limits)
	for key, r := range p.rows {
		p.refillLocked(r)
		limit := p.limit(key)
		r.rate, r.burst = limit.Rate*micro, int64(limit.Burst)*micro
		r.credit = min(r.credit, r.burst)
		r.level = max(min(r.level, float64(r.burst-r.credit)), -float64(r.burst))
		if c.Resets > p.resets {
			r.level = float64(r.burst - r.credit)
		}
	}
	p.resets = max(p.resets, c.Resets)
	for name, peer := range p.peers {
		switch in := c.Roster.index(name) >= 0; {
		case in:
			peer.out = false
		case p.cfg.Roster.index(name) >= 0:
			peer.out = true
		}
	}
	p.cfg.Roster = c.Roster
	p.lookAt = 0
	p.passLocked(p.now)
}

// mint is [Node.Mint]: nothing is admitted from then on.
func (p *pooled) mint(until time.Duration) {
	p.lockAt(p.clock())
	defer p.mu.Unlock()
	p.fence = until
}

// rejoin goes on as another incarnation, which has used nothing yet.
func (p *pooled) rejoin(self crdt.Replica) {
	p.lockAt(p.clock())
	defer p.mu.Unlock()
	p.self = self
	for _, r := range p.rows {
		p.series++
		r.series, r.used, r.asked, r.out = p.series, 0, 0, 0
	}
}

func (l *pooledHandle) rowLocked() *pooledRow {
	if l.row == nil || l.row.dead {
		l.row = l.set.rowLocked(l.key)
	}
	return l.row
}

// forgetLocked drops keys that are full and idle for longer than packets take.
func (p *pooled) forgetLocked() {
	for key, r := range p.rows {
		p.refillLocked(r)
		if r.waiting == 0 && r.level >= float64(r.burst-r.credit) && p.now-max(r.usedAt, r.deniedAt) > pooledIdle {
			p.changes.Remove(&r.change)
			r.dead = true
			delete(p.rows, key)
			for _, peer := range p.peers {
				delete(peer.used, key)
			}
		}
	}
}

// lockAt takes the lock and lets time pass. Time only moves forward.
func (p *pooled) lockAt(now time.Duration) {
	p.mu.Lock()
	p.passLocked(now)
}

func (p *pooled) passLocked(now time.Duration) {
	p.now = max(p.now, now)
	if p.now < p.lookAt {
		return
	}
	p.lookAt = p.now + lookEvery
	heard := 1
	for name, peer := range p.peers {
		switch {
		case p.now-peer.heard <= pooledSilent:
			heard++
		case peer.out, p.cfg.Roster.Learners && p.now-peer.heard > pooledLearner && p.cfg.Roster.index(name) < 0:
			delete(p.peers, name)
		}
	}
	if present := float64(heard) / float64(len(p.peers)+1); present != p.present {
		for _, r := range p.rows {
			p.refillLocked(r) // at the rate so far
		}
		p.present = present
	}
}

// refillLocked brings the level up to now: the whole rate, less what silent peers
// are assumed to use.
func (p *pooled) refillLocked(r *pooledRow) {
	r.level = min(float64(r.burst-r.credit), r.level+r.rate*p.present*(p.now-r.at).Seconds())
	r.at = p.now
}

// fairLocked brings this process's part up to now. There is one while a peer is
// denied.
func (p *pooled) fairLocked(r *pooledRow) {
	most := max(r.fair*fairBurst.Seconds(), micro)
	r.fairLeft = min(r.fairLeft+r.fair*(p.now-r.fairAt).Seconds(), most)
	r.fairAt = p.now
	if p.now < r.fairLook {
		return
	}
	r.fairLook = p.now + lookEvery
	starving := false
	demands := p.demands[:0]
	for _, peer := range p.peers {
		u := peer.used[r.key]
		if u == nil || p.now-peer.heard > pooledSilent {
			continue
		}
		starving = starving || p.now < u.starving
		demands = append(demands, u.lately(p.now))
	}
	p.demands = demands
	had := r.fair > 0
	r.fair = 0
	if starving {
		r.fair = fairSlack * share(r.rate*p.present, demands)
		if !had {
			r.fairLeft = max(r.fair*fairBurst.Seconds(), micro)
		}
	}
}

// share is what one who asks for as much as it can get may have of rate beside
// others: max-min fairness, by which who asks for less gets what it asks for, and
// the rest share equally (Bertsekas and Gallager, Data Networks, 1992).
func share(rate float64, others []float64) float64 {
	slices.Sort(others)
	for i, d := range others {
		equal := rate / float64(len(others)+1-i)
		if d >= equal {
			return equal
		}
		rate -= d
	}
	return rate
}

// bounded tells whether this process keeps to its part. It need not while half of
// the bucket is there; the other half is for those who ask for less than their
// part.
func (r *pooledRow) bounded() bool { return r.fair > 0 && r.level < float64(r.burst)/2 }

// takeLocked admits micro-tokens, all or none.
func (p *pooled) takeLocked(r *pooledRow, amount int64) bool {
	p.refillLocked(r)
	p.fairLocked(r)
	if p.now >= p.fence {
		p.denyLocked(r)
		return false
	}
	again := min(r.credit, amount) // peers know of it already
	fresh := amount - again
	if fresh > 0 && (r.level < float64(fresh) || r.bounded() && r.fairLeft <= 0) {
		p.denyLocked(r)
		return false
	}
	r.credit -= again
	r.out += amount
	r.usedAt = p.now
	if fresh == 0 {
		return true
	}
	r.level -= float64(fresh)
	if r.bounded() {
		r.fairLeft -= float64(fresh)
	}
	r.used += fresh
	p.changes.Touch(&r.change)
	return true
}

func (p *pooled) denyLocked(r *pooledRow) {
	r.deniedAt = p.now
	if p.now-r.toldAt > starvedTell {
		r.toldAt = p.now
		p.changes.Touch(&r.change)
	}
}

// untilLocked is how long it takes until so many are there, if nobody else uses
// any.
func (p *pooled) untilLocked(r *pooledRow, amount int64) time.Duration {
	if p.now >= p.fence { // nothing tells when that ends
		return fenceAsk
	}
	missing := float64(amount-min(r.credit, amount)) - r.level
	wait := time.Duration(max(missing, 0) / max(r.rate*p.present, 1) * 1e9)
	if r.bounded() && r.fairLeft <= 0 {
		wait = max(wait, time.Duration((micro-r.fairLeft)/r.fair*1e9))
	}
	return min(max(wait, minAsk), time.Second)
}

// try admits n, or says how long to wait before it is worth asking again. A
// waiter comes before everybody who asks only once.
func (l *pooledHandle) try(n int, waiter bool) (bool, time.Duration) {
	p := l.set
	p.lockAt(p.clock())
	mark := p.changes.Mark()
	ok, wait := l.tryLocked(amountOf(n), waiter)
	changed := p.changed
	if p.changes.Mark() == mark {
		changed = nil
	}
	p.mu.Unlock()
	if changed != nil {
		changed()
	}
	return ok, wait
}

func (l *pooledHandle) tryLocked(amount int64, waiter bool) (bool, time.Duration) {
	p := l.set
	r := l.rowLocked()
	if p.over || r == nil || amount > r.burst {
		return false, time.Second
	}
	if !waiter {
		r.asked += amount
	}
	switch {
	case r.waiting > 0 && !waiter:
		p.denyLocked(r)
	case p.takeLocked(r, amount):
		return true, 0
	}
	return false, p.untilLocked(r, amount)
}

// AllowN is that of [Handle.AllowN].
func (l *pooledHandle) AllowN(n int) bool {
	if n <= 0 {
		return true
	}
	ok, _ := l.try(n, false)
	return ok
}

// Admit is that of [Handle.Admit].
func (l *pooledHandle) Admit() time.Duration {
	ok, wait := l.try(1, false)
	if ok {
		return 0
	}
	return wait
}

// WaitN is that of [Handle.WaitN].
func (l *pooledHandle) WaitN(ctx context.Context, n int) error {
	if err := ctx.Err(); err != nil || n <= 0 {
		return err
	}
	r, err := l.queue(amountOf(n))
	if err != nil {
		return err
	}
	defer func() {
		l.set.mu.Lock()
		r.waiting--
		l.set.mu.Unlock()
	}()
	select { // a channel serves its senders in the order in which they came
	case r.turn <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	case <-l.set.closed:
		return ErrClosed
	}
	defer func() { <-r.turn }()
	for {
		ok, wait := l.try(n, true)
		if ok {
			return nil
		}
		if err := l.fits(amountOf(n)); err != nil {
			return err
		}
		if err := pause(ctx, l.set.closed, wait); err != nil {
			return err
		}
	}
}

// fits says whether so many can ever be admitted: a configuration may have cut the burst.
func (l *pooledHandle) fits(amount int64) error {
	l.set.mu.Lock()
	defer l.set.mu.Unlock()
	if r := l.rowLocked(); r != nil && amount > r.burst {
		return tooMuch(amount, r.burst)
	}
	return nil
}

// Level is that of [Handle.Level].
func (l *pooledHandle) Level() (limit Limit, left int, next time.Duration) {
	p := l.set
	p.lockAt(p.clock())
	defer p.mu.Unlock()
	r := l.rowLocked()
	if p.over || r == nil {
		return Limit{}, 0, time.Second
	}
	p.refillLocked(r)
	left = int((max(int64(r.level), 0) + r.credit) / micro)
	switch {
	case p.now >= p.fence:
		left, next = 0, time.Second
	case left == 0:
		next = p.untilLocked(r, micro)
	}
	return Limit{Rate: r.rate / micro, Burst: int(r.burst / micro)}, left, next
}

// Refund gives back what was admitted and not used, as far as the bucket has room.
// Peers were told of it and hear nothing: this process admits it once more.
func (l *pooledHandle) Refund(n int) {
	p := l.set
	p.lockAt(p.clock())
	defer p.mu.Unlock()
	r := l.rowLocked()
	if p.over || r == nil {
		return
	}
	p.refillLocked(r)
	back := max(0, min(amountOf(n), r.out, r.burst-r.credit-max(int64(r.level), 0)))
	r.out -= back
	r.credit += back
}

// queue counts one more who waits; a row that is waited for is not forgotten.
func (l *pooledHandle) queue(amount int64) (*pooledRow, error) {
	p := l.set
	p.lockAt(p.clock())
	defer p.mu.Unlock()
	r := l.rowLocked()
	switch {
	case p.over:
		return nil, ErrClosed
	case r == nil:
		return nil, ErrTooManyKeys
	case amount > r.burst:
		return nil, tooMuch(amount, r.burst)
	}
	r.waiting++
	r.asked += amount
	return r, nil
}

// OnChange is that of [Set.OnChange], without a lock.
func (p *pooled) OnChange(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.changed = f
}

// Close is that of [Set.Close].
func (p *pooled) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.over {
		p.over = true
		close(p.closed)
	}
}

// stats puts the pool's figures in place of the node's, which has no tokens.
func (p *pooled) stats(s *Stats) {
	p.lockAt(p.clock())
	defer p.mu.Unlock()
	s.Keys, s.Level, s.Cap, s.Share, s.Stranded = len(p.rows), 0, 0, 1, 0
	for _, r := range p.rows {
		p.refillLocked(r)
		s.Level = plus(s.Level, max(int64(r.level), 0))
		s.Cap = plus(s.Cap, r.burst)
	}
}

func (p *pooled) view(key string) (View, bool) {
	p.lockAt(p.clock())
	defer p.mu.Unlock()
	r := p.rows[key]
	if r == nil {
		return View{}, false
	}
	return p.viewLocked(r), true
}

func (p *pooled) viewLocked(r *pooledRow) View {
	p.refillLocked(r)
	return View{Level: int64(r.level) + r.credit, Cap: r.burst, Sums: Sums{Own: r.used, Denied: max(0, r.asked-r.used)}}
}

func (p *pooled) busiest(most int) []KeyView {
	p.lockAt(p.clock())
	defer p.mu.Unlock()
	all := slices.SortedFunc(maps.Values(p.rows), func(a, b *pooledRow) int {
		return cmp.Or(cmp.Compare(b.used, a.used), cmp.Compare(a.key, b.key))
	})
	views := make([]KeyView, 0, most)
	for _, r := range all[:min(most, len(all))] {
		views = append(views, KeyView{r.key, p.viewLocked(r)})
	}
	return views
}
