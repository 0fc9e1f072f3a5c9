// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package guardtest tests users of package guard: handlers and adapters.
//
// To test a handler, publish messages to a [Broker], consume them with [Broker.Run]
// through a real Guard, and make the dependency fail; see the example of [Broker]. The
// broker is in memory and takes the time from package time alone: with testing/synctest an
// outage of an hour takes a millisecond. [Handler] is a scripted handler that records its
// calls and checks them for order, losses and duplicates.
//
// To test an adapter, write a [Subject] for it and call [Exercise]. It is one suite of
// rules for every broker, in both shapes; [Features] says how brokers differ. The suite
// does not know the adapter's port. If the broker counts the port's calls itself, the
// Subject should be an [Auditor]: the sums of [guard.Account] prove little if only the
// guard counts.
//
// The Broker is no model of any broker's timing. All consumers see a revoke at once, and a
// queue has no partitions.
//
// With an AckWait, Broker.Run starts a reader that feeds the guard: nobody else could
// extend messages that wait in the client's buffer behind a slow handler.
//
// The package imports testing, so no shipped code may import it.
package guardtest
