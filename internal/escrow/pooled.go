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

// pooledSilent is how long a peer may be silent before it is assumed to use its part of
// the rate: three keep-alives.
const pooledSilent = 150 * time.Millisecond

// pooledLearner is how long a learner may be silent before it is assumed to use nothing,
// since nobody can evict a learner. It equals breaker.FleetConfig.Keep: a longer cut is rare.
const pooledLearner = 10 * time.Minute

// pooled holds the limits of one process in the optimistic strategy. Every process has the
// whole bucket, and subtracts the use that all processes report. Each process's use is a
// grow-only counter with one writer (Shapiro et al., Conflict-free replicated data types,
// 2011), so packets may be lost, repeated and reordered. [Pooled] says what it does not
// promise.
//
// If others are denied and less than half of the bucket is left, a process uses at most 98 %
// of its fair part. The part is max-min fair by the recent demand at each process. Without
// this rule the process with the fastest clock would get all tokens.
//
// It runs no goroutine, and is safe for concurrent use. A decision takes a lock and
// reads the clock.
type pooled struct {
	cfg    Config
	config uint32
	clock  func() time.Duration

	mu      sync.Mutex
	self    crdt.Replica
	over    bool          // Close was called
	closed  chan struct{} // closed by Close
	now     time.Duration // the latest time seen; only rises
	rows    map[string]*pooledRow
	changes crdt.Changes[*pooledRow]
	series  uint64                 // the latest number of a series
	peers   map[string]*pooledPeer // by name, the latest incarnation
	present float64                // fraction of the fleet that is heard, this process included
	demands []float64              // scratch
	lookAt  time.Duration          // when present is counted again
	fence   time.Duration          // nothing is admitted from then on
	resets  uint64                 // of the configuration in force
	pruneAt time.Duration          // the earliest next search for keys to forget
	changed func()                 // see OnChange; may be nil
}

// A pooledPeer is one incarnation of another process, as known here.
type pooledPeer struct {
	incarnation uint64
	heard       time.Duration
	out         bool // not in the roster: once silent it is assumed to use nothing
	used        map[string]*pooledUse
}

// A pooledUse is a peer's use of one key.
type pooledUse struct {
	series   uint64
	used     int64         // micro-tokens used in the series, as heard
	asked    int64         // micro-tokens asked for in the series, as heard
	at       time.Duration // when rate was computed
	rate     float64       // recent demand, micro-tokens per second
	starving time.Duration // until then the peer counts as denied
}

// A pooledHandle is the handle of one key of a pooled. It is safe for
// concurrent use.
type pooledHandle struct {
	set *pooled
	key string
	row *pooledRow // nil or dead until the next use finds the key's row; guarded by set.mu
}

// A pooledRow is the state of one key. Amounts are micro-tokens.
type pooledRow struct {
	key    string
	rate   float64 // per second
	burst  int64
	level  float64       // below zero is debt, down to -burst
	at     time.Duration // when level was computed
	series uint64        // of used and asked; a forgotten key gets a new one when it returns
	used   int64         // used by this process, refunded tokens included
	out    int64         // admitted tokens that may be refunded
	credit int64         // refunded tokens: admitted once more without telling peers
	asked  int64         // asked for at this process, denied or not
	usedAt time.Duration
	change crdt.Change[*pooledRow]
	dead   bool // forgotten

	turn     chan struct{} // held by the first waiter; the others queue for it
	waiting  int           // waiters
	deniedAt time.Duration // the latest denial
	toldAt   time.Duration // when peers were last told of a denial

	fair     float64       // this process's part of the rate, per second, while others are denied; 0 is no part
	fairLeft float64       // tokens left of the part
	fairAt   time.Duration // when fairLeft was computed
	fairLook time.Duration // when fair is computed again
}

const (
	pooledIdle  = 10 * time.Second       // a full key may be forgotten when it is idle for longer
	starvingFor = 100 * time.Millisecond // a denial counts for that long
	starvedTell = 40 * time.Millisecond  // peers are told of denials once in that time
	lookEvery   = 10 * time.Millisecond  // between two looks at who is heard and who is denied
	longAgo     = -time.Hour
	fairSlack   = 0.98                   // fraction of its fair part that a process may use
	fairBurst   = 20 * time.Millisecond  // fairLeft holds at most that much of fair
	rateOver    = 100 * time.Millisecond // time constant of pooledUse.rate
	fenceAsk    = 20 * time.Millisecond  // behind a fence a waiter asks again after that time
)

