// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/crdt"
)

// Verdicts is one process's part in what the fleet decides about its scopes.
// The package comment says how it decides and what a driver does.
//
// Instants are monotonic, since an origin of the caller's choice, the same for
// all methods and for the session that calls Merge. All methods are safe for
// concurrent use; nothing of the caller's runs under the lock.
type Verdicts struct {
	cfg  Config
	self crdt.Replica

	mu      sync.Mutex
	start   time.Duration
	roster  Roster
	digest  uint64
	member  bool // self is in the roster
	need    int
	peers   peers
	scopes  map[string]*scope
	order   []*scope // the same, oldest first
	active  []*scope // those that Tick looks at
	actions []Action

	connected bool          // a quorum of the roster is heard, ourselves included
	since     time.Duration // connected last changed
	ticked    time.Duration
	swept     time.Duration
	informed  bool // what we do not know of is not there
	refused   uint64

	version uint64
	votes   int // of others
	log     changes
	wake    func() // a driver's; there may be actions
}

// scope is what this process knows about one scope, and what it does there.
type scope struct {
	name   string
	known  State
	since  time.Duration // known began, by own clock
	own    *row
	rows   map[string]*row      // votes of others, by name
	change *crdt.Change[change] // of known; nil until there is something to say

	active  bool
	claimed bool
	term    uint64
	asking  bool // taken over, and nobody has told of it yet
	wants   bool
	wanted  time.Duration // the others were told
	mode    mode
	release time.Duration // when held gives way to HalfOpen; never if it does not
	seen    uint64        // generation of the breaker at the last Observe
	cast    uint64        // generation of the breaker that the last vote was about
	back    bool          // cut off while the fleet is open, it has closed by itself

	// Of the round.
	trial   trial
	turn    string              // whose turn it is
	turnAt  time.Duration       // since when
	idleAt  time.Duration       // since when nobody is left to probe; never if somebody is
	skipped map[string]struct{} // let their turn go by
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
	at    time.Duration // permitted
	gen   uint64        // of the breaker, before
	taken bool
}

// row is a vote as it arrived, or our own.
type row struct {
	Vote
	opened time.Duration // the open period it tells of began, by own clock
	at     time.Duration // it arrived
	seen   time.Duration // its process was known to stand by it
	relay  bool          // told to all, though it is another's
	change *crdt.Change[change]
}

const never = time.Duration(-1 << 63)

// NewVerdicts returns the part of self, which has just started at now and knows
// nothing. self.Name is its name in the roster; a process that the roster does
// not name follows the fleet and has no vote. The error is [ErrConfig], with all
// that is wrong.
func NewVerdicts(now time.Duration, c Config, self crdt.Replica, r Roster) (*Verdicts, error) {
	var w checks
	if len(self.Name) < 1 || len(self.Name) > maxName {
		w.bad("self: length of the name", len(self.Name), fmt.Sprintf("[1, %d]", maxName))
	}
	if err := errors.Join(c.Validate(), r.Validate(), errors.Join(w...)); err != nil {
		return nil, err
	}
	v := &Verdicts{
		cfg:    c.WithDefaults(),
		self:   self,
		start:  now,
		ticked: now,
		since:  now,
		scopes: make(map[string]*scope),
	}
	v.peers = peers{silent: v.cfg.Silent, m: make(map[string]*peer)}
	v.log.met = make(map[crdt.Replica]uint64)
	v.setRosterLocked(r)
	v.lookAroundLocked(now)
	return v, nil
}

