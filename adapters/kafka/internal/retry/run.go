// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package retry parks Kafka messages in retry topics, and reads them back when they are due. The
// adapter opens the guard's sources. This package does their work with the broker.
package retry

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/cluster"
	"github.com/stormguard-mq/stormguard/guard"
)

// Fits reports why messages of a group's claims could not be parked.
func (t *Topics) Fits(group string, claims map[string][]int32) error {
	var errs []error
	if group != t.cfg.Group {
		errs = append(errs, cluster.Unsuitable("RetryConfig.Group: %q, and the consumer group is %q: retry topics belong to one group", t.cfg.Group, group))
	}
	for topic, partitions := range claims {
		if !slices.Contains(t.cfg.Sources, topic) {
			errs = append(errs, cluster.Unsuitable("RetryConfig.Sources: topic %q is consumed and is not among them; a retry topic is never consumed by itself", topic))
			continue
		}
		for level := range t.cfg.Delays {
			name := t.cfg.Name(topic, level+1)
			have, err := t.out.Client.Partitions(name)
			most := slices.Max(append(partitions, -1))
			if err == nil && int(most) >= len(have) { // what the client knows may be ten minutes old
				if err = t.out.Client.RefreshMetadata(name); err == nil {
					have, err = t.out.Client.Partitions(name)
				}
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("kafka: retry topic %s: %w", name, err))
			} else if int(most) >= len(have) {
				errs = append(errs, cluster.Unsuitable("topic %s: it has %d partitions, and partition %d of %s has none to be parked in: kafka-topics.sh --alter --topic %s --partitions N",
					name, len(have), most, topic, name))
			}
		}
	}
	return errors.Join(errs...)
}

// Open reads the parked messages of a claim. A claim that does not fit is a
// [cluster.ErrUnsuitable]; any other error is ctx's.
func (t *Topics) Open(ctx context.Context, c Claim) (*Partition, error) {
	pt := newPartition(t, c)
	return pt, pt.boot(ctx)
}

// Start reads on until ctx ends, and hands due messages to feed: the feed of the source that was
// opened with [Partition.Port]. It commits what is done until Stop. It calls broken if a retry
// topic is another one than before: the claim must then begin again.
func (pt *Partition) Start(ctx context.Context, feed *guard.Feed[*Message], broken func()) {
	pt.broken = broken
	for _, l := range pt.levels {
		pt.reading.Go(func() { pt.read(ctx, l) })
	}
	pt.reading.Go(func() { pt.dispatch(ctx, feed) })
	pt.committing.Go(func() { pt.commitAlways(pt.settled) })
}

// Stop ends what Start began. Call it when the context of Start and both sources have ended. It
// waits for the last commit, no longer than limit. If a broker is silent, running requests go on
// after limit and end with sarama's timeouts. No new commit is sent then.
func (pt *Partition) Stop(limit time.Duration) error {
	inTime, _ := cluster.EndsWithin(limit, func() error {
		pt.reading.Wait()
		close(pt.settled)
		pt.committing.Wait()
		return nil
	})
	if inTime {
		return nil
	}
	pt.abandoned.Store(true)
	return fmt.Errorf("kafka: claim %s: the last commit of its retry topics is not confirmed: what was handled of them may be handled again", pt.c.Source)
}
