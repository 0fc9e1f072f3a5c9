// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package escrow keeps rate limits over many processes with shares and loans. It needs no
// server, no store and no election.
//
// A [Set] holds the limits of one process. Package fleet makes one for each process of a
// fleet, and package limiter makes one for each local limit. The promises in package
// limiter's comment hold for it.
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
// may admit less than the limit, but never more. Each loan has a lease of one second, which
// the lender's packets renew. If a borrower disappears, the lender writes the loan off after
// that time, when the borrower can no longer spend it.
//
// # Changes
//
// Limits and roster come from a [Configuration], which has a number. A node uses its
// smallest share of each limit in all configurations from the last complete one to the
// newest that it has adopted. A configuration is complete when every node whose share
// shrinks keeps within it. So the shares in use never exceed the whole limit, though nodes
// change at different instants.
//
// Another package agrees on configurations, tells the nodes, and knows when one is complete
// (internal/fleetstate). A new incarnation starts behind a fence, which package fleet sets.
// internal/fleetstate lifts the fence when the incarnation has adopted the newest
// configuration and knows which one is complete.
//
// # What it does not know
//
// The package opens no socket. A [Node] writes packets ([Node.Delta]) and reads them
// ([Node.Merge]); internal/gossip or a test carries them. No node knows how many tokens of
// a limit are left in the fleet, so no such state is merged by taking the larger value.
// Node is a step machine without goroutine, timer or clock. [Set] adds a lock, handles and
// one goroutine.
//
// # Sources
//
// Escrow: O'Neil, The escrow transactional method, 1986. Bounded counters: Balegas
// et al., Extending eventually consistent cloud databases for enforcing numeric
// invariants, 2015. Leases: Gray and Cheriton, 1989. Rendezvous hashing: Thaler and
// Ravishankar, 1996.
package escrow
