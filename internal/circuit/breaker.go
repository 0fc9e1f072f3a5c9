// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sony/gobreaker/v2"

	"github.com/stormguard-mq/stormguard/breaker"
)

// A Change is one step between states, or a longer open period (From and To
// are Open then).
type Change struct {
	Scope string // name of the breaker or of the parent scope
	Seq   uint64 // counts changes of this scope from 1; a gap means some were dropped
	At    time.Duration
	From  breaker.State
	To    breaker.State
	Cause breaker.Cause
	// OpenFor is how long the scope opens for; 0 unless To is Open, and the
	// largest Duration for a force without end. A parent has none.
	OpenFor      time.Duration
	BackoffLevel int // backoff position after the change
}

// maxChanges bounds the mailbox of one breaker; the oldest are dropped.
const maxChanges = 64

// Breaker is the circuit breaker of one scope. All methods are safe for
// concurrent use. Instants may arrive slightly out of order from different
// goroutines.
//
// Lock order: Scopes.mu, then mu, then gobreaker's own. Under mu nothing of the
// caller's runs but the functions given to Attach and WithRand.
type Breaker struct {
	name string
	cfg  *breaker.Config // with defaults; read-only, shared by the leaves of one Scopes
	top  int
	rand func() float64

	// word is generation<<1 | closed, and all that Enter reads. epoch is the
	// same generation with the facts of it. Both change under mu, epoch first.
	word  atomic.Uint64
	epoch atomic.Pointer[epoch]

	// notify, if set, runs after a change of state, without mu.
	notify  func(now time.Duration)
	pending atomic.Int32 // len(changes), so that draining nothing takes no lock

	mu      sync.Mutex
	changed bool
	changes []Change
	seq     uint64

	win    window
	feeds  []*feed
	okSeen uint64 // part of epoch.ok already in win
	fresh  bool   // a success was seen since the last failure
	run    run

	level    int
	remember time.Duration // a trip until then goes on from level; -1: none
	down     time.Duration // since when nothing succeeds: the trip, or the last probe that passed at half pace
	flaps    int           // trips in a row, each within Memory of a close

	gb      *gobreaker.TwoStepCircuitBreaker[struct{}]
	verdict bool            // what ReadyToTrip answers
	judged  gobreaker.State // what gobreaker last changed to
	byHand  bool            // this phase is judged without gobreaker; see admitSlow
	out     []*probe
	passed  int // probes that succeeded in this phase, since one failed
	stretch stretch
	pace    int    // of this phase: see probePassed
	head    uint64 // whose probe failed last
	life    uint64 // successes of attached counters, as far as they were read

	promised time.Duration // the latest end that a force was given: no hold before
}

// epoch is one generation. Only its atomics change once it is published.
type epoch struct {
	gen    uint64
	state  breaker.State
	forced bool
	held   bool // open by Hold, or half-open by Permit
	freed  bool // half-open by Unhold
	trial  Trial
	cause  breaker.Cause
	since  time.Duration

	// until is the instant before which nobody is admitted: the deadline of an
	// open period; half-open, the earliest lease while all slots are taken and
	// the smallest Duration otherwise.
	until atomic.Int64
	// stir is when a probe was last given or settled; the end of the open period,
	// by the backoff here, of a hold since.
	stir atomic.Int64
	// passing is whether probes succeed, half-open: the scope carries a part of its
	// load, and does not vote for its parent.
	passing atomic.Bool

	_  [64]byte      // ok is written on every success, the rest only read
	ok atomic.Uint64 // successes settled by token
}

func (e *epoch) deadline() time.Duration { return time.Duration(e.until.Load()) }

// feed is one attached counter.
type feed struct {
	read func() uint64
	last uint64
}

// run is the attempts that failed with no success between them.
type run struct {
	n      int
	firsts int
	led    bool   // began with a retry, whose delivery has no first attempt in the run
	id     uint64 // of one delivery in the run, 0 if none was named
	two    bool   // two deliveries were named
}

// deliveries is how many deliveries the run is known to come from, at least.
func (r *run) deliveries() int {
	d := r.firsts
	if r.led {
		d++
	}
	if r.two {
		d = max(d, 2)
	}
	return d
}

func (r *run) add(first bool, delivery uint64) {
	r.n++
	switch {
	case first:
		r.firsts++
	case r.n == 1:
		r.led = true
	}
	switch {
	case delivery == 0:
	case r.id == 0:
		r.id = delivery
	case r.id != delivery:
		r.two = true
	}
}

