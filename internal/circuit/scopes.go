// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package circuit

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

// maxDepth is the most elements of a scope path: a leaf and two parents. So an admission
// costs at most two loads more than the leaf's own.
const maxDepth = 3

// ScopesConfig configures a tree of scopes. The zero value is valid and means
// the documented defaults.
type ScopesConfig struct {
	// Quorum is the share of a parent's live children that must not be closed
	// for the parent to open. In (0, 1]; unset means 0.5.
	Quorum float64
	// MinOpen is the least number of such children. In [2, 1000000]; unset means 2: one
	// child is never an outage of its parent.
	MinOpen int
	// Limit is how many leaves may exist at once, with unclaimed leaves that Evict has not
	// dropped. In [1, 10000000]; unset means 10000. A leaf costs about 2 KB.
	Limit int
	// Breaker configures every leaf.
	Breaker breaker.Config
}

// WithDefaults returns c with every unset field replaced by its default.
func (c ScopesConfig) WithDefaults() ScopesConfig {
	c.Quorum = cmp.Or(c.Quorum, 0.5)
	c.MinOpen = cmp.Or(c.MinOpen, 2)
	c.Limit = cmp.Or(c.Limit, 10_000)
	c.Breaker = c.Breaker.WithDefaults()
	return c
}

// Validate returns one error that reports all wrong fields, or nil.
func (c ScopesConfig) Validate() error {
	wrong := []error{c.Breaker.Validate()}
	c = c.WithDefaults()
	if !(c.Quorum > 0 && c.Quorum <= 1) {
		wrong = append(wrong, fmt.Errorf("breaker: config: Quorum: %v is not in (0, 1]", c.Quorum))
	}
	if c.MinOpen < 2 || c.MinOpen > 1e6 {
		wrong = append(wrong, fmt.Errorf("breaker: config: MinOpen: %v is not in [2, 1000000]", c.MinOpen))
	}
	if c.Limit < 1 || c.Limit > 1e7 {
		wrong = append(wrong, fmt.Errorf("breaker: config: Limit: %v is not in [1, 10000000]", c.Limit))
	}
	return errors.Join(wrong...)
}

type path [maxDepth]string

func (p path) elements() []string {
	n := maxDepth
	for n > 1 && p[n-1] == "" {
		n--
	}
	return p[:n]
}

func (p path) String() string { return strings.Join(p.elements(), "/") }

// Scopes is a tree: breakers at the leaves, gates above them. A leaf counts and probes. A
// parent only looks at its live children (claimed by some [Leaf]): it is open while at
// least MinOpen and Quorum of them are not closed. A child of a child is not counted
// twice: a group looks at its topics, a topic at its partitions.
//
// A leaf that is not closed has a vote at its parent, with these exceptions:
//
//   - A leaf that had nothing to probe with for Cap after its deadline or latest probe: an
//     idle partition cannot keep its topic shut. Its next probe gives it the vote again.
//     A held leaf has no deadline; the end of the period of its level, counted from the
//     latest Hold, takes its place.
//   - A leaf that Unhold gave back, until a probe fails.
//   - A half-open leaf whose probes succeed: it carries a part of its load.
//   - A leaf that is open by force: a force says nothing about its siblings.
//
// All methods are safe for concurrent use. Lock order: Scopes.mu, then Breaker.mu, never
// the other way round. A breaker tells the tree of a change after it has released its own
// lock.
type Scopes struct {
	cfg  ScopesConfig
	opts options

	mu      sync.Mutex
	now     time.Duration // the latest instant seen
	leaves  map[path]*node
	parents map[path]*parent
	list    []*node            // leaves, in no order; replaced, never changed in place
	stale   bool               // list is out of date
	shut    map[*node]struct{} // live leaves that are not closed
	dirty   []*node            // leaves with pending changes
	changes []Change           // of parents
}

// maxTreeChanges bounds the pending changes of parents and evicted leaves.
const maxTreeChanges = 1024

