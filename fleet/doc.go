// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package fleet starts one process of a fleet: processes that share rate limits, and that
// open, probe and close their breakers together.
//
//	p, err := fleet.Start(fleet.Config{Fleet: "payments", Name: hostname, Limits: …, Gossip: …}, fleet.WithRegister(r))
//	g, err := guard.New(guard.Config{Group: "payments"}, guard.WithFleet(p.Member()))
//	…  guardnats.WithLimiter(p.Key("gateway")), and likewise in the other adapters
//	defer p.Close()    // for good: p.Leave(ctx)
//
//	            ┌───────────────── Process ─────────────────┐
//	  guards ──▶│ Member ─▶ verdicts, storms, totals ┐      │
//	  handlers ▶│ Key ────▶ limits ──────────────────┤      │
//	  operators▶│ Set ────▶ configuration ───────────┼▶ gossip ◀──▶ the others
//	  people  ◀─│ Status, Journal ───────────────────┘      │
//	            └───────────────────────────────────────────┘
//
// The configuration (roster, weights, limits, fills) is kept in a register of the user's,
// [WithRegister], or is static, [Config].Number; docs/fleet.md says how to choose. The
// limits change when it does, and so does the roster by which breakers are voted on. What
// the limits promise is in the comment of package limiter.
//
// # Goroutines and locks
//
// Beside those of its gossip and of its limits, a Process owns the goroutine of
// its driver; with a register one that watches it, and while something is written one
// that writes. Close ends all. It holds no lock around a call of a part; the lock
// order is that of the parts: the configuration, then the limits; Member, then verdicts or
// storms.
package fleet
