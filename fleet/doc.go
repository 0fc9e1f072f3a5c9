// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package fleet is what the processes of a fleet agree on beside the rate
// limit: whether a breaker's scope is open for all of them, which one of them
// probes it, and whether they are in a storm together.
//
// Start with [NewVerdicts] for scopes and [NewStorms] for storms. Each is
// a section of a gossip session, which carries what they say to the others; a
// driver passes on what the breakers do ([Verdicts.Observe], [Verdicts.Want])
// and does what comes back ([Verdicts.Actions], [Action.Apply]). [Member] is that
// driver for a guard.
//
// # Who decides
//
// Each process writes one [Vote] for a scope, and nobody else writes it. What
// the fleet decided is a [State], ordered by [Position]: a generation, which
// rises at each close, and the open periods since. A decision is a fact, passed
// on by everybody who hears of it; the latest holds ([State.Join]), so packets
// may be lost, repeated and overtake each other, and nothing from before a close
// can reopen. Decisions are made from votes by a pure function ([Decide]), by
// whoever hears enough of them. There is no leader, no clock and no
// instant that travels: an open period is a length, counted from when a process
// hears of it, and cut at its own Cap.
//
//	fleet         when                                              becomes
//	closed g      Need of the roster vote that they have tripped    open g.1
//	open g.r      a permitted probe fails, is too slow or is lost,  open g.r+1, one rung up; if others
//	              by its own process's word                         passed in this round, one rung down
//	open g.r      Need passed or seconded in round r, with          closed g+1
//	              Successes probes between them
//
//	a process     in the fleet's state                              does
//	heard by a    closed                                            its breaker decides by itself; tripped, it
//	quorum                                                          votes so, until it closes again
//	              open, period not over                             holds its breaker
//	              open, period over, its turn                       lets one probe through, and holds on
//	              open, all who can have probed, it cannot          seconds their success
//	              just closed                                       closes its breaker, and keeps its ladder
//	heard again   open, its own breaker has closed meanwhile        holds it, and counts as passed
//	cut off       closed                                            its breaker decides by itself
//	              open, period not over                             holds its breaker
//	              open, period over, and up to a fifth longer       its breaker decides by itself
//
// The quorum ([Need]) is of the roster, which lists names, not of who is heard:
// a lone side of a split knows that it is one, and neither opens nor closes
// anything for the fleet. Of one and two, the two are a quorum and decide; the
// one goes by its own breaker, and takes the decision over when it hears of it.
// With Quorum above 0.5 no two sides of a split can decide; at or below, both
// halves of an even one can, and afterwards the higher position holds. Votes
// count while their process is heard in both directions, within Silent: a vote
// that its dead author can never take back would be half a quorum for ever. A
// local trip acts at once, whatever the fleet thinks, and costs nobody else
// anything.
//
// A process that is cut off probes as a breaker by itself does, each period with
// certainty, or one that is alone for good would not recover. N of them
// therefore probe like N breakers that have never heard of each other, their
// first probes spread over a fifth of the period.
//
// # Who probes
//
// One process at a time: of those that are heard, are in the roster and have
// something to probe with ([Verdicts.Want]), who has probed least in this round,
// then who has not ended a round lately, then by the highest random weight of
// scope, position and name. It announces the probe, lets one delivery through and says what
// became of it; its breaker stays shut. A turn that is not taken is over after
// Turn, a probe of which no more is heard after its Lease: neither is
// a failed probe. One that still runs at the end of its Lease is.
//
// Two processes probe at once only if they differ about whose turn it is. They
// cannot while all of one side hear each other, within half of Settle, and keep
// a clock that runs evenly: who is newly there, or newly has something to probe
// with, keeps out of its turn for Settle, when everybody knows. They can where
// only some hear each other (a hears b, b hears c, a does not hear c), and
// within Silent of a cut, before it is known to be one.
//
// # Who takes a scope over
//
// The votes of processes that have gone stay with the others, and so does what
// was decided. [Verdicts.Adopt] returns what follows from them, before the first
// delivery is handled. Terms say which of several owners was the last.
//
//	known                                    begins
//	open for the fleet                       held, as everybody
//	last owner gone, tripped                 held for the rest of its period, then half-open
//	an owner that is heard, tripped          half-open: it may be sharing the scope
//	last owner had nothing wrong             closed
//	nothing, and somebody who was here       closed
//	before said that this is all
//	nothing yet, within Start of our start   held until told, half-open at the end
//	nothing                                  half-open
//
// # What is remembered
//
// A vote is forgotten Keep after its process gave the scope up, was last heard,
// or said that nothing is wrong; what trips and is heard stays. A process keeps
// its own votes, and everybody the fleet's decisions, for as long as it runs, or
// who missed one would go on with the one before. All of it is bounded by
// Scopes and Votes. At the bound the oldest scope that is closed, not ours and
// not in trouble makes room; if there is none, what is new is refused and
// counted, and the scope's breaker goes by itself. A process that missed the
// close of a scope which everybody else has forgotten can reopen it for one
// round, until probes close it.
//
// # Inside
//
// There is no goroutine, timer or clock: each method is a step at an instant.
// Processes trust each other; who can send to the session can decide.
//
// # Sources
//
// Votes are single-writer registers, decisions a join-semilattice: M. Shapiro,
// N. Preguiça, C. Baquero and M. Zawirski, Conflict-free replicated data types,
// SSS 2011. The patience before a turn is that of timed mutual exclusion: L.
// Lamport, A fast mutual exclusion algorithm, ACM Trans. Comput. Syst. 5 (1987),
// who credits M. Fischer.
package fleet
