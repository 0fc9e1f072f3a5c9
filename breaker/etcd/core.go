// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/crdt"
	"github.com/stormguard-mq/stormguard/fleet"
)

// core is what this process knows of etcd and what it makes of it: a
// [fleet.Decider] without goroutine, timer or I/O. A session tells it what is there
// (reset, apply, contact) and asks it what to write (next, done).
//
// What it wants to be there, its own vote above all, is compared with what the
// watch says is there; a difference is a write. So it does not matter whether an
// answer was lost, or a lease with all that hung on it.
type core struct {
	cfg    fleet.Config
	self   crdt.Replica
	roster fleet.Roster
	need   int
	member bool          // self is in the roster
	report func([]event) // called without the lock; must not be nil

	mu        sync.Mutex
	start     time.Duration
	scopes    map[string]*scope
	active    []*scope // those that step and next look at: something is wrong there
	actions   []fleet.Action
	events    []event // to be reported
	wake      func()
	work      chan struct{} // holds one: next may have something
	connected bool
	full      bool // something was left out for want of room
	opaque    int  // values that cannot be read
	parting   bool // Close was called

	// Of the session.
	link    link
	members map[string]uint64 // who has a lease, by name: incarnation
	rev     int64             // the watch has told all up to here
	asked   time.Duration     // the watch was asked for a sign of life; never if it has answered
}

// link is our standing with etcd.
type link struct {
	up      bool          // a session is there, and what it is told is written
	ttl     time.Duration // of our lease
	renewed time.Duration // it was asked for, at its latest renewal
	watched time.Duration // the watch was asked for a sign of life, at its latest
	born    int64         // revision that created our member key
	charter int64         // revision of the roster
	late    uint64        // number of a roster later than ours, under which we decide and probe no more; 0 is none
}

// scope is what is known about one scope, and what this process does there.
type scope struct {
	name  string
	known fleet.State
	rev   int64         // of the state's key; 0 is none
	since time.Duration // known was heard of
	blind bool          // the state cannot be read: the breaker goes by itself
	votes map[string]vote
	probe *slot
	freed time.Duration // nobody has had the probe since
	last  *heir

	active  bool
	claimed bool
	asking  bool // taken over, and nothing is known yet
	wants   bool
	mode    mode
	release time.Duration // when held gives way to half-open; never if it does not
	seen    uint64        // generation of the breaker at the last Observe
	cast    uint64        // generation of the breaker that the last vote was about
	back    bool          // cut off while the fleet is open, it has closed by itself
	own     fleet.Vote    // as it should be
	testify *fleet.Vote   // what a next owner has to know, to be written

	trial   trial
	result  result
	cause   breaker.Cause // of a failed one
	turn    string
	turnAt  time.Duration
	mine    bool          // it is our turn
	idleAt  time.Duration // since when nobody is left to probe; never if somebody is
	skipped map[string]struct{}

	busy    bool          // an operation is under way
	barrier int64         // the latest operation is known once rev is this
	retry   time.Duration // not before
	backoff time.Duration
}

// vote is a row, and the revision that a decision compares.
type vote struct {
	fleet.Vote
	rev int64
}

// slot is the probe of a scope.
type slot struct {
	probe
	rev int64
}

// heir is the last owner's word.
type heir struct {
	fleet.Vote
	rev   int64
	heard time.Duration
}

// mode is who decides over the scope's breaker.
type mode uint8

const (
	free    mode = iota // the breaker itself
	held                // the fleet, or a handover
	probing             // the fleet, with our probe out
)

// trial is our probe.
type trial struct {
	asked   time.Duration // its lease was renewed after this; never if none was
	granted time.Duration
	gen     uint64 // of the breaker, before
	taken   bool
}

// result is a probe that is over, and not written yet.
type result uint8

const (
	pending result = iota
	passed
	failed
)

const never = time.Duration(-1 << 63)

func newCore(c Config, self crdt.Replica, now time.Duration) *core {
	r := fleet.Roster{Number: c.Roster.Number, Names: slices.Sorted(slices.Values(c.Roster.Names))}
	_, member := slices.BinarySearch(r.Names, self.Name)
	return &core{
		cfg: c.Fleet, self: self, roster: r, need: fleet.Need(c.Fleet.Quorum, len(r.Names)), member: member,
		report: func([]event) {},
		start:  now, scopes: make(map[string]*scope), members: make(map[string]uint64), asked: never, work: make(chan struct{}, 1),
	}
}

// Config is [fleet.Decider]'s.
func (c *core) Config() fleet.Config { return c.cfg }

