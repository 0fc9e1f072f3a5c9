// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleetstate

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/internal/crdt"
	"github.com/stormguard-mq/stormguard/internal/scope"
)

// Verdicts is one process's part in the fleet's decisions about scopes: a section of the gossip
// session. A [Member] carries the decisions out. The package comment has the rules.
//
// Instants are monotonic, since an origin that the caller chooses. The origin is the same for all
// methods and for the session that calls Merge. All methods are safe for concurrent use. Under the
// lock they call no function of the caller, except that of [Verdicts.OnChange].
type Verdicts struct {
	m    *scope.Machine
	self crdt.Replica

	// The Machine's lock guards these fields.
	number   uint64 // number of the roster
	digest   uint64 // digest of the roster
	peers    peers
	informed bool   // all votes and scopes are known: an unknown one does not exist
	refused  uint64 // votes that were left out for lack of room
	version  uint64 // counts the changes of our own votes
	votes    int    // number of votes of others
	log      changes
}

// book has the data that travels about a scope: one vote for each process, written by that process
// alone.
type book struct {
	*scope.Scope
	v      *Verdicts
	own    *row                 // our own vote; nil until there is one
	rows   map[string]*row      // votes of others, by name
	change *crdt.Change[change] // the change of Known; nil until there is something to send
	term   uint64               // the term of our latest claim
	wanted time.Duration        // when the others were told that we have something to probe with
}

func bookOf(sc *scope.Scope) *book { return sc.Book.(*book) } //nolint:forcetypeassert // there is no other

// row is our own vote, or a vote that was received.
type row struct {
	scope.Vote
	opened time.Duration // when the vote's open period began, by our clock
	at     time.Duration // when it arrived
	seen   time.Duration // when its process last held to it, as far as known
	relay  bool          // sent to all peers, though it is another process's vote
	change *crdt.Change[change]
}

// NewVerdicts returns the part of self, which has just started at now and knows nothing. self.Name
// is its name in the roster. A process that is not in the roster follows the fleet and has no vote.
// The error is an [ErrConfig] that lists everything that is wrong.
func NewVerdicts(now time.Duration, c Config, self crdt.Replica, r Roster) (*Verdicts, error) {
	var w checks
	if len(self.Name) < 1 || len(self.Name) > maxName {
		w.bad("self: length of the name", len(self.Name), fmt.Sprintf("[1, %d]", maxName))
	}
	if err := errors.Join(c.Validate(), r.Validate(), errors.Join(w...)); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	v := &Verdicts{self: self, number: r.Number, digest: rosterDigest(r)}
	v.m = scope.New(now, c, self.Name, r.Names, substrate{v})
	v.peers = peers{silent: v.m.Config().Silent, m: make(map[string]*peer)}
	v.log.met = make(map[crdt.Replica]uint64)
	v.m.LookAround(now)
	return v, nil
}

// SetRoster replaces the roster by one with a higher number. The same roster again changes nothing;
// any other is [ErrConfig].
func (v *Verdicts) SetRoster(now time.Duration, r Roster) error {
	if err := r.Validate(); err != nil {
		return fmt.Errorf("%w: %w", ErrConfig, err)
	}
	v.m.Lock()
	defer v.m.End()
	if r.Number == v.number && rosterDigest(r) == v.digest {
		return nil
	}
	if r.Number <= v.number {
		return fmt.Errorf("%w: Roster: number %d is not above %d", ErrConfig, r.Number, v.number)
	}
	v.number, v.digest = r.Number, rosterDigest(r)
	v.m.SetRoster(now, r.Names)
	return nil
}

// substrate is the gossip as the Machine uses it.
type substrate struct{ *Verdicts }

// Look notices which processes fell silent, and reports whether a quorum is heard.
func (v substrate) Look(now time.Duration) bool {
	connected := v.Heard(now) >= v.m.Need()
	if connected && now-v.m.Started() >= v.m.Config().Start {
		v.informed = true
	}
	v.lostLocked(now)
	return connected
}