// New returns a closed breaker. The name is what refusals, changes and
// snapshots call the scope. The error has all that is wrong with cfg.
func New(name string, cfg breaker.Config, opts ...Option) (*Breaker, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.WithDefaults()
	return newBreaker(name, &cfg, buildOptions(opts), nil), nil
}

func newBreaker(name string, cfg *breaker.Config, o options, notify func(time.Duration)) *Breaker {
	b := &Breaker{
		name:     name,
		cfg:      cfg,
		promised: math.MinInt64,
		top:      topLevel(cfg.Base, cfg.Cap),
		rand:     o.rand,
		notify:   notify,
		remember: -1,
	}
	b.win.width = cfg.Bucket()
	b.win.reset(0)
	b.gb = b.newGobreaker()
	b.publishLocked(&epoch{gen: 1})
	return b
}

// Name returns the name given to New.
func (b *Breaker) Name() string { return b.name }

// Config returns the configuration with its defaults filled in.
func (b *Breaker) Config() breaker.Config { return *b.cfg }

// Closed reports whether the breaker is closed: one atomic load.
func (b *Breaker) Closed() bool { return b.word.Load()&1 != 0 }

// Enter is the closed path: one atomic load, no clock, no lock, no
// allocation. False means the breaker is not closed: ask Admit.
func (b *Breaker) Enter() (Token, bool) {
	w := b.word.Load()
	if w&1 == 0 {
		return Token{}, false
	}
	return Token{gen: w >> 1}, true
}

// Admit asks for a token in any state. Closed: a token like Enter's. Open: a
// refusal until the deadline; at the deadline the first to ask becomes a
// probe. Half-open: a probe while there is room, a refusal otherwise.
//
// head identifies the delivery that would probe, the same number for the same
// delivery each time; 0 means that it has no identity. While other probes succeed,
// a delivery that fails again is no further evidence. A refusal takes no lock and
// allocates nothing.
func (b *Breaker) Admit(now time.Duration, head uint64) (Token, Refusal) {
	return b.admit(now, head, 0)
}

// admit is Admit for a call that may take so long that its lease must be longer.
func (b *Breaker) admit(now time.Duration, head uint64, lease time.Duration) (Token, Refusal) {
	e := b.epoch.Load()
	if e.state == breaker.Closed {
		return Token{gen: e.gen}, Refusal{}
	}
	if until := e.deadline(); now < until {
		return Token{}, b.refusal(e, until)
	}
	return b.admitSlow(now, head, max(lease, b.cfg.Lease))
}

func (b *Breaker) admitSlow(now time.Duration, head uint64, lease time.Duration) (Token, Refusal) {
	b.mu.Lock()
	defer b.unlock(now)
	b.expireLocked(now)
	e := b.epoch.Load()
	if e.state == breaker.Closed {
		return Token{gen: e.gen}, Refusal{}
	}
	if until := e.deadline(); now < until {
		return Token{}, b.refusal(e, until)
	}
	if e.state == breaker.Open {
		e = b.halfOpenLocked(now, false)
	}
	p := &probe{gen: e.gen, head: head, lease: lease, deadline: later(now, lease)}
	if !b.byHand {
		// gobreaker gives out no more than Successes. Its own open period of 1 ns is long over,
		// unless the clock it reads has not moved since (a frozen or a coarse
		// one). It cannot be made half-open otherwise, so a phase in which it
		// refuses is judged here.
		done, err := b.gb.Allow()
		p.done, b.byHand = done, err != nil
	}
	b.out = append(b.out, p)
	b.roomLocked(e, now)
	return Token{gen: e.gen, probe: p}, Refusal{}
}

func (b *Breaker) refusal(e *epoch, until time.Duration) Refusal {
	return Refusal{State: e.state, Cause: e.cause, Scope: b.name, Until: until}
}

// Success settles t as succeeded. On the closed path it is one atomic add, and
// not needed at all by a caller who attached a counter ([Breaker.Attach]):
// doing both counts twice. A token of an older generation changes nothing, a
// probe settles once.
func (b *Breaker) Success(now time.Duration, t Token) {
	if t.probe != nil {
		b.settleProbe(now, t.probe, passed)
		return
	}
	if e := b.epoch.Load(); e.gen == t.gen {
		e.ok.Add(1)
	}
}