// Alone is [fleet.Decider]'s.
func (c *core) Alone() bool { return len(c.roster.Names) == 1 }

// OnActions is [fleet.Decider]'s.
func (c *core) OnActions(wake func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wake = wake
}

// Actions is [fleet.Decider]'s.
func (c *core) Actions(dst []fleet.Action) []fleet.Action {
	c.mu.Lock()
	defer c.mu.Unlock()
	dst = append(dst, c.actions...)
	clear(c.actions)
	c.actions = c.actions[:0]
	return dst
}

// Stirs is [fleet.Decider]'s.
func (c *core) Stirs() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.ContainsFunc(c.active, func(sc *scope) bool { return sc.claimed })
}

// unlock ends a step, and wakes who may have something to do after it: the writer,
// and the driver if the step was not its own.
func (c *core) unlock(driver bool) {
	wake, events := c.wake, c.events
	if driver || len(c.actions) == 0 {
		wake = nil
	}
	c.events = nil
	if len(c.active) > 0 {
		c.nudge()
	}
	c.mu.Unlock()
	if len(events) > 0 {
		c.report(events)
	}
	if wake != nil {
		wake()
	}
}

// nudge has somebody ask next.
func (c *core) nudge() {
	select {
	case c.work <- struct{}{}:
	default:
	}
}

// event is a change of state, to be logged.
type event struct {
	scope string
	state fleet.State
}

// Tick is [fleet.Decider]'s.
func (c *core) Tick(now time.Duration) {
	c.mu.Lock()
	defer c.unlock(true)
	c.stepLocked(now)
}

// freshLocked reports whether what is known is what is there: our lease cannot be
// over, and the watch has shown life after that time. A process that stood still
// finds itself stale, for its lease was renewed before.
func (c *core) freshLocked(now time.Duration) bool {
	return now < min(c.link.renewed, c.link.watched)+c.link.ttl
}

// status tells whether what is known is what is there, and the number of a roster
// later than ours, or 0.
func (c *core) status(now time.Duration) (fresh bool, late uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.freshLocked(now), c.link.late
}

// heardLocked is how many of the roster have a lease, ourselves included.
func (c *core) heardLocked(now time.Duration) (heard int) {
	fresh := c.freshLocked(now)
	for _, n := range c.roster.Names {
		if _, ok := c.members[n]; n == c.self.Name || ok && fresh {
			heard++
		}
	}
	return heard
}

// stepLocked makes time pass.
func (c *core) stepLocked(now time.Duration) {
	c.lookAroundLocked(now)
	for _, sc := range c.active { // none becomes active by this
		if sc.asking {
			c.takeOverLocked(now, sc)
		}
		if sc.release != never && now >= sc.release {
			c.releaseLocked(sc)
		}
		c.electLocked(now, sc)
	}
	c.active = slices.DeleteFunc(c.active, func(sc *scope) bool {
		sc.active = sc.known.Open() || sc.asking || sc.release != never || sc.testify != nil || sc.result != pending ||
			sc.busy || len(sc.votes) > 0 || c.ours(sc) || sc.says() != (fleet.Vote{}) || !c.saidLocked(sc)
		if !sc.active && !sc.claimed && sc.rev == 0 && sc.probe == nil && sc.last == nil {
			delete(c.scopes, sc.name)
		}
		return !sc.active
	})
}

func (c *core) stirLocked(sc *scope) {
	if !sc.active {
		sc.active = true
		c.active = append(c.active, sc)
	}
}

// ours reports whether the probe of sc is this process's.
func (c *core) ours(sc *scope) bool { return sc.probe != nil && sc.probe.holder == c.self }

// lookAroundLocked notices when this process is cut off, and when it is back.
func (c *core) lookAroundLocked(now time.Duration) {
	connected := c.freshLocked(now) && c.heardLocked(now) >= c.need
	if connected == c.connected {
		return
	}
	c.connected = connected
	for _, sc := range c.scopes {
		if !sc.claimed || !sc.known.Open() {
			continue
		}
		if connected {
			c.rejoinLocked(now, sc)
			continue
		}
		switch sc.mode {
		case probing:
			c.holdLocked(now, sc) // what is out counts for nothing
		case held:
			sc.release = c.soloLocked(now, sc)
		case free:
		}
	}
}

// rejoinLocked follows the fleet again.
func (c *core) rejoinLocked(now time.Duration, sc *scope) {
	if sc.mode == free {
		c.creditLocked(sc)
		if c.adriftLocked(now, sc) {
			return
		}
	}
	c.holdLocked(now, sc)
}

