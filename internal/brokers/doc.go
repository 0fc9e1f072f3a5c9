// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package brokers gives tests, demos and benchmarks a real broker on loopback.
// The work is done by scripts/brokers, which must be above the working
// directory; this package runs it.
//
// [Find] and [ForTest] return the shared instance of a kind, or the one that an environment
// variable names. Use your own names for topics, queues and streams there. [Start] makes an
// instance for the caller alone, who may kill it.
//
// All functions are safe for concurrent use, also across processes: the script locks each
// instance. The first call on a machine may install packages and take minutes. A start
// takes 2 s (NATS) to 8 s (Kafka). Finding a running instance takes 0.1 s.
package brokers
