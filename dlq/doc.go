// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package dlq decides when a message may be dead-lettered, and how a dead
// letter is written so that it can be found and brought back.
//
// Deciding takes two state machines, one of each per source:
//
//   - A [Detector] tells a poison message from a storm, in which everything
//     fails. In a storm nothing is to be dead-lettered; the source is held.
//   - A [Budget] bounds what may be dead-lettered at all. The detector needs
//     a minute to be sure, and a slow source may never give it enough to judge
//     by; the budget needs neither, since only successes earn its credits.
//
// Neither has a clock, a timer or a goroutine. Each method takes the present
// instant, so a test or a simulation runs an hour of them in no time. Neither
// is safe for concurrent use.
//
// Writing takes the record of a dead letter: the message as it came, where it
// came from, and what happened to it. It travels as headers in one of several
// dialects, so that tools made for other libraries can read it, and theirs can
// be read here.
//
// The package knows no broker and imports the standard library only. It does
// not know what a handler is, which deliveries are unsettled or whether a
// breaker is open: the guard tells it. Start with [NewDetector] and
// [NewBudget].
package dlq