// newPooled makes the pooled limits of an incarnation that begins now. cfg was validated.
func newPooled(self crdt.Replica, cfg Config, clock func() time.Duration) *pooled {
	p := &pooled{
		cfg: cfg.WithDefaults(), self: self, config: cfg.fingerprint(), clock: clock, closed: make(chan struct{}),
		rows: map[string]*pooledRow{}, peers: map[string]*pooledPeer{}, present: 1, fence: never,
	}
	p.now = p.clock()
	return p
}

// Key makes a handle of a key. It does not fail: if the key is too long, or there are too
// many keys, the handle denies everything.
func (p *pooled) Key(key string) *pooledHandle { return &pooledHandle{set: p, key: key} }

// rowLocked returns the key's row, and makes it if there is none; nil if there is no room.
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

// adopt takes over the limits of a configuration. Levels stay as they are, up to the new
// burst.
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

// mint is [Node.Mint]: nothing is admitted from until on.
func (p *pooled) mint(until time.Duration) {
	p.lockAt(p.clock())
	defer p.mu.Unlock()
	p.fence = until
}

// rejoin continues as another incarnation, which has used nothing yet.
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

// forgetLocked drops keys that are full and idle for longer than packets travel.
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

// refillLocked brings the level up to now: it adds the whole rate, less the assumed use of
// silent peers.
func (p *pooled) refillLocked(r *pooledRow) {
	r.level = min(float64(r.burst-r.credit), r.level+r.rate*p.present*(p.now-r.at).Seconds())
	r.at = p.now
}

// fairLocked brings this process's fair part up to now. It has one only while a peer is
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

// share is the part of rate for a process with unlimited demand beside others with these
// demands, by max-min fairness: small demands are met, and the rest is shared equally
// (Bertsekas and Gallager, Data Networks, 1992).
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

// bounded tells whether this process keeps to its fair part. It need not while at least
// half of the bucket is left. The other half is for processes that ask for less than their
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
	again := min(r.credit, amount) // peers were told of these tokens before
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

// untilLocked is how long it takes until the amount is there, if no other process uses
// tokens.
func (p *pooled) untilLocked(r *pooledRow, amount int64) time.Duration {
	if p.now >= p.fence { // no event tells when a fence is lifted
		return fenceAsk
	}
	missing := float64(amount-min(r.credit, amount)) - r.level
	wait := time.Duration(max(missing, 0) / max(r.rate*p.present, 1) * 1e9)
	if r.bounded() && r.fairLeft <= 0 {
		wait = max(wait, time.Duration((micro-r.fairLeft)/r.fair*1e9))
	}
	return min(max(wait, minAsk), time.Second)
}

// try admits n tokens, or returns how long to wait before asking again. Waiters come before
// callers that ask only once.
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

// AllowN is [Handle.AllowN].
func (l *pooledHandle) AllowN(n int) bool {
	if n <= 0 {
		return true
	}
	ok, _ := l.try(n, false)
	return ok
}

// Admit is [Handle.Admit].
func (l *pooledHandle) Admit() time.Duration {
	ok, wait := l.try(1, false)
	if ok {
		return 0
	}
	return wait
}

// WaitN is [Handle.WaitN].
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

// fits returns an error if the amount can never be admitted: a configuration may have cut
// the burst.
func (l *pooledHandle) fits(amount int64) error {
	l.set.mu.Lock()
	defer l.set.mu.Unlock()
	if r := l.rowLocked(); r != nil && amount > r.burst {
		return tooMuch(amount, r.burst)
	}
	return nil
}

// Level is [Handle.Level].
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

// Refund gives back tokens that were admitted and not used, as far as the bucket has room.
// Peers keep counting them as used: this process may admit them once more.
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

// queue counts a new waiter. A row with waiters is not forgotten.
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

// OnChange is [Set.OnChange], but f is called without a lock.
func (p *pooled) OnChange(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.changed = f
}

// Close is [Set.Close].
func (p *pooled) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.over {
		p.over = true
		close(p.closed)
	}
}

// stats replaces the node's figures, since the node has no tokens with [Pooled].
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
