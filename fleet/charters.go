// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/crdt"
	"github.com/stormguard-mq/stormguard/limiter"
)

const (
	// fewPending is how many charters may wait for members to apply them before
	// only evictions are accepted, and maxPending before nothing is.
	fewPending = 64
	maxPending = 96

	maxRequests = 64   // of this process, undecided
	maxOutcomes = 256  // remembered
	maxLives    = 8192 // names of which the first life is remembered

	activeTick  = 5 * time.Millisecond
	idleTick    = 50 * time.Millisecond
	pullTimeout = 100 * time.Millisecond
	nearby      = time.Second // for how long one who was heard counts as there
)

// Charters is one process's part in how a fleet changes its charter. The package
// comment says how it is agreed.
//
// It has no goroutine, timer or clock. Its methods take instants of one monotonic
// clock, that of the session which calls Merge; a driver calls [Charters.Tick] at
// [Charters.Wake], and steps the session after each call that changed something. It
// is safe for concurrent use; the [Books] are called under its lock.
type Charters struct {
	cfg      CharterConfig
	self     crdt.Replica
	books    Books
	rand     *rand.Rand
	fleet    uint64 // digest of what all must have alike
	founding uint64 // digest of charter 1

	mu      sync.Mutex
	start   time.Duration
	ticked  time.Duration
	chain   []*enacted // from the last complete one to the newest
	seats   []seat     // of the newest roster, by name
	seat    int        // ours, -1 if there is none
	fellows map[string]*fellow
	list    []*fellow // the same, in the order in which they were met
	first   map[string]uint64
	applied map[string]uint64  // by the word of each, whichever life; see takeWord
	gone    map[string]release // evicted
	own     uint64             // applied by our books

	// Voting for the next number; see charter_vote.go.
	votes      uint64 // from which number on; 0 is not known yet
	settled    bool   // the charter is known to have been the newest after our start
	promised   ballot
	promisedAt time.Duration
	accepted   accepted
	acceptedAt time.Duration
	proposals  map[uint64]*decree // for the next number, by digest
	round      uint64             // the highest that was seen
	bid        bid
	fails      int
	retryAt    time.Duration
	calm       time.Duration // until then nobody is evicted for silence
	wanted     time.Duration // something is requested since; never if nothing is
	rank       int           // in which order members propose it

	pull     pull
	requests []request
	outcomes map[uint64]uint64
	tickets  uint64
	joining  bool
	weight   int
	leaving  bool
	deadline time.Duration
	leftAt   uint64 // the number that is without us
	over     bool   // evicted
	until    time.Duration
	broken   error // the books refused a charter
	stamps   []time.Duration

	seq, shared uint64
	toldAt      time.Duration // seq last rose
	foreign     uint64
	differing   uint64
	differs     *CharterError
	row         statement // being sent or read; here so that it is not allocated
}

// enacted is a charter in the chain.
type enacted struct {
	*decree
	at      time.Duration // learned
	from    string        // whom it was learned of
	lacking []string      // losers that have not applied it, when last looked at
}

// seat is a member.
type seat struct {
	*fellow // nil if it was not met

	name  string
	since time.Duration // it is a member since, as we know
}

// fellow is another process, by its latest life.
type fellow struct {
	id     crdt.Replica
	seat   int           // -1 if it has none
	sent   time.Duration // its clock: of the latest row
	heard  time.Duration // and what it rests
	row    statement     // zero if none came
	told   uint64        // the latest change that concerns it
	frozen time.Duration // sent, when we last accepted something
	grant  time.Duration // own clock: what it confirmed under the newest charter
}

// release is the eviction of a name.
type release struct {
	number uint64
	from   time.Duration // its share is free
}

// bid is our own proposal.
type bid struct {
	at     ballot // zero if there is none
	decree *decree
	fresh  bool
	since  time.Duration
}

// pull is a decree that is being fetched.
type pull struct {
	want

	chosen bool
	from   *fellow // nil if nothing is
	buf    []byte
	at     time.Duration // last progress
}

// request is what an operator asked this process for.
type request struct {
	ticket uint64
	change *Change
	resets uint64 // that it wants
	evict  string
	life   uint64   // of evict, as far as it was met
	in     []uint64 // digests of proposals that have it
}

// A CharterError says with whom this process differs about a charter.
type CharterError struct {
	Number       uint64
	Peer         crdt.Replica
	Ours, Theirs uint64 // digests
}

