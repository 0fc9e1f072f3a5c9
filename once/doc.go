// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package once runs the effect of a message once, although the message may be delivered
// twice: after a restart, a rebalance, or a lost ack.
//
// A handler gives [Runner.Do] a key and the effect. Do runs the effect, writes a mark for
// the key, and returns when the mark is on the disk. The message is acked only after that.
// When the same message is delivered again, Do finds the mark and returns nil at once.
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
// For any other effect no store can guarantee that: a process may die after the effect and
// before the mark. The effect is then in doubt. [Config] and [WithLookup] choose what to
// do:
//
//   - run the effect again (at least once, the default),
//   - wait for a person (at most once),
//   - ask the dependency whether the effect happened. That is exactly once, if the
//     dependency answers correctly.
//
// An outbox has no doubts: the effect is a row in the user's transaction. A second process
// sends the rows, with a key by which the receiver recognises duplicates.
//
// # States
//
// An order, for example, is created, allocated, packed, shipped. A [Machine] declares these
// states and the steps between them. [Entities] keeps the state of each order and runs the
// effect of each step once. A repeated step is skipped, and an impossible one is an error.
//
// docs/once.md compares the stores, and says what a crash can do to each.
package once