// Failure settles t as failed. first says that this was the delivery's first
// attempt: only those count in the ratio, or a retried poison message would
// weigh as many times as it is tried; every attempt counts in the run. The
// run's deliveries are told apart by their first attempts; see
// [Breaker.FailureOf] for a scope whose workers retry side by side.
//
// It takes the breaker's lock and reads the attached counters. The ratio is judged
// here alone: a success never opens a breaker, be it the one that completes MinSample.
func (b *Breaker) Failure(now time.Duration, t Token, first bool) {
	b.fail(now, t, first, 0, failed)
}

// FailureOf is Failure for a delivery that has an identity (0 means none), so
// that a run of retries from two deliveries is known to be two.
func (b *Breaker) FailureOf(now time.Duration, t Token, first bool, delivery uint64) {
	b.fail(now, t, first, delivery, failed)
}

// Unavailable is Failure for a call whose error says that the dependency itself is
// down, such as a refused connection: one delivery is evidence enough for the run,
// and a probe that fails so counts each time.
func (b *Breaker) Unavailable(now time.Duration, t Token, first bool) {
	b.fail(now, t, first, 0, down)
}

// Slow reports that the call of t is still running after Config.Slow. It
// counts as a failed attempt at once, so that a dependency that hangs is seen
// before its calls return. A probe is settled by it: whatever is reported
// later changes nothing. On the closed path a token carries no identity, so
// the caller reports it slow once and then settles it with Exclude, or not at
// all; if it succeeds after all, an attached counter may count that as one
// success more, which is harmless.
func (b *Breaker) Slow(now time.Duration, t Token, first bool) {
	b.fail(now, t, first, 0, tooSlow)
}

func (b *Breaker) fail(now time.Duration, t Token, first bool, delivery uint64, how outcome) {
	if t.probe != nil {
		b.settleProbe(now, t.probe, how)
		return
	}
	if b.epoch.Load().gen != t.gen {
		return
	}
	b.mu.Lock()
	defer b.unlock(now)
	if b.epoch.Load().gen != t.gen {
		return
	}
	b.collectLocked(now)
	if b.fresh {
		b.run, b.fresh = run{}, false
	}
	b.run.add(first, delivery)
	b.run.two = b.run.two || how == down
	if first {
		b.win.failed()
	}
	cause, trip := b.judgeLocked()
	if !trip {
		return
	}
	if how == tooSlow {
		cause = breaker.CauseSlow
	}
	b.tripLocked(now, cause)
}

// Exclude settles t without an outcome: cancelled by a shutdown or a revoke, a
// rejection of our own, a permanently bad message. It frees the slot of a
// probe and changes nothing else.
func (b *Breaker) Exclude(now time.Duration, t Token) {
	if t.probe != nil {
		b.settleProbe(now, t.probe, excluded)
	}
}

// Probing tells whether a token is a probe that is still out.
func (b *Breaker) Probing(t Token) bool {
	if t.probe == nil {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return !t.probe.settled && t.probe.gen == b.epoch.Load().gen
}

// Renew begins the lease of a probe anew: its caller goes on with another delivery
// under the same token. It reports whether the token is still one.
func (b *Breaker) Renew(now time.Duration, t Token) bool {
	if t.probe == nil {
		return false
	}
	b.mu.Lock()
	defer b.unlock(now)
	b.expireLocked(now)
	e := b.epoch.Load()
	if t.probe.settled || t.probe.gen != e.gen {
		return false
	}
	t.probe.deadline = later(now, t.probe.lease)
	b.roomLocked(e, now)
	return true
}

// Attach gives the breaker a cumulative count of successes that somebody else
// writes, so that a success costs the closed path nothing. read is called
// under the breaker's lock, at bucket edges and when a failure is judged: it
// must be a few atomic loads. A counter that goes backwards is taken as
// restarted.
//
// A counter knows no generations: a call admitted before a trip that succeeds
// after the close counts. detach takes what the counter still owes and forgets
// it; calling it again does nothing.
func (b *Breaker) Attach(read func() uint64) (detach func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f := &feed{read: read, last: read()}
	b.feeds = append(b.feeds, f)
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		if i := slices.Index(b.feeds, f); i >= 0 {
			if n := b.takeLocked(f); n > 0 && b.Closed() {
				b.win.succeeded(n, false)
				b.fresh = true
			}
			b.feeds = slices.Delete(b.feeds, i, i+1)
		}
	}
}

