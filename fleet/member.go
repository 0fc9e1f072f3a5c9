// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
)

// Member is one process's part in a fleet as a guard drives it: it carries what
// happens between its breakers and a [Decider], between its detectors and [Storms],
// and between its counts and [Totals]. It is a [breaker.Fleet] and a [dlq.StormFleet].
//
// # Which scopes
//
// A breaker's own scope is adopted. Where that is a partition, which one process
// has at a time, the topic above it is adopted too, or no quorum could ever see an
// outage of all: a process says that a topic has tripped while Config.Quorum of
// its own partitions have by their own verdict, one at least. While the fleet
// holds the topic all its partitions are held, and a probe is one delivery of any
// of them. In a fleet of one a topic is its partitions and has no vote. A gate
// further up, over the topics of a group, follows from topics that are open
// everywhere alike and has no vote of its own.
//
// # An operator's word
//
// A force stands until it ends; the hold comes back after it if there still is
// one. A breaker that is held and that somebody closed by force stays closed
// until it trips again: then it is held with the others.
//
// # Locks
//
// Lock order: Member.mu, then a lock of Verdicts, of Storms, of Totals, or of the breakers
// and their tree. All methods are safe for concurrent use.
type Member struct {
	clock func() time.Duration
	v     Decider // may be nil
	s     *Storms // may be nil
	t     *Totals // may be nil

	mu       sync.Mutex
	attached bool
	claims   map[string]*claim
	above    []*claim // those that are topics
	leaves   map[*breaker.Breaker]*leaf
	list     []*leaf // the same, in the order of adoption
	acts     []Action
	changes  []StormChange
	stormy   func(StormChange)
}

var (
	_ breaker.Fleet  = (*Member)(nil)
	_ dlq.StormFleet = (*Member)(nil)
)

// ErrAttached means that a [Member] is driven already.
var ErrAttached = errors.New("fleet: member has a driver already")

// claim is a scope that this process has.
type claim struct {
	name   string
	topic  bool    // leaves are its partitions; otherwise there is one
	leaves []*leaf // in the order of adoption

	held   bool
	last   Action // the hold
	prober *leaf  // has the permit of the probe that is out

	// Of a topic, which has no breaker of its own.
	gen     uint64
	tripped bool
	rung    int
	cause   breaker.Cause
}

// leaf is a breaker.
type leaf struct {
	b      *breaker.Breaker
	refs   int
	err    error    // of Adopt
	claims []*claim // its own first; without those that could not be adopted

	half    *claim // gave it back half-open while another held it: it is not closed with that one
	told    bool   // it is closed, and that was told
	waits   bool   // a message waits at it
	freed   bool   // held, but closed by an operator
	tripped bool   // by its own verdict, and not closed since
	rung    int
	cause   breaker.Cause
}

// held reports whether one of its scopes holds it.
func (l *leaf) held() bool {
	return slices.ContainsFunc(l.claims, func(c *claim) bool { return c.held })
}

// NewMember returns the driver of v and s, either of which may be nil (a nil
// interface, for v). clock is that of the gossip session that carries them. It need not be the one of the
// breakers: no instant passes between the two.
func NewMember(clock func() time.Duration, v Decider, s *Storms) *Member {
	return &Member{clock: clock, v: v, s: s, claims: make(map[string]*claim), leaves: make(map[*breaker.Breaker]*leaf)}
}

// OnStorm has f called, with the lock held, when a storm of the fleet begins or
// ends. Set it before the first Step.
func (m *Member) OnStorm(f func(StormChange)) { m.stormy = f }

// CarryTotals has what guards count carried to the other processes, and what those
// count to the guards. Without it a guard knows of its own successes only. Set it
// before the first Step.
func (m *Member) CarryTotals(t *Totals) { m.t = t }

