// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package ringbuf holds messages in memory, in order, until they are settled.
//
// A [Ring] is a set of lanes that share one budget of messages and bytes. A
// [Lane] is a first-in first-out queue; order holds inside a lane and nowhere
// else, so there is one lane per partition, queue or key. Producers place
// batches with [Lane.Put]. A consumer takes a [Lease] on the oldest messages,
// which frees nothing: [Lease.Commit] frees what was settled and
// [Lease.Release] leaves the rest where it was, in the same order; [Lease.Next]
// commits and takes the next lease in one step.
//
// The package decides three things: what still fits, who waits, and in which
// order messages leave. A full ring makes Put wait and [Lane.TryPut] refuse;
// nothing is ever dropped to make room. It does not know brokers, acks, retries
// or time, keeps nothing across a restart, and starts no goroutine. A held
// message is not settled: its broker still owns it.
//
// Start with [NewRing]. [NewSlabRing] is the same ring for very many messages:
// it keeps them encoded in reused memory without pointers, so that the garbage
// collector has next to nothing to scan.
//
// Calls take one lock of the lane for a batch of up to 64 messages, mostly no
// step on the shared budget, and allocate nothing unless they must wait or the
// lane grows. Batches are where the speed is; one message at a time costs
// about a quarter more than a buffered channel does with Next, and more again
// with Lease and Commit.
package ringbuf
