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
// A source is what is guarded: one Kafka topic-partition of a group, one
// RabbitMQ queue, one JetStream consumer. A delivery is one message handed over
// once by a broker. An attempt is one call of the handler that this process
// made; the broker's own count of deliveries also rises for messages that no
// handler ever saw, and is never used as the number of attempts. A verdict is
// what the guard decided for a delivery: ack, retry, hold or dead-letter. The
// hold is the ring buffer in front of the handler. A storm is the three
// thresholds of [dlq.StormConfig] crossed together.
//
// # Where to start
//
// [New] makes a Guard, one for a process. Programs then call an adapter
// (package adapters/nats and its siblings) or, for a plain function, [Protect].
// Adapters call [Open] and [Source.Run]; docs/adapter.md walks through one.
//
// # What is promised
//
// A delivery is settled at the broker only when its effect is safe: the handler
// returned nil, or the dead letter is confirmed. A rejection by the guard is not
// an outcome: it costs no attempt, is no failure and is never dead-lettered.
// Every delivery is in exactly one state of [Account] at any instant. Within a
// source (or, when chosen, a key) handlers succeed in the order in which this
// process was handed the messages. Nothing is unbounded, and what is full stops
// intake.
package guard