// Attach is [breaker.Fleet]'s. The error is [ErrAttached].
func (m *Member) Attach(wake func()) (detach func(), err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.attached {
		return nil, ErrAttached
	}
	m.attached = true
	if m.v != nil {
		m.v.OnActions(wake)
	}
	return sync.OnceFunc(func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.attached = false
		if m.v != nil {
			m.v.OnActions(nil)
		}
	}), nil
}

// Adopt is [breaker.Fleet]'s. The errors are those of [Verdicts.Adopt].
func (m *Member) Adopt(now time.Duration, b *breaker.Breaker, path []string) error {
	if m.v == nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if l := m.leaves[b]; l != nil {
		l.refs++
		return l.err
	}
	l := &leaf{b: b, refs: 1}
	m.leaves[b] = l
	m.list = append(m.list, l)
	l.err = m.claimLocked(now, l, strings.Join(path, "/"), false)
	if len(path) == partitionDepth {
		l.err = errors.Join(l.err, m.claimLocked(now, l, strings.Join(path[:partitionDepth-1], "/"), true))
	}
	m.lookLocked(now, l)
	m.drainLocked(now)
	return l.err
}

// partitionDepth is the length of the path of a scope that one process has at a
// time: group, topic, partition.
const partitionDepth = 3

// claimLocked makes a scope one of l's, and holds l as the scope is held.
func (m *Member) claimLocked(now time.Duration, l *leaf, name string, topic bool) error {
	c := m.claims[name]
	var first Action
	if c == nil {
		var err error
		if first, err = m.v.Adopt(m.clock(), name); err != nil {
			return err
		}
		c = &claim{name: name, topic: topic}
		m.claims[name] = c
		if topic {
			m.above = append(m.above, c)
		}
	}
	c.leaves = append(c.leaves, l)
	l.claims = append(l.claims, c)
	if first.Kind != 0 {
		m.applyLocked(now, c, first)
	} else if c.held {
		l.hold(now, c)
	}
	return nil
}

// Leave is [breaker.Fleet]'s.
func (m *Member) Leave(now time.Duration, b *breaker.Breaker) {
	if m.v == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.leaves[b]
	if l == nil {
		return
	}
	if l.refs--; l.refs > 0 {
		return
	}
	m.drainLocked(now)
	l.told = false
	m.lookLocked(now, l) // its last word
	for _, c := range l.claims {
		c.leaves = slices.DeleteFunc(c.leaves, func(other *leaf) bool { return other == l })
		if len(c.leaves) > 0 {
			if c.prober == l {
				c.prober = nil // the turn ends at the next look
			}
			m.lookAboveLocked(now, c)
			continue
		}
		if c.topic { // with its last partition, which it still is
			c.leaves = append(c.leaves, l)
			m.lookAboveLocked(now, c)
		}
		m.v.Leave(m.clock(), c.name)
		delete(m.claims, c.name)
		m.above = slices.DeleteFunc(m.above, func(other *claim) bool { return other == c })
	}
	delete(m.leaves, b)
	m.list = slices.DeleteFunc(m.list, func(other *leaf) bool { return other == l })
	b.Unhold(now)
	m.drainLocked(now)
}

// Step is [breaker.Fleet]'s.
func (m *Member) Step(now time.Duration, waiting map[*breaker.Breaker]bool) (busy bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.s != nil {
		m.s.Tick(m.clock())
		m.changes = m.s.Changes(m.changes[:0]) // who wants to know else asks Storm
		for _, c := range m.changes {
			if m.stormy != nil {
				m.stormy(c)
			}
		}
	}
	if m.v == nil {
		return false
	}
	for _, l := range m.list {
		l.waits = waiting[l.b]
		m.lookLocked(now, l)
		busy = busy || !l.told
	}
	for _, c := range m.above {
		m.lookAboveLocked(now, c)
	}
	m.v.Tick(m.clock())
	m.drainLocked(now)
	return busy || m.v.Stirs()
}

