// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package scope

import (
	"slices"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/circuit"
)

// Machine is one process's part in the fleet's decisions about scopes. Methods whose names begin
// with a capital letter take its lock, except those that say that it must be held.
type Machine struct {
	cfg  breaker.FleetConfig
	self string // our name in the roster
	sub  Substrate

	mu      sync.Mutex
	start   time.Duration
	names   []string // the roster, sorted
	need    int
	scopes  map[string]*Scope
	order   []*Scope // the scopes, oldest first
	active  []*Scope // scopes that a step looks at
	actions []Action
	refused uint64
	full    bool

	connected bool          // latest result of Substrate.Look
	since     time.Duration // when connected last changed, or this process stood still
	ticked    time.Duration
	swept     time.Duration

	wake func() // the driver's; called when there may be actions
}

// New returns the Machine of the process self, which has started at now and knows nothing. The
// configuration and the roster must be valid. New does not call sub.
func New(now time.Duration, c breaker.FleetConfig, self string, names []string, sub Substrate) *Machine {
	m := &Machine{
		cfg: c.WithDefaults(), self: self, sub: sub,
		start: now, since: now, ticked: now, scopes: make(map[string]*Scope),
	}
	m.setRoster(names)
	return m
}

func (m *Machine) setRoster(names []string) {
	m.names = slices.Sorted(slices.Values(names))
	m.need = Need(m.cfg.Quorum, len(names))
}

// SetRoster replaces the roster. The lock must be held.
func (m *Machine) SetRoster(now time.Duration, names []string) {
	m.setRoster(names)
	m.Step(now)
}

// Lock locks the Machine.
func (m *Machine) Lock() { m.mu.Lock() }

// Unlock unlocks the Machine; see End.
func (m *Machine) Unlock() { m.mu.Unlock() }

// End is Unlock after a step that another process's message began. It wakes the driver if there are
// actions.
func (m *Machine) End() { m.unlock(m.wake) }

func (m *Machine) unlock(wake func()) {
	if len(m.actions) == 0 {
		wake = nil
	}
	after := m.sub.After()
	m.mu.Unlock()
	if after != nil {
		after()
	}
	if wake != nil {
		wake()
	}
}

// Config returns the configuration with its defaults filled in. It needs no lock.
func (m *Machine) Config() breaker.FleetConfig { return m.cfg }

// Names returns the roster, sorted. The lock must be held for this method and for those below, down
// to Get.
func (m *Machine) Names() []string { return m.names }

// Need returns the quorum, in processes.
func (m *Machine) Need() int { return m.need }

// Member reports whether self is in the roster.
func (m *Machine) Member() bool {
	_, ok := slices.BinarySearch(m.names, m.self)
	return ok
}

// Started returns the instant that was given to New.
func (m *Machine) Started() time.Duration { return m.start }

// Connected returns the latest result of Substrate.Look.
func (m *Machine) Connected() bool { return m.connected }

// Settled reports whether we have been in touch, and have not stood still, for so long that all
// others know it.
func (m *Machine) Settled(now time.Duration) bool { return now-m.since >= m.cfg.Settle }

// Refused returns how many scopes were left out because there was no room.
func (m *Machine) Refused() uint64 { return m.refused }

// All returns every scope that is known, oldest first.
func (m *Machine) All() []*Scope { return m.order }

// Stirring returns every scope in which something may happen by itself.
func (m *Machine) Stirring() []*Scope { return m.active }

// SetFull says whether something that exists was left out because there was no room. Then nothing
// is known of a scope that is not remembered.
func (m *Machine) SetFull(full bool) { m.full = full }

// Get returns a scope that is known, or nil.
func (m *Machine) Get(name string) *Scope { return m.scopes[name] }

// Obtain returns the scope of that name, made if there is room, or nil if there is not. To make
// room it forgets the oldest scope that is closed, has no owner here, and whose book can be spared.
// The lock must be held.
func (m *Machine) Obtain(now time.Duration, name string) *Scope {
	if sc := m.scopes[name]; sc != nil {
		return sc
	}
	if len(m.scopes) >= m.cfg.Scopes {
		i := slices.IndexFunc(m.order, func(sc *Scope) bool {
			return !sc.Claimed && !sc.active && !sc.Known.Open() && sc.Book.Forget(now, true)
		})
		if i < 0 {
			m.refused++
			return nil
		}
		delete(m.scopes, m.order[i].Name)
		m.order = slices.Delete(m.order, i, i+1)
	}
	sc := &Scope{Name: name, Since: now, release: Never, idleAt: Never}
	sc.Book = m.sub.Book(sc)
	m.scopes[name] = sc
	m.order = append(m.order, sc)
	return sc
}

