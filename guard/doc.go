// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package guard is the pipeline between a message broker's client and a handler.
//
// For each delivery of a source it decides between ack, retry, hold and dead letter.
// So a failing dependency does not become a dead-letter storm. The package knows no
// broker: an adapter hands it deliveries through a [Port] and carries out its decisions.
//
// # The way of a message
//
//	broker ─▶ adapter ─▶ admit ───▶ handle ──▶ settle ─▶ broker
//	          (a Port)     │  limiter  │  timeout   ├─ ok          ─▶ ack
//	                       │  breaker  │  panic     ├─ retry       ─▶ waits its delay, back to admit
//	                       ▼           │  recovery  └─ dead letter ─▶ budget ─▶ writer, confirmed ─▶ ack
//	                     hold ◀────────┘
//
// # Words
//
// A source is one Kafka topic-partition of a group, one RabbitMQ queue or one JetStream
// consumer. Each source is guarded by itself. The order says which of its messages are
// handled in sequence: all, those of each key, or none. The window is how many unsettled
// messages of a source may be in this process. The others stay with the broker.
//
// A delivery is one message handed over once by a broker. An attempt is one handler call
// in this process. The broker's own count of deliveries also rises for messages that no
// handler ever saw. The guard never uses it as the number of attempts.
//
// A verdict is the guard's decision about a delivery: ack, retry, hold or dead-letter.
// The breaker stops calls to a failing dependency. Meanwhile messages wait in the hold,
// a ring buffer in front of the handler. In a storm the three thresholds of
// [dlq.StormConfig] are crossed together. A dead letter is a message that the guard gave
// up, with its history. It costs a credit of the source's budget; successes earn credits.
//
// # Poison or outage
//
// By itself the guard dead-letters a message in three cases:
//
//   - Its error, or its handler, says that the message is at fault.
//   - Its attempts are used up, and it failed twice after something else succeeded.
//   - Nothing can be compared, and the source was silent for [Retry.Patience].
//
// An error of the dependency never dead-letters its message: see [Class]. In an ordered
// source the guard compares by trying up to 64 messages behind a failing one, unless
// [Policy.StrictOrder] forbids it. docs/design.md has the reasons.
//
// # Where to start
//
// [New] makes a Guard, one for a process. Programs then call an adapter
// (package adapters/nats and its siblings) or, for a plain function, [Protect].
// Adapters call [Open] and [Source.Run]; docs/adapter.md walks through one.
//
// # What is promised
//
// Safety:
//
//   - The guard settles a delivery at the broker only when its effect is safe: the
//     handler returned nil, or the dead letter is confirmed.
//   - A rejection by the guard is not an outcome: it costs no attempt, is no failure and
//     is never dead-lettered.
//   - Every delivery is in exactly one state of [Account] at any instant.
//   - Within a source (or a key, with [OrderKey]) handlers succeed in the order in which
//     this process received the messages. One message may come early if a dependency
//     recovers while a message fails with an error of [ClassUnknown].
//   - Every buffer is bounded, and a full one stops intake.
//
// Liveness: after the last fault every source goes on by itself within a stated time.
// docs/liveness.md has the times. docs/operating.md lists the few cases that wait for a
// person.
package guard