func (e *CharterError) Error() string {
	return fmt.Sprintf("%v: number %d of %v is %016x, ours is %016x", ErrCharter, e.Number, e.Peer, e.Theirs, e.Ours)
}

// Unwrap makes errors.Is(err, ErrCharter) hold.
func (e *CharterError) Unwrap() error { return ErrCharter }

// NewCharters is the part of a life that begins now and knows the founding charter
// only. A process outside of its roster is a guest, and may [Charters.Join]. The
// errors are [ErrConfig].
func NewCharters(self crdt.Replica, cfg CharterConfig, books Books, now time.Duration) (*Charters, error) {
	var w checks
	if len(self.Name) < 1 || len(self.Name) > maxName {
		w.bad("self", fmt.Sprintf("%q", self.Name), fmt.Sprintf("[1, %d] bytes", maxName))
	}
	if err := errors.Join(append(w, cfg.Validate())...); err != nil {
		return nil, err
	}
	cfg = cfg.WithDefaults()
	founding := newDecree(normal(cfg.Founding), nil)
	h := hashString(hashString(hashInit, cfg.Fleet), string(cfg.OnSilence))
	if cfg.OnSilence == limiter.Majority {
		h = hashNumber(h, uint64(cfg.Lease))
	}
	c := &Charters{
		cfg: cfg, self: self, books: books, start: now, ticked: now,
		rand:  rand.New(rand.NewPCG(self.Incarnation, hashEnd(hashString(hashInit, self.Name)))),
		fleet: hashEnd(h), founding: founding.digest,
		fellows: map[string]*fellow{}, first: map[string]uint64{}, applied: map[string]uint64{}, gone: map[string]release{},
		proposals: map[uint64]*decree{}, outcomes: map[uint64]uint64{},
		wanted: never, seq: 1, shared: 1,
	}
	if err := c.adoptLocked(now, founding, ""); err != nil {
		return nil, fmt.Errorf("%w: Founding: %w", ErrConfig, err)
	}
	c.settleLocked(now)
	return c, nil
}

func (c *Charters) top() *enacted    { return c.chain[len(c.chain)-1] }
func (c *Charters) known() uint64    { return c.top().Number }
func (c *Charters) complete() uint64 { return c.chain[0].Number }

// majority is how many of the newest roster decide.
func (c *Charters) majority() int { return len(c.seats)/2 + 1 }

// tell makes a change that concerns f, so that a packet goes there at once. All
// others learn of it with the next keep-alive.
func (c *Charters) tell(f *fellow) {
	if f != nil {
		c.seq++
		f.told, c.toldAt = c.seq, c.ticked
	}
}

func (c *Charters) tellAll() {
	c.seq++
	c.shared, c.toldAt = c.seq, c.ticked
}

// adoptLocked puts a decree at the end of the chain, or makes it the whole chain if
// it does not follow. Then it is complete.
func (c *Charters) adoptLocked(now time.Duration, d *decree, from string) error {
	l := &enacted{decree: d, at: now, from: from}
	jump := len(c.chain) > 0 && d.Number != c.known()+1
	switch {
	case jump:
		c.chain = c.chain[:0]
	case len(c.chain) > 0:
		l.lacking = limiter.Losers(c.top().Charter, d.Charter)
	}
	c.chain = append(c.chain, l)
	for _, e := range d.evicted {
		r := release{d.Number, now}
		if e.silent {
			r.from += fenced(c.cfg.Lease)
		}
		c.gone[e.name] = r
	}
	if c.cfg.OnSilence == limiter.Majority {
		// Who left by itself may die before it says that it has applied this. It mints no
		// longer than who was evicted: see charter_lease.go.
		for i := range c.seats {
			if name := c.seats[i].name; seatOf(d.Roster.Members, name) < 0 && c.gone[name].number != d.Number {
				c.gone[name] = release{d.Number, now + fenced(c.cfg.Lease)}
			}
		}
	}
	member := c.seat >= 0
	c.seatLocked(now, d.Roster.Members)
	switch {
	case !member || c.seat >= 0:
	case c.leaving:
		c.leftAt = d.Number
	case c.settled: // another life was a member by an old charter only
		c.over = true
	}
	err := c.books.Adopt(now, d.Charter)
	if err != nil {
		c.broken = err
	}
	if c.over || c.broken != nil {
		c.stopLocked(now)
	}
	if jump {
		c.books.Complete(now, d.Number)
	}
	return err
}

