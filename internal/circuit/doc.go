// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package circuit decides whether a scope (a partition, a queue, a topic, a
// consumer group) may hand work to its handler. It decides by the outcomes of earlier
// work. Its settings and snapshots are in package breaker.
//
// Start with [New] for one scope and [NewScopes] for a tree of them. A caller
// asks [Breaker.Enter] for every delivery, [Breaker.Admit] when Enter says no,
// and settles the token with [Breaker.Success], [Breaker.Failure] or
// [Breaker.Exclude].
//
// # What it decides
//
// The comment of package breaker describes it. A breaker that opens again soon needs a
// longer row of successes: otherwise a dependency that fails a little would flap it.
//
// # What it does not know
//
// A breaker has no goroutine, no timer and no clock. Every method takes now, a monotonic
// instant since an origin that the caller chooses and keeps. The caller also calls
// [Breaker.Tick] at least once a second.
//
// A breaker does not see why a call failed, and does not measure how long a call runs: the
// caller reports a call that runs longer than breaker.Config.Slow through [Breaker.Slow].
// It knows nothing of other processes. Their verdicts arrive as [Breaker.Force] and
// [Breaker.Trip], or, if they decide in its place, as [Breaker.Hold] and its companions.
// A refusal is not an outcome and must never be settled as one.
//
// # Inside
//
// The closed path is the package's own gate (an atomic word) and a window of buckets.
// gobreaker keeps the states, the generations and the half-open judgement. A trip is one
// Allow with a failed outcome, which ReadyToTrip confirms from the breaker's own verdict.
// Each probe is a half-open request of gobreaker. gobreaker is only called under the
// breaker's lock, never on the closed path.
//
// # Sources
//
// The score interval: E. B. Wilson, Probable inference, the law of succession,
// and statistical inference, J. Am. Stat. Assoc. 22 (1927). The states: M.
// Nygard, Release It! (2007). The doubling period with a cap is the truncated
// binary exponential backoff of IEEE 802.3; ejection that grows with each
// ejection and decays later is Envoy's outlier detection.
package circuit
