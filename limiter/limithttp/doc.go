// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package limithttp puts limits in front of an HTTP handler, and in front of an HTTP
// client. Start with [New].
//
// For each request a function chooses the [Tier]: a name and a [limiter.Gate], of
// whatever kind. A request that is not admitted is answered 429 at once, or waits up
// to Config.MaxWait; it never waits beyond its context's deadline, and not at all
// when the gate knows that the time will not do. The function and the Config can be
// exchanged while requests are served.
//
// A 429 has Retry-After in whole seconds, rounded up, and a problem body (RFC 9457) of the
// type quota-exceeded. All responses have RateLimit and RateLimit-Policy as
// draft-ietf-httpapi-ratelimit-headers-11 says, where the gate knows its limit:
//
//	RateLimit-Policy: "gold";q=100;w=2
//	RateLimit: "gold";r=42;t=2
//
// A bucket has no window. w is the seconds in which it fills, q what that many
// seconds admit when it was empty; t is when it will be full, or when the next request
// can be admitted if none is left. In a fleet r is what this process has, since
// what others may lend nobody knows.
//
// It knows nothing of who a client is: [RemoteIP] is for those who face the
// network themselves; behind a proxy the address is the proxy's, and which header to
// believe is for its operator to say.
package limithttp