// SetRoster replaces the roster by a later one, of a higher number. The same
// one again does nothing; any other is [ErrConfig].
func (v *Verdicts) SetRoster(now time.Duration, r Roster) error {
	if err := r.Validate(); err != nil {
		return err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if r.Number == v.roster.Number && r.digest() == v.digest {
		return nil
	}
	if r.Number <= v.roster.Number {
		return fmt.Errorf("%w: Roster: number %d is not above %d", ErrConfig, r.Number, v.roster.Number)
	}
	v.setRosterLocked(r)
	v.lookAroundLocked(now)
	v.stepLocked(now)
	return nil
}

func (v *Verdicts) setRosterLocked(r Roster) {
	r.Names = slices.Sorted(slices.Values(r.Names))
	v.roster, v.digest = r, r.digest()
	v.need = Need(v.cfg.Quorum, len(r.Names))
	_, v.member = slices.BinarySearch(r.Names, v.self.Name)
}

// Config returns the configuration with its defaults filled in.
func (v *Verdicts) Config() Config { return v.cfg }

// Observe tells what the breaker of a scope is like. Call it after each of its
// changes and after an action was applied; late and repeated calls do no harm,
// for it is the state that counts. It does nothing about a scope that was not
// adopted.
func (v *Verdicts) Observe(now time.Duration, name string, s breaker.Snapshot) {
	v.mu.Lock()
	defer v.mu.Unlock()
	sc := v.scopes[name]
	if sc == nil || !sc.claimed {
		return
	}
	sc.seen = max(sc.seen, s.Generation)
	switch {
	case sc.mode == probing:
		v.observeTrialLocked(now, sc, s)
	case sc.mode == held:
		if s.State != breaker.Closed && !s.Held && !s.Barred {
			v.reholdLocked(now, sc) // a force that stood in the way of the hold is over
		}
	case sc.known.Open(): // cut off: the breaker decides
		sc.back = s.State == breaker.Closed
		sc.cast = s.Generation // what tripped before a close is no vote after it
	case s.State == breaker.Closed:
		if sc.own != nil && sc.own.Troubled(sc.known.Gen) {
			v.writeLocked(now, sc, Vote{At: Position{Gen: sc.known.Gen}})
		}
	case s.State == breaker.Open && !s.Forced && !s.Held && s.Generation > sc.cast:
		sc.cast = s.Generation
		rung := min(max(s.Rung, 1), v.cfg.top())
		if w := sc.own; w != nil && w.Phase == PhaseOpen && w.Rung == rung {
			// The ladder is at its end, and another period begins: whoever takes the
			// scope over has to know.
			w.OpenFor = 0
		}
		v.writeLocked(now, sc, Vote{
			Phase: PhaseOpen, At: Position{Gen: sc.known.Gen}, Wants: sc.wants,
			Rung: rung, OpenFor: v.periodOf(s, rung), Cause: cut(s.Cause),
		})
		v.decideLocked(now, sc)
	default: // half-open, or open by somebody's force: no evidence
	}
}

// periodOf is how long a breaker opens by its own verdict; that of a topic, which is
// made up from its partitions', has the period of its rung.
func (v *Verdicts) periodOf(s breaker.Snapshot, rung int) time.Duration {
	if s.Until > s.Since {
		return min(s.Until-s.Since, v.cfg.Period(rung))
	}
	return v.cfg.Period(rung)
}

func (v *Verdicts) observeTrialLocked(now time.Duration, sc *scope, s breaker.Snapshot) {
	if s.Generation <= sc.trial.gen {
		return
	}
	switch {
	case !s.Held, s.State == breaker.Open && s.Trial == breaker.NoTrial:
		v.withdrawLocked(now, sc) // forced, or held anew: what had the permit is gone
	case s.State == breaker.HalfOpen:
		sc.trial.taken = s.ProbesOut > 0 // an excluded probe gives the permit back
	case s.State == breaker.Open && s.Trial == breaker.TrialPassed:
		w := v.standing(sc)
		w.Phase, w.Passes = PhasePassed, w.Passes+1
		sc.mode = held
		v.writeLocked(now, sc, w)
		v.decideLocked(now, sc)
	case s.State == breaker.Open && s.Trial == breaker.TrialFailed:
		v.failLocked(now, sc, s.Cause)
	}
}

// failLocked ends the round by our own failed probe.
func (v *Verdicts) failLocked(now time.Duration, sc *scope, cause breaker.Cause) {
	mixed := false
	for _, n := range v.roster.Names {
		if w := v.voteLocked(now, sc, n); w != nil && w.At == sc.known.Position && w.Passes > 0 {
			mixed = true
		}
	}
	w := v.standing(sc)
	w.Phase, w.Passes, w.Failed = PhaseWaiting, 0, sc.known.Round
	next := v.cfg.After(sc.known, mixed, cut(cause))
	w.At = next.Position
	sc.mode = held
	v.writeLocked(now, sc, w)
	v.joinLocked(now, sc, next, 0)
}

// standing is our vote in the round, to be changed.
func (v *Verdicts) standing(sc *scope) Vote {
	w := Vote{Phase: PhaseWaiting, At: sc.known.Position, Wants: sc.wants}
	if sc.own != nil && sc.own.At.Gen == w.At.Gen {
		w.Failed = sc.own.Failed
		if sc.own.At == w.At {
			w.Phase, w.Passes = sc.own.Phase, sc.own.Passes
		}
	}
	return w
}

// Want says whether a message waits at the shut breaker of a scope, so that
// there is something to probe with. The fleet's close takes it back. It does
// nothing about a scope that was not adopted.
func (v *Verdicts) Want(now time.Duration, name string, wants bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	sc := v.scopes[name]
	if sc == nil || !sc.claimed || sc.wants == wants {
		return
	}
	sc.wants = wants
	switch {
	case sc.known.Open():
		v.writeLocked(now, sc, v.standing(sc))
	case sc.own != nil && sc.own.Phase == PhaseOpen && sc.own.At.Gen == sc.known.Gen:
		w := sc.own.Vote
		w.Wants = wants
		v.writeLocked(now, sc, w)
	}
}

// Tick makes time pass. Call it every 20 to 100 ms. It costs little where every
// scope is closed; a scope that is not costs a look at each vote.
func (v *Verdicts) Tick(now time.Duration) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if now-v.ticked > v.cfg.Settle {
		// We stood still, and what the others did meanwhile is still on its way.
		v.since = now
	}
	v.ticked = now
	v.lookAroundLocked(now)
	v.stepLocked(now)
	if now-v.swept >= time.Second {
		v.swept = now
		v.forgetLocked(now)
	}
}

