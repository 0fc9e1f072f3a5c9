// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package scope

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/internal/circuit"
)

// Driver is one process's part in a fleet, as a guard drives it. It connects the guard's breakers
// and a [Machine]. It is a [breaker.Fleet]. The comment of fleet.Member says which scopes a breaker
// has, and what an operator's force does. A gate over the topics of a group has no vote of its own:
// it follows from topics that are open everywhere alike.
//
// # Locks
//
// Lock order: Driver.mu, then that of the Machine, or of the breakers and their tree. All methods
// are safe for concurrent use.
type Driver struct {
	clock func() time.Duration
	v     *Machine // nil: no scope is decided on

	mu       sync.Mutex
	attached bool
	claims   map[string]*claim
	above    []*claim // claims of topics
	leaves   map[*circuit.Breaker]*leaf
	list     []*leaf // the leaves, in the order of adoption
	acts     []Action
}

var _ circuit.Fleet = (*Driver)(nil)

// ErrAttached means that a guard drives the [Driver] already.
var ErrAttached = errors.New("fleet: it has a driver already")

// claim is a scope that this process has.
type claim struct {
	name   string
	topic  bool    // the leaves are its partitions; otherwise there is one leaf
	leaves []*leaf // in the order of adoption

	held   bool
	last   Action // the latest Hold
	prober *leaf  // the leaf with the permit of the probe that is out

	// For a topic, which has no breaker of its own.
	gen      uint64
	letGo    bool // half-open since the last HalfOpen
	tripped  bool
	unproved bool // since the topic was let go or tripped, no partition has closed by its own probes
	level    int
	cause    breaker.Cause
}

// leaf is a breaker.
type leaf struct {
	b      *circuit.Breaker
	refs   int
	err    error    // error of Adopt
	claims []*claim // its own claim first; without claims that could not be adopted

	half    *claim // the claim that made it half-open while another held it; the other's close leaves it so
	told    bool   // the breaker is closed, and the fleet was told
	opened  bool   // was not closed at some time since the last HalfOpen
	waits   bool   // a message waits at the breaker
	freed   bool   // held, but closed by an operator
	tripped bool   // tripped by its own verdict, and not closed since
	level   int
	cause   breaker.Cause
}

// held reports whether one of its claims holds it.
func (l *leaf) held() bool {
	return slices.ContainsFunc(l.claims, func(c *claim) bool { return c.held })
}

// NewDriver returns the driver of m, which may be nil. clock is the Machine's clock. It need not be
// the one of the breakers: no instant passes between the two.
func NewDriver(clock func() time.Duration, m *Machine) *Driver {
	return &Driver{clock: clock, v: m, claims: make(map[string]*claim), leaves: make(map[*circuit.Breaker]*leaf)}
}

// Attach implements [breaker.Fleet]. The error is [ErrAttached].
func (d *Driver) Attach(wake func()) (detach func(), err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.attached {
		return nil, ErrAttached
	}
	d.attached = true
	if d.v != nil {
		d.v.OnActions(wake)
	}
	return sync.OnceFunc(func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.attached = false
		if d.v != nil {
			d.v.OnActions(nil)
		}
	}), nil
}

// Driven reports whether a guard drives the Driver.
func (d *Driver) Driven() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.attached
}

