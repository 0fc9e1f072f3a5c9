// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// A Port is the adapter's side of one epoch of one source: a Kafka claim, a
// RabbitMQ channel, a JetStream pull. The adapter alone touches the broker, the
// guard alone decides. M is the client's own message type; the handler gets it, too.
//
// Concurrency: the source's loop calls Lane, Size and Ack. With more than one
// worker, or in the passive shape, these calls may overlap. Other goroutines of
// the guard may call Meta, Extend and, if there is an AckWait, Flush at any time.
// The guard holds no lock during a call, and makes no call after [Source.End]
// returned.
type Port[M any] interface {
	// Lane is the hash of the message's key: messages of one lane keep their
	// order. It is called only with [OrderKey]. If it panics, the lane is 0.
	Lane(M) uint64

	// Size is the message's weight in bytes; see [Policy.WindowBytes]. Run and
	// RunFeed call it once for each message that is not acked at once, in the order
	// of intake, and before a later message is acked. So the port of a log, which can
	// only move a low watermark, learns which messages the watermark must not pass.
	Size(M) int

	// Meta describes the message. It may allocate: without spans, the closed path
	// calls it only for one message in 1,024.
	Meta(M) Meta

	// Ack settles the message as done, at most once for each message. It may coalesce
	// acks: Flush follows before the loop blocks. An error means that the broker will
	// deliver the message again; the guard counts the error and does not retry.
	// [ErrTakenBack] is no such error: the adapter will hand the message over again.
	Ack(M) error

	// Extend tells the broker that these messages are still held. The guard calls it
	// every third of [Limits.AckWait]. Extend must not keep the slice.
	Extend([]M)

	// Return gives messages back unsettled, once, while the epoch lives. If the broker
	// counts that as a delivery, the adapter keeps the count as small as it can.
	Return([]M, Reason) error

	// Demand tells how many more messages the source has room for. 0 pauses
	// fetching. A later number above 0 resumes it: when half of the window is free,
	// or when nothing moves. Such a number also follows each [ErrFull].
	Demand(n int)

	// Flush sends coalesced acks. The guard calls it before the loop blocks, after at
	// most 64 acks, with each Extend while a handler runs, and before the epoch ends.
	Flush() error
}

// Meta has the data of the broker and of the producer about a message.
type Meta struct {
	Key, Body []byte
	Headers   []dlq.Header
	Timestamp time.Time  // zero if the broker gave none
	Origin    dlq.Origin // the message's place at the broker

	// Properties are the fields that the broker keeps beside the headers, such as
	// AMQP's content-type, by the broker's names. They go into its dead letters.
	Properties []dlq.Header

	// Deliveries is the broker's own count of deliveries, from 1; 0 means that the
	// broker does not count. It is never the number of attempts: it tells of a
	// crashing handler, and of [Limits.MaxDeliver].
	Deliveries int

	// Content names a message for which the broker has no name: it returns a hash of
	// what all deliveries of the message have in common. Origin.MessageID is then the
	// name of this delivery alone. Two messages may have one hash, so the guard trusts
	// it only if Redelivered is set. The guard calls Content when the message fails.
	Content     func() string
	Redelivered bool

	// Attempts and FirstFailed are the message's handler calls and first failure before
	// it was parked: see [Parker]. Its dead letter includes them.
	Attempts    int
	FirstFailed time.Time

	// Lag is the number of messages behind this one at the broker, -1 if unknown.
	Lag int64
}

// Limits are the broker's deadlines and bounds for one source. The zero value, also
// of one field, means no limit. [Open] refuses settings that cannot meet the limits.
type Limits struct {
	// AckWait is how long the broker waits for an ack or an extension before it
	// delivers a message again. The guard extends held messages every AckWait/3.
	AckWait time.Duration

	// HoldMax is how long a message may stay unsettled although it is extended
	// (RabbitMQ's consumer timeout). A handler timeout above it is refused.
	HoldMax time.Duration

	// RevokeGrace is how soon a handler must have returned after the broker took the source
	// away (Kafka's rebalance timeout). A handler timeout above it is refused.
	RevokeGrace time.Duration

	// MaxUnacked is how many unsettled messages the broker hands out
	// (MaxAckPending, prefetch). A larger window is refused.
	MaxUnacked int

	// MaxDeliver is how often the broker delivers one message. A failure at the
	// last delivery is treated as if the attempts were used up.
	MaxDeliver int

	// EndsWithInput says that a closed input means that the broker took the source
	// away: Run returns at once and leaves unsettled messages to End. Otherwise Run
	// first finishes its messages.
	EndsWithInput bool
}

// A Reason says why a source waits or is slowed down, or why a message went back to
// the broker. States, metrics, logs and reports use the same words.
type Reason uint8

// The reasons, and what ends each.
const (
	ReasonNone         Reason = iota
	ReasonBreaker             // the breaker is not closed; its own probes clear it
	ReasonLimiter             // the rate limit is spent; time clears it
	ReasonBackpressure        // the window is full, the handler asked for time, or a drain ramps up; ends by itself
	ReasonStorm               // the three thresholds are crossed; the detector clears it
	ReasonDLQ                 // the DLQ budget is spent or its writer is down; credits, an operator or the writer clear it
	ReasonOperator            // a person paused the source; a person or the end of the pause clears it
	ReasonRebalance           // the broker took the source away
	ReasonShutdown            // the process is stopping
	ReasonLost                // the broker takes no ack of this epoch any more, such as after a broken connection
	reasonCount
)

var reasonNames = [reasonCount]string{
	"none", "breaker", "limiter", "backpressure", "storm", "dlq", "operator", "rebalance", "shutdown", "lost",
}

// String is the reason's word in metrics, logs and reports.
func (r Reason) String() string {
	if r < reasonCount {
		return reasonNames[r]
	}
	return "unknown"
}