// seatLocked seats the members of a new roster.
func (c *Charters) seatLocked(now time.Duration, members []limiter.Member) { //nolint:dupl // it goes when processes run on Configurator
	since := make(map[string]time.Duration, len(c.seats))
	for i := range c.seats {
		since[c.seats[i].name] = c.seats[i].since
	}
	for _, f := range c.list {
		f.seat, f.frozen, f.grant = -1, 0, 0
	}
	c.seats = make([]seat, len(members))
	for i, m := range members {
		s := &c.seats[i]
		*s = seat{fellow: c.fellows[m.Name], name: m.Name, since: now}
		if at, ok := since[m.Name]; ok {
			s.since = at
		}
		if s.fellow != nil {
			s.seat = i
		}
	}
	c.seat = seatOf(members, c.self.Name)
}

// learnLocked takes in a charter that was chosen.
func (c *Charters) learnLocked(now time.Duration, d *decree, from *fellow) {
	if d.Number <= c.known() {
		return
	}
	name := ""
	if from != nil {
		name = from.id.Name
	}
	c.promised, c.accepted = ballot{}, accepted{}
	c.proposals, c.bid = map[uint64]*decree{}, bid{}
	c.round, c.fails, c.retryAt, c.wanted = 0, 0, 0, never
	c.pull = pull{}
	_ = c.adoptLocked(now, d, name) // kept in broken
	c.answerLocked(d)
	for _, f := range c.list {
		c.takeWord(f)
	}
	c.completeLocked(now)
	c.settleLocked(now)
	if from == nil {
		c.tellAll() // it was chosen by what we heard
	} else {
		c.tell(from)
	}
	for _, f := range c.list {
		c.readLocked(now, f)
	}
}

// answerLocked notes the number of requests that a charter meets.
func (c *Charters) answerLocked(d *decree) {
	c.requests = slices.DeleteFunc(c.requests, func(r request) bool {
		number := d.Number
		if !slices.Contains(r.in, d.digest) {
			met, possible := r.met(d)
			met = met && !(r.evict != "" && c.lacksLocked(r.evict))
			possible = possible && !c.returnedLocked(&r)
			if !met && possible && c.seat >= 0 {
				return false
			}
			if !possible || c.seat < 0 {
				number = 0
			}
		}
		c.outcomes[r.ticket] = number
		delete(c.outcomes, r.ticket-maxOutcomes)
		return true
	})
	if c.seat >= 0 && c.settled {
		c.joining = false
	}
}

// lacksLocked tells whether a charter waits for a name that the newest roster has no
// more: it left, and may have died before it said that it keeps within that charter.
func (c *Charters) lacksLocked(name string) bool {
	return seatOf(c.top().Roster.Members, name) < 0 &&
		slices.ContainsFunc(c.chain, func(l *enacted) bool { return slices.Contains(l.lacking, name) })
}

// met tells whether nothing is left to do, and whether it can be done at all.
func (r *request) met(d *decree) (met, possible bool) {
	if r.change == nil {
		return seatOf(d.Roster.Members, r.evict) < 0, true
	}
	to, err := r.change.apply(d.Charter, r.resets)
	return err == nil && newDecree(to, d.evicted).digest == d.digest, err == nil
}

// completeLocked moves on to the latest charter that all losers have applied.
func (c *Charters) completeLocked(now time.Duration) {
	before := c.complete()
	for len(c.chain) > 1 {
		l := c.chain[1]
		if l.lacking = slices.DeleteFunc(l.lacking, func(name string) bool { return c.keepsLocked(now, name, l.Number) }); len(l.lacking) > 0 {
			break
		}
		c.chain = c.chain[1:]
	}
	c.completedLocked(now, before, true)
}

// completedLocked says that more is complete than before; found, that it was us who
// found out.
func (c *Charters) completedLocked(now time.Duration, before uint64, found bool) {
	if c.complete() == before {
		return
	}
	c.books.Complete(now, c.complete())
	for name, r := range c.gone {
		if r.number <= c.complete() {
			delete(c.gone, name)
		}
	}
	if len(c.applied) > 4*maxMembers {
		maps.DeleteFunc(c.applied, func(name string, _ uint64) bool { return seatOf(c.top().Roster.Members, name) < 0 })
	}
	if found && c.chain[0].from == "" {
		c.tellAll() // whoever had it chosen tells all; the others, with the next keep-alive
	}
}

// keepsLocked tells whether the name uses no more than it has in a charter: by its
// own word, or because it was evicted there or later.
func (c *Charters) keepsLocked(now time.Duration, name string, number uint64) bool {
	if name == c.self.Name && c.own >= number || c.applied[name] >= number {
		return true
	}
	r, ok := c.gone[name]
	return ok && r.number >= number && now >= r.from
}

