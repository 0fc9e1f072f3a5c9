// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package ringbuf holds messages in memory, in order, until they are settled.
//
// A [Ring] is a set of lanes that share one budget of messages and bytes. A [Lane] is a
// first-in first-out queue. Order holds only inside a lane, so there is one lane per
// partition, queue or key. Producers place batches with [Lane.Put]. A consumer takes a
// [Lease] on the oldest messages, which frees nothing. [Lease.Commit] frees settled messages.
// [Lease.Release] leaves all messages in place, in the same order. [Lease.Next] commits and
// takes the next lease in one step.
//
// The package decides which messages still fit, which calls wait, and in which order messages
// leave. A full ring makes Put wait and [Lane.TryPut] refuse; messages are never dropped to
// make room. It does not know brokers, acks, retries or time, keeps nothing across a restart,
// and starts no goroutine. A held message is not settled: its broker still owns it.
//
// Start with [NewRing]. [NewSlabRing] is the same ring for very many messages: it keeps them
// encoded in reused memory without pointers, so the garbage collector scans almost nothing.
//
// A call takes one lock of the lane for a batch of up to 64 messages, and mostly does not
// touch the shared budget. It allocates nothing, except when it must wait or the lane grows.
// Batches are fast. One message at a time with Next costs about a quarter more than a
// buffered channel, and with Lease and Commit even more.
package ringbuf
