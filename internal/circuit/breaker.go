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

// A Change is one step between states. If From and To are both Open, the open period has
// become longer.
type Change struct {
	Scope string // name of the breaker or of the parent scope
	Seq   uint64 // number of the change in its scope, from 1; a gap means that changes were dropped
	At    time.Duration
	From  breaker.State
	To    breaker.State
	Cause breaker.Cause
	// OpenFor is how long the scope opens for: the largest Duration for a force without
	// end, 0 unless To is Open, always 0 for a parent.
	OpenFor      time.Duration
	BackoffLevel int // backoff position after the change
}

// maxChanges bounds the mailbox of one breaker; the oldest are dropped.
const maxChanges = 64

// Breaker is the circuit breaker of one scope. All methods are safe for concurrent use.
// Instants from different goroutines may arrive slightly out of order.
//
// Lock order: Scopes.mu, then mu, then gobreaker's lock. Under mu the only code of the
// caller that runs are the functions given to Attach and WithRand.
type Breaker struct {
	name string
	cfg  *breaker.Config // with defaults; read-only, shared by the leaves of one Scopes
	top  int
	rand func() float64

	// gate is generation<<1 | closed; Enter reads nothing else. epoch has all facts of
	// the same generation. Both change under mu, epoch first.
	gate  atomic.Uint64
	epoch atomic.Pointer[epoch]

	// notify, if set, runs after a change of state, without mu.
	notify  func(now time.Duration)
	pending atomic.Int32 // len(changes), so that Changes takes no lock when there are none

	mu      sync.Mutex
	changed bool
	changes []Change
	seq     uint64

	win            window
	feeds          []*feed
	okSeen         uint64 // part of epoch.ok already in win
	succeededSince bool   // a success was seen since the last failure
	run            run

	level     int
	remember  time.Duration // a trip until this instant continues from level; -1 for none
	tripped   time.Duration // when the breaker last ceased to be closed
	downSince time.Duration // start of the outage: the trip, or the latest probe that passed at half of maxPace or more
	flaps     int           // trips in a row, each within Memory of a close

	gb             *gobreaker.TwoStepCircuitBreaker[struct{}]
	verdict        bool            // answer of ReadyToTrip
	gobreakerState gobreaker.State // gobreaker's latest state
	byHand         bool            // this phase is judged without gobreaker; see admitSlow
	out            []*probe
	passed         int // probes that succeeded in this phase since the latest failure
	stretch        stretch
	pace           int    // pace of this phase: see probePassed
	head           uint64 // identity of the delivery whose probe failed last
	life           uint64 // successes read from attached counters

	forcedUntil time.Duration // latest end of all forces; no hold begins before it
}

