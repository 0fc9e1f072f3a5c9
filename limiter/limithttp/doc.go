// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package limithttp puts limits in front of an HTTP handler, and in front of an HTTP
// client. Start with [New].
//
// For each request a function chooses the [Tier]: a name and a [limiter.Gate] of any kind. A
// request that is not admitted is answered 429 at once, or waits up to Config.MaxWait. It
// never waits beyond its context's deadline, and not at all if the gate knows that the wait
// would be too long. The function and the Config can be exchanged while requests are served.
//
// A 429 has Retry-After in whole seconds, rounded up, and a problem body (RFC 9457) of the
// type quota-exceeded. All responses have RateLimit and RateLimit-Policy as
// draft-ietf-httpapi-ratelimit-headers-11 says, where the gate knows its limit:
//
//	RateLimit-Policy: "gold";q=100;w=2
//	RateLimit: "gold";r=42;t=2
//
// A bucket has no window. w is the number of seconds in which it fills, and q is how many
// requests its rate admits in that time. t is the time until the bucket is full, or until
// the next request can be admitted if none is left. In a fleet r counts only the tokens of
// this process, since it does not know how many tokens others may lend.
//
// The package does not know clients. [RemoteIP] is for servers that face the network
// directly. Behind a proxy the address is the proxy's, and the operator must choose which
// header to trust.
package limithttp