// takeLocked is what f counted since it was last read.
func (b *Breaker) takeLocked(f *feed) uint64 {
	n := f.read()
	d := n - min(n, f.last)
	f.last = n
	b.life += d
	return d
}

// Life counts what the attached counters have counted since they were attached, those
// that were detached included: the successes of everything that shares the scope, in
// whatever state. It never goes down. A success that came between two failures of a
// message is a sign that the message, and not its dependency, is at fault. It takes
// the breaker's lock.
func (b *Breaker) Life() uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := b.life
	for _, f := range b.feeds {
		if v := f.read(); v > f.last {
			n += v - f.last
		}
	}
	return n
}

// Passing reports whether the breaker is half-open and its probes succeed, all in
// all: it carries what the dependency can. One atomic load.
func (b *Breaker) Passing() bool { return b.epoch.Load().passing.Load() }

// Hasten ends an open period, so that the next to ask becomes a probe: the caller
// knows that the dependency is back. It does nothing while the breaker is forced or
// held.
func (b *Breaker) Hasten(now time.Duration) {
	b.mu.Lock()
	defer b.unlock(now)
	if e := b.epoch.Load(); e.state == breaker.Open && !e.forced && !e.held && now >= b.promised {
		b.halfOpenLocked(now, false)
	}
}

// Force opens the breaker for d from now, or until Release if d <= 0. From the
// moment Force returns, nothing is admitted before that deadline, and no
// outcome of anything admitted earlier can change it; after it, probes decide.
// An open period that ends later already stands as it is, a hold does not. The
// backoff does not move.
func (b *Breaker) Force(now, d time.Duration, cause breaker.Cause) {
	b.mu.Lock()
	defer b.unlock(now)
	until := never
	if d > 0 {
		until = later(now, d)
	} else {
		d = never
	}
	b.promised = max(b.promised, until)
	if e := b.epoch.Load(); e.state == breaker.Open && !e.held && (e.deadline() > until || e.forced && e.deadline() == until) {
		return
	}
	b.gb = b.trippedGobreaker()
	b.openLocked(now, cause, d, true)
}

// ForceClosed is the operator's way back: closed from any state, with an empty
// window and the backoff at its start.
func (b *Breaker) ForceClosed(now time.Duration, cause breaker.Cause) {
	b.mu.Lock()
	defer b.unlock(now)
	b.level, b.flaps = 0, 0
	b.promised = math.MinInt64
	b.gb = b.newGobreaker()
	b.closeLocked(now, cause)
	b.remember = -1
}

// Release ends a force, with or without an end of its own: the breaker is
// half-open. It does nothing unless the breaker is open by force.
//
// A breaker knows one force at a time; where several parties force one scope,
// they must agree among themselves who releases.
func (b *Breaker) Release(now time.Duration) {
	b.mu.Lock()
	defer b.unlock(now)
	if e := b.epoch.Load(); e.state == breaker.Open && e.forced {
		b.promised = math.MinInt64
		b.halfOpenLocked(now, false)
	}
}

// Trip opens the breaker as if it had judged so itself: the backoff applies.
// Half-open it ends the phase, whatever its pace, as a failed first probe does; open
// it does nothing.
func (b *Breaker) Trip(now time.Duration, cause breaker.Cause) {
	b.mu.Lock()
	defer b.unlock(now)
	b.expireLocked(now)
	switch b.epoch.Load().state {
	case breaker.Closed:
		b.tripLocked(now, cause)
	case breaker.HalfOpen:
		b.gb = b.trippedGobreaker()
		if b.epoch.Load().held {
			b.holdLocked(now, cause, TrialFailed)
			return
		}
		b.climbLocked(now)
		b.openLocked(now, cause, b.periodLocked(now), false)
	default: // open already
	}
}

// Tick rolls the window and ends the leases of lost probes. Call it at least
// once a second, and at least once per sixtieth of Window: successes of an
// attached counter are booked when it runs.
func (b *Breaker) Tick(now time.Duration) {
	b.mu.Lock()
	defer b.unlock(now)
	b.expireLocked(now)
	if now >= b.win.edge && b.Closed() {
		b.collectLocked(now)
	}
}