// Heard counts the names of the roster that are heard, this process included.
func (v substrate) Heard(now time.Duration) (heard int) {
	for _, n := range v.m.Names() {
		if n == v.self.Name || v.peers.live(now, v.peers.m[n]) {
			heard++
		}
	}
	return heard
}

func (v substrate) MayDecide() bool { return v.m.Member() }

func (v substrate) Book(sc *scope.Scope) scope.Book {
	return &book{Scope: sc, v: v.Verdicts, rows: make(map[string]*row)}
}

func (substrate) After() func() { return nil }

// lostLocked passes on the last votes of processes that fell silent: not all peers may have heard
// them.
func (v *Verdicts) lostLocked(now time.Duration) {
	var lost map[crdt.Replica]time.Duration
	for name, p := range v.peers.m {
		if live := v.peers.live(now, p); live != p.live {
			p.live = live
			if !live {
				if lost == nil {
					lost = make(map[crdt.Replica]time.Duration)
				}
				lost[crdt.Replica{Name: name, Incarnation: p.incarnation}] = p.heard
			}
		}
	}
	if lost == nil {
		return
	}
	for _, sc := range v.m.All() {
		b := bookOf(sc)
		for _, n := range slices.Sorted(maps.Keys(b.rows)) {
			r := b.rows[n]
			heard, ok := lost[r.Node]
			if ok && !r.relay && heard-r.at <= 2*v.m.Config().Silent {
				r.relay = true
				v.log.vote(r, true)
			}
		}
	}
}

// Vote returns the vote of a name; nil if there is none, or if its process is not heard.
func (b *book) Vote(now time.Duration, name string) *scope.Vote {
	if name == b.v.self.Name {
		if b.own == nil {
			return nil
		}
		return &b.own.Vote
	}
	r, p := b.rows[name], b.v.peers.m[name]
	if r == nil || p == nil || p.incarnation != r.Node.Incarnation || !b.v.peers.live(now, p) {
		return nil
	}
	return &r.Vote
}

// Write makes Own the next version of our vote, if it has news.
func (b *book) Write(now, opened time.Duration, anew bool) {
	w := b.Own
	w.Scope, w.Node, w.Term = b.Name, b.v.self, b.term
	if b.own == nil {
		b.own = &row{opened: opened}
	}
	old := b.own.Vote
	if w.Version = old.Version; w == old && !anew {
		return
	}
	b.v.version++
	w.Version = b.v.version
	if anew || w.Phase != old.Phase || w.At != old.At || w.Passes != old.Passes || w.BackoffLevel != old.BackoffLevel || w.OpenFor != old.OpenFor {
		b.own.opened = opened
	}
	if w.Wants && !(old.Wants && old.At.Gen == w.At.Gen) {
		b.wanted = now
	}
	b.own.Vote, b.own.at = w, now
	b.v.log.vote(b.own, true)
}

// Decide counts the votes, if a quorum is heard.
func (b *book) Decide(now time.Duration) {
	m := b.v.m
	if m.Connected() {
		b.join(now, scope.Decide(m.Config(), m.Names(), b.Known, func(name string) *scope.Vote { return b.Vote(now, name) }), 0)
	}
}

// join takes in a state of the fleet that began age ago.
func (b *book) join(now time.Duration, s scope.State, age time.Duration) {
	if s = b.Known.Join(s); s == b.Known {
		return
	}
	b.v.log.state(b)
	b.v.m.Enter(now, b.Scope, s, now-age)
}

// Claim begins a term that is later than all known ones, for an owner. Otherwise it gives up our
// vote if that says that something is wrong.
func (b *book) Claim(now time.Duration, owner bool) {
	switch {
	case owner:
		b.term = 1
		for _, r := range append(slices.Collect(maps.Values(b.rows)), b.own) {
			if r != nil {
				b.term = max(b.term, r.Term+1)
			}
		}
	case b.Own.Troubled(b.Known.Gen):
		b.Own.Gone, b.Own.Wants = true, false
		if b.Own.Phase == scope.PhaseProbing {
			b.Own.Phase = scope.PhaseWaiting
		}
		b.Write(now, now, false)
	}
}

