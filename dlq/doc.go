// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package dlq describes dead letters: their content, their headers, and the settings that
// decide when a message becomes one.
//
// A [Record] is a dead letter: the original message, its origin, and what happened to it.
// [Encode] writes a record as message headers in one of several dialects, so that tools
// made for other libraries can read it. [Decode] reads these dialects and those of other
// libraries. A [Writer] stores records.
//
// A [StormConfig] holds the thresholds of a storm, and a [Storm] the measured values. A
// [BudgetConfig] limits the number of dead letters. The budget works at once; the detection
// of a storm takes a minute. A [Quarantine] holds rules: messages that match one are not
// handled.
//
// The package knows no broker and imports the standard library only.
package dlq
