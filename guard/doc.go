// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package guard is the pipeline between a message broker's client and a handler.
//
// It decides, for each delivery of a source, between ack, retry, hold and dead
// letter, so that a failing dependency does not become a dead-letter storm. It
// knows no broker: an adapter hands it deliveries through a [Port] and carries
// its decisions out.
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
// A source is what is guarded by itself: one Kafka topic-partition of a group, one
// RabbitMQ queue, one JetStream consumer. The order says what of it is handled in
// sequence: the whole source, each key, or nothing. The window is how many of its
// messages may be in this process and not settled. Messages beyond it stay with the
// broker.
//
// A delivery is one message handed over once by a broker. An attempt is one call of
// the handler that this process made. The broker's own count of deliveries also rises
// for messages that no handler ever saw, and is never used as the number of attempts.
//
// A verdict is what the guard decided for a delivery: ack, retry, hold or
// dead-letter. The breaker stops calls to a dependency that fails, and the hold is
// the ring buffer in front of the handler meanwhile. A storm is the three thresholds
// of [dlq.StormConfig] crossed together. A dead letter is a message given up, with its
// history. It costs a credit of the source's budget, and successes earn credits.
//
// # Poison or outage
//
// A message is dead-lettered if its error, or its handler, says that it is at fault; if
// it failed twice after something else succeeded, and has had its attempts; or, where
// nothing can be compared, after [Retry.Patience] of silence. An error of the
// dependency never condemns its message: see [Class]. In an ordered source the guard
// finds out by trying up to 64 messages behind one that fails, unless
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
// Safety: a delivery is settled at the broker only when its effect is safe, that is,
// the handler returned nil, or the dead letter is confirmed. A rejection by the guard
// is not an outcome: it costs no attempt, is no failure and is never dead-lettered.
// Every delivery is in exactly one state of [Account] at any instant. Within a
// source (or, when chosen, a key) handlers succeed in the order in which this
// process was handed the messages. One message may come early when a dependency
// recovers while a message fails with an error of [ClassUnknown]. Nothing is
// unbounded, and what is full stops intake.
//
// Liveness: after the last fault every source goes on by itself within a stated time.
// docs/liveness.md has the times, docs/operating.md the few things that wait for a
// person.
package guard