// Adopt implements [breaker.Fleet]. The errors are those of [Machine.Adopt], and one for a breaker
// whose calls may outlast a probe of the fleet.
func (d *Driver) Adopt(now time.Duration, b *circuit.Breaker, path []string, slow time.Duration) error {
	if d.v == nil {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if l := d.leaves[b]; l != nil {
		l.refs++
		return l.err
	}
	l := &leaf{b: b, refs: 1}
	d.leaves[b] = l
	d.list = append(d.list, l)
	if lease := d.v.Config().Lease; slow > lease {
		l.err = fmt.Errorf("fleet: FleetConfig.Lease: %v is not in [%v, 1h]: a call may take %v before it is slow, and no probe that does would pass", lease, slow, slow)
		return l.err
	}
	l.err = d.claimLocked(now, l, strings.Join(path, "/"), false)
	if len(path) == partitionDepth {
		l.err = errors.Join(l.err, d.claimLocked(now, l, strings.Join(path[:partitionDepth-1], "/"), true))
	}
	d.lookLocked(now, l)
	d.drainLocked(now)
	return l.err
}

// partitionDepth is the length of the path of a scope that one process has at a
// time: group, topic, partition.
const partitionDepth = 3

// claimLocked adds a scope to l's claims, and holds l if the scope is held.
func (d *Driver) claimLocked(now time.Duration, l *leaf, name string, topic bool) error {
	c := d.claims[name]
	var first Action
	if c == nil {
		var err error
		if first, err = d.v.Adopt(d.clock(), name); err != nil {
			return err
		}
		c = &claim{name: name, topic: topic}
		d.claims[name] = c
		if topic {
			d.above = append(d.above, c)
		}
	}
	c.leaves = append(c.leaves, l)
	l.claims = append(l.claims, c)
	if first.Kind != 0 {
		d.applyLocked(now, c, first)
	} else if c.held {
		l.hold(now, c)
	}
	return nil
}

// Leave implements [breaker.Fleet].
func (d *Driver) Leave(now time.Duration, b *circuit.Breaker) {
	if d.v == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	l := d.leaves[b]
	if l == nil {
		return
	}
	if l.refs--; l.refs > 0 {
		return
	}
	d.drainLocked(now)
	l.told = false
	d.lookLocked(now, l) // the fleet hears of l once more
	for _, c := range l.claims {
		c.leaves = slices.DeleteFunc(c.leaves, func(other *leaf) bool { return other == l })
		if len(c.leaves) > 0 {
			if c.prober == l {
				c.prober = nil // the turn ends at the next look
			}
			d.lookAboveLocked(now, c)
			continue
		}
		if c.topic { // the topic still counts its last partition
			c.leaves = append(c.leaves, l)
			d.lookAboveLocked(now, c)
		}
		d.v.Leave(d.clock(), c.name)
		delete(d.claims, c.name)
		d.above = slices.DeleteFunc(d.above, func(other *claim) bool { return other == c })
	}
	delete(d.leaves, b)
	d.list = slices.DeleteFunc(d.list, func(other *leaf) bool { return other == l })
	b.Unhold(now)
	d.drainLocked(now)
}

// Step implements [breaker.Fleet].
func (d *Driver) Step(now time.Duration, waiting map[*circuit.Breaker]bool) (busy bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.v == nil {
		return false
	}
	for _, l := range d.list {
		l.waits = waiting[l.b]
		d.lookLocked(now, l)
		busy = busy || !l.told
	}
	for _, c := range d.above {
		d.lookAboveLocked(now, c)
	}
	d.v.Tick(d.clock())
	d.drainLocked(now)
	return busy || d.v.Stirs()
}

// lookLocked tells the fleet the state of a breaker. If the breaker is closed and the fleet was
// told so, it costs an atomic load.
func (d *Driver) lookLocked(now time.Duration, l *leaf) {
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
	case !s.Held && !s.Barred: // the force is over, or the breaker tripped after one
		l.freed = false
		for _, c := range l.claims {
			if c.held {
				l.hold(now, c)
			}
		}
		s = l.b.Snapshot(now)
	}
	l.told, l.opened = closed, l.opened || !closed
	switch {
	case closed:
		l.tripped = false
	case s.State == breaker.Open && !s.Forced && !s.Held:
		l.tripped, l.level, l.cause = true, s.BackoffLevel, s.Cause
	}
	l.waits = l.waits && !closed && !s.Barred
	if len(l.claims) > 0 && !l.claims[0].topic {
		s.Forced = s.Forced || s.State == breaker.Closed && !l.b.Proved() // closed by an operator is Forced; see Observe
		d.v.Observe(d.clock(), l.claims[0].name, s)
		d.v.Want(d.clock(), l.claims[0].name, l.waits)
	}
}

