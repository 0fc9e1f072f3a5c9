// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package register keeps one numbered document in a store that exists already.
//
// A fleet has something to decide once for all its processes: who is in the fleet,
// and what the limits are. A [Register] orders these decisions. A document has a
// number. Number n can be written once only, by whoever is first, and only when the
// newest is n-1. So everybody who reads number n reads the same document.
//
// The drivers live beside their client libraries: adapters/kafka, adapters/amqp,
// adapters/nats, breaker/etcd and fleet/register/postgres. [File] serves the
// processes of one host, [Memory] serves tests. docs/register.md compares them.
//
// # Only the newest is kept
//
// A register may forget a document when the next one is written, and a reader that was
// away sees the newest only. A document must carry whatever a reader needs of the
// documents before it.
//
// # Unknown outcomes
//
// A write is a message to another machine. When its context ends, or the connection
// breaks, the message may still be on its way. Then CompareAndSet returns [ErrUnknown].
// The write has happened, or it may happen later, but only while its number is free.
// [Settle] ends that: it takes the number with a document that changes nothing, unless
// the number is taken already. Afterwards the write happened or did not, for good.
//
// To recognise its own write, a caller puts a random id into each document.
package register
