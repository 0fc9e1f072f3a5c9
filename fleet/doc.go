// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package fleet starts one process of a fleet: processes that share rate limits, and that open,
// probe and close their breakers together.
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
// The fleet configuration has the roster, the weights, the limits and the count of fills. It is
// kept in a register that the user provides ([WithRegister]), or it is static ([Config].Number);
// docs/fleet.md says how to choose. A new configuration changes the limits, and the roster that
// votes on breakers. The comment of package limiter says what the limits promise.
//
// A member is a process in the roster. To mint is to make new tokens, at a member's share of the
// rate. A learner is a process outside of the roster that only borrows tokens. An incarnation is
// one run of a process under its name.
//
// # Goroutines and locks
//
// The gossip and the limits have their own goroutines. Besides these, a Process owns the goroutine
// of its driver. With a register it also owns one that watches the register, and one for each write
// while it lasts. Close ends all of them.
//
// A Process holds no lock while it calls one of its parts, except in writeDown: that holds mu while
// it calls the configuration and the journal. The lock order is that of the parts: the
// configuration, then the limits; Member, then verdicts or storms.
package fleet
