// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"errors"
	"fmt"
)

// Errors to branch on.
var (
	// ErrConsumerGone means that the consumer, or its stream, does not exist any
	// more. What was unsettled is delivered by whatever consumer is made next.
	ErrConsumerGone = errors.New("nats: consumer gone")

	// ErrConnectionClosed means that the connection has ended for good. Connect
	// with MaxReconnects(-1) and IgnoreAuthErrorAbort, so that only Close does that.
	ErrConnectionClosed = errors.New("nats: connection closed")

	// ErrUnsuitable means that a stream or consumer is configured in a way that
	// the guard cannot keep its promises with; the text has the command that
	// mends it.
	ErrUnsuitable = errors.New("nats: unsuitable configuration")

	// errNoStream means that no stream takes the subject of a dead letter. It is
	// a [dlq.ErrRefused].
	errNoStream = errors.New("nats: no stream takes the subject")
)

// unsuitable is an [ErrUnsuitable] with its reason.
func unsuitable(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrUnsuitable}, args...)...)
}