// epoch is one generation. After publication only its atomics change.
type epoch struct {
	gen    uint64
	state  breaker.State
	forced bool
	held   bool // open by Hold, or half-open by Permit
	freed  bool // half-open by Unhold
	trial  Trial
	cause  breaker.Cause
	since  time.Duration

	// until is the instant before which no call is admitted. Open: the deadline of the
	// open period. Half-open: the end of the earliest lease while all slots are taken,
	// otherwise the smallest Duration.
	until atomic.Int64
	// stir is when a probe was last given or settled. After Hold it is the end of the
	// open period that the backoff of this breaker gives.
	stir atomic.Int64
	// passing says that the breaker is half-open and its probes succeed: the scope
	// carries a part of its load, and has no vote at its parent.
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

// run counts failed attempts with no success between them.
type run struct {
	n      int
	firsts int
	led    bool   // the run began with a retry, whose delivery has no first attempt in the run
	id     uint64 // identity of one delivery in the run, 0 if none has one
	two    bool   // the run has at least two deliveries
}

// deliveries is the least number of deliveries that the run is known to come from.
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

// New returns a closed breaker. Refusals, changes and snapshots have the name as the name
// of the scope. The error reports all wrong fields of cfg.
func New(name string, cfg breaker.Config, opts ...Option) (*Breaker, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.WithDefaults()
	return newBreaker(name, &cfg, buildOptions(opts), nil), nil
}

func newBreaker(name string, cfg *breaker.Config, o options, notify func(time.Duration)) *Breaker {
	b := &Breaker{
		name:        name,
		cfg:         cfg,
		forcedUntil: math.MinInt64,
		top:         topLevel(cfg.Base, cfg.Cap),
		rand:        o.rand,
		notify:      notify,
		remember:    -1,
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
func (b *Breaker) Closed() bool { return b.gate.Load()&1 != 0 }

// Enter is the closed path: one atomic load, no clock, no lock, no
// allocation. False means that the breaker is not closed: call Admit.
func (b *Breaker) Enter() (Token, bool) {
	w := b.gate.Load()
	if w&1 == 0 {
		return Token{}, false
	}
	return Token{gen: w >> 1}, true
}

// Admit asks for a token in any state. Closed: it returns a token like Enter's. Open: it
// refuses until the deadline; the first call after it becomes a probe. Half-open: it
// returns a probe while there is room, otherwise a refusal.
//
// head identifies the delivery that would probe: always the same number for a delivery, or
// 0 for no identity. While other probes succeed, a delivery that fails again is no further
// evidence. A refusal takes no lock and allocates nothing.
func (b *Breaker) Admit(now time.Duration, head uint64) (Token, Refusal) {
	return b.admit(now, head, 0)
}

// admit is Admit with a lease that may be longer than Config.Lease, for long calls.
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
		// gobreaker allows at most Successes requests. Its own open period of 1 ns is over,
		// unless its clock has not moved since (it is frozen or coarse). Nothing else makes
		// gobreaker half-open, so a phase in which it refuses is judged here.
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

// Success settles t as succeeded. On the closed path it is one atomic add. A caller with
// an attached counter ([Breaker.Attach]) must not call it there: the success would count
// twice. A token of an older generation changes nothing. A probe settles once.
func (b *Breaker) Success(now time.Duration, t Token) {
	if t.probe != nil {
		b.settleProbe(now, t.probe, passed)
		return
	}
	if e := b.epoch.Load(); e.gen == t.gen {
		e.ok.Add(1)
	}
}

// Failure settles t as failed. first says that this was the delivery's first attempt. Only
// first attempts count in the ratio: otherwise a retried poison message would count once
// for each try. Every attempt counts in the run. The run's deliveries are told apart by
// their first attempts; for a scope whose workers retry side by side see
// [Breaker.FailureOf].
//
// Failure takes the breaker's lock and reads the attached counters. The ratio is judged
// only here: a success never opens a breaker, not even the success that completes
// MinSample.
func (b *Breaker) Failure(now time.Duration, t Token, first bool) {
	b.fail(now, t, first, 0, failed)
}

// FailureOf is Failure for a delivery that has an identity (0 means none). So the breaker
// knows whether the retries of a run come from one delivery or from two.
func (b *Breaker) FailureOf(now time.Duration, t Token, first bool, delivery uint64) {
	b.fail(now, t, first, delivery, failed)
}

// Unavailable is Failure for a call whose error says that the dependency itself is down,
// such as a refused connection. One delivery is then enough evidence for the run, and
// every probe that fails like this counts.
func (b *Breaker) Unavailable(now time.Duration, t Token, first bool) {
	b.fail(now, t, first, 0, down)
}

// Slow reports that the call of t is still running after Config.Slow. The call counts as a
// failed attempt at once, so that the breaker sees a hanging dependency before its calls
// return. Slow settles a probe: later reports change nothing.
//
// On the closed path a token has no identity. The caller reports it slow once, and then
// settles it with Exclude or not at all. If the call succeeds after all, an attached
// counter may count one more success, which is harmless.
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
	if b.succeededSince {
		b.run, b.succeededSince = run{}, false
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

// Exclude settles t without an outcome, for example after a shutdown, a revoke, a
// rejection by the guard or a permanently bad message. It frees the slot of a probe and
// changes nothing else.
func (b *Breaker) Exclude(now time.Duration, t Token) {
	if t.probe != nil {
		b.settleProbe(now, t.probe, excluded)
	}
}

// Probing reports whether a token is a probe that is still out.
func (b *Breaker) Probing(t Token) bool {
	if t.probe == nil {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return !t.probe.settled && t.probe.gen == b.epoch.Load().gen
}

// Renew restarts the lease of a probe: its caller continues with another delivery under
// the same token. It reports whether the token is still a probe that is out.
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

// Attach gives the breaker a cumulative count of successes that the caller writes, so that
// a success costs the closed path nothing. The breaker calls read under its lock, at
// bucket edges and when it judges a failure: read must be a few atomic loads. A counter
// that goes backwards counts as restarted.
//
// A counter knows no generations: a call that was admitted before a trip and succeeds
// after the close counts. detach reads the counter once more and forgets it; a second call
// does nothing.
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
				b.succeededSince = true
			}
			b.feeds = slices.Delete(b.feeds, i, i+1)
		}
	}
}

// takeLocked returns what f has counted since its latest reading.
func (b *Breaker) takeLocked(f *feed) uint64 {
	n := f.read()
	d := n - min(n, f.last)
	f.last = n
	b.life += d
	return d
}

// Life is the number of successes of all attached counters since each was attached,
// detached counters included. These are the successes of everything that shares the scope,
// in any state. Life never decreases. A success between two failures of a message is a
// sign that the message is at fault, and not its dependency. Life takes the breaker's
// lock.
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

// Passing reports whether the breaker is half-open and enough of its probes succeed (its
// pace is above 0): it carries what the dependency can. One atomic load.
func (b *Breaker) Passing() bool { return b.epoch.Load().passing.Load() }

// Hasten ends an open period, so that the next call of Admit becomes a probe. The caller
// knows that the dependency is back. Hasten does nothing while the breaker is forced or
// held.
func (b *Breaker) Hasten(now time.Duration) {
	b.mu.Lock()
	defer b.unlock(now)
	if e := b.epoch.Load(); e.state == breaker.Open && !e.forced && !e.held && now >= b.forcedUntil {
		b.halfOpenLocked(now, false)
	}
}

// Force opens the breaker for d from now, or until Release if d <= 0. After Force returns,
// nothing is admitted before that deadline, and no outcome of earlier calls changes it.
// After the deadline, probes decide. An open period that ends later stays as it is; a hold
// does not. The level of the backoff does not change.
func (b *Breaker) Force(now, d time.Duration, cause breaker.Cause) {
	b.mu.Lock()
	defer b.unlock(now)
	until := never
	if d > 0 {
		until = later(now, d)
	} else {
		d = never
	}
	b.forcedUntil = max(b.forcedUntil, until)
	if e := b.epoch.Load(); e.state == breaker.Open && !e.held && (e.deadline() > until || e.forced && e.deadline() == until) {
		return
	}
	b.gb = b.trippedGobreaker()
	b.openLocked(now, cause, d, true)
}

// ForceClosed closes the breaker from any state, for an operator. The window is empty and
// the backoff at its start.
func (b *Breaker) ForceClosed(now time.Duration, cause breaker.Cause) {
	b.mu.Lock()
	defer b.unlock(now)
	b.level, b.flaps = 0, 0
	b.forcedUntil = math.MinInt64
	b.gb = b.newGobreaker()
	b.closeLocked(now, cause)
	b.remember = -1
}

// Release ends a force, also one with a deadline: the breaker becomes half-open. It does
// nothing unless the breaker is open by force.
//
// A breaker has one force at a time. If several parties force one scope, they must agree
// which of them releases it.
func (b *Breaker) Release(now time.Duration) {
	b.mu.Lock()
	defer b.unlock(now)
	if e := b.epoch.Load(); e.state == breaker.Open && e.forced {
		b.forcedUntil = math.MinInt64
		b.halfOpenLocked(now, false)
	}
}

// Trip opens the breaker as if it had judged so itself: the backoff applies. In a
// half-open breaker Trip ends the phase at any pace, as a failed first probe does. It does
// nothing if the breaker is open.
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

// Tick rolls the window and ends the leases of lost probes. Call it at least once a second
// and at least once per sixtieth of Window: it adds the successes of attached counters to
// the window.
func (b *Breaker) Tick(now time.Duration) {
	b.mu.Lock()
	defer b.unlock(now)
	b.expireLocked(now)
	if now >= b.win.edge && b.Closed() {
		b.collectLocked(now)
	}
}

// Changes appends the pending changes to dst, oldest first, and forgets them. A breaker
// keeps at most 64. If there are none it costs one atomic load.
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

	Trial Trial // outcome of the latest permitted probe, while held and open
}

