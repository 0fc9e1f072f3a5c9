// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package process is one process's part in a fleet, whole: sockets, goroutines and
// all that package fleet and package limiter have agreed on through them.
//
//	p, err := process.Start(process.Config{Fleet: "payments", Name: hostname, Limits: …, Gossip: …})
//	g, err := guard.New(guard.Config{Group: "payments"}, guard.WithFleet(p.Member()))
//	…  nats.WithLimiter(p.Key("gateway")), and likewise in the other adapters
//	defer p.Close()    // for good: p.Leave(ctx)
//
//	            ┌───────────────── Process ─────────────────┐
//	  guards ──▶│ Member ─▶ verdicts, storms ┐              │
//	  handlers ▶│ Key ────▶ limits ──────────┤              │
//	  operators▶│ Propose ▶ charter ─────────┼▶ gossip.Node │◀──▶ the others
//	  people  ◀─│ journal, standings ────────┘              │
//	            └───────────────────────────────────────────┘
//
// Each of the six is a section of the gossip. The limits change when the charter
// does, and so does the roster by which breakers are voted on.
//
// # Goroutines and locks
//
// A Process owns one goroutine beside those of its [gossip.Node] and its
// [limiter.Set]; Close ends all. It holds no lock around a call of a part; the lock
// order is that of the parts: Charters, then Set; Member, then Verdicts or Storms.
package process
