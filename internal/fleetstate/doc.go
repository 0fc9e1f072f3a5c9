// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package fleetstate is what the processes of a fleet agree on: whether a breaker's scope
// is open for all of them, which one of them probes it, whether they are in a storm
// together, and who mints how much of the rate limit.
//
// Start with [NewVerdicts] for scopes, [NewStorms] for storms and [NewConfigurator] for
// shares and limits. Each is a section of a gossip session, which carries what they say
// to the others. [NewMember] is what a guard takes: it tells them what its breakers,
// detectors and counters do, and does to the breakers what was decided.
//
// # Who decides
//
// Each process writes one vote for a scope, and nobody else writes it. What
// the fleet decided is a state, ordered by its position: a generation, which
// rises at each close, and the open periods since. A decision is a fact, passed
// on by everybody who hears of it; the latest holds, so packets
// may be lost, repeated and overtake each other, and nothing from before a close
// can reopen. Decisions are made from votes by a pure function, by
// whoever hears enough of them. There is no leader, no clock and no
// instant that travels: an open period is a length, counted from when a process
// hears of it, and cut at its own Cap.
//
//	fleet         when                                              becomes
//	closed g      Need of the roster vote that they have tripped    open g.1
//	open g.r      a permitted probe fails, is too slow or is lost,  open g.r+1, one level up; if others
//	              by its own process's word                         passed in this round, one level down
//	open g.r      Need passed or seconded in round r, with          closed g+1
//	              Successes probes between them
//
//	a process     in the fleet's state                              does
//	heard by a    closed                                            its breaker decides by itself; tripped, it
//	quorum                                                          votes so, until it closes again
//	              closed, and doubts its own path                   the same, without a vote
//	              open, period not over                             holds its breaker
//	              open, period over, its turn                       lets one probe through, and holds on
//	              open, all who can have probed, it cannot          seconds their success; does not wait for
//	                                                                those, fewer than Need, who ended rounds
//	              open, and the round does not move for twice       its breaker decides by itself, until the
//	              Lease and two Turns, though it has calls;         fleet's next decision
//	              or others end each round for so long, though
//	              its probes pass
//	              just closed                                       closes its breaker, and keeps its backoff
//	heard again   open, its own probes closed it meanwhile          holds it, and counts as passed
//	cut off       closed                                            its breaker decides by itself
//	              open, period not over                             holds its breaker
//	              open, period over, and up to a fifth longer       its breaker decides by itself
//	not in the    open                                              holds its breaker, and never probes
//	roster        open, nobody probed for Lease and two Turns       its breaker decides by itself, until the
//	                                                                fleet's next decision
//
// The quorum is of the roster, which lists names, not of who is heard:
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
// A process doubts its own path if a probe of its ended a round, the probes of others closed the
// scope though it had calls, and its breaker trips within Cap of that. Of a roster of four, two
// whose path stays broken are a quorum: without this rule they would hold the two that are well at
// once after each close. The doubt ends when the process's own probes have closed its breaker. The
// price: an outage that follows a close within Cap opens the scope by the votes of those whose
// probes had closed it. If these are fewer than Need, each process opens its own breaker only.
//
// A process that is cut off probes as a breaker by itself does, each period with
// certainty, or one that is alone for good would not recover. N of them
// therefore probe like N breakers that have never heard of each other, their
// first probes spread over a fifth of the period.
//
// # Who probes
//
// One process at a time: of those that are heard, are in the roster and have
// something to probe with, who has not ended a round lately,
// then who has probed least in this round, then by the highest random weight of
// scope, position and name. Once enough probes have passed only those have a turn who have
// not probed in the round. It announces the probe, lets one delivery through and says what
// became of it; its breaker stays shut. A turn that is not taken is over after
// Turn, one whose probe ends without an outcome (a handler that returned Ignore or
// Permanent, an operator's force) within half of it, and a probe of which no more
// is heard after its Lease: none of these is a failed probe. One that still runs at
// the end of its Lease is.
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
// was decided. What follows from them is done to a breaker before its first
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
// # Configuration
//
// A configuration is a numbered document that says who mints what: roster, weights,
// limits, and how often all buckets were filled. It is applied in two steps, so that no
// share is ever used twice:
//
//	known        who loses by it uses less at once; nobody uses more
//	complete     all who lose have applied it, or were evicted, and all configurations
//	             before it are complete: who gains uses what was freed
//
// A process uses the smallest share that it has in any configuration from the last
// complete one to the newest it knows. So the shares in use are never more than
// the whole of the last complete configuration, whatever is lost, cut or starts again.
//
// [Configurator] does that. A configuration is decided where the user decides things
// already: a compare-and-set register keeps the newest document, and its number orders it.
//
//	who                  asks                              and has
//	a learner              [Configurator.Join]               its share when complete; borrows until then
//	a member             [Configurator.Leave]              no share when written; may end when complete
//	an operator          [Configurator.Evict]              the share of one that is gone, or an error
//	                     [Configurator.Set]                limits, weights, a fill, or an error
//	a new incarnation           nothing                           its share, once it has read the register
//	an evicted one       nothing                           its share again
//
// What an operator asks for names the number that it changes. It is made upon that one, or
// not at all, and never after its outcome was an error. Requests to join and to leave are
// written by whoever is first, for all that it hears of. While the register is away the
// newest configuration stays in force. Without a register the operator loads a numbered
// configuration into each process ([Configurator.Load]), and it is complete when all have
// it who lose by it.
//
// Beside what the limiter names, the bound has these terms:
//
//   - An evicted process that is alive behind a cut mints its share until it hears
//     of it. With limiter.Majority its lease has ended before, and nothing is added.
//   - A rate that was cut binds a process that has not heard of it, and is listed,
//     only when it does.
//   - A reset admits up to Burst more, once.
//   - A process that starts while the register is away mints by its peers' word, and
//     may miss what only processes outside of the roster know, that nobody else hears.
//   - In a static fleet, a process that starts and hears nobody for a second mints its
//     share of what it has loaded, though others have loaded something newer.
//   - In a static fleet, where two configurations of one number were loaded apart, each
//     process mints its share of its own one.
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
// who credits M. Fischer. Grants are leases: C. Gray
// and D. Cheriton, SOSP 1989.
package fleetstate
