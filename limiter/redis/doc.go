// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package redis holds a limit in Redis, for fleets that do not gossip. Start with
// [New] and [Store.Key].
//
// A key is a token bucket in one string at Redis, and a decision is one script in
// one round trip: exact, as long as that Redis is up, however many processes ask.
// Time is Redis' own, so that nobody else's clock matters. Only one key is touched
// at a time, with a hash tag, so a cluster will do as well as a single server.
//
// # What is promised
//
// In any interval of length T all handles of a key together admit at most
// Burst + Rate·T, if all have the same Limit for it. What comes on top is named
// here, and nowhere else is the bound stated without:
//
//   - Tokens that [Handle.Admit] took ahead: at most Config.Batch for each handle
//     that a guard uses.
//   - Tokens on their way back: of [Handle.Refund], and of those who gave up while Redis
//     was asked for them.
//   - Tokens that are given back twice or more. When a connection breaks, the client sends
//     the command again, up to MaxRetries times (unset means 3), and Redis may have run it
//     each time. With MaxRetries -1 it does not.
//   - All that is admitted while Redis does not answer, with [FailOpen].
//   - What Redis forgets. One that comes back empty, or a replica that takes over
//     and has not heard of the last admissions, has fuller buckets: at most one Burst
//     each time. The same for a jump of its clock ahead. One that comes back with
//     its append-only file has forgotten nothing if it said "appendfsync always".
//     With "everysec", Redis' default, it can have forgotten what it admitted in its
//     last second or two, even if only the process was killed, for while the disk is
//     slow it answers before it writes. As much can be admitted again.
//
// An answer that is lost, or comes too late, has taken its tokens: less is admitted
// then, never more. A command that the client sends again takes its tokens again.
//
// # What it costs
//
// Allow, AllowN and each question for those who Wait are a round trip, of at most
// Config.Timeout. After one that failed, nothing is asked for 100 ms, and everybody is
// answered at once as [Config] says; then one asks, for all. Admit never waits for Redis:
// it has a goroutine fetch up to Config.Batch tokens ahead, and those not used within a
// second are lost.
//
// A [Handle] whose callers Wait asks one question at a time, for all of them. After a
// denial it asks again when Redis has said that there can be enough for the first, and up to
// as much later again (at most 100 ms) by chance, so that processes do not all come at
// once. Between processes there is no order.
package redis
