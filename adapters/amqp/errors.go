// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"errors"
	"fmt"
)

// Errors to branch on.
var (
	// ErrQueueGone means that the queue does not exist, or was deleted.
	ErrQueueGone = errors.New("amqp: queue gone")

	// ErrUnsuitable means that a connection, a channel or a queue has settings with which the guard
	// cannot keep its promises. The text says how to repair it.
	ErrUnsuitable = errors.New("amqp: unsuitable configuration")

	// errBlocked means that the broker takes no messages from a connection, usually because memory
	// or disk is short. The text has its reason.
	errBlocked = errors.New("amqp: connection blocked by the broker")

	// errNoQueue means that a dead letter could not be routed to its queue. It
	// is a [dlq.ErrRefused].
	errNoQueue = errors.New("amqp: no queue takes the dead letter")

	// errChannelGone means that a delivery can no longer be settled, because its channel has ended.
	// The broker delivers it again.
	errChannelGone = errors.New("amqp: the delivery's channel has ended")

	// errSettled means that a delivery was settled before, or that the caller must not settle it.
	errSettled = errors.New("amqp: already settled")
)

// unsuitable is an [ErrUnsuitable] with its reason.
func unsuitable(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrUnsuitable, fmt.Sprintf(format, args...))
}