// lookAboveLocked is lookLocked for a topic, whose breaker is made up from those of its partitions.
// It is open while enough of them are open by their own verdict. While the topic is held, its
// breaker is like the partition that probes. Once it is let go it is half-open, until a partition
// has closed by its own probes, or all are closed.
func (d *Driver) lookAboveLocked(now time.Duration, c *claim) {
	if !c.topic {
		return
	}
	open, waits, rest, proved := 0, false, true, false
	level, cause := 0, breaker.Cause("")
	for _, l := range c.leaves {
		rest = rest && l.told
		waits = waits || l.waits
		proved = proved || c.unproved && l.opened && l.told && l.b.Proved()
		if l.tripped {
			open++
			if l.level > level {
				level, cause = l.level, l.cause
			}
		}
	}
	if rest && !c.held && !c.unproved {
		return
	}
	s := circuit.Snapshot{Snapshot: breaker.Snapshot{Name: c.name}}
	switch {
	case c.held:
		s.State, s.Held, s.Cause = breaker.Open, true, c.last.Cause
		if c.prober != nil {
			if p := c.prober.b.Snapshot(now); p.Held {
				s.State, s.Trial, s.ProbesOut, s.Cause = p.State, p.Trial, p.ProbesOut, p.Cause
			}
		}
	case open > 0 && float64(open) >= d.v.Config().Quorum*float64(len(c.leaves)) && !d.v.Alone():
		if !c.tripped || level != c.level {
			c.gen++
		}
		c.tripped, c.letGo, c.unproved, c.level, c.cause = true, false, true, level, cause // its own verdict
		s.State, s.BackoffLevel, s.Cause = breaker.Open, level, cause
	default:
		c.tripped, c.unproved = false, c.unproved && !proved
		if c.letGo = c.letGo && c.unproved && !rest; c.letGo {
			s.State = breaker.HalfOpen
		}
		s.Forced = c.unproved && !c.letGo
	}
	s.Generation = c.gen
	d.v.Observe(d.clock(), c.name, s)
	d.v.Want(d.clock(), c.name, waits)
}

// drainRounds bounds how often applied actions may lead to more actions at one instant. A few
// rounds are enough. The bound keeps a mistake from hanging a guard; the next Step does the rest.
const drainRounds = 8

// drainLocked applies the fleet's actions until there are no more. Actions of a scope that was left
// are dropped.
func (d *Driver) drainLocked(now time.Duration) {
	for range drainRounds {
		d.acts = d.v.Actions(d.acts[:0])
		if len(d.acts) == 0 {
			return
		}
		for _, a := range d.acts {
			c := d.claims[a.Scope]
			if c == nil {
				continue
			}
			d.applyLocked(now, c, a)
			for _, l := range c.leaves {
				d.lookLocked(now, l)
			}
			d.lookAboveLocked(now, c)
		}
	}
}

// applyLocked applies a to a scope's breakers. A breaker that another scope holds too stays held.
func (d *Driver) applyLocked(now time.Duration, c *claim, a Action) {
	c.prober = nil
	switch a.Kind {
	case Hold:
		c.held, c.last, c.letGo, c.tripped, c.unproved = true, a, false, false, false
		for _, l := range c.leaves {
			l.hold(now, c)
		}
	case HalfOpen:
		c.held, c.letGo, c.unproved = false, true, true
		for _, l := range c.leaves {
			if l.opened = !l.freed || !l.b.Closed(); !l.opened {
				continue
			}
			l.half = nil
			if l.b.Hold(now, a.BackoffLevel, a.Cause); l.held() {
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
		c.held, c.letGo, c.unproved = false, false, false
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

// hold holds a breaker because c is held. It does not if that would take back the probe that
// another of its scopes permitted, or undo an operator's close.
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
	l.b.Hold(now, c.last.BackoffLevel, c.last.Cause)
	l.told = false
}

// pick chooses the held breaker that probes. In a topic that is in turn one at which a message
// waits. It returns nil if there is none; then the permit is taken back.
func (c *claim) pick(now time.Duration) *leaf {
	for i := range c.leaves {
		l := c.leaves[(int(c.gen)+i)%len(c.leaves)]
		if (l.waits || !c.topic) && l.b.Snapshot(now).Held {
			return l
		}
	}
	return nil
}

// Scopes implements [breaker.Fleet]. It costs a lock for each scope.
func (d *Driver) Scopes() []breaker.FleetScope {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := make([]breaker.FleetScope, 0, len(d.claims))
	for _, name := range slices.Sorted(maps.Keys(d.claims)) {
		all = append(all, d.describeLocked(d.claims[name]))
	}
	return all
}

// Scope implements [breaker.Fleet]. It returns the scope that holds b, an open scope before one
// that was taken over. If none holds b, it returns b's own scope.
func (d *Driver) Scope(b *circuit.Breaker) (breaker.FleetScope, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	l := d.leaves[b]
	if l == nil || len(l.claims) == 0 {
		return breaker.FleetScope{}, false
	}
	best := d.describeLocked(l.claims[0])
	for _, c := range l.claims[1:] {
		if s := d.describeLocked(c); s.Held && (!best.Held || s.State > best.State) {
			best = s
		}
	}
	return best, true
}

func (d *Driver) describeLocked(c *claim) breaker.FleetScope {
	s := d.v.Describe(d.clock(), c.name)
	s.Held = c.held
	if s.Cause == "" && c.held {
		s.Cause = c.last.Cause
	}
	return s
}
