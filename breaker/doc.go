// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package breaker has the settings and the snapshots of circuit breakers.
//
// A guard makes a breaker for each scope: a partition, a queue, a topic or a consumer
// group. guard.Policy.Breaker is a [Config], guard.State.Breaker a [Snapshot].
//
// # What a breaker decides
//
// A closed breaker opens for one of two reasons:
//
//   - The failure ratio of first attempts over a sliding window is above a limit, with
//     confidence. The lower end of the Wilson score interval counts: three failures in
//     twenty are weaker evidence than three hundred in two thousand.
//   - Several attempts in a row fail, with no success between them.
//
// An open period lasts a tenth of the time that the outage has lasted, at least a base and
// at most a cap. Then probes decide. While probes succeed, the breaker lets more and more
// through at once; when they fail, fewer. So it throttles a dependency that fails a part
// of its calls, and does not stop it. Several successes in a row close the breaker. If it
// opens again soon, it needs more of them.
package breaker