// Actions appends what is to be done to dst, oldest first, and forgets it. They
// must be applied in this order. Collect them after each call of Observe, Tick,
// Adopt and Merge.
func (v *Verdicts) Actions(dst []Action) []Action {
	v.mu.Lock()
	defer v.mu.Unlock()
	dst = append(dst, v.actions...)
	clear(v.actions)
	v.actions = v.actions[:0]
	return dst
}

// OnActions sets what is called, without the lock, when another process's word
// may have left actions behind.
func (v *Verdicts) OnActions(wake func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.wake = wake
}

// unlock ends a step that another process's word began.
func (v *Verdicts) unlock() {
	wake := v.wake
	if len(v.actions) == 0 {
		wake = nil
	}
	v.mu.Unlock()
	if wake != nil {
		wake()
	}
}

// Alone reports a roster of one.
func (v *Verdicts) Alone() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.roster.Names) == 1
}

// Stirs reports whether time may change something here by itself.
func (v *Verdicts) Stirs() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.ContainsFunc(v.active, func(sc *scope) bool { return sc.claimed })
}

// stepLocked looks at every scope in which something may happen by itself.
func (v *Verdicts) stepLocked(now time.Duration) {
	for _, sc := range v.active { // none becomes active by this
		v.decideLocked(now, sc)
		if sc.asking {
			v.answerLocked(now, sc)
		}
		if sc.release != never && now >= sc.release {
			v.releaseLocked(sc)
		}
		v.electLocked(now, sc)
	}
	v.active = slices.DeleteFunc(v.active, func(sc *scope) bool {
		sc.active = sc.known.Open() || sc.asking || sc.release != never || sc.troubled()
		return !sc.active
	})
}

func (sc *scope) troubled() bool {
	if sc.own != nil && sc.own.Troubled(sc.known.Gen) {
		return true
	}
	for _, r := range sc.rows {
		if r.Troubled(sc.known.Gen) {
			return true
		}
	}
	return false
}

