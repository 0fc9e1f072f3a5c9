// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package limitgrpc puts limits in front of a gRPC server's methods. Start with [New].
//
// For each call a function chooses a [limiter.Gate], of whatever kind, by method, peer
// or metadata. A call that is not admitted fails at once, or waits up to
// Config.MaxWait; it never waits beyond its deadline, and not at all when the gate
// knows that the time will not do. A stream costs one admission when it is opened,
// and with Config.PerMessage one for each message that the client sends as well.
// The function and the Config can be exchanged while calls are served.
//
// What is denied is ResourceExhausted with a RetryInfo, which says when it is worth
// trying again, and with the trailer grpc-retry-pushback-ms, which clients with a
// retry policy for that code obey by themselves. A gate that cannot admit anything is
// Unavailable.
package limitgrpc
