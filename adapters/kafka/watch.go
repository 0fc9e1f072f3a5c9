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

// WatchErrors reads a group's Errors until they are closed, which
// ConsumerGroup.Close does, or ctx ends. It needs Consumer.Return.Errors. sarama
// tells there, and nowhere else, that a commit failed or a partition cannot be
// read; when nobody reads, it drops what it has to tell. Each error is logged
// when it is new for its partition, and again with its count after 30s at the
// earliest. Run it on a goroutine of its own, before the first Consume.
//
// The guard's own look at what is committed (see [WithClient]) says the same
// later, without it.
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
			if now := time.Now(); now.Sub(t.said) >= sayAgain {
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
	sayAgain = 30 * time.Second
	maxKinds = 1024 // kinds of errors that are remembered
)