// Observe tells the Machine the state of a scope's breaker. Call it after each change of the
// breaker, and after an action was applied. Late and repeated calls do no harm, since only the
// state counts. A closed breaker that is Forced was closed by no probe, and has not recovered.
// Observe does nothing about a scope that was not adopted.
func (m *Machine) Observe(now time.Duration, name string, s circuit.Snapshot) {
	m.mu.Lock()
	defer m.unlock(nil)
	sc := m.scopes[name]
	if sc == nil || !sc.Claimed {
		return
	}
	sc.seen = max(sc.seen, s.Generation)
	switch {
	case sc.mode == probing:
		m.observeTrial(now, sc, s)
	case sc.mode == held:
		if s.State != breaker.Closed && !s.Held && !s.Barred {
			m.rehold(now, sc) // a force that stood in the way of the hold is over
		}
	case sc.Known.Open(): // cut off, or let go: the breaker decides
		sc.back = s.State == breaker.Closed && !s.Forced
		sc.cast = s.Generation // a trip before a close is no vote after it
		if m.connected && !sc.Blind {
			m.credit(now, sc)
		}
	case s.State == breaker.Closed:
		if sc.Own.Troubled(sc.Known.Gen) {
			sc.doubt = sc.doubt && s.Forced
			m.write(now, sc, Vote{At: Position{Gen: sc.Known.Gen}})
		}
	case s.State == breaker.Open && !s.Forced && !s.Held && s.Generation > sc.cast:
		sc.cast = s.Generation
		level := min(max(s.BackoffLevel, 1), top(m.cfg))
		phase := PhaseOpen
		if m.doubted(now, sc) {
			phase = PhaseInherited // for the next owner; no vote
		}
		// At the highest backoff level all periods have the same values. The next owner has to know
		// that another one began.
		sc.Own = Vote{
			Phase: phase, At: Position{Gen: sc.Known.Gen}, Wants: sc.wants,
			BackoffLevel: level, OpenFor: m.periodOf(s, level).Truncate(time.Microsecond), Cause: Cut(s.Cause),
		}
		m.stir(sc)
		sc.Book.Write(now, now, true)
		sc.Book.Decide(now)
	default: // half-open, or forced open: no evidence
	}
}

// doubted reports whether a trip here may be due to our own path. That is so if three things
// happened. A probe of ours ended a round; probes of others closed the scope though we had calls;
// and our breaker tripped again within Cap. The others have shown that the dependency is well, and
// are not to be held for our trip. The doubt ends when our breaker's own probes have closed it, or
// when the scope was closed for Cap.
func (m *Machine) doubted(now time.Duration, sc *Scope) bool {
	first := sc.Own.Phase != PhaseInherited || sc.Own.At.Gen != sc.Known.Gen
	sc.doubt = sc.doubt && !(first && now-sc.Since >= m.cfg.Cap)
	return sc.doubt
}

// periodOf returns how long a breaker opens by its own verdict. The breaker of a topic is made up
// from its partitions' breakers; its period is that of its level.
func (m *Machine) periodOf(s circuit.Snapshot, level int) time.Duration {
	if s.Until > s.Since {
		return min(s.Until-s.Since, Period(m.cfg, level))
	}
	return Period(m.cfg, level)
}

// Want says whether a message waits at the shut breaker of a scope, so that there is something to
// probe with. The fleet's close resets it. Want does nothing about a scope that was not adopted.
func (m *Machine) Want(now time.Duration, name string, wants bool) {
	m.mu.Lock()
	defer m.unlock(nil)
	sc := m.scopes[name]
	if sc == nil || !sc.Claimed || sc.wants == wants {
		return
	}
	sc.wants = wants
	switch {
	case sc.Known.Open():
		m.write(now, sc, m.standing(sc))
	case sc.Own.Phase == PhaseOpen && sc.Own.At.Gen == sc.Known.Gen:
		w := sc.Own
		w.Wants = wants
		m.write(now, sc, w)
	}
}

// Tick makes time pass. Call it every 20 to 100 ms. It costs little if every scope is closed. Each
// other scope costs a look at each vote.
func (m *Machine) Tick(now time.Duration) {
	m.mu.Lock()
	defer m.unlock(nil)
	if now-m.ticked > m.cfg.Settle {
		// We stood still. News of what the others did meanwhile is still on its way.
		m.since = now
	}
	m.ticked = now
	m.Step(now)
	if now-m.swept >= time.Second {
		m.swept = now
		m.order = slices.DeleteFunc(m.order, func(sc *Scope) bool {
			if !sc.Book.Forget(now, false) || sc.Claimed || sc.active || sc.Known != (State{}) {
				return false
			}
			delete(m.scopes, sc.Name)
			return true
		})
	}
}

