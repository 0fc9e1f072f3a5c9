// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package chaos plans faults and judges what a consumer made of them.
//
// A [Schedule] is faults as data: drawn from a seed, written down as JSON, and the same
// each time. Whoever runs it records a [History]: what was published, which effects the
// dependency had, which dead letters there are, and which faults happened. [Judge] is a
// pure function of both, so a stored history can be judged again.
//
// The oracles are of two kinds. Safety: nothing is lost, no effect happens twice, a key's
// messages keep their order, no healthy message is a dead letter. Liveness: after the last
// fault everything drains. A run in which a planned fault did not happen proves nothing,
// and fails.
//
// "stormguard chaos run" has such runs, on real brokers.
package chaos