// node is a leaf scope. Its b, path and up never change. Scopes.mu guards the other
// fields; parts and turned are also read without the lock.
type node struct {
	path path
	b    *Breaker
	up   *parent

	refs     int
	parts    atomic.Int64 // claims with a part in the parents, a part of refs
	released time.Duration
	votes    bool
	dirty    bool

	turned atomic.Int64 // number of its latest turn at a parent; 0 for none
}

// parent is a gate. Admissions read open; the counts are guarded by Scopes.mu.
type parent struct {
	path  path
	name  string
	up    *parent
	open  atomic.Bool
	paced atomic.Bool  // leaves take turns to probe: no probe has succeeded since one failed
	turn  atomic.Int64 // instant before which no leaf begins a turn
	turns atomic.Int64 // how many turns have begun
	shut  atomic.Int64 // when the parent opened
	voted atomic.Int64 // copy of votes
	kids  int          // children that exist
	live  int          // children that are live
	votes int          // live children that are not closed and have a vote
	seq   uint64
	since time.Duration
}

// NewScopes returns an empty tree. The error reports all wrong fields of cfg.
func NewScopes(cfg ScopesConfig, opts ...Option) (*Scopes, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &Scopes{
		cfg:     cfg.WithDefaults(),
		opts:    buildOptions(opts),
		leaves:  make(map[path]*node),
		parents: make(map[path]*parent),
		shut:    make(map[*node]struct{}),
	}, nil
}

// Config returns the configuration with its defaults filled in.
func (s *Scopes) Config() ScopesConfig { return s.cfg }

// Leaf claims the leaf scope at a path of one to three elements, none empty, the coarsest
// first (group, topic, partition). The first claim creates the scope, later claims share
// it; Release ends a claim. A released scope keeps its state until Evict drops it.
//
// The errors are [ErrPath] and [ErrTooManyScopes].
func (s *Scopes) Leaf(elements ...string) (*Leaf, error) { return s.claim(true, elements) }

// Aside claims a leaf as Leaf does, but without a part in its parents: the leaf is not
// their child, and they do not stop it. If others claim the same leaf with a part, this
// claim has a part, too.
func (s *Scopes) Aside(elements ...string) (*Leaf, error) { return s.claim(false, elements) }

func (s *Scopes) claim(part bool, elements []string) (*Leaf, error) {
	if len(elements) < 1 || len(elements) > maxDepth {
		return nil, fmt.Errorf("%w: %q has %d elements, not in [1, %d]", ErrPath, elements, len(elements), maxDepth)
	}
	if slices.Contains(elements, "") {
		return nil, fmt.Errorf("%w: %q has an empty element", ErrPath, elements)
	}
	var key path
	copy(key[:], elements)

	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.leaves[key]
	if n == nil {
		if len(s.leaves) >= s.cfg.Limit {
			return nil, fmt.Errorf("%w: %q would be number %d, Limit is %d", ErrTooManyScopes, key.String(), len(s.leaves)+1, s.cfg.Limit)
		}
		n = &node{path: key, up: s.parentLocked(elements[:len(elements)-1])}
		n.b = newBreaker(key.String(), &s.cfg.Breaker, s.opts, func(now time.Duration) { s.changed(n, now) })
		if n.up != nil {
			n.up.kids++
		}
		s.leaves[key] = n
		s.stale = true
	}
	n.refs++
	if part && n.parts.Add(1) == 1 {
		s.lookLocked(n, +1, s.now)
	}
	l := &Leaf{Breaker: n.b, node: n, near: n.up, part: part}
	if n.up != nil {
		l.far = n.up.up
	}
	return l, nil
}

// Release ends a claim, as of the latest Tick. The scope stays until Evict drops it, but
// has no vote once nobody claims it. A second Release of a leaf does nothing.
func (s *Scopes) Release(l *Leaf) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.gone {
		return
	}
	l.gone = true
	n := l.node
	if n.refs--; n.refs == 0 {
		n.released = s.now
	}
	if !l.part || n.parts.Add(-1) > 0 {
		return
	}
	s.countLocked(n.up, step(n.votes, false), -1, s.now, breaker.CauseReleased)
	n.votes = false
	delete(s.shut, n)
}