// pollLocked asks the books how far they are.
func (c *Charters) pollLocked() {
	if a := min(c.books.Applied(), c.known()); a > c.own {
		c.own = a
		for _, l := range c.chain {
			c.tell(c.fellows[l.from])
		}
		if c.top().from == "" {
			c.tellAll()
		}
	}
}

// Tick lets time pass.
func (c *Charters) Tick(now time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tickLocked(now)
}

func (c *Charters) tickLocked(now time.Duration) {
	c.ticked = now
	c.pollLocked()
	c.completeLocked(now)
	c.settleLocked(now)
	c.leaseLocked(now)
	c.refetchLocked(now)
	c.proposeLocked(now)
}

// Wake is when Tick wants to be called next.
func (c *Charters) Wake() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.activeLocked() {
		return c.ticked + activeTick
	}
	return c.ticked + min(idleTick, c.cfg.Lease/16, c.cfg.Gather)
}

// activeLocked tells whether something is under way.
func (c *Charters) activeLocked() bool {
	return len(c.chain) > 1 || c.own < c.known() || c.bid.at != (ballot{}) || c.pull.from != nil || c.wanted != never || len(c.requests) > 0 || c.accepted.digest != 0
}

// stopLocked ends minting at once.
func (c *Charters) stopLocked(now time.Duration) {
	c.until = now
	c.books.Mint(now)
}

// Join asks for a share of the given weight, in [1, 1000000]. Members propose it
// once this life knows the newest charter and its books keep within it, and only if it
// is none of them there; Status tells when it is a member. Before its books do, which a
// limiter's take 1.011 s for, a share would be taken from the others and minted by nobody.
// Asking twice is asking once, with the later weight. The errors are [ErrConfig],
// [ErrMember] and [ErrEvicted].
func (c *Charters) Join(now time.Duration, weight int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case weight < 1 || weight > 1e6:
		return fmt.Errorf("%w: weight: %v is not in [1, 1000000]", ErrConfig, weight)
	case c.over:
		return ErrEvicted
	case c.leaving:
		return fmt.Errorf("%w: %q is leaving", ErrMember, c.self.Name)
	case c.seat >= 0 && c.settled:
		return fmt.Errorf("%w: %q is one", ErrMember, c.self.Name)
	}
	c.joining, c.weight = true, weight
	c.tellAll()
	c.tickLocked(now)
	return nil
}

// Leave asks for a roster without this process. It stops minting when that is
// chosen; see [Charters.Left]. The last member that mints cannot leave. The
// error is [ErrMember].
func (c *Charters) Leave(now, deadline time.Duration) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	others := slices.ContainsFunc(c.top().Roster.Members, func(m limiter.Member) bool { return m.Name != c.self.Name && m.Weighs() > 0 })
	switch {
	case c.seat < 0 && !c.joining:
		return fmt.Errorf("%w: %q is none", ErrMember, c.self.Name)
	case c.seat >= 0 && !others:
		return fmt.Errorf("%w: %q is the last that mints", ErrMember, c.self.Name)
	}
	c.joining, c.leaving, c.deadline = false, true, deadline
	c.tellAll()
	c.tickLocked(now)
	return nil
}

// Left tells whether the leaver may end: all members that it hears, one at least, know
// that it mints no more. At the deadline it is true whatever the others know, with an error that is [ErrBusy] if
// they do not; then the share is stranded until the name is back or evicted, or, with
// [limiter.Majority], its lease is over.
func (c *Charters) Left(now time.Duration) (bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case !c.leaving:
		return false, nil
	case c.seat < 0 && c.leftAt == 0, c.leftAt > 0 && c.complete() >= c.leftAt && c.leftLocked(now):
		return true, nil
	case now < c.deadline:
		return false, nil
	case c.leftAt == 0:
		return true, fmt.Errorf("%w: no charter without %q was chosen in time", ErrBusy, c.self.Name)
	default:
		return true, fmt.Errorf("%w: charter %d is not complete in time", ErrBusy, c.leftAt)
	}
}

// leftLocked tells whether those who stay and are heard know that the charter without
// us is complete. That we know it is not enough: of many who leave at once each has
// heard all the others, who end, and those who stay may have missed one of them.
func (c *Charters) leftLocked(now time.Duration) bool {
	known := false
	for i := range c.seats {
		f := c.seats[i].fellow
		if f == nil || f.row.known == 0 || now-f.heard >= nearby {
			continue
		}
		if f.row.complete < c.leftAt {
			return false
		}
		known = true
	}
	return known
}