func (v *Verdicts) stirLocked(sc *scope) {
	if !sc.active {
		sc.active = true
		v.active = append(v.active, sc)
	}
}

// heardLocked is how many of the roster are heard, ourselves included.
func (v *Verdicts) heardLocked(now time.Duration) (heard int) {
	for _, n := range v.roster.Names {
		if n == v.self.Name || v.peers.live(now, v.peers.m[n]) {
			heard++
		}
	}
	return heard
}

// lookAroundLocked notices when a quorum comes or goes.
func (v *Verdicts) lookAroundLocked(now time.Duration) {
	connected := v.heardLocked(now) >= v.need
	if connected && now-v.start >= v.cfg.Start {
		v.informed = true
	}
	v.lostLocked(now)
	if connected == v.connected {
		return
	}
	v.connected, v.since = connected, now
	for _, sc := range v.order {
		if !sc.claimed || !sc.known.Open() {
			continue
		}
		if connected {
			v.rejoinLocked(now, sc)
		} else if sc.mode != free {
			sc.mode, sc.release = held, v.soloLocked(now, sc)
		}
	}
}

// rejoinLocked follows the fleet again. Where our breaker has closed by itself
// meanwhile, its probes count as ours in the round: if the others have recovered
// likewise, nobody needs to probe again.
func (v *Verdicts) rejoinLocked(now time.Duration, sc *scope) {
	if sc.mode == free && sc.back {
		w := v.standing(sc)
		w.Phase, w.Passes = PhasePassed, uint32(v.cfg.Successes)
		v.writeLocked(now, sc, w)
	}
	v.holdLocked(now, sc)
	v.decideLocked(now, sc)
}

// lostLocked passes on the last words of processes that fell silent: not all
// may have heard them.
func (v *Verdicts) lostLocked(now time.Duration) {
	var lost map[crdt.Replica]time.Duration
	for name, p := range v.peers.m {
		if live := v.peers.live(now, p); live != p.live {
			p.live = live
			if !live {
				if lost == nil {
					lost = make(map[crdt.Replica]time.Duration)
				}
				lost[crdt.Replica{Name: name, Incarnation: p.life}] = p.heard
			}
		}
	}
	if lost == nil {
		return
	}
	for _, sc := range v.order {
		for _, n := range slices.Sorted(maps.Keys(sc.rows)) {
			r := sc.rows[n]
			heard, ok := lost[r.Node]
			if ok && !r.relay && heard-r.at <= 2*v.cfg.Silent {
				r.relay = true
				v.log.vote(r, true)
			}
		}
	}
}

// voteLocked is the vote of a name in the roster that counts now, or nil.
func (v *Verdicts) voteLocked(now time.Duration, sc *scope, name string) *Vote {
	if name == v.self.Name {
		if sc.own == nil {
			return nil
		}
		return &sc.own.Vote
	}
	r := sc.rows[name]
	if r == nil {
		return nil
	}
	if p := v.peers.m[name]; p == nil || p.life != r.Node.Incarnation || !v.peers.live(now, p) {
		return nil
	}
	return &r.Vote
}

// decideLocked counts, where a quorum is heard.
func (v *Verdicts) decideLocked(now time.Duration, sc *scope) {
	if !v.connected {
		return
	}
	t := tally{cfg: v.cfg, need: v.need, known: sc.known}
	for _, n := range v.roster.Names {
		if w := v.voteLocked(now, sc, n); w != nil {
			t.add(w)
		}
	}
	v.joinLocked(now, sc, t.result(), 0)
}