// Heir returns the vote of the last owner: the vote with the highest term. Two sides of a split may
// have made two votes of one term: then it is the one in deeper trouble.
func (b *book) Heir(now time.Duration) (h scope.Heir, told scope.Told) {
	rows := slices.Collect(maps.Values(b.rows))
	if b.own != nil && b.own.Gone {
		rows = append(rows, b.own)
	}
	m := b.v.m
	switch {
	case len(rows) > 0:
	case b.v.informed && m.Connected():
		return h, scope.ToldAll
	case len(m.Names()) == 1:
		return h, scope.NobodyTells
	default:
		return h, scope.Untold
	}
	depth := func(r *row) int {
		if r.Troubled(b.Known.Gen) {
			return 1 + r.BackoffLevel
		}
		return 0
	}
	r := slices.MaxFunc(rows, func(r, s *row) int {
		return cmp.Or(cmp.Compare(r.Term, s.Term), cmp.Compare(depth(r), depth(s)), cmp.Compare(r.Node.Name, s.Node.Name))
	})
	there := !r.Gone && r.Node.Name != b.v.self.Name && b.Vote(now, r.Node.Name) != nil
	return scope.Heir{Vote: &r.Vote, Opened: r.opened, StillThere: there}, scope.ToldAll
}

// Out reports whether a process has announced a probe that may still run, even if it is not heard.
func (b *book) Out(now time.Duration) bool {
	for _, n := range b.v.m.Names() {
		if r := b.rows[n]; r != nil && n != b.v.self.Name && r.Phase == scope.PhaseProbing && r.At == b.Known.Position &&
			now < r.opened+b.v.m.Config().Lease+b.v.m.Config().Settle {
			return true
		}
	}
	return false
}

// Take announces our probe. It waits until the others know us, and know that we have something to
// probe with: then they agree that it is our turn.
func (b *book) Take(now time.Duration) {
	if m := b.v.m; m.Settled(now) && now-b.wanted >= m.Config().Settle {
		m.Announce(now, b.Scope)
		m.Grant(now, b.Scope, now)
	}
}

func (b *book) Settle(now time.Duration, next scope.State) {
	b.Write(now, now, false)
	b.join(now, next, 0)
	b.Decide(now)
}

// Stirs reports whether a vote says that something is wrong.
func (b *book) Stirs() bool {
	return b.Own.Troubled(b.Known.Gen) || slices.ContainsFunc(slices.Collect(maps.Values(b.rows)), func(r *row) bool { return r.Troubled(b.Known.Gen) })
}

// Forget drops the votes of others that are older than Keep. Our own vote stays: a process that
// missed it would believe the one before. Decisions stay, too: a process that missed a close would
// reopen the scope. Scopes bounds both. With spare it drops everything for lack of room, unless a
// vote says that something is wrong. If a process then returns that has not heard of the close, it
// opens the scope again, and the next round closes it.
func (b *book) Forget(now time.Duration, spare bool) bool {
	if spare && b.Stirs() {
		return false
	}
	for n, r := range b.rows {
		if spare || now-b.stood(r) > b.v.m.Config().Keep {
			b.v.log.Remove(r.change)
			delete(b.rows, n)
			b.v.votes--
		}
	}
	if spare && b.own != nil {
		b.v.log.Remove(b.own.change)
	}
	if spare {
		b.v.log.Remove(b.change)
	}
	return spare || b.own == nil && len(b.rows) == 0
}

// stood is when the process of r last held to it. A vote that nothing is wrong, or on a scope that
// was given up, ages from its arrival.
func (b *book) stood(r *row) time.Duration {
	if r.Gone || !r.Troubled(b.Known.Gen) {
		return r.seen
	}
	if p := b.v.peers.m[r.Node.Name]; p != nil && p.incarnation == r.Node.Incarnation {
		return max(r.seen, p.heard)
	}
	return r.seen
}

// Refused counts the votes and scopes that were left out for lack of room.
func (v *Verdicts) Refused() uint64 {
	v.m.Lock()
	defer v.m.Unlock()
	return v.refused + v.m.Refused()
}
