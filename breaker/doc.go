// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package breaker has the settings of circuit breakers, and what is shown of them.
//
// A guard makes a breaker for each scope: a partition, a queue, a topic or a consumer
// group. guard.Policy.Breaker is a [Config], guard.State.Breaker a [Snapshot].
//
// # What a breaker decides
//
// A closed breaker opens when the failure ratio of first attempts over a sliding window
// is above a limit with confidence (the lower end of the Wilson score interval, so that
// three failures in twenty do not count like three hundred in two thousand), or when a
// run of attempts fails with no success between. An open period lasts a tenth of the
// time that nothing has succeeded, up to a cap; then probes decide. While they succeed,
// more and more are let through at once, and fewer as they fail: a dependency that fails
// a part of its calls is throttled, and not stopped. A row of successes closes the
// breaker. One that opens again soon needs a longer row.
package breaker
