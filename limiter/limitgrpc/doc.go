// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package limitgrpc puts limits in front of a gRPC server's methods. Start with [New].
//
// For each call a function chooses a [limiter.Gate] of any kind, by method, peer or
// metadata. A call that is not admitted fails at once, or waits up to Config.MaxWait. It
// never waits beyond its deadline, and not at all if the gate knows that the wait would be
// too long. Opening a stream costs one admission. With Config.PerMessage each message from
// the client costs one, too. The function and the Config can be exchanged while calls are
// served.
//
// A denied call gets the code ResourceExhausted with a RetryInfo, which says when to try
// again. It also gets the trailer grpc-retry-pushback-ms: clients with a retry policy for
// the code obey it automatically. If the gate cannot admit anything, the code is Unavailable.
package limitgrpc