// creditLocked counts the probes of our breaker, where it has closed by itself while
// the fleet is open, as ours in the round.
func (c *core) creditLocked(sc *scope) {
	if !sc.back {
		return
	}
	w := c.standing(sc)
	w.Phase, w.Passes = fleet.PhasePassed, uint32(c.cfg.Successes)
	sc.own = w
}

// standing is our vote in the round, to be changed.
func (c *core) standing(sc *scope) fleet.Vote {
	w := fleet.Vote{Phase: fleet.PhaseWaiting, At: sc.known.Position, Wants: sc.wants}
	if sc.own.At.Gen == w.At.Gen {
		w.Failed = sc.own.Failed
		if sc.own.At == w.At && sc.own.Phase != fleet.PhaseOpen {
			w.Phase, w.Passes = sc.own.Phase, sc.own.Passes
		}
	}
	return w
}

// says is our vote as it should be in etcd; the zero Vote is none.
func (sc *scope) says() fleet.Vote {
	w := sc.own
	switch {
	case w.At.Gen != sc.known.Gen,
		w.Phase == fleet.PhaseClosed, w.Phase == fleet.PhaseInherited,
		w.Phase == fleet.PhaseOpen && sc.known.Open(),
		w.Phase == fleet.PhaseWaiting && !w.Wants && w.Failed == 0:
		return fleet.Vote{}
	}
	return w
}

// saidLocked reports whether etcd has our vote as it should be.
func (c *core) saidLocked(sc *scope) bool {
	have, ok := sc.votes[c.self.Name]
	want := sc.says()
	if want == (fleet.Vote{}) {
		return !ok
	}
	want.Scope, want.Node, want.Version = sc.name, c.self, 1
	return ok && have.Vote == want
}

// setStateLocked takes in what the fleet decided. Revisions, not positions, say
// what is later.
func (c *core) setStateLocked(now time.Duration, sc *scope, s fleet.State, rev int64, blind bool) {
	sc.rev = rev
	if blind {
		s = sc.known
	}
	if blind != sc.blind {
		sc.blind = blind
		if blind && sc.claimed && sc.mode != free {
			c.releaseLocked(sc)
		}
	}
	if s == sc.known {
		return
	}
	sc.known, sc.since = s, now
	sc.result, sc.turn, sc.mine, sc.idleAt = pending, "", false, never
	clear(sc.skipped)
	c.stirLocked(sc)
	if !sc.claimed {
		return
	}
	c.events = append(c.events, event{scope: sc.name, state: s})
	if s.Open() {
		c.holdLocked(now, sc)
		return
	}
	sc.wants = false
	if sc.mode != free {
		sc.mode, sc.release, sc.asking = free, never, false
		c.actions = append(c.actions, fleet.Action{Scope: sc.name, Kind: fleet.Close, Cause: fleet.CauseFleet, At: s.Position})
	}
}

// holdLocked holds the scope as the fleet does.
func (c *core) holdLocked(now time.Duration, sc *scope) {
	sc.mode, sc.asking, sc.release, sc.back = held, false, never, false
	if !c.connected {
		sc.release = c.soloLocked(now, sc)
	}
	if sc.wants && !(sc.own.At.Gen == sc.known.Gen && sc.own.Wants && sc.own.Phase != fleet.PhaseOpen) {
		sc.own = c.standing(sc)
	}
	c.reholdLocked(now, sc)
}

func (c *core) reholdLocked(now time.Duration, sc *scope) {
	c.stirLocked(sc)
	a := fleet.Action{Scope: sc.name, Kind: fleet.Hold, Rung: sc.known.Rung, Cause: sc.known.Cause, At: sc.known.Position}
	switch {
	case sc.known.Open():
		a.For = max(c.dueLocked(sc)-now, 0)
	case sc.asking:
		a.For, a.Cause = max(c.start+c.cfg.Start-now, 0), fleet.CauseUnknown
	default:
		a.For, a.Rung, a.Cause = max(sc.release-now, 0), sc.own.Rung, sc.own.Cause
	}
	c.actions = append(c.actions, a)
}

// dueLocked is when the fleet's open period is over.
func (c *core) dueLocked(sc *scope) time.Duration { return sc.since + min(sc.known.OpenFor, c.cfg.Cap) }

// soloLocked is when a process that is cut off goes on by itself: when the period
// it knows of is over, and a little later, not all at once.
func (c *core) soloLocked(now time.Duration, sc *scope) time.Duration {
	extra := c.round(sc).Share(c.self.Name) * soloSpread * float64(min(sc.known.OpenFor, c.cfg.Cap))
	return max(now, c.dueLocked(sc)) + time.Duration(extra)
}

