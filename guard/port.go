// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// A Port is the adapter's side of one epoch of one source: a Kafka claim, a
// RabbitMQ channel, a JetStream pull. The adapter alone touches the broker, the
// guard alone decides. M is the client's own message type, end to end.
//
// Concurrency. Lane, Size and Ack are called by the source's loop; with more
// than one worker, or in the passive shape, calls may overlap. Meta, Extend and,
// where there is an AckWait, Flush may come from other goroutines of the guard
// at any time. No lock of the guard is held during any call, and none comes
// after [Source.End] returned.
type Port[M any] interface {
	// Lane is the hash of the message's key: messages of one lane keep their
	// order. It is asked only when the order is [OrderKey]. A panic is lane 0.
	Lane(M) uint64

	// Size is the message's weight in bytes in the budget of the hold. Run and
	// RunFeed ask it once for each message that is not acked at once, in the order
	// of intake and before a later one is acked: a port of a log, which may only
	// move a low watermark, learns there what it must not pass.
	Size(M) int

	// Meta describes the message. It may allocate: the closed path never asks,
	// unless spans are recorded.
	Meta(M) Meta

	// Ack settles the message as done, at most once for each. It may coalesce:
	// Flush follows before the loop blocks. An error means that the broker will
	// deliver the message again; it is counted, and not retried by the guard.
	// [ErrTakenBack] is none: the adapter itself will hand the message over again.
	Ack(M) error

	// Extend tells the broker that these messages are still being held, every
	// third of [Limits.AckWait]. The slice is the guard's: don't keep it.
	Extend([]M)

	// Return gives messages back unsettled, once, while the epoch lives. What
	// the broker counts as a delivery for that is the adapter's to keep small.
	Return([]M, Reason) error

	// Demand tells how many more messages the source has room for. 0 pauses
	// fetching; a later number above 0 resumes it: when half of the window is free,
	// or when nothing moves. After an [ErrFull] it is told such a number too.
	Demand(n int)

	// Flush sends coalesced acks: before the loop blocks, after every 64 acks
	// at most, with each Extend while a handler runs, and before the epoch ends.
	Flush() error
}

// Meta is what the broker and the producer said about a message.
type Meta struct {
	Key, Body []byte
	Headers   []dlq.Header
	Timestamp time.Time  // zero if the broker gave none
	Origin    dlq.Origin // where it stands at the broker

	// Properties are what the broker carries beside the headers, such as
	// AMQP's content-type, under the broker's names: for its own dead letters.
	Properties []dlq.Header

	// Deliveries is the broker's own count, from 1; 0 means that it does not
	// count. It is evidence of a crashing handler only, never our attempts.
	Deliveries int

	// Content names a message for which the broker has no name: a hash of what each
	// delivery of it has. Origin.MessageID is of this delivery alone then. The same may
	// be said of two messages, so it counts from the second delivery on: Redelivered. It
	// is called when the message fails.
	Content     func() string
	Redelivered bool

	// Attempts and FirstFailed are of a message's handler calls before it was parked: see
	// [Parker]. They are a part of those of its dead letter.
	Attempts    int
	FirstFailed time.Time

	// Lag is the number of messages behind this one at the broker, -1 if unknown.
	Lag int64
}

// Limits are the broker's deadlines and bounds for one source. The zero value
// means that the broker has none. [Open] refuses settings that cannot meet them.
type Limits struct {
	// AckWait is how long the broker waits for an ack or an extension before it
	// delivers a message again. Held messages are extended at a third of it.
	AckWait time.Duration

	// HoldMax is how long a message may stay unsettled although it is extended
	// (RabbitMQ's consumer timeout). A handler timeout above it is refused.
	HoldMax time.Duration

	// RevokeGrace is how long a handler may go on once the source is taken away
	// (Kafka's rebalance timeout). A handler timeout above it is refused.
	RevokeGrace time.Duration

	// MaxUnacked is how many unsettled messages the broker hands out
	// (MaxAckPending, prefetch). A larger window is refused.
	MaxUnacked int

	// MaxDeliver is how often the broker delivers one message. A failure at the
	// last delivery is treated as if the attempts were used up.
	MaxDeliver int

	// EndsWithInput says that a closed input means the source was taken away:
	// Run returns at once and leaves what is held to End. Otherwise Run first
	// finishes what it has.
	EndsWithInput bool
}

// A Reason says why a source is not simply running, or why a message went back.
// It is one vocabulary for states, metrics, logs and reports.
type Reason uint8

// The reasons, and who may clear each.
const (
	ReasonNone         Reason = iota
	ReasonBreaker             // the breaker is not closed; its own probes clear it
	ReasonLimiter             // the rate limit is spent; time clears it
	ReasonBackpressure        // the window is full, the handler asked for time, or a drain ramps up; clears itself
	ReasonStorm               // the three thresholds are crossed; the detector clears it
	ReasonDLQ                 // the DLQ budget is spent or its writer is down; credits, an operator or the writer clear it
	ReasonOperator            // paused or forced by a person, who clears it
	ReasonRebalance           // the broker took the source away
	ReasonShutdown            // the process is stopping
	reasonCount
)

var reasonNames = [reasonCount]string{
	"none", "breaker", "limiter", "backpressure", "storm", "dlq", "operator", "rebalance", "shutdown",
}

// String is the reason's word in metrics, logs and reports.
func (r Reason) String() string {
	if r < reasonCount {
		return reasonNames[r]
	}
	return "unknown"
}