// Evict frees the share of a member, or of one that left and that a charter still waits
// for: an operator's word that its process does not mint, and does not start again
// before the eviction is known. One that is alive
// behind a cut adds what its share mints until it hears of it. A request is given
// up when a later life of the name is met. The ticket is for [Charters.Outcome]. Only members can be asked. The errors
// are [ErrMember] and [ErrBusy].
func (c *Charters) Evict(now time.Duration, name string) (ticket uint64, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if name == c.self.Name || seatOf(c.top().Roster.Members, name) < 0 && !c.lacksLocked(name) {
		return 0, fmt.Errorf("%w: %q is no other member", ErrMember, name)
	}
	return c.requestLocked(now, request{evict: name, life: c.lifeLocked(name)})
}

// Propose asks for a change of limits, weights or fill. It goes on asking while the
// process lives; the ticket is for [Charters.Outcome]. Of two changes of one thing
// both are made, in an order that all see alike. Only members can be asked. The
// errors are [ErrConfig], [ErrMember] and [ErrBusy].
func (c *Charters) Propose(now time.Duration, change Change) (ticket uint64, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := request{change: &change, resets: c.top().Resets}
	if change.Reset {
		r.resets++
	}
	if _, err := change.apply(c.top().Charter, r.resets); err != nil {
		return 0, err
	}
	return c.requestLocked(now, r)
}

// lifeLocked is the latest life of a name that was met, 0 if none was.
func (c *Charters) lifeLocked(name string) uint64 {
	if f := c.fellows[name]; f != nil {
		return f.id.Incarnation
	}
	return 0
}

// returnedLocked tells whether somebody who is to be evicted has started again.
func (c *Charters) returnedLocked(r *request) bool {
	return r.evict != "" && c.lifeLocked(r.evict) > r.life
}

// giveUpLocked ends requests to evict who has started again.
func (c *Charters) giveUpLocked() {
	c.requests = slices.DeleteFunc(c.requests, func(r request) bool {
		if len(r.in) == 0 && c.returnedLocked(&r) {
			c.outcomes[r.ticket] = 0
			return true
		}
		return false
	})
}

func (c *Charters) requestLocked(now time.Duration, r request) (uint64, error) {
	switch {
	case c.seat < 0:
		return 0, fmt.Errorf("%w: %q is none, and cannot propose", ErrMember, c.self.Name)
	case len(c.requests) >= maxRequests:
		return 0, fmt.Errorf("%w: %d requests of this process are undecided", ErrBusy, len(c.requests))
	}
	c.tickets++
	r.ticket = c.tickets
	c.requests = append(c.requests, r)
	c.tickLocked(now)
	return r.ticket, nil
}

// Outcome is the number of the charter that has what a ticket stands for, once it
// is chosen; 0 if it cannot be made any more: its member is gone or started again,
// or this process is no member any more. The latest 256 are remembered.
func (c *Charters) Outcome(ticket uint64) (number uint64, done bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	number, done = c.outcomes[ticket]
	return number, done
}

// apply makes the change. A reset is to a number, so that made twice it is made
// once.
func (ch *Change) apply(to limiter.Charter, resets uint64) (limiter.Charter, error) {
	var w checks
	if ch.Limit != nil {
		to.Limit = *ch.Limit
	}
	if len(ch.Limits) > 0 {
		to.Limits = maps.Clone(to.Limits)
		if to.Limits == nil {
			to.Limits = map[string]limiter.Limit{}
		}
		for k, l := range ch.Limits {
			if l == nil {
				delete(to.Limits, k)
			} else {
				to.Limits[k] = *l
			}
		}
	}
	if len(ch.Weights) > 0 {
		to.Roster.Members = slices.Clone(to.Roster.Members)
		for _, name := range slices.Sorted(maps.Keys(ch.Weights)) {
			i := seatOf(to.Roster.Members, name)
			if i < 0 {
				w = append(w, fmt.Errorf("%w: Weights: %q is none", ErrMember, name))
				continue
			}
			m := &to.Roster.Members[i]
			m.Weight, m.NoShare = ch.Weights[name], ch.Weights[name] == 0
		}
	}
	if ch.Reset {
		to.Resets = max(to.Resets, resets)
	}
	if err := checkCharter(to); err != nil {
		w = append(w, fmt.Errorf("%w: %w", ErrConfig, err))
	}
	return to, errors.Join(w...)
}