// soloSpread is over which share of the open period processes that are cut off
// spread their first probes.
const soloSpread = 0.2

func (c *core) releaseLocked(sc *scope) {
	sc.mode, sc.release, sc.asking = free, never, false
	a := fleet.Action{Scope: sc.name, Kind: fleet.HalfOpen, Rung: sc.known.Rung, Cause: sc.known.Cause, At: sc.known.Position}
	if sc.own.Phase == fleet.PhaseInherited && !sc.known.Open() {
		a.Rung, a.Cause = sc.own.Rung, sc.own.Cause
	}
	if a.Cause == "" {
		a.Cause = fleet.CauseUnknown
	}
	c.actions = append(c.actions, a)
}

// Observe is [fleet.Decider]'s.
func (c *core) Observe(now time.Duration, name string, s breaker.Snapshot) {
	c.mu.Lock()
	defer c.unlock(true)
	sc := c.scopes[name]
	if sc == nil || !sc.claimed {
		return
	}
	sc.seen = max(sc.seen, s.Generation)
	switch {
	case sc.mode == probing:
		c.observeTrialLocked(now, sc, s)
	case sc.mode == held:
		if s.State != breaker.Closed && !s.Held && !s.Barred {
			c.reholdLocked(now, sc) // a force that stood in the way of the hold is over
		}
	case sc.known.Open(): // cut off, or let go: the breaker decides
		sc.back = s.State == breaker.Closed
		sc.cast = s.Generation // what tripped before a close is no vote after it
		if c.connected && !sc.blind {
			c.creditLocked(sc)
		}
	case s.State == breaker.Closed:
		if sc.own.Troubled(sc.known.Gen) {
			sc.own = fleet.Vote{At: fleet.Position{Gen: sc.known.Gen}}
			if l := sc.last; sc.testify != nil || l != nil && (l.Node == c.self || !l.Vote.Troubled(sc.known.Gen)) {
				c.testifyLocked(sc)
			}
			c.stirLocked(sc)
		}
	case s.State == breaker.Open && !s.Forced && !s.Held && s.Generation > sc.cast:
		sc.cast = s.Generation
		rung := min(max(s.Rung, 1), maxRung)
		sc.own = fleet.Vote{
			Phase: fleet.PhaseOpen, At: fleet.Position{Gen: sc.known.Gen}, Wants: sc.wants,
			Rung: rung, OpenFor: c.periodOf(s, rung).Truncate(time.Microsecond), Cause: cut(s.Cause),
		}
		c.testifyLocked(sc)
		c.stirLocked(sc)
	default: // half-open, or open by somebody's force: no evidence
	}
}

// testifyLocked leaves word for a next owner.
func (c *core) testifyLocked(sc *scope) {
	w := fleet.Vote{
		Scope: sc.name, Node: c.self, Version: 1, Phase: sc.own.Phase, At: fleet.Position{Gen: sc.known.Gen},
		Rung: sc.own.Rung, OpenFor: sc.own.OpenFor, Cause: sc.own.Cause,
	}
	sc.testify = &w
}

// Want is [fleet.Decider]'s.
func (c *core) Want(_ time.Duration, name string, wants bool) {
	c.mu.Lock()
	defer c.unlock(true)
	sc := c.scopes[name]
	if sc == nil || !sc.claimed || sc.wants == wants {
		return
	}
	sc.wants = wants
	switch {
	case sc.known.Open():
		sc.own = c.standing(sc)
	case sc.own.Phase == fleet.PhaseOpen && sc.own.At.Gen == sc.known.Gen:
		sc.own.Wants = wants
	}
	if !c.saidLocked(sc) {
		c.stirLocked(sc)
	}
}

// Describe is [fleet.Decider]'s.
func (c *core) Describe(now time.Duration, name string) breaker.FleetScope {
	c.mu.Lock()
	defer c.mu.Unlock()
	b := breaker.FleetScope{Name: name, Heard: c.heardLocked(now), Need: c.need}
	sc := c.scopes[name]
	if sc == nil {
		return b
	}
	b.Cause, b.Round, b.Probing = sc.known.Cause, sc.known.Round, sc.mode == probing
	switch {
	case sc.known.Open():
		b.State, b.Left = breaker.Open, max(c.dueLocked(sc)-now, 0)
	case sc.asking:
		b.Left = max(c.start+c.cfg.Start-now, 0)
	case sc.release != never:
		b.Left = max(sc.release-now, 0)
	}
	return b
}

