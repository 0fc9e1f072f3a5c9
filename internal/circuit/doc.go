// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package circuit decides whether a scope (a partition, a queue, a topic, a
// consumer group) may hand work to its handler, from what became of the work
// before. Its settings, and what is shown of it, are package breaker.
//
// Start with [New] for one scope and [NewScopes] for a tree of them. A caller
// asks [Breaker.Enter] for every delivery, [Breaker.Admit] when Enter says no,
// and settles the token with [Breaker.Success], [Breaker.Failure] or
// [Breaker.Exclude].
//
// # What it decides
//
// A closed breaker opens when the failure ratio of first attempts over a
// sliding window is above a limit with confidence (the lower end of the Wilson
// score interval, so that three failures in twenty do not count like three
// hundred in two thousand), or when a run of attempts fails with no success
// between. An open period lasts a tenth of the time that nothing has succeeded, up to
// a cap; then probes decide. While they succeed, more and more are let through at
// once, and fewer as they fail: a dependency that fails a part of its calls is
// throttled, and not stopped. A row of successes closes the breaker. One that opens
// again soon needs a longer row, or a dependency that fails a little would flap it.
//
// # What it does not know
//
// It has no goroutine, no timer and no clock: every method takes now, a
// monotonic instant since an origin the caller chose and keeps. Someone calls
// [Breaker.Tick] at least once a second. It does not see why a call failed,
// does not measure how long it runs (the caller reports one that exceeds
// breaker.Config.Slow while it still runs, through [Breaker.Slow]), and knows nothing
// of other processes: their verdicts arrive as [Breaker.Force] and
// [Breaker.Trip], or, where they decide in its place, as [Breaker.Hold] and
// what goes with it. A refusal is not an outcome and must never be settled as one.
//
// # Inside
//
// The closed path is a gate of our own (an atomic word) and a bucketed window.
// gobreaker keeps the states, the generations and the half-open judgement: a
// trip is one Allow with a failed outcome, which its ReadyToTrip confirms from
// our verdict, and each probe is one of its half-open requests. It is only
// called under the breaker's lock, never on the closed path.
//
// # Sources
//
// The score interval: E. B. Wilson, Probable inference, the law of succession,
// and statistical inference, J. Am. Stat. Assoc. 22 (1927). The states: M.
// Nygard, Release It! (2007). The doubling period with a cap is the truncated
// binary exponential backoff of IEEE 802.3; ejection that grows with each
// ejection and decays later is Envoy's outlier detection.
package circuit
