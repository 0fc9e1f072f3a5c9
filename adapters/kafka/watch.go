// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/IBM/sarama"
)

// WatchErrors logs the errors of a consumer group. It reads the group's Errors until
// ConsumerGroup.Close closes them, or ctx ends. Run it on its own goroutine, before the first
// Consume. It needs Consumer.Return.Errors.
//
// Only there does sarama tell that a commit failed or a partition cannot be read. When nobody
// reads, sarama drops these errors. An error is logged when it is new for its partition, and
// again with its count after 30s at the earliest.
//
// The guard also looks at the committed offsets (see [WithClient]): without WatchErrors it
// reports the same, later.
func WatchErrors(ctx context.Context, group sarama.ConsumerGroup, log *slog.Logger) {
	type kind struct {
		place
		text string
	}
	type tally struct {
		said time.Time
		n    int
	}
	seen := make(map[kind]tally)
	for {
		select {
		case err, ok := <-group.Errors():
			if !ok {
				return
			}
			k := kind{place{"", -1}, err.Error()}
			if ce, ok := errors.AsType[*sarama.ConsumerError](err); ok {
				k = kind{place{ce.Topic, ce.Partition}, ce.Err.Error()}
			}
			t := seen[k]
			t.n++
			if now := time.Now(); now.Sub(t.said) >= repeatAfter {
				log.Warn("consumer group", "topic", k.topic, "partition", k.partition, "error", k.text, "times", t.n)
				t = tally{said: now}
			}
			if len(seen) >= maxKinds {
				clear(seen)
			}
			seen[k] = t
		case <-ctx.Done():
			return
		}
	}
}

const (
	repeatAfter = 30 * time.Second
	maxKinds    = 1024 // kinds of errors that are remembered
)
