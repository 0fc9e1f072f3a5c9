// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package guardnats guards JetStream consumers.
//
// [Consume] is the shape to choose: it owns the reader, so everything it took
// from the server is kept alive, handed to a plain function, and acked, retried,
// held or dead-lettered as package guard decides. [WrapConsumer] keeps the loop
// of a program that already calls a [jetstream.Consumer]; its comment lists what
// that shape cannot do.
//
// JetStream has no dead-letter queue. [NewDLQ] makes one of a stream, and
// [NewMover] brings the messages to it that the server itself has given up on.
// Consume works it off at a rate ([WithLimiter]), and not at all while the breaker of
// what it works with is open. [ReadDeadLetter] reads a letter. What fails here needs a
// place too: [WithDeadLetters] with another stream. Without it a letter that keeps failing
// waits, and unless the policy's order is none, those behind it wait as well.
//
// # What the consumer should be
//
// A durable pull consumer with explicit acks. MaxAckPending is shared by all
// instances: one that holds takes one and a half windows out of it, so with
// several instances set [WithWindow] to a part of it. A MaxDeliver is best left
// out (-1): the guard's own attempts end a message, and every nak, crash and
// missed keep-alive counts as a delivery. After a failure at the last delivery the
// message's attempts count as used up. The connection needs nats.MaxReconnects(-1),
// nats.IgnoreAuthErrorAbort(), a nats.PingInterval of 10s and a nats.FlusherTimeout of 5s;
// a line at WARN names those that are missing.
//
// # What happens when
//
// A server restarts, or the connection breaks: acks are buffered by the client
// and sent after it is back; what could not be kept alive is delivered again, and
// handled once if this process still has it, or has just acked it. The
// consumer is deleted: [ErrConsumerGone]. The stream of dead letters is down:
// nothing that should go there is acked; it waits. The process is killed: what
// was not acked comes back after the AckWait, at most what was being handled and
// the acks in the client's buffer twice.
package guardnats
