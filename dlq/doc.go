// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package dlq has what is written of a dead letter, how it is written, and the settings
// that say when.
//
// A [Record] is a dead letter: the message as it came, where it came from, and what
// happened to it. It travels as headers in one of several dialects, so that tools made
// for other libraries can read it, and theirs can be read here: [Encode] and [Decode]. A
// [Writer] puts it where dead letters are kept.
//
// A [StormConfig] says when a storm is called, in which nothing is dead-lettered, and a
// [Storm] what was seen of it. A [BudgetConfig] bounds what may be dead-lettered at all:
// the storm takes a minute to be sure of, the budget does not. A [Quarantine] holds the
// rules that keep messages from the handler.
//
// The package knows no broker and imports the standard library only.
package dlq