// Changes appends the pending changes to dst, oldest first, and forgets them.
// At most 64 are kept. With none pending it is one atomic load.
func (b *Breaker) Changes(dst []Change) []Change {
	if b.pending.Load() == 0 {
		return dst
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	dst = append(dst, b.changes...)
	b.changes = b.changes[:0]
	b.pending.Store(0)
	return dst
}

// Snapshot is a breaker at one instant, for people and for its fleet.
type Snapshot struct {
	breaker.Snapshot

	Trial Trial // of the last permit, while held and open
}

// Snapshot describes the breaker as of now. It never changes it: not even an
// open period that is over becomes half-open by being looked at.
func (b *Breaker) Snapshot(now time.Duration) Snapshot {
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.epoch.Load()
	s := Snapshot{Trial: e.trial, Snapshot: breaker.Snapshot{
		Name:         b.name,
		State:        e.state,
		Cause:        e.cause,
		Forced:       e.forced,
		Barred:       now < b.promised,
		Held:         e.held,
		Since:        e.since,
		BackoffLevel: b.levelLocked(now),
		Generation:   e.gen,
	}}
	if e.state != breaker.Closed {
		s.Until = max(e.deadline(), 0)
		s.ProbesOut, s.ProbesPassed = len(b.out), b.passed
		return s
	}
	w := b.win
	crossed := w.roll(now)
	n := e.ok.Load() - b.okSeen
	for _, f := range b.feeds {
		if v := f.read(); v > f.last {
			n += v - f.last
		}
	}
	w.succeeded(n, crossed)
	s.Successes, s.Failures = w.ok, w.bad
	if total := w.ok + w.bad; total > 0 {
		s.Ratio = float64(w.bad) / float64(total)
		s.Bound = wilsonLow(w.bad, total, b.cfg.Z)
	}
	if n == 0 && !b.fresh {
		s.Run = b.run.n
	}
	return s
}

// unlock releases mu and, if the state changed, tells the tree.
func (b *Breaker) unlock(now time.Duration) {
	changed := b.changed
	b.changed = false
	b.mu.Unlock()
	if changed && b.notify != nil {
		b.notify(now)
	}
}

// collectLocked moves the window to now and books the successes since the last
// time.
func (b *Breaker) collectLocked(now time.Duration) {
	crossed := b.win.roll(now)
	ok := b.epoch.Load().ok.Load()
	n := ok - b.okSeen
	b.okSeen = ok
	for _, f := range b.feeds {
		n += b.takeLocked(f)
	}
	if n > 0 {
		b.win.succeeded(n, crossed)
		b.fresh = true
	}
}

func (b *Breaker) judgeLocked() (breaker.Cause, bool) {
	n := b.win.ok + b.win.bad
	if !b.cfg.NoRun && b.run.deliveries() >= 2 && b.run.n >= runLength(b.cfg.Run, n, b.cfg.Window) {
		return breaker.CauseRun, true
	}
	if n < uint64(b.cfg.MinSample) || float64(b.win.bad) <= b.cfg.Ratio*float64(n) {
		return "", false
	}
	return breaker.CauseRate, wilsonLow(b.win.bad, n, b.cfg.Z) > b.cfg.Ratio
}

// tripLocked opens a closed breaker by verdict.
func (b *Breaker) tripLocked(now time.Duration, cause breaker.Cause) {
	if now > b.remember {
		b.flaps = 0
	} else {
		b.flaps = min(b.flaps+1, maxFlaps)
	}
	b.level = max(b.levelLocked(now), 1)
	b.down = now
	b.tripGobreaker(b.gb)
	b.openLocked(now, cause, b.periodLocked(now), false)
}

// climbLocked goes one level up, if the next period may last longer than that of the
// level it leaves.
func (b *Breaker) climbLocked(now time.Duration) {
	if d := b.cfg.Period(b.level); b.cfg.PeriodAfter(b.level+1, now-b.down) >= d {
		b.level = min(b.level+1, b.top)
	}
}

// levelLocked is the level as of now: forgotten once Memory has passed since the
// close.
func (b *Breaker) levelLocked(now time.Duration) int {
	if b.Closed() && now > b.remember {
		return 0
	}
	return b.level
}

// periodLocked is the open period that begins now.
func (b *Breaker) periodLocked(now time.Duration) time.Duration {
	d := b.cfg.PeriodAfter(b.level, now-b.down)
	if b.cfg.Jitter > 0 {
		d = jittered(d, b.cfg.Jitter, b.rand())
	}
	return d
}

// openLocked is the only way into Open.
func (b *Breaker) openLocked(now time.Duration, cause breaker.Cause, d time.Duration, forced bool) {
	e := &epoch{state: breaker.Open, cause: cause, forced: forced}
	e.until.Store(int64(later(now, d)))
	b.moveLocked(now, e, cause, d)
}

// halfOpenLocked begins a phase of probes, of one probe if it is by permit.
func (b *Breaker) halfOpenLocked(now time.Duration, permit bool) *epoch {
	// gobreaker judges a whole phase; a permit is not one.
	b.byHand, b.judged = permit || b.flaps > 0, gobreaker.StateHalfOpen
	prev := b.epoch.Load()
	e := &epoch{state: breaker.HalfOpen, cause: prev.cause, held: permit, freed: prev.held && !permit}
	e.until.Store(math.MinInt64)
	b.moveLocked(now, e, e.cause, 0)
	return e
}

func (b *Breaker) closeLocked(now time.Duration, cause breaker.Cause) {
	b.level = max(b.level-1, 0)
	b.remember = later(now, b.cfg.Memory)
	for _, f := range b.feeds {
		b.takeLocked(f)
	}
	b.win.reset(now)
	b.okSeen, b.fresh, b.run = 0, false, run{}
	b.moveLocked(now, &epoch{state: breaker.Closed}, cause, 0)
}

// moveLocked makes e the next generation, which voids every token of the one
// before, and records the change.
func (b *Breaker) moveLocked(now time.Duration, e *epoch, cause breaker.Cause, openFor time.Duration) {
	prev := b.epoch.Load()
	e.gen, e.since = prev.gen+1, now
	e.stir.Store(int64(now))
	clear(b.out)
	b.out, b.passed, b.pace, b.head, b.stretch = b.out[:0], 0, 0, 0, stretch{}
	if prev.state == breaker.Closed && e.state == breaker.Open {
		b.down = now
	}
	b.publishLocked(e)
	if prev.state == breaker.Closed && e.state == breaker.Closed {
		return
	}
	b.changed = true
	b.seq++
	if len(b.changes) == maxChanges {
		b.changes = slices.Delete(b.changes, 0, 1)
	}
	b.changes = append(b.changes, Change{
		Scope: b.name, Seq: b.seq, At: now, From: prev.state, To: e.state,
		Cause: cause, OpenFor: openFor, BackoffLevel: b.level,
	})
	b.pending.Store(int32(len(b.changes)))
}

func (b *Breaker) publishLocked(e *epoch) {
	word := e.gen << 1
	if e.state == breaker.Closed {
		word |= 1
	}
	b.epoch.Store(e)
	b.word.Store(word)
}

// roomLocked sets the instant before which half-open admits nobody.
func (b *Breaker) roomLocked(e *epoch, now time.Duration) {
	e.stir.Store(int64(now))
	room := max(b.cfg.Probes, 1<<(b.pace/probePassed))
	if e.held {
		room = 1
	}
	if len(b.out) < room {
		e.until.Store(math.MinInt64)
		return
	}
	first := b.out[0].deadline
	for _, p := range b.out[1:] {
		first = min(first, p.deadline)
	}
	e.until.Store(int64(first))
}

// expireLocked settles the probes that outlived their leases.
func (b *Breaker) expireLocked(now time.Duration) {
	for i := 0; i < len(b.out); { // settled, a probe is out no more; the phase may end
		if p := b.out[i]; p.deadline <= now {
			b.settleLocked(now, p, lost)
		} else {
			i++
		}
	}
}

func (b *Breaker) settleProbe(now time.Duration, p *probe, o outcome) {
	b.mu.Lock()
	defer b.unlock(now)
	b.expireLocked(now)
	b.settleLocked(now, p, o)
}

// outcome is what became of a probe.
type outcome uint8

const (
	passed outcome = iota
	failed
	down // failed, and the error says that the dependency is down
	tooSlow
	lost
	excluded
)

// settleLocked settles p once, and only in its own generation.
func (b *Breaker) settleLocked(now time.Duration, p *probe, o outcome) {
	e := b.epoch.Load()
	if p.settled || p.gen != e.gen {
		return
	}
	p.settled = true
	if i := slices.Index(b.out, p); i >= 0 {
		b.out = slices.Delete(b.out, i, i+1)
	}
	again := p.head != 0 && p.head == b.head
	switch {
	case o == excluded, o == failed && again && b.pace > 0:
		b.tellLocked(p, errExcluded)
	case o == passed && e.held:
		b.holdLocked(now, e.cause, TrialPassed)
		return
	case o == passed:
		b.passed++
		b.stretchLocked(now, false)
		b.pace = min(b.pace+probePassed, maxPace)
		if b.pace >= maxPace/2 {
			b.down = now
		}
		b.tellLocked(p, nil)
		if b.byHand && b.passed >= b.cfg.Successes<<b.flaps {
			b.gb, b.judged = b.newGobreaker(), gobreaker.StateClosed
		}
		if b.judged == gobreaker.StateClosed {
			b.closeLocked(now, breaker.CauseProbe)
			return
		}
	case e.held:
		b.holdLocked(now, probeCause[o], TrialFailed)
		return
	case b.pace > 0:
		b.pace-- // others succeed: slower, and not stopped
		b.stretchLocked(now, true)
		b.head, b.passed, b.byHand = p.head, 0, true
	default:
		b.tellLocked(p, errFailed)
		if b.byHand {
			b.gb = b.trippedGobreaker()
		}
		b.climbLocked(now)
		b.openLocked(now, probeCause[o], b.periodLocked(now), false)
		return
	}
	if passing := b.pace > 0; passing != e.passing.Load() {
		e.passing.Store(passing)
		b.changed = true // so is its vote
	}
	b.roomLocked(e, now)
}

// stretch is a part of a half-open phase, Memory long from its first probe on.
type stretch struct {
	from     time.Duration
	bad, all int // probes
}

// stretchLocked counts a probe. A stretch in which no more of them failed than a closed breaker
// bears forgets a flap: else a row of 640 would be asked for long after the flapping is over,
// which a dependency that fails one call in fifty never has.
func (b *Breaker) stretchLocked(now time.Duration, bad bool) {
	s := &b.stretch
	if s.all == 0 {
		s.from = now
	}
	if s.all++; bad {
		s.bad++
	}
	if now-s.from < b.cfg.Memory {
		return
	}
	if s.all >= b.cfg.Successes && float64(s.bad) <= b.cfg.Ratio*float64(s.all) {
		b.flaps = max(0, b.flaps-1)
	}
	*s = stretch{}
}

// The pace of a half-open breaker is how many probes may be out: 2^(pace/probePassed),
// or Config.Probes if that is more. A success doubles it, two failures halve it, and a
// failure at pace 0 opens the breaker. So a dependency that fails up to two calls in
// three carries what it can, and one that is down is left alone.
//
// Doubling on success and halving on failure is the slow start and the multiplicative
// decrease of TCP (V. Jacobson, Congestion avoidance and control, SIGCOMM 1988).
const (
	probePassed = 2
	maxPace     = 6 * probePassed // 64 at once
	maxFlaps    = 6
)

var probeCause = [...]breaker.Cause{failed: breaker.CauseProbe, down: breaker.CauseProbe, tooSlow: breaker.CauseSlow, lost: breaker.CauseLost}

// tellLocked passes a probe's outcome to gobreaker, whose answer is in judged. A failure
// that only slows the phase is not told: the rest of that phase is judged by hand.
func (b *Breaker) tellLocked(p *probe, err error) {
	if p.done != nil && !b.byHand {
		p.done(err)
	}
}

// votes reports whether the breaker counts as not closed for a parent: it is
// not, and something was there to probe with in the last Cap. A hold has no end to
// count from, but the open period that it began with. What a hold was given back
// from is not known to fail until a probe of its own has, and then it is open. A force is
// somebody's decision about this breaker, and says nothing about its siblings.
func (b *Breaker) votes(now time.Duration) bool {
	e := b.epoch.Load()
	if e.state == breaker.Closed || e.forced || e.freed || e.passing.Load() {
		return false
	}
	last := e.stir.Load()
	if !e.held || e.state != breaker.Open {
		last = max(last, e.until.Load())
	}
	return now < later(time.Duration(last), b.cfg.Cap)
}

// spent reports whether the breaker holds nothing worth keeping.
func (b *Breaker) spent(now time.Duration) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.epoch.Load()
	if e.state != breaker.Closed {
		last := time.Duration(max(e.until.Load(), e.stir.Load()))
		return len(b.out) == 0 && now >= later(last, b.cfg.Memory)
	}
	w := b.win
	w.roll(now)
	return w.bad == 0 && b.levelLocked(now) == 0
}