// Snapshot describes the breaker as of now and does not change it: an open period that is
// over does not become half-open.
func (b *Breaker) Snapshot(now time.Duration) Snapshot {
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.epoch.Load()
	s := Snapshot{Trial: e.trial, Snapshot: breaker.Snapshot{
		Name:         b.name,
		State:        e.state,
		Cause:        e.cause,
		Forced:       e.forced,
		Barred:       now < b.forcedUntil,
		Held:         e.held,
		Since:        e.since,
		BackoffLevel: b.levelLocked(now),
		Generation:   e.gen,
	}}
	if e.state != breaker.Closed {
		s.Tripped = b.tripped
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
	if n == 0 && !b.succeededSince {
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

// collectLocked moves the window to now and adds the successes since its latest call.
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
		b.succeededSince = true
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

// tripLocked opens a closed breaker by the breaker's own verdict.
func (b *Breaker) tripLocked(now time.Duration, cause breaker.Cause) {
	if now > b.remember {
		b.flaps = 0
	} else {
		b.flaps = min(b.flaps+1, maxFlaps)
	}
	b.level = max(b.levelLocked(now), 1)
	b.downSince = now
	b.tripGobreaker(b.gb)
	b.openLocked(now, cause, b.periodLocked(now), false)
}

// climbLocked raises the level by one if the next period may be at least as long as that
// of the current level.
func (b *Breaker) climbLocked(now time.Duration) {
	if d := b.cfg.Period(b.level); b.cfg.PeriodAfter(b.level+1, now-b.downSince) >= d {
		b.level = min(b.level+1, b.top)
	}
}

// levelLocked is the level as of now: 0 once Memory has passed since the close.
func (b *Breaker) levelLocked(now time.Duration) int {
	if b.Closed() && now > b.remember {
		return 0
	}
	return b.level
}

// periodLocked is the open period that begins now.
func (b *Breaker) periodLocked(now time.Duration) time.Duration {
	d := b.cfg.PeriodAfter(b.level, now-b.downSince)
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

// halfOpenLocked begins a phase of probes. By permit it is one probe.
func (b *Breaker) halfOpenLocked(now time.Duration, permit bool) *epoch {
	// gobreaker judges whole phases; a permit is no whole phase.
	b.byHand, b.gobreakerState = permit || b.flaps > 0, gobreaker.StateHalfOpen
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
	b.okSeen, b.succeededSince, b.run = 0, false, run{}
	b.moveLocked(now, &epoch{state: breaker.Closed}, cause, 0)
}

// moveLocked makes e the next generation, which voids all older tokens, and records the
// change.
func (b *Breaker) moveLocked(now time.Duration, e *epoch, cause breaker.Cause, openFor time.Duration) {
	prev := b.epoch.Load()
	e.gen, e.since = prev.gen+1, now
	e.stir.Store(int64(now))
	clear(b.out)
	b.out, b.passed, b.pace, b.head, b.stretch = b.out[:0], 0, 0, 0, stretch{}
	if prev.state == breaker.Closed && e.state != breaker.Closed {
		b.tripped = now
	}
	if prev.state == breaker.Closed && e.state == breaker.Open {
		b.downSince = now
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
	b.gate.Store(word)
}

// roomLocked sets the instant before which a half-open breaker admits no call.
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
	for i := 0; i < len(b.out); { // settling removes the probe from b.out, and may end the phase
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

// outcome is how an attempt or a probe ended.
type outcome uint8

const (
	passed outcome = iota
	failed
	down // failed, and the error says that the dependency is down
	tooSlow
	lost
	excluded
)

// settleLocked settles p once and only in the generation of p.
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
			b.downSince = now
		}
		b.tellLocked(p, nil)
		if b.byHand && b.passed >= b.cfg.Successes<<b.flaps {
			b.gb, b.gobreakerState = b.newGobreaker(), gobreaker.StateClosed
		}
		if b.gobreakerState == gobreaker.StateClosed {
			b.closeLocked(now, breaker.CauseProbe)
			return
		}
	case e.held:
		b.holdLocked(now, probeCause[o], TrialFailed)
		return
	case b.pace > 0:
		b.pace-- // other probes succeed: slow down, do not stop
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
		b.changed = true // the vote at the parent changed
	}
	b.roomLocked(e, now)
}

// stretch is a part of a half-open phase. It lasts Memory from its first probe on.
type stretch struct {
	from     time.Duration
	bad, all int // failed probes, all probes
}

// stretchLocked counts a probe. If a stretch ends with at most Ratio of its probes failed,
// one flap is forgotten. Otherwise 640 successes in a row could be needed long after the
// flapping is over; a dependency that fails one call in fifty never has so many.
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

// The pace of a half-open breaker sets how many probes may be out: 2^(pace/probePassed),
// or Config.Probes if that is more. A success doubles the number, two failures halve it,
// and a failure at pace 0 opens the breaker. So a dependency that fails up to two calls in
// three carries what it can, and a dependency that is down gets no calls.
//
// Doubling on success and halving on failure is the slow start and the multiplicative
// decrease of TCP (V. Jacobson, Congestion avoidance and control, SIGCOMM 1988).
const (
	probePassed = 2
	maxPace     = 6 * probePassed // 64 at once
	maxFlaps    = 6
)

var probeCause = [...]breaker.Cause{failed: breaker.CauseProbe, down: breaker.CauseProbe, tooSlow: breaker.CauseSlow, lost: breaker.CauseLost}

// tellLocked passes a probe's outcome to gobreaker, which answers in gobreakerState. gobreaker is
// not told a failure that only slows the phase: the rest of that phase is judged by hand.
func (b *Breaker) tellLocked(p *probe, err error) {
	if p.done != nil && !b.byHand {
		p.done(err)
	}
}

// votes reports whether the breaker counts as not closed at its parent: it is not closed,
// and had something to probe with in the last Cap. A hold has no deadline to count from;
// the end of its open period counts.
//
// A breaker that Unhold gave back has no vote: nothing shows that it fails until its own
// probe fails, and then it is open. A forced breaker has no vote: a force is a decision
// about this breaker and says nothing about its siblings.
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

// spent reports whether the breaker has no state worth keeping.
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
