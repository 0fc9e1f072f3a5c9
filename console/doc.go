// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package console serves what an operator asks of a program's guards: what is held and
// why, and the actions that contain a storm.
//
// A [Console] is an http.Handler over the guards of one process. The stormguard command
// speaks to it: stormguard status, source, breaker, credits, audit, and with a fleet
// stormguard fleet.
//
//	c, err := console.New(console.Config{Process: "billing-1"}, g)
//	go http.ListenAndServe("127.0.0.1:8790", c)
//
// # Requests
//
//	GET  /           the page, for a browser
//	GET  status      [Status]
//	GET  sources     all sources: [Source], by name; ?name=NAME, or a prefix and *, are those
//	GET  breakers    all breakers: [Breaker], by name
//	GET  quarantine  the rules in force: [Rule]
//	GET  events      what happened, ?since=1h or another time ago: [Event], oldest first
//	GET  causes      dead letters by their error, ?since likewise: [Cause], the most frequent first
//	GET  history     what held the sources in the last six hours: [History]
//	GET  watch       server-sent events, one a second: [Change]
//	GET  topology    who produces, who reads, and what handlers call: [Flow]
//	     fleet/…     with a fleet, as fleet.Process.Handler answers
//	GET  audit       the last 1000 orders and refused orders, oldest first: [Entry]
//	POST order       [Order]: answered with [Outcome]
//	POST quarantine  [RuleChange]: answered as GET
//
// Paths are relative to where the handler is mounted: use http.StripPrefix, and a path that
// ends with a slash. The page itself needs no token, only what it asks does: it has none of
// the process's data.
//
// An order that is wrong is answered 400, one about a source that is not there 404, one
// that may not be given 401, 403 or 415. A change of the quarantine that is not in force in
// the whole fleet is answered 502. These have {"error": text}.
//
// # Who may ask
//
// A request that came to a loopback address or a Unix socket needs no token, unless there
// are some. Any other needs TLS and a token: the listener's address of each request
// decides ([http.LocalAddrContextKey]), so a server that listens on all addresses by
// mistake serves nobody but this host. An order must be application/json, and never comes
// from a page of another origin.
//
// # What ends by itself
//
// A pause and a forced breaker end after [Order.For], 30 minutes if unset. The process
// keeps that time, not the one who asked.
package console
