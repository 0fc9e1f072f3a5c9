// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package guardhttp is net/http middleware. It guards handlers that use a dependency which may
// fail.
//
// [New] makes an [Intake] for one dependency. While its breaker is closed, a request runs in its
// own goroutine, as it would without the guard. Handler errors, panics and 5xx answers count as
// failures.
//
// While the breaker is not closed, [Intake.Wrap] answers 503 with Retry-After at once.
// [Intake.Defer] answers 202 and holds the request, in memory or on the disk. When the dependency
// is back, the intake replays held requests in order, at the ramp. Requests that come during the
// drain queue up behind it, unless that would keep it from ending.
//
//	intake, err := guardhttp.New(g, guardhttp.Config{Name: "payments"}, guardhttp.WithDeadLetters(letters))
//	mux.Handle("GET /orders/{id}", intake.Wrap(show))
//	mux.Handle("POST /orders", intake.Defer(create))
//
// # What a 202 promises
//
// The intake calls the handler with the request until it succeeds, or the request becomes a dead
// letter. The header [HeaderHold] of the answer says how far that goes:
//
//   - "memory": as long as this process lives and ends by [Intake.Close]. A crash loses held
//     requests. A client that cannot bear that should send the request again, with an idempotency
//     key of its own, until it gets another answer than 202.
//   - "disk", which guard.Policy.Spill asks for: the request is synced before the answer, and the
//     next process handles it.
//
// docs/http.md has the rest: settings, deadlines, probes, replays.
package guardhttp
