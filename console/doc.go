// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package console serves an HTTP API for the operators of a program's guards. It shows
// which sources are held and why, and takes the orders that contain a storm.
//
// A [Console] is an http.Handler over the guards of one process. These commands of the CLI
// use it: stormguard status, source, breaker, credits, audit, and with a fleet stormguard
// fleet.
//
//	c, err := console.New(console.Config{Process: "billing-1"}, g)
//	go http.ListenAndServe("127.0.0.1:8790", c)
//
// # Requests
//
//	GET  /           the page, for a browser
//	GET  status      [Status]
//	GET  sources     by name: [Source]; ?name=NAME, or a prefix and *, selects some
//	GET  breakers    all breakers by name: [Breaker]
//	GET  quarantine  the rules in force: [Rule]
//	GET  events      those of the last hour, or of ?since=2h: [Event], oldest first
//	GET  causes      dead letters by error, ?since as above: [Cause], the most frequent first
//	GET  history     why sources were held in the last six hours: [History]
//	GET  watch       server-sent events, one a second: [Change]
//	GET  topology    who produces, who reads, and what handlers call: [Flow]
//	     fleet/...   with a fleet, the answers of fleet.Process.Handler
//	GET  audit       the last 1000 orders, and refused requests, oldest first: [Entry]
//	POST order       [Order]: answered with [Outcome]
//	POST quarantine  [RuleChange]: answered as GET
//
// Paths are relative to the place where the handler is mounted: use http.StripPrefix, and a
// path that ends with a slash. The page itself needs no token, since it contains no data of
// the process. Its requests need one.
//
// Errors have these status codes, and the body {"error": text}:
//
//   - 400: the order is wrong
//   - 401, 403 or 415: the request is not allowed
//   - 404: the process has no such source or breaker, or no process is in the zone
//   - 502: a change of the quarantine is not in force in the whole fleet
//
// # Who may ask
//
// A request to a loopback address or a Unix socket needs no token, unless tokens are
// configured. Without tokens its Host must be a loopback address or localhost. Any other
// request needs TLS and a token. The listener's address of each request decides
// ([http.LocalAddrContextKey]). So a server that listens on all addresses by mistake serves
// this host only, if it has no TLS or no tokens. An order must be application/json, and is
// refused if it comes from a page of another origin.
//
// # What ends by itself
//
// A pause and a forced breaker end after [Order.For], by default after 30 minutes. The
// process measures this time, not the client.
package console