// Adopt is [fleet.Decider]'s: it answers from what the watch has told, and where
// that may be stale holds the scope until it is not, or until Start is over.
func (c *core) Adopt(now time.Duration, name string) (fleet.Action, error) {
	if len(name) < 1 || len(name) > maxScope {
		return fleet.Action{}, fmt.Errorf("%w: %d bytes are not in [1, %d]", ErrScope, len(name), maxScope)
	}
	c.mu.Lock()
	defer c.unlock(true)
	if c.scopes[name] == nil && c.full {
		return fleet.Action{}, fmt.Errorf("%w: %q, and Scopes is %d", ErrTooManyScopes, name, c.cfg.Scopes)
	}
	sc := c.scopeLocked(name)
	if sc == nil {
		return fleet.Action{}, fmt.Errorf("%w: %q would be number %d, Scopes is %d", ErrTooManyScopes, name, len(c.scopes)+1, c.cfg.Scopes)
	}
	if sc.claimed {
		return fleet.Action{}, nil
	}
	before := len(c.actions)
	sc.claimed = true
	c.stirLocked(sc)
	if sc.known.Open() {
		c.holdLocked(now, sc)
	} else {
		c.takeOverLocked(now, sc)
	}
	var a fleet.Action
	if len(c.actions) > before {
		a = c.actions[len(c.actions)-1]
		c.actions = c.actions[:before]
	}
	return a, nil
}

// takeOverLocked decides how a scope begins that the fleet does not hold open.
func (c *core) takeOverLocked(now time.Duration, sc *scope) {
	switch {
	case sc.blind:
		c.releaseLocked(sc)
	case c.freshLocked(now):
		if sc.last != nil && sc.last.Vote.Troubled(sc.known.Gen) {
			c.inheritLocked(now, sc)
			return
		}
		if sc.asking {
			sc.mode, sc.asking = free, false
			c.actions = append(c.actions, fleet.Action{Scope: sc.name, Kind: fleet.Close, Cause: fleet.CauseFleet, At: sc.known.Position})
		}
		sc.own = fleet.Vote{}
	case now-c.start >= c.cfg.Start:
		c.releaseLocked(sc)
	case !sc.asking:
		sc.mode, sc.asking = held, true
		c.reholdLocked(now, sc)
	}
}

// periodOf is how long a breaker opens by its own verdict; that of a topic, which is
// made up from its partitions', has the period of its rung.
func (c *core) periodOf(s breaker.Snapshot, rung int) time.Duration {
	if s.Until > s.Since {
		return min(s.Until-s.Since, c.cfg.Period(rung))
	}
	return c.cfg.Period(rung)
}

// inheritLocked goes on where the last owner was.
func (c *core) inheritLocked(now time.Duration, sc *scope) {
	l := sc.last
	sc.own = fleet.Vote{
		Phase: fleet.PhaseInherited, At: fleet.Position{Gen: sc.known.Gen},
		Rung: l.Rung, OpenFor: min(l.OpenFor, c.cfg.Cap), Cause: l.Cause,
	}
	c.testifyLocked(sc)
	sc.asking = false
	until := l.heard + sc.own.OpenFor
	_, sharing := sc.votes[l.Node.Name]
	if until <= now || sharing && l.Node != c.self {
		c.releaseLocked(sc)
		return
	}
	sc.mode, sc.release = held, until
	c.reholdLocked(now, sc)
}

// Leave is [fleet.Decider]'s. What a next owner has to know stays.
func (c *core) Leave(_ time.Duration, name string) {
	c.mu.Lock()
	defer c.unlock(true)
	sc := c.scopes[name]
	if sc == nil || !sc.claimed {
		return
	}
	sc.claimed, sc.asking, sc.wants, sc.mode, sc.release = false, false, false, free, never
	sc.seen, sc.cast, sc.result, sc.mine = 0, 0, pending, false
	sc.own = fleet.Vote{}
	// What was not applied yet is void, or it would be done to whoever takes the
	// scope over next.
	c.actions = slices.DeleteFunc(c.actions, func(a fleet.Action) bool { return a.Scope == name })
	c.stirLocked(sc)
}

// scopeLocked is the scope of that name, made if there is room; nil if there is
// not.
func (c *core) scopeLocked(name string) *scope {
	if sc := c.scopes[name]; sc != nil {
		return sc
	}
	if len(c.scopes) >= c.cfg.Scopes {
		return nil
	}
	sc := &scope{name: name, release: never, idleAt: never, votes: make(map[string]vote)}
	sc.trial.asked = never
	c.scopes[name] = sc
	return sc
}

// cut keeps a cause short enough to travel.
func cut(c breaker.Cause) breaker.Cause { return c[:min(len(c), maxCause)] }
