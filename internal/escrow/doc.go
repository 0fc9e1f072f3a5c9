// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package escrow holds rate limits over many processes by shares and loans, without a
// server, a store or an election between them.
//
// A [Set] is the limits of one process: package fleet makes one for a fleet's process, and
// package limiter one for each limit of its own. The words of package limiter's comment
// about what is promised hold for it.
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
// # Changes
//
// Limits and roster are those of a [Configuration], which has a number. Of each limit a
// node uses the smallest share that it has in any configuration from the last complete
// one to the newest that it has adopted; a configuration is complete when all who have
// less by it keep within it. So the shares in use are never more than the whole,
// though no two nodes change at the same instant. Who agrees on configurations, tells the
// nodes, and knows when one is complete is not in this package. It keeps a new incarnation
// behind a fence until that incarnation has adopted the newest configuration and knows what is
// complete.
//
// # What it does not know
//
// It opens no socket: a [Node] writes packets ([Node.Delta]) and reads them
// ([Node.Merge]), and internal/gossip or a test carries them. It has no state that is
// merged by taking the larger: what remains of a limit is nobody's to know. Node is
// a step machine without goroutine, timer or clock; [Set] puts a lock, handles and
// one goroutine around it.
//
// # Sources
//
// Escrow: O'Neil, The escrow transactional method, 1986. Bounded counters: Balegas
// et al., Extending eventually consistent cloud databases for enforcing numeric
// invariants, 2015. Leases: Gray and Cheriton, 1989. Rendezvous hashing: Thaler and
// Ravishankar, 1996.
package escrow
