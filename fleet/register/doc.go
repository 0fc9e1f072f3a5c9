// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package register keeps one numbered document in a store that the user has already.
//
// The processes of a fleet must agree on the members and the limits. A [Register] orders these
// decisions. Each document has a number. Number n can be written only once, by the first writer,
// and only while the newest number is n-1. So all readers of number n read the same document.
//
// Drivers are in the packages adapters/kafka, adapters/amqp, adapters/nats, breaker/etcd and
// fleet/register/postgres, beside their client libraries. [File] serves the processes of one host.
// [Memory] serves tests. docs/register.md compares them.
//
// # Only the newest is kept
//
// A register may forget a document when the next one is written. A reader that was away sees only
// the newest. So a document must carry all that a reader needs of earlier documents.
//
// # Unknown outcomes
//
// A write is a message to another machine. When its context ends, or the connection breaks, the
// message may still be on its way. Then CompareAndSet returns [ErrUnknown]: the write has happened,
// or it may happen later, but only while its number is free.
//
// [Settle] makes the outcome final. If the number is free, it writes a document that changes
// nothing.
//
// To recognise its own write, a caller puts a random id into each document.
package register
