// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"errors"
	"fmt"
)

// Errors to branch on.
var (
	// ErrConsumerGone means that the consumer, or its stream, no longer exists. The next
	// consumer that is made delivers the unsettled messages.
	ErrConsumerGone = errors.New("nats: consumer gone")

	// ErrConnectionClosed means that the connection has ended for good. Connect with
	// MaxReconnects(-1) and IgnoreAuthErrorAbort, so that only Close ends it.
	ErrConnectionClosed = errors.New("nats: connection closed")

	// ErrUnsuitable means that the guard cannot keep its promises with the configuration
	// of a stream or consumer. The text has the command that corrects it.
	ErrUnsuitable = errors.New("nats: unsuitable configuration")

	// errNoStream means that no stream takes the subject of a dead letter. It comes with
	// a [dlq.ErrRefused].
	errNoStream = errors.New("nats: no stream takes the subject")
)

// unsuitable is an [ErrUnsuitable] with its reason.
func unsuitable(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrUnsuitable}, args...)...)
}
