// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package guardhttp guards what an HTTP service does with a dependency that may
// fail: net/http middleware in front of the handlers that use it.
//
// [New] makes an [Intake] for one dependency. While its breaker is closed a
// request runs in its own goroutine as it would without the guard, and handler
// errors, panics and 5xx answers are its outcomes. While it is not closed,
// [Intake.Wrap] answers 503 with Retry-After at once, and [Intake.Defer]
// answers 202 and holds the request, in memory or on the disk, to be replayed in order,
// at the ramp, when the dependency is back. Requests that come during the drain queue up
// behind it, unless it would not end so.
//
//	intake, err := guardhttp.New(g, guardhttp.Config{Name: "payments"}, guardhttp.WithDeadLetters(letters))
//	mux.Handle("GET /orders/{id}", intake.Wrap(show))
//	mux.Handle("POST /orders", intake.Defer(create))
//
// # What a 202 promises
//
// That the handler will be called with the request until it succeeds, or that
// the request ends with the dead-letter writer. The header [HeaderHold] of the answer says
// how far that goes. With "memory" it holds as long as this process lives and ends by
// [Intake.Close]: a crash loses what is held, and a client that cannot bear that should
// send the request again, with an idempotency key of its own, until it gets another answer
// than 202. With "disk", which guard.Policy.Spill asks for, the request is synced before
// the answer, and the next process handles it.
//
// docs/http.md has the rest: settings, deadlines, probes, what a replay is.
package guardhttp
