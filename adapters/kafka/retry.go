// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/retry"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// RetryConfig describes the retry topics of one consumer group. Sources, Group and Delays are
// required.
type RetryConfig struct {
	// Sources are the topics whose messages may be parked. They must name all topics that the
	// group consumes.
	Sources []string

	// Group is the consumer group. Retry topics belong to one group. Messages that another group
	// has parked in topics of the same names are skipped, unhandled.
	Group string

	// Delays are how long a message is parked at each level, such as 1m, 10m, 1h: from 1 to 8
	// ascending delays, each from 1ms to 720h.
	Delays []time.Duration

	// Topic names the retry topics. {topic} stands for the source's topic, {group} for the
	// consumer group, and {level} for 1, 2 and so on. Several Delays need {level}, several
	// Sources {topic}. Unset means "{topic}.{group}.retry.{level}".
	Topic string

	// MaxParked is how many messages of a partition may be parked at once, all levels together,
	// from 1 to 10,000,000. Unset means 100,000. Each costs the partition's owner about 200
	// bytes of memory. At the limit nothing more is parked: the message waits, and so do those
	// behind it.
	MaxParked int

	// NoCreate refuses a missing topic instead of creating it. The error has the command that
	// creates it.
	NoCreate bool

	// Replicas is the number of replicas of a topic that is created, from 1 to 32767. Unset
	// means the broker's default.replication.factor.
	Replicas int16

	// Retention is how long a topic that is created keeps messages beyond its delay. If an
	// outage or a stop of the group lasts longer, parked messages are lost. At least 1h; unset
	// means 168h.
	Retention time.Duration
}

// Validate reports everything wrong at once.
func (c RetryConfig) Validate() error { return retry.Config(c).Validate() }

// RetryTopics parks messages whose attempts are used up in retry topics. A long delay there does
// not block a partition: see [WithRetryTopics]. Bodies stay in the topics: for each level of a
// partition, about 1024 messages or 8 MiB at most wait in memory. RetryTopics is safe for
// concurrent use by several handlers of one group. It has two clients, one to write and one to
// read.
type RetryTopics struct{ topics *retry.Topics }

// NewRetryTopics connects to addrs, and creates or checks the retry topics. A retry topic must
//
//   - have as many partitions as its source;
//   - keep messages for its delay and at least 1h more, without a limit in bytes;
//   - not be compacted;
//   - take the source's largest message with 64 KiB of headers.
//
// An unsuitable topic is an [ErrUnsuitable] that names the command that mends it. So is a broker
// that accepts too little metadata with an offset. So are messages that the group has parked in
// topics that cfg does not name any more (fewer Delays, another Topic): nobody would read them.
//
// config is for connecting, as for [NewDLQ]. nil means sarama's defaults. The consumer group's
// Consumer.Offsets.AutoCommit.Interval sets how often the offsets of the retry topics are
// committed. Close the RetryTopics after the consumer group.
func NewRetryTopics(addrs []string, config *sarama.Config, cfg RetryConfig) (*RetryTopics, error) {
	topics, err := retry.New(addrs, config, retry.Config(cfg))
	if err != nil {
		return nil, err
	}
	return &RetryTopics{topics}, nil
}

// Close waits for writes under way, 1s at most, and disconnects. The error tells how many writes
// are left. A consumer group that still runs cannot park after Close: its messages wait.
func (t *RetryTopics) Close() error { return t.topics.Close() }

// parkingPort is the port of a claim with retry topics.
type parkingPort struct {
	*claim
	parked *retry.Partition
}

var (
	_ guard.Parker[*sarama.ConsumerMessage] = parkingPort{}
	_ guard.Marker                          = parkingPort{}
)

func (p parkingPort) Parks(*sarama.ConsumerMessage) bool { return p.parked.Parks() }

func (p parkingPort) Park(ctx context.Context, m *sarama.ConsumerMessage, r *dlq.Record) error {
	return p.parked.Park(ctx, m, r)
}

func (p parkingPort) Parked() (now int, followed uint64) { return p.parked.Parked() }

// Ack also ends an attempt to park the message.
func (p parkingPort) Ack(m *sarama.ConsumerMessage) error {
	p.parked.Settled(m)
	return p.claim.Ack(m)
}

// consumeParking is consume with retry topics.
func (ss *session) consumeParking(c *claim, revoked <-chan struct{}) error {
	ctx, cancel := context.WithCancel(ss.native.Context())
	defer cancel()
	go func() {
		select {
		case <-revoked:
			ss.makeWay()
			cancel()
		case <-ctx.Done():
		}
	}()
	parked, err := ss.h.opts.retries.topics.Open(ctx, retry.Claim{
		Topic: c.topic, Partition: c.partition, Source: c.name, Initial: c.initial,
		Session: ss.native, Config: ss.set.config, Timeout: ss.timeout, Log: ss.h.opts.log,
		ByKey: ss.h.opts.order(ss.h.g) == guard.OrderKey, Key: c.key,
		Settled: func() int64 { at, _ := c.marks.Position(); return at },
	})
	switch {
	case errors.Is(err, ErrUnsuitable):
		return ss.h.refuse(fmt.Errorf("kafka: claim %s: %w", c.name, err))
	case err != nil:
		return nil // the claim is over before it began
	}
	src, err := openClaim(ss, c.name, revoked, func() (*guard.Source[*sarama.ConsumerMessage], error) {
		return guard.Open(ss.h.g, ss.sourceConfig(c), limits(ss.set.config), guard.Port[*sarama.ConsumerMessage](parkingPort{c, parked}), c.noting(parked.Handler(ss.guarded(revoked))))
	})
	if src == nil {
		return err
	}
	again, err := openClaim(ss, c.name+"/retry", revoked, func() (*guard.Source[*retry.Message], error) {
		return guard.OpenParked(src, c.name+"/retry", parked.Port(), parked.ParkedHandler(ss.guarded(revoked)))
	})
	if again == nil {
		ss.endSource(c.topic, src.End)
		return err
	}
	ss.add(c)
	defer ss.remove(c)

	// Handlers may finish after the session's context is over. So that context does not end the
	// loops: End, below, does.
	running := context.WithoutCancel(ss.native.Context())
	ended, end := context.WithCancel(context.Background())
	defer end()
	var loops sync.WaitGroup
	loops.Go(func() { defer end(); _ = src.Run(running, c.native.Messages()) })
	loops.Go(func() { defer end(); _ = again.RunFeed(running) })
	parked.Start(ctx, again.Feed(), end)
	ss.await(c, src.Ended(), ended.Done(), revoked)
	cancel()
	var late guard.Report
	var ending sync.WaitGroup
	ending.Go(func() { late = ss.endSource(c.topic, again.End) })
	report := ss.endSource(c.topic, src.End)
	ending.Wait()
	err = parked.Stop(claimSlack)
	if len(report.Left) == 0 && len(late.Left) == 0 {
		loops.Wait()
	}
	return errors.Join(leftError(c.name, report), leftError(again.Name(), late), err)
}
