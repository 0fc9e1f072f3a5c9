// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package once runs the effect of a message once, although the message may be delivered
// twice: after a restart, a rebalance, or an ack that was lost.
//
// A handler names a key and hands over the effect. [Runner.Do] runs it, writes a mark, and
// returns when the mark is on the disk; so the message is acked after that. A delivery that
// comes again finds the mark, and Do returns nil at once.
//
//	marks, err := bolt.Open("/var/lib/billing/once.db", bolt.Config{})
//	charges, err := once.New(marks, once.Config{})
//	err = charges.Do(ctx, "charge/"+order.ID, func(ctx context.Context) error {
//		return bank.Charge(ctx, order)
//	})
//
// # What can be guaranteed
//
// An effect inside the store's own transaction happens exactly once: package once/postgres
// writes the mark in the user's transaction.
//
// For any other effect no store can guarantee that. A process may die after the effect and
// before the mark. The effect is then in doubt, and [Config] and [WithLookup] say what
// becomes of it: run it again (at least once, the default), wait for a person (at most
// once), or ask the dependency whether it happened. The last is exactly once, if the
// dependency answers truly. An outbox is the way without doubts: the effect is a row in the
// user's transaction, and a second process sends the rows, with a key that the receiver
// knows again.
//
// # States
//
// An order is created, allocated, packed, shipped. A [Machine] declares these states and the
// steps between them. [Entities] keeps the state of each order and runs the effect of each
// step once. A step that comes again is skipped, and one that is impossible is an error.
//
// docs/once.md compares the stores, and says for each what a crash can do.
package once
