// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package fleetstate keeps the state that the processes of a fleet agree on: whether a breaker's
// scope is open for all of them, which process probes it, whether they are in a storm together, and
// how much of the rate limit each process mints.
//
// Start with [NewVerdicts] for scopes, [NewStorms] for storms and [NewConfigurator] for shares and
// limits. Each is a section of a gossip session, which carries its data to the other processes.
// [NewMember] makes the part that a guard takes. A Member reports to these sections what its
// breakers, detectors and counters do, and does to the breakers what was decided.
//
// # Who decides
//
// Each process has one vote for a scope, and only that process writes it. The fleet's decision is a
// state with a position: a generation, which rises at each close, and the number of open periods
// since. Each process passes on every decision that it hears, and the latest holds. So packets may
// be lost, repeated or reordered, and no decision from before a close can reopen a scope.
//
// A pure function makes decisions from votes, in each process that hears enough of them. There is
// no leader and no clock, and no instant travels: an open period is a length. A process counts it
// from when it hears of it, and cuts it at its own Cap.
//
//	the fleet is  and                                               becomes
//	closed g      Need processes of the roster vote that they       open g.1
//	              have tripped
//	open g.r      a process reports that its permitted probe        open g.r+1, one level up; one level
//	              failed, was too slow or was lost                  down if others passed in this round
//	open g.r      Need processes passed or seconded in round r,     closed g+1
//	              with Successes probes in all
//
//	a process     while the fleet is                                does this
//	heard by a    closed                                            its breaker decides by itself; once tripped,
//	quorum                                                          the process votes so, until it closes again
//	              closed, and the process doubts its path           the same, without a vote
//	              open, in the open period                          holds its breaker
//	              open, after the period, in its turn               lets one probe through, and still holds
//	              open, all that can probe have probed, and         seconds their success; it does not wait for
//	              it has nothing to probe with                      processes that ended rounds, if these are
//	                                                                fewer than Need
//	              open, and the round does not move for twice       its breaker decides by itself, until the
//	              Lease and two Turns, though it has calls;         fleet's next decision
//	              or others end each round for so long, though
//	              its probes pass
//	              just closed                                       closes its breaker, and keeps its backoff
//	heard again   open, and its own probes closed it meanwhile      holds its breaker, and counts as passed
//	cut off       closed                                            its breaker decides by itself
//	              open, in the open period                          holds its breaker
//	              open, after the period and up to a fifth more     its breaker decides by itself
//	not in the    open                                              holds its breaker, and never probes
//	roster        open, nobody probed for Lease and two Turns       its breaker decides by itself, until the
//	                                                                fleet's next decision
//
// The quorum is counted over the roster, which lists names, not over the processes that are heard.
// So a small side of a split knows that it is small, and neither opens nor closes anything for the
// fleet. In a split of three into one and two, the two are a quorum and decide. The one goes by its
// own breaker, and takes over the decision when it hears of it.
//
// With Quorum above 0.5 at most one side of a split can decide. At 0.5 or below, both halves of an
// even split can, and afterwards the higher position holds. A vote counts while its process is
// heard in both directions, within Silent. Otherwise the vote of a dead process, which it can never
// take back, would count forever. A local trip acts at once, whatever the fleet decided, and
// affects no other process.
//
// A process doubts its own path under three conditions: its probe ended a round, probes of others
// closed the scope though it had calls, and its breaker trips within Cap of that close. The reason:
// in a roster of four, two processes with a broken path are a quorum. After each close they would
// at once hold the two healthy ones again. The doubt ends when the process's own probes have closed
// its breaker.
//
// The price: if an outage follows a close within Cap, only processes whose probes had closed the
// scope can vote to open it. If these are fewer than Need, each process opens its own breaker only.
//
// A process that is cut off probes as a breaker by itself does, in each period. Otherwise a process
// that stays alone would not recover. So N of them probe like N separate breakers. Their first
// probes are spread over a fifth of the period.
//
// # Who probes
//
// One process probes at a time. It is heard, is in the roster and has something to probe with. The
// order is:
//
//   - first the process that has not ended a round lately;
//   - then the one that has probed least in this round;
//   - then the one with the highest random weight of scope, position and name.
//
// Once enough probes have passed, only processes that have not probed in the round get a turn. The
// process announces its probe, lets one delivery through and reports the outcome. Its breaker stays
// shut.
//
// A turn that is not taken ends after Turn. It ends within half of Turn if the probe has no
// outcome: a handler returned Ignore or Permanent, or an operator forced the breaker. If no more is
// heard of a probe, the turn ends after its Lease. None of these counts as a failed probe. A probe
// that still runs at the end of its Lease counts as failed.
//
// Two processes probe at once only if they disagree about whose turn it is. They do not if all
// processes of one side hear each other within half of Settle, and their clocks run evenly: a
// process that is new, or newly has something to probe with, waits for Settle before its turn, so
// that all know of it. They may if hearing is partial (a hears b, b hears c, a does not hear c),
// and within Silent of a cut, before it is known.
//
// # Who takes a scope over
//
// The votes of processes that have gone stay with the others, and so do decisions. They decide how
// a new owner's breaker begins, before its first delivery is handled. Terms say which of several
// owners was the last.
//
//	known                                    the breaker begins
//	open for the fleet                       held, as everywhere
//	last owner gone, tripped                 held for the rest of its period, then half-open
//	an owner that is heard, tripped          half-open: it may be sharing the scope
//	last owner had nothing wrong             closed
//	nothing, and a process that was here     closed
//	before said that this is all
//	nothing yet, within Start of our start   held until told, half-open at the end
//	nothing                                  half-open
//
// # What is remembered
//
// A vote is forgotten Keep after its process gave the scope up, was last heard, or reported that
// nothing is wrong. A vote of a tripped process that is heard stays. A process remembers its own
// votes, and all processes the fleet's decisions, as long as they run. Otherwise a process that
// missed one would believe the one before.
//
// Scopes and Votes bound all of this. At the bound of Scopes the oldest scope that is closed, not
// ours and not in trouble makes room. If there is none, the new scope is refused and counted, and
// its breaker decides by itself. At the bound of Votes a new vote of another process is refused and
// counted. If all others have forgotten a scope, a process that missed its close can reopen it for
// one round, until probes close it.
//
// # Configuration
//
// A configuration is a numbered document that says how much each process mints: roster, weights,
// limits, and how often all buckets were filled. It is applied in two steps, so that no share is
// ever used twice:
//
//	known        members that lose by it use less at once; no member uses more
//	complete     all members that lose have applied it or were evicted, and all
//	             configurations before it are complete: members that gain use what was freed
//
// A process uses the smallest share that it has in any configuration from the last complete one to
// the newest it knows. So the shares in use are never more than the whole of the last complete
// configuration, even after loss, cuts and restarts.
//
// [Configurator] does that. The order of configurations comes from a store that the user has
// already: a compare-and-set register keeps the newest document, and its number orders it.
//
//	who                asks by                 and gets
//	a learner          [Configurator.Join]     its share when complete; borrows until then
//	a member           [Configurator.Leave]    no share when written; may end when complete
//	an operator        [Configurator.Evict]    the share of a member that is gone, or an error
//	                   [Configurator.Set]      limits, weights, a fill, or an error
//	a new incarnation  nothing                 its share, once it has read the register
//	an evicted one     nothing                 its share again
//
// An operator's request names the number that it changes. It changes that configuration or none,
// and it is never made after its outcome was an error, except [ErrUnknown]. The first process that
// can write puts the requests to join and to leave of all processes that it hears into one document.
// While the register is away the newest configuration stays in force. Without a register the
// operator loads a numbered configuration into each process ([Configurator.Load]). It is complete
// when all members that lose by it have it.
//
// The limiter lists the exceptions to its bound. These are added:
//
//   - An evicted process that is alive behind a cut mints its share until it hears of the eviction.
//     With escrow.Majority its lease has ended before, and nothing is added.
//   - If a rate was cut, a process that has not heard of it keeps the old one until it does. The
//     status lists it as lacking.
//   - A reset admits up to Burst more, once.
//   - A process that starts while the register is away mints by its peers' reports. It may miss a
//     configuration that only processes outside of the roster know, and that is heard nowhere.
//   - In a static fleet, a process that starts and hears nobody for a second mints its share of its
//     loaded configuration, though others may have loaded a newer one.
//   - In a static fleet, if two configurations of one number were loaded into processes that do not
//     hear each other, each process mints its share of its own one.
//
// # Inside
//
// There is no goroutine, timer or clock: each method is a step at an instant. Processes trust each
// other: whoever can send to the session can decide.
//
// # Sources
//
// Votes are single-writer registers, decisions a join-semilattice: M. Shapiro, N. Preguiça, C.
// Baquero and M. Zawirski, Conflict-free replicated data types, SSS 2011. The patience before a
// turn is that of timed mutual exclusion: L. Lamport, A fast mutual exclusion algorithm, ACM Trans.
// Comput. Syst. 5 (1987), who credits M. Fischer. Grants are leases: C. Gray and D. Cheriton, SOSP
// 1989.
package fleetstate
