// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"errors"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/cluster"
)

// Errors to branch on.
var (
	// ErrUnsuitable means that the guard cannot keep its promises with the configuration of a
	// client, group or topic. The text says what to set.
	ErrUnsuitable = cluster.ErrUnsuitable

	// errNotWrapped means that [Fail] was given a session that is not the one
	// [WrapHandler] handed to the handler.
	errNotWrapped = errors.New("kafka: not the session of a wrapped handler")

	// errNotMarked is the failure of a message that a wrapped handler has
	// neither marked nor failed within the policy's Timeout.
	errNotMarked = errors.New("kafka: not marked within the timeout")
)