// joinLocked takes in a state that the fleet is in, which began age ago.
func (v *Verdicts) joinLocked(now time.Duration, sc *scope, s State, age time.Duration) {
	joined := sc.known.Join(s)
	if joined == sc.known {
		return
	}
	moved := joined.Position != sc.known.Position
	sc.known = joined
	v.log.state(sc)
	v.stirLocked(sc)
	if !moved {
		if sc.mode == held {
			v.holdLocked(now, sc)
		}
		return
	}
	sc.since = now - age
	sc.trial, sc.turn, sc.turnAt, sc.idleAt = trial{}, "", 0, never
	clear(sc.skipped)
	if !sc.claimed {
		return
	}
	if joined.Open() {
		v.holdLocked(now, sc)
		return
	}
	sc.wants = false
	if sc.mode != free {
		sc.mode, sc.release, sc.asking = free, never, false
		v.actions = append(v.actions, Action{Scope: sc.name, Kind: Close, Cause: CauseFleet, At: sc.known.Position})
	}
}

// holdLocked holds the scope as the fleet does.
func (v *Verdicts) holdLocked(now time.Duration, sc *scope) {
	sc.mode, sc.asking, sc.release, sc.back = held, false, never, false
	if !v.connected {
		sc.release = v.soloLocked(now, sc)
	}
	if sc.wants && (sc.own == nil || sc.own.At.Gen != sc.known.Gen || !sc.own.Wants) {
		v.writeLocked(now, sc, v.standing(sc))
	}
	v.reholdLocked(now, sc)
}

func (v *Verdicts) reholdLocked(now time.Duration, sc *scope) {
	a := Action{Scope: sc.name, Kind: Hold, Rung: sc.known.Rung, Cause: sc.known.Cause, At: sc.known.Position}
	switch {
	case sc.known.Open():
		a.For = max(v.dueLocked(sc)-now, 0)
	case sc.asking:
		a.For, a.Cause = max(v.start+v.cfg.Start-now, 0), CauseUnknown
	default:
		a.For, a.Rung, a.Cause = max(sc.release-now, 0), sc.own.Rung, sc.own.Cause
	}
	v.actions = append(v.actions, a)
}

// dueLocked is when the fleet's open period is over.
func (v *Verdicts) dueLocked(sc *scope) time.Duration {
	return sc.since + min(sc.known.OpenFor, v.cfg.Cap)
}

// soloLocked is when a process that is cut off goes on by itself: when the
// period it knows of is over, and a little later, not all at once.
func (v *Verdicts) soloLocked(now time.Duration, sc *scope) time.Duration {
	extra := Round{Scope: sc.name, At: sc.known.Position}.Share(v.self.Name) * soloSpread * float64(min(sc.known.OpenFor, v.cfg.Cap))
	return max(now, v.dueLocked(sc)) + time.Duration(extra)
}

// soloSpread is over which share of the open period processes that are cut off
// spread their first probes.
const soloSpread = 0.2

func (v *Verdicts) releaseLocked(sc *scope) {
	sc.mode, sc.release, sc.asking = free, never, false
	a := Action{Scope: sc.name, Kind: HalfOpen, Rung: sc.known.Rung, Cause: sc.known.Cause, At: sc.known.Position}
	if w := sc.own; w != nil && w.Phase == PhaseInherited && !sc.known.Open() {
		a.Rung, a.Cause = w.Rung, w.Cause
	}
	if a.Cause == "" {
		a.Cause = CauseUnknown
	}
	v.actions = append(v.actions, a)
}

// writeLocked makes w our vote, if it says anything new.
func (v *Verdicts) writeLocked(now time.Duration, sc *scope, w Vote) {
	w.Scope, w.Node, w.Term = sc.name, v.self, sc.term
	if sc.own == nil {
		sc.own = &row{opened: now}
	}
	old := sc.own.Vote
	w.Version = old.Version
	if w == old {
		return
	}
	v.version++
	w.Version = v.version
	if w.Phase != old.Phase || w.At != old.At || w.Passes != old.Passes || w.Rung != old.Rung || w.OpenFor != old.OpenFor {
		sc.own.opened = now
	}
	if w.Wants && !(old.Wants && old.At.Gen == w.At.Gen) {
		sc.wanted = now
	}
	sc.own.Vote, sc.own.at = w, now
	v.log.vote(sc.own, true)
	v.stirLocked(sc)
}

// cut keeps a cause short enough to travel.
func cut(c breaker.Cause) breaker.Cause { return c[:min(len(c), maxCause)] }
