// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package simnet runs whole fleets in one goroutine, on simulated clocks and over a simulated
// network, exactly repeatable from a seed.
//
//	            schedule: At(t, func)         faults: Cut, Split, Crash, Pause, ...
//	                   │                                  │
//	                   ▼                                  ▼
//	┌─ events in order of true time ─┐  own clock  ┌──── Process ────┐
//	│ packets on their way           │ ──Step────▶ │ one incarnation │
//	│ one wake for each node         │ ◀─packets── │ of a node       │
//	└────────────────────────────────┘  next wake  └─────────────────┘
//
// A [Process] is told the time of its own clock, which may run fast, step, or stop with its
// machine. Only the schedule and the tests see true time. Links delay, lose (one by one or in
// bursts), repeat and reorder packets. Everything random comes from one seed, and [Net.Hash] tells
// two runs apart.
//
// Start with [New], [Net.Add] and [Net.Run]; plan faults with [Net.At].
//
// A delivery to a process that does nothing costs 0.15 to 0.3 µs for small packets and allocates
// nothing. So the simulation is as fast as the code that runs in it.
package simnet
