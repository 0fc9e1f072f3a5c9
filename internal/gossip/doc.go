// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package gossip moves named sections of replicated state between processes.
//
//	section ──Mark, Delta──▶ ┌─────────┐ ──Send──▶ driver ──▶ peers
//	        ◀──Merge, Gone── │ Session │
//	section ──Mark, Delta──▶ │         │ ◀─Packet─ driver ◀── peers
//	        ◀──Merge, Gone── └─────────┘ ◀──Wake, Join, Leave─
//
// A [Section] is replicated state that can say what changed since a mark, and can
// merge what others say in any order and any number of times. A [Session] knows
// the peers and who has acknowledged what; it decides when which packet leaves.
// It is a step machine without goroutines, timers, sockets or clocks, so that a
// driver and a simulation run the same code: internal/gossip/simnet runs whole fleets
// of them in one goroutine.
//
// Between two processes there is no queue. What a peer has not acknowledged is
// computed anew for each packet, so a slow or cut-off peer costs what the state
// is and not what happened meanwhile. It is sent again at each floor (2 ms) until
// it is acknowledged. At 35 % independent loss five packets are what 99 of 100
// changes need: four floors, the wait for the first one, and the delay, in all
// 10.5 ms in the simulation with a one-way delay of 0.5 ms and exponentially
// distributed 0.5 ms; without loss 4.0 ms. Loss in bursts takes what the burst takes.
//
// Every process talks to every other: what has changed it tells directly and at once.
// Those who have nothing to say to each other rest: a process sends two packets in a
// keep-alive, to all its peers together, and each says how long the next one may take.
// A peer that is late is asked, and one that does not answer for 20 keep-alives is
// silent. Each is told who else is heard, so knowing one is enough; peers of the own zone are
// served first; addresses that fell silent are tried for ever, which is what heals a split.
// Freshness is judged by a peer's own packets only.
//
// A process that stops says so ([Leave]), and its peers need not wait for silence.
//
// The session neither encrypts nor authenticates: its driver must, or whoever can
// send a packet can change the state or end a process's part in it.
//
// # The driver
//
// [Start] is the one that ships: a [Node] owns a session, one UDP socket and one
// TCP listener at one port, and a timer, and has memberlist for membership. With a
// [Keyring] everything is sealed; without one nothing is, and nobody is who they
// say they are. docs/gossip.md is for operators.
package gossip
