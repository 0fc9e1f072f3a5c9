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

// maxDepth is how long a scope path may be: a leaf and two parents, so that an
// admission pays at most two loads more than the leaf's own.
const maxDepth = 3

// ScopesConfig configures a tree of scopes. The zero value is valid and means
// the documented defaults.
type ScopesConfig struct {
	// Quorum is the share of a parent's live children that must not be closed
	// for the parent to open. In (0, 1]; unset means 0.5.
	Quorum float64
	// MinOpen is how many of them it must be at least. In [2, 1000000]; unset
	// means 2: one child is never an outage of its parent.
	MinOpen int
	// Limit is how many leaves may exist at once, the unreferenced ones that
	// Evict has not dropped included. In [1, 10000000]; unset means 10000. A
	// leaf costs about 2 KB.
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

// Validate returns one error with all that is wrong, or nil.
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

// Scopes is a tree: breakers at the leaves, gates above them. A leaf counts
// and probes; a parent only looks at its live children, those some [Leaf]
// refers to, and is open while at least MinOpen and Quorum of them are not
// closed. A child of a child is not counted twice: a group looks at its
// topics, a topic at its partitions.
//
// A leaf that is not closed but has had nothing to probe with, for Cap after
// its deadline or its last probe, has no vote: an idle partition cannot keep
// its topic shut for ever. It has one again as soon as it probes. A leaf that is
// held has no deadline: the end of the period at its level, from the latest Hold,
// counts as one. One that was given back by Unhold has a vote once a probe failed. A
// half-open leaf whose probes succeed has none: it carries a part of its load.
//
// All methods are safe for concurrent use. Lock order: Scopes.mu, then
// Breaker.mu, never the other way round: a breaker tells the tree of a change
// after it has let go of its own lock.
type Scopes struct {
	cfg  ScopesConfig
	opts options

	mu      sync.Mutex
	now     time.Duration // the latest instant seen
	leaves  map[path]*node
	parents map[path]*parent
	list    []*node            // leaves, in no order; replaced, never changed in place
	stale   bool               // list is behind leaves
	shut    map[*node]struct{} // live leaves that are not closed
	dirty   []*node            // leaves with pending changes
	changes []Change           // of parents
}

// maxTreeChanges bounds the pending changes of parents and evicted leaves.
const maxTreeChanges = 1024

// node is a leaf scope. Its b, path and up never change; the rest is guarded
// by Scopes.mu. parts and turned are read without it.
type node struct {
	path path
	b    *Breaker
	up   *parent

	refs     int
	parts    atomic.Int64 // of these, claims with a part in the parents
	released time.Duration
	votes    bool
	dirty    bool

	turned atomic.Int64 // number of its last turn at a parent; 0 none
}

// parent is a gate. Admissions read open; the counts are guarded by Scopes.mu.
type parent struct {
	path  path
	name  string
	up    *parent
	open  atomic.Bool
	paced atomic.Bool  // its leaves take turns to probe: none has succeeded since one failed
	turn  atomic.Int64 // instant before which none of them begins to
	turns atomic.Int64 // how many have begun
	shut  atomic.Int64 // when it opened
	voted atomic.Int64 // copy of votes
	kids  int          // children that exist
	live  int          // children that are live
	votes int          // live children that are not closed, and have a vote
	seq   uint64
	since time.Duration
}

// NewScopes returns an empty tree. The error has all that is wrong with cfg.
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

// Leaf claims the leaf scope at path, coarsest element first (group, topic,
// partition), one to three elements, none empty. It is created at the first
// claim and shared by every later one; Release ends the claim. What a leaf
// learned before it was released is still there if Evict has not dropped it.
//
// The errors are [ErrPath] and [ErrTooManyScopes].
func (s *Scopes) Leaf(elements ...string) (*Leaf, error) { return s.claim(true, elements) }

// Aside claims a leaf as Leaf does, without a part in its parents: it is no child of theirs,
// and they do not hold it. Where others claim the same leaf with a part, so does this one.
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

// Release ends a claim, as of the latest Tick. The scope stays, without a
// vote once nobody claims it, until Evict drops it. Releasing a leaf twice
// does nothing.
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

// Evict drops the scopes nobody has claimed for idle or longer that hold
// nothing worth keeping: closed, with no failure in the window and the backoff
// forgotten; or not closed but past their deadline by Memory, when what they
// know is out of date. A force without end is kept. It returns how many it
// dropped.
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

// Tick ticks every leaf and takes the vote of those that idle. Call it at
// least once a second; it costs about a lock per leaf.
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

// Changes appends the pending changes of leaves and parents to dst and forgets
// them. Those of one scope are in order.
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

// ParentSnapshot is what a parent scope looks like at one instant.
type ParentSnapshot struct {
	Name  string
	Open  bool
	Since time.Duration // of the last change
	Live  int           // children somebody has claimed
	Votes int           // of them not closed, idle ones left out
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

// nodes returns the leaves as a slice that stays as it is.
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

// changed is what a leaf's breaker calls after a change of state.
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

// step is by how much a count of trues changes.
func step(was, is bool) int {
	switch {
	case is && !was:
		return +1
	case was && !is:
		return -1
	}
	return 0
}

// countLocked changes the counts of p, opens it by them or closes it, with the given
// cause, and passes both on as p's own vote and liveness. Counts change together, or a
// parent would flap on the way from one sum to the other.
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

// Leaf is one claim of a leaf scope: its breaker, behind the gates of its
// parents. Asking differs, and the outcome of a probe is one for its parents' other
// leaves, too.
type Leaf struct {
	*Breaker

	node      *node
	near, far *parent // nil where the path is shorter
	part      bool
	gone      bool // guarded by Scopes.mu
}

// apart tells whether the leaf has no part in its parents.
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

// Wider are the parents that are open, the nearest first.
func (l *Leaf) Wider() (open []breaker.Snapshot) {
	if l.apart() {
		return nil
	}
	for p := l.near; p != nil; p = p.up {
		if p.open.Load() {
			open = append(open, breaker.Snapshot{
				Name: p.name, State: breaker.Open, Cause: breaker.CauseQuorum, Since: time.Duration(p.shut.Load()),
			})
		}
	}
	return open
}

// Closed reports whether the leaf and all its parents are closed: at most
// three atomic loads, and one for a claim aside.
func (l *Leaf) Closed() bool { return l.gate() == nil && l.Breaker.Closed() }

// Enter is [Breaker.Enter] behind the parents: at most three atomic loads.
func (l *Leaf) Enter() (Token, bool) {
	if l.gate() != nil {
		return Token{}, false
	}
	return l.Breaker.Enter()
}

// Admit is [Breaker.Admit] behind the parents. A leaf that is itself closed is
// refused while a parent is open; one that is not probes, for that is what lets the
// parent close. While these probes fail, the leaves of a parent take turns at its pace:
// a dependency that many partitions share is asked once and not by each. After one that
// succeeds each goes by its own backoff.
func (l *Leaf) Admit(now time.Duration, head uint64) (Token, Refusal) {
	return l.AdmitFor(now, head, 0)
}

// AdmitFor is Admit for a call that may take longer than Config.Lease: its lease is at least
// the given one.
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

// turnCaps is how long a leaf waits for its turn at most, in Caps.
const turnCaps = 4

// awaitTurn refuses the probe by which a leaf would end its open period, while it is
// another leaf's turn: under an open parent whose probes fail all leaves share one probe
// at a time, at the pace of the parent. Who has had a turn lets those go first who have
// not, for Base. A leaf that waits has something to probe with, and keeps its vote. It
// waits for turnCaps times Cap at most: its own part of the dependency may be back.
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

// probed tells the parents what became of a leaf's probe: after a success the other
// leaves probe at their own pace, until one fails.
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

// Exclude is [Breaker.Exclude]. A probe that says nothing gives its turn back.
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
