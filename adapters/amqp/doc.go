// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package guardamqp guards consumers of RabbitMQ queues, over AMQP 0-9-1.
//
// [Consume] is the shape to choose: it owns connection and channel, hands each
// delivery to a plain function, and acks, retries, holds or dead-letters it as
// package guard decides. [Deliveries] keeps the loop of a program that already
// consumes from a channel; its comment lists what that shape cannot do.
//
// Dead letters go to a queue or stream by [NewDLQ], with their history, or
// natively by [WithDeadLetterExchange], without. [Inspect] reads what the
// protocol does not tell about a queue, and says what would lose messages.
//
// # What the queue should be
//
// A quorum queue with a dead-letter exchange, or one without a delivery limit, which
// [WithDeliveryLimit] must say: a channel that breaks counts as a delivery of
// everything it had prefetched, and at its limit the broker drops a message unless it
// has somewhere to put it. For order over several consumers, x-single-active-consumer.
// Streams are not queues of work: they are refused.
//
// # What happens when
//
// A broker restarts, or the connection breaks: it is made anew, to any of the
// endpoints. The queue is deleted: [ErrQueueGone]. The broker has a memory or
// disk alarm: consuming goes on, since dead letters have a connection of their
// own; they wait, and the source's state says why. The consumer timeout comes
// near: see [Consume]. The process is killed: what was not acked comes back, at
// most what was being handled and the acks on their way twice.
package guardamqp
