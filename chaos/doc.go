// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package chaos plans faults for consumers, and judges how the consumers handled them.
//
// A [Schedule] is a list of faults as data: it is drawn from a seed, written as JSON, and
// the same each time. The program that runs it records a [History]: the published messages,
// the effects at the dependency, the dead letters, and the faults that happened. [Judge] is
// a pure function of the history, which includes the schedule. So a stored history can be
// judged again.
//
// There are two kinds of checks, called oracles. Safety: no message is lost, no effect
// happens twice, the messages of a key keep their order, no healthy message is a dead
// letter. Liveness: after the last fault everything drains. A run in which a planned fault
// did not happen proves nothing, and fails.
//
// The command "stormguard chaos run" does such runs on real brokers.
package chaos
