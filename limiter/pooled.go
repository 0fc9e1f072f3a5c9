// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package limiter

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/crdt"
)

// PooledConfig is what an operator may set. All processes of a fleet must have the
// same limits, or they refuse each other's packets. Limit has no default.
type PooledConfig struct {
	// Limit is that of each key that Limits does not name, of the whole fleet.
	Limit Limit

	// Limits are those of keys that have their own.
	Limits map[string]Limit

	// Silent is after which silence a peer is assumed to use its part of the rate.
	// In [10ms, 1m]; unset means 150 ms, three keep-alives.
	Silent time.Duration

	// MaxKeys is as in [Config].
	MaxKeys int
}

// WithDefaults returns c with every unset field replaced by its default.
func (c PooledConfig) WithDefaults() PooledConfig {
	c.Silent = cmp.Or(c.Silent, 150*time.Millisecond)
	c.MaxKeys = cmp.Or(c.MaxKeys, 100_000)
	return c
}

func (c PooledConfig) limits() Config {
	return Config{Limit: c.Limit, Limits: c.Limits, MaxKeys: c.MaxKeys}
}

// Validate reports everything that is wrong with c at once, as an error that is
// [ErrConfig], or nil. Unset fields are judged as their defaults.
func (c PooledConfig) Validate() error {
	c = c.WithDefaults()
	err := c.limits().Validate()
	if c.Silent < 10*time.Millisecond || c.Silent > time.Minute {
		err = errors.Join(err, fmt.Errorf("%w: Silent: %v is not in [10ms, 1m0s]", ErrConfig, c.Silent))
	}
	return err
}

// A Pooled is the limits of one process in the optimistic strategy: every process
// has the whole bucket, and takes from it what all of them say that they have
// used. What each has used is a grow-only counter with one writer (Shapiro et al.,
// Conflict-free replicated data types, 2011), so packets may be lost, repeated and
// overtake each other. It needs no roster, no shares and no loans; a process that
// crashes takes nothing with it, and the full burst is to be had anywhere at once.
//
// # What it does not promise
//
// It is not a strict limit, and nothing here calls it one. With N processes, rate
// R, burst B, and d from a use to its arrival at a peer (floor, delay and what is
// lost on the way), the fleet admits more than B + R·T by up to
//
//	(N-1)·R·d              while it is busy
//	(N-1)·(B + R·d)        when all begin at the same instant after a rest
//	(P-1)·(B + R·Silent)   at each split into P sides; afterwards a peer that is not
//	                       heard is assumed to use R/N, so the sides share the rate
//
// A process that starts in a split knows of nobody on the other side, and of
// nobody's use before: it may admit B + R·T by itself. What a peer was assumed to
// use is not given back when it is heard again.
//
// # Who gets it
//
// While others are denied and less than half of the bucket is there, a process
// keeps to 98 % of its max-min fair part, by what each was asked for lately. Else
// the one whose clock is fastest would have it all.
//
// It is a section for crdt/gossip, runs no goroutine, and is safe for concurrent
// use. A decision takes a lock and reads the clock.
type Pooled struct {
	cfg    PooledConfig
	self   crdt.Replica
	config uint32
	clock  func() time.Duration

	mu      sync.Mutex
	over    bool
	closed  chan struct{} // closed with over
	now     time.Duration
	rows    map[string]*pooledRow
	changes crdt.Changes[*pooledRow]
	series  uint64
	peers   map[string]*pooledPeer // by name, the latest life
	present float64                // the part of the fleet that is heard, this process included
	demands []float64              // scratch
	lookAt  time.Duration          // when it is counted again
	pruneAt time.Duration
	changed func()
}

