// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package limiter keeps a rate limit over many processes. It needs no server, no store and
// no election.
//
// Start with [Local] for one process. For a fleet, package fleet starts a process, and the
// process's Key returns the [Limiter] of a key. limiter/redis keeps a limit in a Redis. Each
// of them is a [Gate]. [All] combines several gates, [Observe] tries one out, and [Enter]
// admits a request with a deadline. limiter/limithttp and limiter/limitgrpc put gates in
// front of servers and clients.
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
// Every node mints tokens at its share of the rate, and spends its own and borrowed tokens.
// It lends surplus tokens, within milliseconds, to nodes that report a need. A loan fills
// its lender's cap until the borrower reports it used or returned. So the tokens of the
// fleet are never more than the burst, whatever the network does: during a cut the fleet
// may admit less than the limit, but never more. Each loan has a lease of one second. If a
// borrower disappears, the lender writes the loan off after that time, when the borrower
// can no longer spend it.
//
// # What is promised
//
// In any interval of length T the fleet admits at most Burst + Rate·T. Conditions: every
// clock keeps its rate within 500 ppm, Rate, Burst and roster are constant, and each name is
// one living process. Lost, late, repeated and reordered packets, partitions, crashes,
// restarts and wrong wall clocks do not change the bound. Only these things do:
//
//   - A paused process: if it pauses between an admission and the admitted work, it works
//     later than others think. If its machine pauses, so that the monotonic clock pauses
//     too, it may spend loans that were written off: at most all tokens lent to it.
//   - Two living processes with one name mint its share twice: the name's part of
//     Burst + Rate·T more.
//   - A limit that is lowered while processes run: the higher limit bounds until all
//     processes whose share shrinks have applied the change. fleet.Status lists the
//     processes that have not. A process that is cut off does not hear of the change.
//   - A reset: at most Burst more, once. Until every process has heard of the reset, Burst
//     is the largest one: a process that hears of the reset together with a higher limit
//     fills up to the higher limit.
//   - fleet.TakeOver: P sides of a split admit up to (P-1)·(Burst + Rate·(T-After)) more,
//     each time. T is the longest time for which two nodes merge no packet of each other:
//     up to 5.1 s longer than the split, see there.
//   - fleet.Open: each start of a process admits up to its share of Burst + Rate·T more,
//     where T is how long it may not mint.
//   - A fence that passes while the process or its machine is paused: at most one pool for
//     each key.
//   - A process that starts with an outdated configuration and without a fence, until it
//     hears of the configuration in force.
//
// The 500 ppm cost 0.05 % of the rate. How near the fleet comes to the rate is measured, not
// promised; docs/limiter.md has the table. The table also shows what no design can do. A node
// that is cut off with most of the load has only its share. The share of a crashed process
// is not minted until its name is back.
//
// A single process ([Local], or a fleet without a roster) never admits more than
// Burst + Rate·T either. Tokens spent from the pool of a full bucket are counted only when
// the pool is filled again. So a burst may be smaller by the size of the pool, at most 64
// tokens and at most a quarter of the burst.
//
// # What is assumed
//
// Names are stable: each name in the roster has its share, whether its process runs or not.
// A new incarnation mints nothing until every member of the roster has written to it, or
// 1.011 s have passed. In a fleet whose configuration can change it always waits 1.011 s.
// No process needs to remember earlier incarnations. The session that carries the packets
// tells incarnations apart, and provides the clock.
//
// # Small limits
//
// If the smallest share of the burst is below two tokens, the whole limit has one owner per
// key, chosen by rendezvous hashing. The owner lends whole tokens, by a draw among all nodes
// that need one. While the owner is down or cut off, other nodes deny the key.
//
// # Sources
//
// Escrow: O'Neil, The escrow transactional method, 1986. Bounded counters: Balegas
// et al., Extending eventually consistent cloud databases for enforcing numeric
// invariants, 2015. Leases: Gray and Cheriton, 1989. Rendezvous hashing: Thaler and
// Ravishankar, 1996.
package limiter