// Actions appends the pending actions to dst, oldest first, and forgets them. They must be applied
// in this order. Collect them after each call of Observe, Tick and Adopt, and when woken.
func (m *Machine) Actions(dst []Action) []Action {
	m.mu.Lock()
	defer m.mu.Unlock()
	dst = append(dst, m.actions...)
	clear(m.actions)
	m.actions = m.actions[:0]
	return dst
}

func (m *Machine) act(sc *Scope, a Action) {
	a.Scope, a.At = sc.Name, sc.Known.Position
	m.actions = append(m.actions, a)
}

// OnActions sets the function that is called, without the lock, when another process's message may
// have left actions behind.
func (m *Machine) OnActions(wake func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.wake = wake
}

// Alone reports whether the roster has one name.
func (m *Machine) Alone() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.names) == 1
}

// Stirs reports whether time alone may change something here.
func (m *Machine) Stirs() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.ContainsFunc(m.active, func(sc *Scope) bool { return sc.Claimed })
}

// Step looks at every scope in which something may happen by itself. The lock must
// be held.
func (m *Machine) Step(now time.Duration) {
	m.LookAround(now)
	for _, sc := range m.active { // this makes no scope active
		sc.Book.Decide(now)
		m.answer(now, sc)
		if sc.mode == held && sc.release != Never && now >= sc.release {
			m.letGo(sc)
		}
		m.elect(now, sc)
	}
	m.active = slices.DeleteFunc(m.active, func(sc *Scope) bool {
		sc.active = sc.Known.Open() || sc.asking || sc.release != Never || sc.Book.Stirs()
		return !sc.active
	})
}

// Stir has a scope looked at in each step. The lock must be held.
func (m *Machine) Stir(sc *Scope) { m.stir(sc) }

func (m *Machine) stir(sc *Scope) {
	if !sc.active {
		sc.active = true
		m.active = append(m.active, sc)
	}
}

// LookAround notices when this process gets or loses touch. The lock must be held.
func (m *Machine) LookAround(now time.Duration) {
	connected := m.sub.Look(now)
	if connected == m.connected {
		return
	}
	m.connected, m.since = connected, now
	for _, sc := range m.order {
		switch {
		case !sc.Claimed || !sc.Known.Open():
		case connected:
			m.rejoin(now, sc)
		case sc.mode == probing:
			m.hold(now, sc) // the probe that is out counts for nothing
		case sc.mode == held:
			sc.release = m.Solo(now, sc)
		}
	}
}

// rejoin has a scope follow the fleet again.
func (m *Machine) rejoin(now time.Duration, sc *Scope) {
	if sc.mode == free {
		m.credit(now, sc)
		if !sc.Book.Out(now) && m.adrift(now, sc) {
			return
		}
	}
	m.hold(now, sc)
	sc.Book.Decide(now)
}

// credit counts the probes of our own breaker as ours in the round, if they have closed it while
// the fleet is open. If the others have recovered likewise, no process needs to probe again.
func (m *Machine) credit(now time.Duration, sc *Scope) {
	if !sc.back {
		return
	}
	w := m.standing(sc)
	w.Phase, w.Passes = PhasePassed, uint32(m.cfg.Successes)
	m.write(now, sc, w)
}

// standing returns a copy of our vote in the round, to be changed.
func (m *Machine) standing(sc *Scope) Vote {
	w := Vote{Phase: PhaseWaiting, At: sc.Known.Position, Wants: sc.wants}
	if sc.Own.At.Gen == w.At.Gen {
		w.Failed = sc.Own.Failed
		if sc.Own.At == w.At {
			w.Phase, w.Passes = sc.Own.Phase, sc.Own.Passes
		}
	}
	return w
}

// write makes w our vote, if it differs.
func (m *Machine) write(now time.Duration, sc *Scope, w Vote) {
	if w == sc.Own {
		return
	}
	sc.Own = w
	m.stir(sc)
	sc.Book.Write(now, now, false)
}

