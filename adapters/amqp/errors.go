// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"errors"
	"fmt"
)

// Errors to branch on.
var (
	// ErrQueueGone means that the queue does not exist, or does not exist any
	// more.
	ErrQueueGone = errors.New("amqp: queue gone")

	// ErrUnsuitable means that a connection, a channel or a queue is set up in a
	// way that the guard cannot keep its promises with; the text says what
	// mends it.
	ErrUnsuitable = errors.New("amqp: unsuitable configuration")

	// errBlocked means that the broker takes no messages from a connection,
	// usually for want of memory or disk; the text has its reason.
	errBlocked = errors.New("amqp: connection blocked by the broker")

	// errNoQueue means that a dead letter could not be routed to its queue. It
	// is a [dlq.ErrRefused].
	errNoQueue = errors.New("amqp: no queue takes the dead letter")

	// errChannelGone means that a delivery cannot be settled any more, since the
	// channel it came from has ended: the broker delivers it again.
	errChannelGone = errors.New("amqp: the delivery's channel has ended")

	// errSettled means that a delivery was settled before, or that it is not the
	// caller's to settle.
	errSettled = errors.New("amqp: already settled")
)

// unsuitable is an [ErrUnsuitable] with its reason.
func unsuitable(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrUnsuitable, fmt.Sprintf(format, args...))
}
