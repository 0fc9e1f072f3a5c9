// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package scope is the machine that decides, with other processes, whether a
// breaker's scope is open for all of them, who probes it, and how a process begins
// that takes a scope over. The comment of internal/fleetstate has the rules; they are the
// same whatever carries them.
//
// A [Machine] is the rules. What carries votes and decisions is a [Substrate]:
//
//	            gossip (fleetstate)             a store (package breaker/etcd)
//	a vote      a row that travels              a key under the lease of its process
//	a decision  a fact, made by who hears       a transaction that compares the state
//	            a quorum; the later one holds   and each vote that it counts
//	a probe     is announced, after Settle      a key under a lease
//	in touch    hears a quorum                  has a lease, and the watch is alive
//
// A [Driver] carries what happens between a Machine and a guard's breakers.
//
// There is no goroutine, timer, clock or I/O: each method is a step at an instant.
// Instants are monotonic, since an origin of the caller's choice.
package scope

import (
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

const (
	// MaxName is the length of a scope's name, in bytes.
	MaxName = 255
	// MaxCause is that of a cause. A longer one is cut.
	MaxCause = 64
	// MaxBackoffLevel bounds a backoff: a period doubles from a millisecond to a day in less.
	MaxBackoffLevel = 64
)

// Never is an instant that does not come.
const Never = time.Duration(-1 << 63)

// A Substrate carries what the processes of a fleet say about their scopes. Its
// methods, and those of its Books, are called with the Machine locked; they may call
// the methods of the Machine that say so.
type Substrate interface {
	// Look is called at each step. It reports whether this process is in touch with a
	// quorum of the roster: it follows what the fleet decided, and may take part.
	Look(now time.Duration) bool

	// Heard is how many of the roster are known to be there, this process included.
	Heard(now time.Duration) int

	// MayDecide reports whether this process may decide and probe. One that may not
	// is held with the others.
	MayDecide() bool

	// Book begins what is kept about a scope.
	Book(sc *Scope) Book

	// After ends a step. It returns what is to be called without the lock, or nil.
	After() func()
}

// A Book is what a Substrate keeps about one scope.
type Book interface {
	// Vote is the vote of a name in the roster, our own included, that counts now; or
	// nil.
	Vote(now time.Duration, name string) *Vote

	// Write says that Scope.Own has changed, which is to be made known. The open
	// period that it tells of began at opened. anew says that it tells of another
	// period, even if it reads the same.
	Write(now, opened time.Duration, anew bool)

	// Decide has the votes counted, if that is not done by itself. What is decided at
	// once goes to [Machine.Enter].
	Decide(now time.Duration)

	// Claim begins a term of this process as the scope's owner, or ends it and leaves
	// word for the next.
	Claim(now time.Duration, owner bool)

	// Heir is what is known of the last owner before us.
	Heir(now time.Duration) (Heir, Told)

	// Out reports whether somebody's probe may be out, other than one that the
	// Machine knows as ours.
	Out(now time.Duration) bool

	// Take is called at each step in which it is our turn to probe. Once nobody else
	// can, call [Machine.Grant].
	Take(now time.Duration)

	// Settle ends our probe. Own is to be written, and with it the state that one which
	// failed leads to; of one that passed, it is Known.
	Settle(now time.Duration, next State)

	// Stirs reports whether time may change something in the book by itself.
	Stirs() bool

	// Forget drops what is too old, and reports whether nothing is left to remember. To
	// spare the book of a closed scope without an owner here, for want of room, it drops
	// all, or reports that it may not.
	Forget(now time.Duration, spare bool) bool
}

// Told is what a process that takes a scope over has been told.
type Told uint8

const (
	// Untold is nothing yet; somebody may.
	Untold Told = iota
	// ToldAll is everything: what is not known is not there.
	ToldAll
	// NobodyTells is nothing, and nobody will.
	NobodyTells
)

// Heir is the last owner's word about a scope.
type Heir struct {
	*Vote                    // nil if there is none
	Opened     time.Duration // the open period it tells of began, by our clock
	StillThere bool          // its process may be sharing the scope
}

// Scope is what this process knows about one scope, and what it does there.
type Scope struct {
	Name  string
	Book  Book
	Known State         // what the fleet decided
	Since time.Duration // Known began, by our clock
	Own   Vote          // our own vote, without Scope, Node, Version and Term

	// Claimed says that this process has the scope.
	Claimed bool
	// Blind says that the substrate cannot tell what was decided: the breaker goes by
	// itself. Set it with [Machine.SetBlind].
	Blind bool
	// Mine says that it is our turn to probe.
	Mine bool

	active  bool
	asking  bool // taken over, and nobody has told of it yet
	wants   bool // has something to probe with
	mode    mode
	release time.Duration // when held gives way to HalfOpen; Never if it does not
	seen    uint64        // generation of the breaker at the last Observe
	cast    uint64        // generation of the breaker that the last vote was about
	back    bool          // let go while the fleet is open, its own probes have closed it
	doubt   bool          // closed by the probes of others, after one of ours had ended a round: see doubted

	// Of the round.
	trial   trial
	turn    string              // whose turn it is
	turnAt  time.Duration       // since when
	idleAt  time.Duration       // since when nobody is left to probe; Never if somebody is
	probed  time.Duration       // the round moved, as far as we saw: see adrift
	passed  int                 // probes of the round, when last counted
	firm    time.Duration       // the open period was over of the latest round that did not begin in vain
	spoilt  bool                // another ended the round before, in which probes of ours had passed
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
	since time.Duration // its lease lasts from here
	at    time.Duration // permitted
	gen   uint64        // of the breaker, before
	taken bool
}

// lost reports whether a probe that outlived its lease began the round.
func (sc *Scope) lost() bool { return sc.Known.Open() && sc.Known.Cause == breaker.CauseLost }

// vain reports whether the round began without anything learned: by a lost probe, or by another's
// failure although ours passes.
func (sc *Scope) vain() bool { return sc.lost() || sc.spoilt }

// Held reports whether the fleet, or a handover, holds the scope, and no probe of
// ours is out.
func (sc *Scope) Held() bool { return sc.mode == held }

// Probing reports whether our probe is out.
func (sc *Scope) Probing() bool { return sc.mode == probing }

func (sc *Scope) skip(name string) {
	if sc.skipped == nil {
		sc.skipped = make(map[string]struct{})
	}
	sc.skipped[name] = struct{}{}
}

// Cut keeps a cause short enough to travel.
func Cut(c breaker.Cause) breaker.Cause { return c[:min(len(c), MaxCause)] }