// A pooledPeer is what is known of one life of another process.
type pooledPeer struct {
	life  uint64
	heard time.Duration
	used  map[string]*pooledUse
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

// A PooledLimiter is the handle of one key of a [Pooled]. It is safe for
// concurrent use.
type PooledLimiter struct {
	set *Pooled
	key string
	row *pooledRow // guarded by set.mu; of an earlier life of the key, or nil, until it is used
}

// A pooledRow is one key's books. Amounts are micro-tokens.
type pooledRow struct {
	key    string
	rate   float64 // per second
	burst  int64
	level  float64 // below zero is debt, down to -burst
	at     time.Duration
	series uint64 // of used: a key that was forgotten begins anew
	used   int64  // by this process
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
)

// PooledOption supplies a collaborator that a config file cannot express.
type PooledOption func(*Pooled)

// WithPooledClock sets the monotonic clock; see [WithClock].
func WithPooledClock(clock func() time.Duration) PooledOption {
	return func(p *Pooled) { p.clock = clock }
}

// NewPooled is the pooled limits of a life that begins now. The error is
// [ErrConfig], with all that is wrong.
func NewPooled(self crdt.Replica, cfg PooledConfig, opts ...PooledOption) (*Pooled, error) {
	err := cfg.Validate()
	if self.Name == "" {
		err = errors.Join(err, fmt.Errorf("%w: self: %v has no name", ErrConfig, self))
	}
	if err != nil {
		return nil, err
	}
	cfg = cfg.WithDefaults()
	h := fnv.New32a()
	_, _ = fmt.Fprintf(h, "pooled%d", cfg.limits().fingerprint())
	p := &Pooled{
		cfg: cfg, self: self, config: h.Sum32(), clock: monotonic(), closed: make(chan struct{}),
		rows: map[string]*pooledRow{}, peers: map[string]*pooledPeer{}, present: 1,
	}
	for _, o := range opts {
		o(p)
	}
	p.now = p.clock()
	return p, nil
}

// Key is a handle of a key. It does not fail: a key that is too long, or one too
// many, is denied everything.
func (p *Pooled) Key(key string) *PooledLimiter { return &PooledLimiter{set: p, key: key} }

// rowLocked is the key's books, opened if need be; nil if there is no room.
func (p *Pooled) rowLocked(key string) *pooledRow {
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
	limit := p.cfg.limits().limit(key)
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

func (l *PooledLimiter) rowLocked() *pooledRow {
	if l.row == nil || l.row.dead {
		l.row = l.set.rowLocked(l.key)
	}
	return l.row
}

// forgetLocked drops keys that are full and idle for longer than packets take.
func (p *Pooled) forgetLocked() {
	for key, r := range p.rows {
		p.refillLocked(r)
		if r.waiting == 0 && r.level >= float64(r.burst) && p.now-max(r.usedAt, r.deniedAt) > pooledIdle {
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
func (p *Pooled) lockAt(now time.Duration) {
	p.mu.Lock()
	p.passLocked(now)
}

func (p *Pooled) passLocked(now time.Duration) {
	p.now = max(p.now, now)
	if p.now < p.lookAt {
		return
	}
	p.lookAt = p.now + lookEvery
	heard := 1
	for _, peer := range p.peers {
		if p.now-peer.heard <= p.cfg.Silent {
			heard++
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
func (p *Pooled) refillLocked(r *pooledRow) {
	r.level = min(float64(r.burst), r.level+r.rate*p.present*(p.now-r.at).Seconds())
	r.at = p.now
}

// fairLocked brings this process's part up to now. There is one while a peer is
// denied.
func (p *Pooled) fairLocked(r *pooledRow) {
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
		if u == nil || p.now-peer.heard > p.cfg.Silent {
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
func (p *Pooled) takeLocked(r *pooledRow, amount int64) bool {
	p.refillLocked(r)
	p.fairLocked(r)
	if r.level < float64(amount) || r.bounded() && r.fairLeft <= 0 {
		p.denyLocked(r)
		return false
	}
	r.level -= float64(amount)
	if r.bounded() {
		r.fairLeft -= float64(amount)
	}
	r.used += amount
	r.usedAt = p.now
	p.changes.Touch(&r.change)
	return true
}

func (p *Pooled) denyLocked(r *pooledRow) {
	r.deniedAt = p.now
	if p.now-r.toldAt > starvedTell {
		r.toldAt = p.now
		p.changes.Touch(&r.change)
	}
}

// untilLocked is how long it takes until so many are there, if nobody else uses
// any.
func (p *Pooled) untilLocked(r *pooledRow, amount int64) time.Duration {
	missing := float64(amount) - r.level
	wait := time.Duration(max(missing, 0) / max(r.rate*p.present, 1) * 1e9)
	if r.bounded() && r.fairLeft <= 0 {
		wait = max(wait, time.Duration((micro-r.fairLeft)/r.fair*1e9))
	}
	return min(max(wait, minAsk), time.Second)
}

// try admits n, or says how long to wait before it is worth asking again. A
// waiter comes before everybody who asks only once.
func (l *PooledLimiter) try(n int, waiter bool) (bool, time.Duration) {
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

func (l *PooledLimiter) tryLocked(amount int64, waiter bool) (bool, time.Duration) {
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

// Allow admits one, or denies it at once.
func (l *PooledLimiter) Allow() bool { return l.AllowN(1) }

// AllowN admits n, all or none; n may be up to the burst, and anything more is
// denied. n <= 0 is admitted.
func (l *PooledLimiter) AllowN(n int) bool {
	if n <= 0 {
		return true
	}
	ok, _ := l.try(n, false)
	return ok
}

// Admit takes one admission and returns 0, or takes none and returns how long to
// wait before it is worth asking again; see [Limiter.Admit].
func (l *PooledLimiter) Admit(time.Duration) time.Duration {
	ok, wait := l.try(1, false)
	if ok {
		return 0
	}
	return wait
}

// Wait waits until one is admitted, or ctx ends, or the set is closed
// ([ErrClosed]). Waiters are served in the order in which they came, and before
// any Allow that comes after them.
func (l *PooledLimiter) Wait(ctx context.Context) error { return l.WaitN(ctx, 1) }

// WaitN is Wait for n at once; more than the burst is [ErrBurst].
func (l *PooledLimiter) WaitN(ctx context.Context, n int) error {
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
		if err := pause(ctx, l.set.closed, wait); err != nil {
			return err
		}
	}
}

// queue counts one more who waits; a row that is waited for is not forgotten.
func (l *PooledLimiter) queue(amount int64) (*pooledRow, error) {
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
		return nil, fmt.Errorf("%w: %d of %d", ErrBurst, amount/micro, r.burst/micro)
	}
	r.waiting++
	r.asked += amount
	return r, nil
}

// OnChange has f called after each change that peers are to hear of, without a
// lock. Set it before the first use.
func (p *Pooled) OnChange(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.changed = f
}

// Close ends all waits with [ErrClosed] and denies everything from now on.
func (p *Pooled) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.over {
		p.over = true
		close(p.closed)
	}
}
