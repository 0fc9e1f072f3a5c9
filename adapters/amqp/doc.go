// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package guardamqp guards consumers of RabbitMQ queues, over AMQP 0-9-1.
//
// Use [Consume] in a new program. It owns the connection and the channel, and calls a plain
// function with each delivery. Then it acks, retries, holds or dead-letters the delivery, as
// package guard decides. [Deliveries] is for a program that has its own loop over a channel. Its
// comment lists what that shape cannot do.
//
// [NewDLQ] writes dead letters to a queue or stream, with their history. [WithDeadLetterExchange]
// leaves dead-lettering to the broker, without the history. [Inspect] reads settings of a queue
// that a client cannot read over AMQP, and reports those that would lose messages.
//
// # What the queue should be
//
// Use a quorum queue. A channel that breaks counts as a delivery of all messages that it had
// prefetched. At the delivery limit the broker drops a message, unless the queue has a dead-letter
// exchange. So set one, or use a queue without a limit and say so with [WithDeliveryLimit].
//
// To keep order over several consumers, set x-single-active-consumer. Streams are refused: they are
// no work queues.
//
// # What happens when
//
//   - The broker restarts, or the connection breaks: Consume connects again, to any endpoint.
//   - The queue is deleted: Consume returns [ErrQueueGone].
//   - The broker has a memory or disk alarm: consuming goes on, because dead letters have a
//     connection of their own. Dead letters wait, and the source's state says why.
//   - The consumer timeout comes near: see [Consume].
//   - The process is killed: the broker delivers all unacked messages again. At most the messages
//     in handlers, and those whose acks were on their way, are handled twice.
package guardamqp
