// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package brokers gives tests, demos and benchmarks a real broker on loopback.
// The work is done by scripts/brokers, which must be above the working
// directory; this package runs it.
//
// [Find] and [ForTest] hand out the shared instance of a kind, or the one that
// an environment variable names. Use names of your own for topics, queues and
// streams there. [Start] makes an instance that belongs to the caller, for
// those who kill it.
//
// All functions are safe for concurrent use, across processes as well: the
// script locks each instance. The first call of a machine may install packages
// and takes minutes; a start takes 2 s (NATS) to 8 s (Kafka), and finding a
// running instance 0.1 s.
package brokers
