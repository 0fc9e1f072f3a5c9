// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package scope is the machine that decides, with other processes, whether a breaker's scope is open
// for all of them. It also decides which process probes the scope, and how a process begins that
// takes the scope over. The comment of internal/fleetstate has the rules; they are the same on
// every substrate.
//
// A [Machine] is the rules. A [Substrate] carries votes and decisions:
//
//	            gossip (fleetstate)             a store (package breaker/etcd)
//	a vote      a row that is sent              a key under the lease of its process
//	a decision  a fact of a process that hears  a transaction that compares the state
//	            a quorum; the later fact holds  and each vote that it counts
//	a probe     is announced, after Settle      a key under a lease
//	in touch    hears a quorum                  has a lease, and the watch is alive
//
// A [Driver] connects a Machine and a guard's breakers.
//
// There is no goroutine, timer, clock or I/O: each method is a step at an instant. Instants are
// monotonic, since an origin of the caller's choice.
package scope

import (
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

const (
	// MaxName is the longest name of a scope, in bytes.
	MaxName = 255
	// MaxCause is the longest cause, in bytes. A longer one is cut.
	MaxCause = 64
	// MaxBackoffLevel bounds a backoff level. Fewer doublings lead from a millisecond to a day.
	MaxBackoffLevel = 64
)

// Never is an instant that does not come.
const Never = time.Duration(-1 << 63)

// A Substrate carries the votes and decisions of a fleet's processes. Its methods, and those of its
// Books, are called with the Machine locked. They may call the methods of the Machine that say that
// the lock must be held.
type Substrate interface {
	// Look is called at each step. It reports whether this process is in touch with a quorum of the
	// roster: it follows the fleet's decisions, and may take part.
	Look(now time.Duration) bool

	// Heard returns how many processes of the roster are known to be there, this one included.
	Heard(now time.Duration) int

	// MayDecide reports whether this process may decide and probe. A process that may not is held
	// with the others.
	MayDecide() bool

	// Book returns the new Book of a scope.
	Book(sc *Scope) Book

	// After ends a step. It returns a function to call without the lock, or nil.
	After() func()
}

// A Book is what a Substrate keeps about one scope.
type Book interface {
	// Vote returns the vote of a name in the roster that counts now, or nil. The name may be our
	// own.
	Vote(now time.Duration, name string) *Vote

	// Write says that Scope.Own has changed and must be made known. The open period in Own began at
	// opened. anew says that it is another period, even if its values are the same.
	Write(now, opened time.Duration, anew bool)

	// Decide has the votes counted, if the substrate does not do that by itself. A state that is
	// decided at once goes to [Machine.Enter].
	Decide(now time.Duration)

	// Claim begins a term of this process as the scope's owner, or ends it and leaves a vote for
	// the next owner.
	Claim(now time.Duration, owner bool)

	// Heir returns what is known of the last owner before us.
	Heir(now time.Duration) (Heir, Told)

	// Out reports whether a probe may be out, other than one that the Machine knows as ours.
	Out(now time.Duration) bool

	// Take is called at each step in which it is our turn to probe. Once no other process can
	// probe, call [Machine.Grant].
	Take(now time.Duration)

	// Settle ends our probe. It writes Own and, with it, next: the state that a failed probe leads
	// to. After a passed probe next is Known.
	Settle(now time.Duration, next State)

	// Stirs reports whether time alone may change something in the book.
	Stirs() bool

	// Forget drops what is too old, and reports whether nothing is left to remember. With spare,
	// room is needed, and the scope is closed and has no owner here. Then Forget drops everything,
	// or reports that it may not.
	Forget(now time.Duration, spare bool) bool
}

// Told says what a process that takes a scope over has been told.
type Told uint8

const (
	// Untold means nothing yet; something may still be told.
	Untold Told = iota
	// ToldAll means everything: what is not known does not exist.
	ToldAll
	// NobodyTells means nothing, and no process will tell.
	NobodyTells
)

// Heir is the last owner's vote about a scope.
type Heir struct {
	*Vote                    // nil if there is none
	Opened     time.Duration // when the open period in the vote began, by our clock
	StillThere bool          // the owner's process may be sharing the scope
}

// Scope is what this process knows about one scope, and what it does there.
type Scope struct {
	Name  string
	Book  Book
	Known State         // the fleet's decision
	Since time.Duration // when Known began, by our clock
	Own   Vote          // our own vote, without Scope, Node, Version and Term

	// Claimed says that this process has the scope.
	Claimed bool
	// Blind says that the substrate cannot tell what was decided: then the breaker decides alone.
	// Set it with [Machine.SetBlind].
	Blind bool
	// Mine says that it is our turn to probe.
	Mine bool

	active  bool
	asking  bool // taken over, but nothing was told about it yet
	wants   bool // we have something to probe with
	mode    mode
	release time.Duration // when a held scope becomes half-open; Never if it does not
	seen    uint64        // generation of the breaker at the last Observe
	cast    uint64        // generation of the breaker that the last vote was about
	back    bool          // let go while the fleet is open, and closed by its own probes
	doubt   bool          // closed by the probes of others, after our probe had ended a round; see doubted

	// The present round.
	trial   trial
	turn    string              // the process whose turn it is
	turnAt  time.Duration       // since when it is that process's turn
	idleAt  time.Duration       // since when no process is left to probe; Never if one is
	probed  time.Duration       // when the round last moved, as far as we saw; see adrift
	passed  int                 // passed probes of the round, when last counted
	firm    time.Duration       // end of the open period of the latest round that did not begin in vain
	spoilt  bool                // another process ended the previous round, in which probes of ours had passed
	skipped map[string]struct{} // processes that let their turn pass
}

// mode says who decides about the scope's breaker.
type mode uint8

const (
	free    mode = iota // the breaker itself
	held                // the fleet, or a handover
	probing             // the fleet, with our probe out
)

// trial is our probe.
type trial struct {
	since time.Duration // when its lease began
	at    time.Duration // when it was permitted
	gen   uint64        // generation of the breaker before the probe
	taken bool
}

// lost reports whether a probe that outlived its lease began the round.
func (sc *Scope) lost() bool { return sc.Known.Open() && sc.Known.Cause == breaker.CauseLost }

// vain reports whether the round began without anything learned: after a lost probe, or after
// another's failure although ours passes.
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

// Cut cuts a cause to MaxCause bytes.
func Cut(c breaker.Cause) breaker.Cause { return c[:min(len(c), MaxCause)] }
