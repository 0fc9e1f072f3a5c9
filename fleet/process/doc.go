// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package process is one process's part in a fleet, whole: sockets, goroutines and
// all that package fleet and package limiter have agreed on through them.
//
//	p, err := process.Start(process.Config{Fleet: "payments", Name: hostname, Limits: …, Gossip: …}, process.WithRegister(r))
//	g, err := guard.New(guard.Config{Group: "payments"}, guard.WithFleet(p.Member()))
//	…  nats.WithLimiter(p.Key("gateway")), and likewise in the other adapters
//	defer p.Close()    // for good: p.Leave(ctx)
//
//	            ┌───────────────── Process ─────────────────┐
//	  guards ──▶│ Member ─▶ verdicts, storms ┐              │
//	  handlers ▶│ Key ────▶ limits ──────────┤              │
//	  operators▶│ Set ────▶ configuration ───┼▶ gossip.Node │◀──▶ the others
//	  people  ◀─│ journal, standings ────────┘              │
//	            └───────────────────────────────────────────┘
//
// Each of the six is a section of the gossip. The configuration (roster, weights, limits,
// fills) is kept in a register of the user's, [WithRegister], or is static,
// [Config.Number]; docs/fleet.md says how to choose. The limits change when it does, and
// so does the roster by which breakers are voted on.
//
// # Goroutines and locks
//
// Beside those of its [gossip.Node] and its [limiter.Set], a Process owns the goroutine of
// its driver; with a register one that watches it, and while something is written one
// that writes. Close ends all. It holds no lock around a call of a part; the lock
// order is that of the parts: Configurator, then Set; Member, then Verdicts or Storms.
package process