// Evict drops scopes that nobody has claimed for idle or longer and that have no state
// worth keeping. A closed scope has none if its window has no failure and its backoff is
// forgotten. Any other scope has none from Memory after its deadline on, since its state
// is out of date. A force without end is kept. Evict returns the number of dropped scopes.
func (s *Scopes) Evict(now, idle time.Duration) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	dropped := 0
	for key, n := range s.leaves {
		if n.refs > 0 || now < later(n.released, idle) || !n.b.spent(now) {
			continue
		}
		if n.dirty {
			n.dirty = false
			s.dirty = slices.DeleteFunc(s.dirty, func(d *node) bool { return d == n })
			for _, c := range n.b.Changes(nil) {
				s.recordLocked(c)
			}
		}
		delete(s.leaves, key)
		for p := n.up; p != nil; p = p.up {
			p.kids--
			if p.kids > 0 {
				break
			}
			delete(s.parents, p.path)
		}
		s.stale = true
		dropped++
	}
	return dropped
}

// Tick ticks every leaf and takes the vote from idle leaves. Call it at least once a
// second. It costs about one lock per leaf.
func (s *Scopes) Tick(now time.Duration) {
	for _, n := range s.nodes(now) {
		n.b.Tick(now)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for n := range s.shut {
		s.lookLocked(n, 0, now)
	}
}

// Hasten ends the open periods of all leaves, as [Breaker.Hasten].
func (s *Scopes) Hasten(now time.Duration) {
	for _, n := range s.nodes(now) {
		n.b.Hasten(now)
	}
}

// Changes appends the pending changes of leaves and parents to dst and forgets them. The
// changes of one scope are in order.
func (s *Scopes) Changes(dst []Change) []Change {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.dirty {
		n.dirty = false
		dst = n.b.Changes(dst)
	}
	clear(s.dirty)
	s.dirty = s.dirty[:0]
	dst = append(dst, s.changes...)
	s.changes = s.changes[:0]
	return dst
}

// Len returns how many leaves exist, unclaimed ones included.
func (s *Scopes) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.leaves)
}

// ParentSnapshot is the state of a parent scope at one instant.
type ParentSnapshot struct {
	Name  string
	Open  bool
	Since time.Duration // when Open last changed
	Live  int           // claimed children
	Votes int           // claimed children that are not closed and have a vote; see Scopes
}