// lookLocked tells the fleet what a breaker is like. One that is closed and
// was before costs an atomic load.
func (m *Member) lookLocked(now time.Duration, l *leaf) {
	closed := l.b.Closed()
	if closed && l.told {
		return
	}
	s := l.b.Snapshot(now)
	switch {
	case !l.held():
		l.freed = false
	case closed:
		l.freed = true
	case !s.Held && !s.Barred: // the force is over, or it tripped after one
		l.freed = false
		for _, c := range l.claims {
			if c.held {
				l.hold(now, c)
			}
		}
		s = l.b.Snapshot(now)
	}
	l.told = closed
	switch {
	case closed:
		l.tripped = false
	case s.State == breaker.Open && !s.Forced && !s.Held:
		l.tripped, l.rung, l.cause = true, s.Rung, s.Cause
	}
	l.waits = l.waits && !closed && !s.Barred
	if len(l.claims) > 0 && !l.claims[0].topic {
		m.v.Observe(m.clock(), l.claims[0].name, s)
		m.v.Want(m.clock(), l.claims[0].name, l.waits)
	}
}

// lookAboveLocked is the same for a topic, whose breaker is made up from those of
// its partitions: open while enough of them are by their own verdict, and while it
// is held what the one is like that probes.
func (m *Member) lookAboveLocked(now time.Duration, c *claim) {
	if !c.topic {
		return
	}
	open, waits, rest := 0, false, true
	rung, cause := 0, breaker.Cause("")
	for _, l := range c.leaves {
		rest = rest && l.told
		waits = waits || l.waits
		if l.tripped {
			open++
			if l.rung > rung {
				rung, cause = l.rung, l.cause
			}
		}
	}
	if rest && !c.held && !c.tripped {
		return
	}
	s := breaker.Snapshot{Name: c.name}
	switch {
	case c.held:
		s.State, s.Held, s.Cause = breaker.Open, true, c.last.Cause
		if c.prober != nil {
			if p := c.prober.b.Snapshot(now); p.Held {
				s.State, s.Trial, s.ProbesOut, s.Cause = p.State, p.Trial, p.ProbesOut, p.Cause
			}
		}
	case open > 0 && float64(open) >= m.v.Config().Quorum*float64(len(c.leaves)) && !m.v.Alone():
		if !c.tripped || rung != c.rung {
			c.gen++
		}
		c.tripped, c.rung, c.cause = true, rung, cause
		s.State, s.Rung, s.Cause = breaker.Open, rung, cause
	default:
		c.tripped = false
	}
	s.Generation = c.gen
	m.v.Observe(m.clock(), c.name, s)
	m.v.Want(m.clock(), c.name, waits)
}

// drainRounds is how often what was done may ask for more at one instant: a few times
// at most. It is bounded because a mistake in that must not hang a guard; what is left
// is done by the next Step.
const drainRounds = 8

// drainLocked does what the fleet asks for, until it asks for nothing more. The
// word of a scope that has been left is void.
func (m *Member) drainLocked(now time.Duration) {
	for range drainRounds {
		m.acts = m.v.Actions(m.acts[:0])
		if len(m.acts) == 0 {
			return
		}
		for _, a := range m.acts {
			c := m.claims[a.Scope]
			if c == nil {
				continue
			}
			m.applyLocked(now, c, a)
			for _, l := range c.leaves {
				m.lookLocked(now, l)
			}
			m.lookAboveLocked(now, c)
		}
	}
}

// applyLocked does to a scope's breakers what a asks for. One that is held by
// another scope too stays held.
func (m *Member) applyLocked(now time.Duration, c *claim, a Action) {
	c.prober = nil
	switch a.Kind {
	case Hold:
		c.held, c.last, c.tripped = true, a, false
		for _, l := range c.leaves {
			l.hold(now, c)
		}
	case HalfOpen:
		c.held = false
		for _, l := range c.leaves {
			if l.freed && l.b.Closed() {
				continue
			}
			l.half = nil
			if l.b.Hold(now, a.Rung, a.Cause); l.held() {
				l.half = c
			} else {
				l.b.Unhold(now)
			}
			l.told = false
		}
	case Probe:
		c.gen++
		if l := c.pick(now); l != nil {
			l.b.Permit(now)
			c.prober = l
		}
	case Close:
		c.held = false
		for _, l := range c.leaves {
			if l.half == c {
				l.half = nil
			}
			switch {
			case l.held():
			case l.half != nil:
				l.half = nil
				l.b.Unhold(now)
			default:
				l.b.CloseHeld(now, a.Cause)
			}
			l.told = false
		}
	}
}

