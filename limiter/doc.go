// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package limiter holds one rate limit over many processes, without a server, a
// store or an election between them.
//
// Start with [Local] for one process. For a fleet, package fleet starts a process and its
// Key returns the [Limiter] of a key. limiter/redis keeps a limit in a Redis. All of them
// are a [Gate]. [All] puts several together, [Observe] tries one out, and [Enter] admits a
// request with a deadline. limiter/limithttp and limiter/limitgrpc put gates in front of
// servers and clients.
//
// # In a fleet
//
//	    own clock                             own clock
//	        │ mints its share                     │ mints its share
//	        ▼                                     ▼
//	┌──── node a ────┐   loan: out 40      ┌──── node b ────┐
//	│ level      60  │ ──────────────────▶ │ held       40  │
//	│ lent       40  │ ◀────────────────── │ level       0  │
//	└────────────────┘  need; used, ret    └────────────────┘
//	 level + lent ≤ share of the burst      spends loans first, then its own
//
// Every node mints its share of the rate and spends what it holds. What it does
// not need itself it lends, within milliseconds, to those who say that they need
// it. A loan fills its lender's cap until the borrower reports it used or
// returned, so the tokens of the fleet are never more than the burst, wherever
// they are and whatever the network does: a cut costs use of the limit, never its
// bound. Loans are leased: what a borrower that is gone had is written off after a
// second, when it can no longer spend it.
//
// # What is promised
//
// In any interval of length T the fleet admits at most Burst + Rate·T, if every
// clock keeps its rate within 500 ppm, Rate, Burst and roster are constant, and
// each name is one living process. Loss, delay, repetition and reordering of
// packets, partitions, crashes and restarts, and wrong wall clocks do not change
// that. What does is named here, and nowhere is the bound stated without:
//
//   - A process that is paused between an admission and the work it admitted does
//     the work later than everybody else thinks; and one whose machine stands still,
//     so that its monotonic clock does too, may spend loans that were written off:
//     at most what was lent to it.
//   - Two living processes of one name mint its share twice: its part of
//     Burst + Rate·T more.
//   - A limit that is cut while processes run: until all who lose by it have applied the
//     cut, the larger limit bounds. fleet.Status lists the processes that have not. One that
//     is cut off does not hear of it.
//   - A reset: at most Burst more, once. Burst is the largest until every process has heard
//     of the reset: one that hears of it together with a higher limit fills up to that.
//   - fleet.TakeOver: P sides of a split admit up to (P-1)·(Burst + Rate·(T-After))
//     more, each time. T is the longest time for which two nodes take in nothing of
//     each other: up to 5.1 s longer than the split, see there.
//   - fleet.Open: each start of a process admits up to its share of Burst + Rate·T more,
//     where T is how long it may not mint.
//   - A fence of a process that stood still, or whose machine did: at most one pool for
//     each key.
//   - A process that is given an outdated configuration and no fence, until it hears
//     of the configuration that is in force.
//
// The price of the 500 ppm is 0.05 % of the rate. How near the fleet comes to the
// rate is measured, not promised; docs/limiter.md has the table. What no design can
// have is in it too: a node that is cut off with most of the load has only its
// share, and what a crashed process would have minted is not minted until its name
// is back.
//
// Alone ([Local], or a fleet without a roster) the bucket is exact: never more than
// Burst + Rate·T. What the pool of a full bucket gave is counted when the pool is
// filled again, so a burst may be smaller by what the pool holds, at most 64
// tokens and a quarter of it.
//
// # What is assumed
//
// Names are stable: each name in the roster has its share, whether it is there or
// not. A new incarnation mints nothing until every member of the
// roster has written to it, or 1.011 s have passed, and always for that long in a
// fleet whose configuration can change; nobody needs to know that it had an earlier
// one. The session that carries the packets tells incarnations apart, and
// gives the clock.
//
// # Small limits
//
// When the smallest share of the burst is below two tokens, the whole limit lives
// with one owner per key, chosen by rendezvous hashing, which lends whole tokens by a
// draw among all who need one. While that node is down or cut off the key is denied
// elsewhere.
//
// # Sources
//
// Escrow: O'Neil, The escrow transactional method, 1986. Bounded counters: Balegas
// et al., Extending eventually consistent cloud databases for enforcing numeric
// invariants, 2015. Leases: Gray and Cheriton, 1989. Rendezvous hashing: Thaler and
// Ravishankar, 1996.
package limiter
