// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package guardtest tests what stands on package guard: handlers, and adapters.
//
// To test a handler, publish to a [Broker], consume it with [Broker.Run] through
// a real Guard, and make the dependency fail; see the example of [Broker]. The
// broker is in memory and lives on package time alone, so with testing/synctest
// an outage of an hour takes a millisecond. [Handler] is a scripted handler that
// records its calls and checks them: order, losses, duplicates.
//
// To test an adapter, write a [Subject] for it and call [Exercise]: one suite of
// rules for every broker, in both shapes, with [Features] saying where brokers
// differ. The suite does not know the adapter's port; an adapter whose broker
// keeps books of its own should be an [Auditor], since the identity of
// [guard.Account] proves little if the guard alone does the counting.
//
// What it does not do: it is no model of any broker's timing, a revoke is seen
// at once by all, and a queue has no partitions.
//
// With an AckWait a reader of its own feeds the guard, since what waits in the
// client's buffer behind a slow handler cannot be extended by anyone else.
//
// The package imports testing; nothing that ships may import it.
package guardtest