// hold holds a breaker because c is held, unless it would take back the probe
// that another of its scopes permitted, or undo an operator's close.
func (l *leaf) hold(now time.Duration, c *claim) {
	if l.freed && l.b.Closed() {
		return
	}
	for _, other := range l.claims {
		if other != c && other.prober == l && l.b.Snapshot(now).State == breaker.HalfOpen {
			return
		}
	}
	if l.half == c {
		l.half = nil
	}
	l.b.Hold(now, c.last.Rung, c.last.Cause)
	l.told = false
}

// pick chooses the breaker that probes: one that a message waits at, each in its
// turn. Nil if there is none; the permit is then taken back.
func (c *claim) pick(now time.Duration) *leaf {
	for i := range c.leaves {
		l := c.leaves[(int(c.gen)+i)%len(c.leaves)]
		if (l.waits || !c.topic) && l.b.Snapshot(now).Held {
			return l
		}
	}
	return nil
}

// Scopes is [breaker.Fleet]'s. It costs a lock for each scope.
func (m *Member) Scopes() []breaker.FleetScope {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := make([]breaker.FleetScope, 0, len(m.claims))
	for _, name := range slices.Sorted(maps.Keys(m.claims)) {
		all = append(all, m.describeLocked(m.claims[name]))
	}
	return all
}

// Scope is [breaker.Fleet]'s: of the scope that holds b, one that is open before
// one that was taken over, or else of its own.
func (m *Member) Scope(b *breaker.Breaker) (breaker.FleetScope, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.leaves[b]
	if l == nil || len(l.claims) == 0 {
		return breaker.FleetScope{}, false
	}
	best := m.describeLocked(l.claims[0])
	for _, c := range l.claims[1:] {
		if s := m.describeLocked(c); s.Held && (!best.Held || s.State > best.State) {
			best = s
		}
	}
	return best, true
}

func (m *Member) describeLocked(c *claim) breaker.FleetScope {
	s := m.v.Describe(m.clock(), c.name)
	s.Held = c.held
	if s.Cause == "" && c.held {
		s.Cause = c.last.Cause
	}
	return s
}

// Report is [dlq.StormFleet]'s. The errors are those of [Storms.Report].
func (m *Member) Report(key string, s dlq.Storm) error {
	if m.s == nil {
		return nil
	}
	return m.s.Report(m.clock(), key, ReportOf(s, s.String()))
}

// Withdraw is [dlq.StormFleet]'s.
func (m *Member) Withdraw(key string) {
	if m.s != nil {
		m.s.Withdraw(m.clock(), key)
	}
}

// Storm is [dlq.StormFleet]'s.
func (m *Member) Storm(key string) dlq.FleetStorm {
	if m.s == nil {
		return dlq.FleetStorm{}
	}
	s := m.s.Storm(m.clock(), key)
	return dlq.FleetStorm{Active: s.Active, Reporters: s.Reporters, Affected: s.Affected, Need: s.Need}
}

// Count is guard.Fleet's. The errors are those of [Totals.Count].
func (m *Member) Count(key string, handled, failed, deadLettered uint64) error {
	if m.t == nil {
		return nil
	}
	return m.t.Count(m.clock(), key, handled, failed, deadLettered)
}

// OthersSucceeded is guard.Fleet's; see [Totals.OthersSucceeded].
func (m *Member) OthersSucceeded(key string) (ago time.Duration, ok bool) {
	if m.t == nil {
		return 0, false
	}
	return m.t.OthersSucceeded(m.clock(), key)
}
