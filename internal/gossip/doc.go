// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package gossip moves named sections of replicated state between processes.
//
//	section ──Mark, Delta──▶ ┌─────────┐ ──Send──▶ driver ──▶ peers
//	        ◀──Merge, Gone── │ Session │
//	section ──Mark, Delta──▶ │         │ ◀─Packet─ driver ◀── peers
//	        ◀──Merge, Gone── └─────────┘ ◀──Wake, Join, Leave─
//
// A [Section] is replicated state. It can say what changed since a mark, and it merges the changes
// of others in any order and any number of times. A [Session] knows the peers and their
// acknowledgements; it decides when which packet leaves. It is a step machine without goroutines,
// timers, sockets or clocks, so that a driver and a simulation run the same code:
// internal/gossip/simnet runs whole fleets of sessions in one goroutine.
//
// There is no queue between two processes. Each packet is computed from the changes that its peer
// has not acknowledged. So a slow or disconnected peer costs the size of the state, not the number
// of changes meanwhile. Unacknowledged changes are sent again at each floor (2 ms). At 35 %
// independent loss 99 of 100 changes need at most five packets: four floors, the wait for the first
// floor, and the delay. In the simulation that takes 10.5 ms, with a one-way delay of 0.5 ms plus
// an exponentially distributed 0.5 ms; without loss 4.0 ms. A burst of loss takes as long as the
// burst lasts.
//
// Every process sends its changes to every other process, directly and at once. Pairs that have
// nothing to say rest: a process sends two packets in a keep-alive, to all its peers together. Each
// packet says how long the next one may take. A process asks a late peer for an answer. A peer that
// does not answer for 20 keep-alives is silent. Each process is told which others are heard, so
// knowing one is enough. Peers of the own zone are served first. Addresses of silent peers are
// tried without end, which heals a split. Only a peer's own packets show whether it is fresh.
//
// A process that stops tells its peers ([Leave]), so they need not wait for silence.
//
// The session neither encrypts nor authenticates. Its driver must do that. Otherwise anyone who can
// send a packet can change the state, or end the incarnation of a process.
//
// # The driver
//
// [Start] starts the driver that ships, a [Node]. It owns a session, one UDP socket and one TCP
// listener at one port, and a timer; memberlist does its membership. With a [Keyring] all traffic
// is sealed. Without one nothing is sealed or authenticated. docs/gossip.md is for operators.
package gossip
