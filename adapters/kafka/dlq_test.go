// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package kafka

import (
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// letterOf is a dead letter of a message of a topic's partition 0.
func letterOf(topic string, offset int64) *dlq.Record {
	return &dlq.Record{
		Key: []byte("k"), Body: []byte("body"), Headers: []dlq.Header{{Name: "tenant", Value: []byte("acme")}},
		Timestamp: time.Now().Add(-time.Hour).UTC().Truncate(time.Millisecond),
		Origin:    dlq.Origin{System: system, Source: topic, Group: "g", HasPartition: true, Offset: offset, HasOffset: true},
		Attempts:  3, Reason: dlq.ReasonAttempts, Error: dlq.ErrorInfo{Type: "*errors.errorString", Message: "down"},
		FirstFailed: time.Now().UTC(), LastFailed: time.Now().UTC(),
	}
}
