// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package guardnats guards JetStream consumers.
//
// Use [Consume] if you can. It owns the reader: it keeps every message from the server
// alive, hands it to a plain function, and acks, retries, holds or dead-letters it as
// package guard decides. [WrapConsumer] is for a program that already calls a
// [jetstream.Consumer] in its own loop; its comment lists the limits of that shape.
//
// JetStream has no dead-letter queue. [NewDLQ] uses a stream as one, and [NewMover] brings
// messages there that the server itself has given up on. [ReadDeadLetter] reads a letter.
//
// To work off dead letters, guard their stream with Consume: at a rate ([WithLimiter]), and
// with a pause while the breaker of the dependency is open. A letter that fails there again
// needs another stream, set with [WithDeadLetters]. Without it such a letter waits, and the
// letters behind it wait as well, unless the policy's order is none.
//
// # What the consumer should be
//
// A durable pull consumer with explicit acks, and without a MaxDeliver (-1): the guard's own
// attempts end a message. Every nak, crash and missed keep-alive counts as a delivery. If a
// message fails at its last delivery, its attempts count as used up.
//
// All instances share MaxAckPending. An instance on hold uses one and a half windows of it,
// so with several instances set [WithWindow] to a part of it.
//
// The connection needs nats.MaxReconnects(-1), nats.IgnoreAuthErrorAbort(), a
// nats.PingInterval of 10s and a nats.FlusherTimeout of 5s. A line at WARN names missing
// options.
//
// # What happens when
//
//   - A server restarts, or the connection breaks: the client keeps acks and sends them after
//     the reconnect. The server redelivers messages that could not be kept alive. This
//     process does not handle such a copy if it still has the message or has just acked it.
//   - The consumer is deleted: Consume returns [ErrConsumerGone].
//   - The stream of dead letters is down: messages that should go there wait unacked.
//   - The process is killed: unacked messages come back after the AckWait. At most the
//     messages in a handler, and those whose acks were in the client's buffer, are handled
//     twice.
package guardnats
