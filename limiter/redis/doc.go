// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package redis keeps a limit in Redis, for fleets that do not gossip. Start with [New] and
// [Store.Key].
//
// A key is a token bucket in one Redis string, and a decision is one script in one round
// trip. It is exact for any number of processes while that Redis is up. Only Redis' clock
// matters. Each script touches a single key with a hash tag, so a cluster works as well as a
// single server.
//
// # What is promised
//
// In any interval of length T all handles of a key together admit at most Burst + Rate·T, if
// all have the same Limit for the key. Only these things may come on top:
//
//   - Tokens that [Handle.Admit] took ahead: at most Config.Batch for each handle that a
//     guard uses.
//   - Tokens on their way back: of [Handle.Refund], and of waiters that gave up while Redis
//     was asked for their tokens.
//   - Tokens that are given back twice or more. When a connection breaks, the client sends
//     the command again, up to MaxRetries times (unset means 3), and Redis may have run it
//     each time. With MaxRetries -1 the client does not send it again.
//   - With [FailOpen]: everything that is admitted while Redis does not decide.
//   - Admissions that Redis forgets. If it comes back empty, or if a replica takes over that
//     has not heard of the last admissions, its buckets are fuller: by at most one Burst each
//     time. A forward jump of Redis' clock does the same. If it comes back with its
//     append-only file and "appendfsync always", it has forgotten nothing. With "everysec",
//     the default, it may have forgotten the admissions of its last one or two seconds, and
//     may admit as much again. This can happen even if only the process was killed: while
//     the disk is slow, Redis answers before it writes.
//
// If an answer is lost or comes too late, its tokens are taken: then less is admitted, never
// more. A command that the client sends again takes its tokens again.
//
// # What it costs
//
// Allow, AllowN and each question for waiters cost a round trip of at most Config.Timeout.
// After a question without a decision nothing is asked for 100 ms, and all calls are answered
// at once by Config.Silence. Then a single call asks for all. A refusal that waiting does not
// fix, such as NOPERM, has no such pause: Redis may answer for other keys. Admit never waits
// for Redis: a goroutine fetches up to Config.Batch tokens ahead. Fetched tokens that are not
// used within a second are lost.
//
// A [Handle] with waiters asks one question at a time, for all of them. After a denial it
// asks again when, as Redis said, there can be enough tokens for the first waiter. It adds a
// random delay up to the same time again (at most 100 ms), so that processes do not all ask
// at once. Waiters of different processes are served in no order.
package redis