// Enter takes in the fleet's state s, which began at since on our clock. The lock must be held.
func (m *Machine) Enter(now time.Duration, sc *Scope, s State, since time.Duration) {
	if s == sc.Known {
		return
	}
	before := sc.Known
	sc.Known = s
	m.stir(sc)
	if s.Position == before.Position {
		if sc.mode == held {
			m.hold(now, sc)
		}
		return
	}
	sc.Since = since
	if !s.Open() {
		own, round := sc.Own, sc.Own.At == before.Position
		failed := own.At.Gen == before.Gen && own.Failed > 0 && !(round && own.Phase == PhaseSeconded)
		sc.doubt = (sc.doubt || failed) && !(round && own.Passes > 0)
	}
	goesOn := before.Open() && before.Gen == s.Gen // another round of the same open scope
	sc.spoilt = goesOn && sc.Own.At == before.Position && sc.Own.Passes > 0 && m.sub.MayDecide()
	if !sc.vain() || !goesOn {
		sc.firm = m.Due(sc)
	}
	sc.trial, sc.turn, sc.turnAt, sc.idleAt, sc.Mine = trial{}, "", 0, Never, false
	clear(sc.skipped)
	if !sc.Claimed {
		return
	}
	if s.Open() {
		if sc.mode == free && goesOn && sc.vain() && m.connected {
			m.credit(now, sc) // a scope that was let go because rounds are in vain is not held by the next
			return
		}
		m.hold(now, sc)
		return
	}
	sc.wants = false
	if sc.mode != free {
		sc.mode, sc.release, sc.asking = free, Never, false
		m.act(sc, Action{Kind: Close, Cause: CauseFleet})
	}
}

// SetBlind says whether the substrate cannot tell what was decided. The lock must be held.
func (m *Machine) SetBlind(sc *Scope, blind bool) {
	if blind && !sc.Blind && sc.Claimed && sc.mode != free {
		m.letGo(sc)
	}
	sc.Blind = blind
}

// hold holds the scope as the fleet does.
func (m *Machine) hold(now time.Duration, sc *Scope) {
	sc.mode, sc.asking, sc.release, sc.back = held, false, Never, false
	if !m.connected {
		sc.release = m.Solo(now, sc)
	}
	if sc.wants && (sc.Own.At.Gen != sc.Known.Gen || !sc.Own.Wants) {
		m.write(now, sc, m.standing(sc))
	}
	m.rehold(now, sc)
}

func (m *Machine) rehold(now time.Duration, sc *Scope) {
	m.stir(sc)
	a := Action{Kind: Hold, BackoffLevel: sc.Known.BackoffLevel, Cause: sc.Known.Cause, For: m.left(now, sc)}
	switch {
	case sc.Known.Open():
	case sc.asking:
		a.Cause = CauseUnknown
	default:
		a.BackoffLevel, a.Cause = sc.Own.BackoffLevel, sc.Own.Cause
	}
	m.act(sc, a)
}

// left returns the rest of the open period, or of a handover.
func (m *Machine) left(now time.Duration, sc *Scope) time.Duration {
	until := now
	switch {
	case sc.Known.Open():
		until = m.Due(sc)
	case sc.asking:
		until = m.start + m.cfg.Start
	case sc.release != Never:
		until = sc.release
	}
	return max(until-now, 0)
}

// Due returns when the fleet's open period is over. The lock must be held.
func (m *Machine) Due(sc *Scope) time.Duration {
	return sc.Since + min(sc.Known.OpenFor, m.cfg.Cap)
}

// Solo returns when a process that is cut off goes on by itself: after the open period that it
// knows, plus a part of soloSpread that differs by process. The lock must be held.
func (m *Machine) Solo(now time.Duration, sc *Scope) time.Duration {
	extra := m.Share(sc) * soloSpread * float64(min(sc.Known.OpenFor, m.cfg.Cap))
	return max(now, m.Due(sc)) + time.Duration(extra)
}

// soloSpread is the share of the open period over which processes that are cut off spread their
// first probes.
const soloSpread = 0.2

// letGo gives a held scope back to its breaker, half-open.
func (m *Machine) letGo(sc *Scope) {
	sc.mode, sc.release, sc.asking = free, Never, false
	a := Action{Kind: HalfOpen, BackoffLevel: sc.Known.BackoffLevel, Cause: sc.Known.Cause}
	if sc.Own.Phase == PhaseInherited && !sc.Known.Open() {
		a.BackoffLevel, a.Cause = sc.Own.BackoffLevel, sc.Own.Cause
	}
	if a.Cause == "" {
		a.Cause = CauseUnknown
	}
	m.act(sc, a)
}

// Describe returns a scope as a guard shows it.
func (m *Machine) Describe(now time.Duration, name string) breaker.FleetScope {
	m.mu.Lock()
	defer m.mu.Unlock()
	b := breaker.FleetScope{Name: name, Heard: m.sub.Heard(now), Need: m.need}
	if sc := m.scopes[name]; sc != nil {
		b.Cause, b.Round, b.Probing, b.Left = sc.Known.Cause, sc.Known.Round, sc.mode == probing, m.left(now, sc)
		if sc.Known.Open() {
			b.State = breaker.Open
		}
	}
	return b
}