// Parents describes every parent scope, sorted by name.
func (s *Scopes) Parents() []ParentSnapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]ParentSnapshot, 0, len(s.parents))
	for _, p := range s.parents {
		all = append(all, ParentSnapshot{p.name, p.open.Load(), p.since, p.live, p.votes})
	}
	slices.SortFunc(all, func(a, b ParentSnapshot) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// nodes returns the leaves in a slice that nobody changes.
func (s *Scopes) nodes(now time.Duration) []*node {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now = max(s.now, now)
	if s.stale {
		s.list = make([]*node, 0, len(s.leaves))
		for _, n := range s.leaves {
			s.list = append(s.list, n)
		}
		s.stale = false
	}
	return s.list
}

func (s *Scopes) parentLocked(elements []string) *parent {
	if len(elements) == 0 {
		return nil
	}
	var key path
	copy(key[:], elements)
	p := s.parents[key]
	if p == nil {
		p = &parent{path: key, name: key.String(), up: s.parentLocked(elements[:len(elements)-1])}
		if p.up != nil {
			p.up.kids++
		}
		s.parents[key] = p
	}
	return p
}

// changed takes note of a change of state. The leaf's breaker calls it.
func (s *Scopes) changed(n *node, now time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !n.dirty {
		n.dirty = true
		s.dirty = append(s.dirty, n)
	}
	s.lookLocked(n, 0, now)
}

// lookLocked brings the vote of n up to date. live is +1 when n has just been
// claimed.
func (s *Scopes) lookLocked(n *node, live int, now time.Duration) {
	s.now = max(s.now, now)
	if n.parts.Load() == 0 {
		return
	}
	if n.b.Closed() {
		delete(s.shut, n)
	} else {
		s.shut[n] = struct{}{}
	}
	vote := n.b.votes(now)
	s.countLocked(n.up, step(n.votes, vote), live, now, breaker.CauseQuorum)
	n.votes = vote
}

// step is the change of a count of true values, when one value goes from was to is.
func step(was, is bool) int {
	switch {
	case is && !was:
		return +1
	case was && !is:
		return -1
	}
	return 0
}

// countLocked changes the counts of p and opens or closes p by them. The parent of p gets the
// result as the vote and liveness of p. A close has the given cause. Both counts change
// together: one after the other, a parent could flap in between.
func (s *Scopes) countLocked(p *parent, votes, live int, now time.Duration, closes breaker.Cause) {
	if p == nil || votes == 0 && live == 0 {
		return
	}
	wasLive, wasOpen := p.live > 0, p.open.Load()
	p.votes += votes
	p.voted.Store(int64(p.votes))
	p.live += live
	open := p.votes >= s.cfg.MinOpen && float64(p.votes) >= s.cfg.Quorum*float64(p.live)
	if open != wasOpen {
		p.open.Store(open)
		p.shut.Store(int64(now))
		p.turn.Store(int64(now))
		p.paced.Store(open)
		p.seq++
		p.since = now
		c := Change{Scope: p.name, Seq: p.seq, At: now, From: breaker.Closed, To: breaker.Open, Cause: breaker.CauseQuorum}
		if !open {
			c.From, c.To, c.Cause = breaker.Open, breaker.Closed, closes
		}
		s.recordLocked(c)
	}
	s.countLocked(p.up, step(wasOpen, open), step(wasLive, p.live > 0), now, closes)
}

func (s *Scopes) recordLocked(c Change) {
	if len(s.changes) == maxTreeChanges {
		s.changes = slices.Delete(s.changes, 0, 1)
	}
	s.changes = append(s.changes, c)
}

// Leaf is one claim of a leaf scope: its breaker, behind the gates of its parents. Closed,
// Enter and Admit also ask the parents, and the outcome of a probe also paces the other
// leaves of an open parent.
type Leaf struct {
	*Breaker

	node      *node
	near, far *parent // nil where the path is shorter
	part      bool
	gone      bool // guarded by Scopes.mu
}

// apart reports whether the leaf has no part in its parents.
func (l *Leaf) apart() bool { return !l.part && l.node.parts.Load() == 0 }

// gate returns the nearest parent that is open, or nil.
func (l *Leaf) gate() *parent {
	switch {
	case l.near == nil, l.apart():
		return nil
	case l.near.open.Load():
		return l.near
	case l.far != nil && l.far.open.Load():
		return l.far
	}
	return nil
}

// Wider returns the open parents, the nearest first.
func (l *Leaf) Wider() (open []breaker.Snapshot) {
	if l.apart() {
		return nil
	}
	for p := l.near; p != nil; p = p.up {
		if p.open.Load() {
			shut := time.Duration(p.shut.Load())
			open = append(open, breaker.Snapshot{
				Name: p.name, State: breaker.Open, Cause: breaker.CauseQuorum, Since: shut, Tripped: shut,
			})
		}
	}
	return open
}

// Closed reports whether the leaf and all its parents are closed: at most three atomic
// loads, and one more for a claim by Aside.
func (l *Leaf) Closed() bool { return l.gate() == nil && l.Breaker.Closed() }

// Enter is [Breaker.Enter] behind the parents: at most three atomic loads.
func (l *Leaf) Enter() (Token, bool) {
	if l.gate() != nil {
		return Token{}, false
	}
	return l.Breaker.Enter()
}

// Admit is [Breaker.Admit] behind the parents. While a parent is open, Admit refuses a
// closed leaf, but a leaf that is not closed probes: only probes let the parent close.
//
// While these probes fail, the leaves of a parent take turns at the parent's pace: a
// dependency that many partitions share gets one probe, not one from each. After a probe
// that succeeds each leaf follows its own backoff.
func (l *Leaf) Admit(now time.Duration, head uint64) (Token, Refusal) {
	return l.AdmitFor(now, head, 0)
}

// AdmitFor is Admit for a call that may take longer than Config.Lease. A probe's lease is
// at least the given lease.
func (l *Leaf) AdmitFor(now time.Duration, head uint64, lease time.Duration) (Token, Refusal) {
	if r, waits := l.awaitTurn(now); waits {
		return Token{}, r
	}
	t, r := l.Breaker.admit(now, head, lease)
	if r.OK() && !t.Probe() {
		if p := l.gate(); p != nil {
			return Token{}, Refusal{State: breaker.Open, Cause: breaker.CauseQuorum, Scope: p.name, Until: later(now, l.cfg.Base)}
		}
	}
	return t, r
}

// turnCaps is the longest time that a leaf waits for its turn, in multiples of Cap.
const turnCaps = 4

// awaitTurn refuses the probe that would end a leaf's open period while it is another
// leaf's turn. Under an open parent whose probes fail, all leaves share one probe at a
// time, at the pace of the parent.
//
// A leaf that has had a turn waits Base longer, so that other leaves go first. A waiting
// leaf has something to probe with and keeps its vote. It waits for turnCaps times Cap at
// most: its own part of the dependency may be back.
func (l *Leaf) awaitTurn(now time.Duration) (Refusal, bool) {
	p := l.gate()
	if p == nil || !p.paced.Load() {
		return Refusal{}, false
	}
	e := l.epoch.Load()
	if e.state != breaker.Open || e.held || e.forced || now < e.deadline() || now-e.deadline() > turnCaps*l.cfg.Cap {
		return Refusal{}, false
	}
	turn := p.turn.Load()
	mine := time.Duration(turn)
	if had := l.node.turned.Load(); had > 0 && p.turns.Load()-had < p.voted.Load()-1 {
		mine = later(mine, l.cfg.Base)
	}
	if now >= mine {
		next := later(now, l.cfg.PeriodAfter(topLevel(l.cfg.Base, l.cfg.Cap), now-time.Duration(p.shut.Load())))
		if p.turn.CompareAndSwap(turn, int64(next)) {
			l.node.turned.Store(p.turns.Add(1))
			return Refusal{}, false
		}
		mine = time.Duration(p.turn.Load())
	}
	e.stir.Store(int64(now))
	return Refusal{State: breaker.Open, Cause: breaker.CauseQuorum, Scope: p.name, Until: mine}, true
}

// probed tells the parents the outcome of a leaf's probe. After a success the other leaves
// probe at their own pace, until a probe fails.
func (l *Leaf) probed(t Token, passed bool) {
	if !t.Probe() || l.apart() {
		return
	}
	for _, p := range []*parent{l.near, l.far} {
		if p != nil && p.open.Load() {
			p.paced.Store(!passed)
		}
	}
}

// Success is [Breaker.Success].
func (l *Leaf) Success(now time.Duration, t Token) { l.Breaker.Success(now, t); l.probed(t, true) }

// Failure is [Breaker.Failure].
func (l *Leaf) Failure(now time.Duration, t Token, first bool) {
	l.Breaker.Failure(now, t, first)
	l.probed(t, false)
}

// FailureOf is [Breaker.FailureOf].
func (l *Leaf) FailureOf(now time.Duration, t Token, first bool, delivery uint64) {
	l.Breaker.FailureOf(now, t, first, delivery)
	l.probed(t, false)
}

// Unavailable is [Breaker.Unavailable].
func (l *Leaf) Unavailable(now time.Duration, t Token, first bool) {
	l.Breaker.Unavailable(now, t, first)
	l.probed(t, false)
}

// Exclude is [Breaker.Exclude]. A probe without an outcome gives its turn back.
func (l *Leaf) Exclude(now time.Duration, t Token) {
	l.Breaker.Exclude(now, t)
	if p := l.gate(); p != nil && t.Probe() {
		p.turn.Store(int64(now))
	}
}

// Slow is [Breaker.Slow].
func (l *Leaf) Slow(now time.Duration, t Token, first bool) {
	l.Breaker.Slow(now, t, first)
	l.probed(t, false)
}
