// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

var kafka = newKafka(240_000, 60_000, 0.05)

// partitions is how many the topics have: as many claims, so as many handlers.
const partitions = 4

// newKafka consumes a topic of n messages with a no-op handler, and one of
// fewer with a handler that is busy for 10 µs. An operation is one message, from
// when the first is there until the last handler call in all four partitions. Each turn is a
// fresh group that reads from the oldest offset; that it has committed every
// message is checked after the clock has stopped.
//
// Both sides have sarama's defaults (256 messages of channel, fetches of 1 MB,
// a commit a second), but for two: what a turn fetches before it is let go must
// not count as a slow consumer, and the fetch that waits when a turn ends does
// so for 100 ms.
func newKafka(n, fewer int, within float64) Group {
	r := &kafkaRig{}
	c := func(name string, n int, busy time.Duration, side kafkaSide) Case {
		return Case{Name: name, N: n, Open: func(ctx context.Context) (Runner, error) { return r.runner(ctx, n, busy, side) }}
	}
	return Group{
		Name:   "kafka",
		About:  "adapters/kafka against a bare sarama consumer group, on a real Kafka, 4 partitions",
		Rounds: 11,
		Passes: 6,
		Steady: "raw_raw",
		Within: within,
		Cases: []Case{
			c("raw", n, 0, r.raw),
			c("guarded", n, 0, r.guarded),
			c("rawcoalesced", n, 0, r.coalesced),
			c("raw_again", n, 0, r.raw),
			c("raw_10us", fewer, busyFor, r.raw),
			c("guarded_10us", fewer, busyFor, r.guarded),
		},
		Ratios: []Ratio{
			{Name: "guarded_raw", Kind: Throughput, Ours: "guarded", Theirs: "raw"},
			{Name: "guarded_rawcoalesced", Kind: Throughput, Ours: "guarded", Theirs: "rawcoalesced"},
			{Name: "raw_raw", Kind: Throughput, Ours: "raw_again", Theirs: "raw"},
			{Name: "guarded_raw_10us", Kind: Throughput, Ours: "guarded_10us", Theirs: "raw_10us"},
			{Name: "cpu_guarded_raw", Kind: CPU, Ours: "guarded", Theirs: "raw"},
			{Name: "cpu_raw_raw", Kind: CPU, Ours: "raw_again", Theirs: "raw"},
		},
	}
}

// A kafkaSide makes the group's handler of one turn.
type kafkaSide func(*course) sarama.ConsumerGroupHandler

func (*kafkaRig) raw(c *course) sarama.ConsumerGroupHandler       { return rawKafka{c, 1} }
func (*kafkaRig) coalesced(c *course) sarama.ConsumerGroupHandler { return rawKafka{c, 64} }
func (r *kafkaRig) guarded(c *course) sarama.ConsumerGroupHandler {
	return guardkafka.Wrap(r.guard.Guard, func(_ context.Context, m *sarama.ConsumerMessage) error {
		c.handle(int(m.Partition))
		return nil
	})
}

// rawKafka is the loop of sarama's documentation. It marks every message, or
// every so many and before it would block, as the guard does.
type rawKafka struct {
	course *course
	every  int
}

func (rawKafka) Setup(sarama.ConsumerGroupSession) error   { return nil }
func (rawKafka) Cleanup(sarama.ConsumerGroupSession) error { return nil }
func (h rawKafka) ConsumeClaim(s sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	if h.every == 1 {
		for m := range claim.Messages() {
			h.course.handle(int(m.Partition))
			s.MarkMessage(m, "")
		}
		return nil
	}
	handled := 0
	for m := range claim.Messages() {
		h.course.handle(int(m.Partition))
		if handled++; handled%h.every == 0 || len(claim.Messages()) == 0 {
			s.MarkMessage(m, "")
		}
	}
	return nil
}

// kafkaRig is what the cases share, from the first to open to the last to close.
type kafkaRig struct {
	users  int
	addrs  []string
	admin  sarama.ClusterAdmin
	guard  *metered
	prefix string
	topics map[int]string // by their number of messages
	turns  int
}

func kafkaConfig() *sarama.Config {
	c := sarama.NewConfig()
	c.Version = sarama.V3_6_0_0
	c.Consumer.Offsets.Initial = sarama.OffsetOldest
	c.Consumer.MaxProcessingTime = time.Minute
	c.Consumer.MaxWaitTime = 100 * time.Millisecond
	c.Producer.Return.Successes = true
	c.Producer.Partitioner = sarama.NewManualPartitioner
	return c
}

func (r *kafkaRig) open(ctx context.Context) (err error) {
	if r.users++; r.users > 1 {
		return nil
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	addr, err := brokers.Find(ctx, brokers.Kafka)
	if err != nil {
		return err
	}
	r.addrs = strings.Split(addr, ",")
	r.prefix = fmt.Sprintf("stormguard-bench-%d-%s", os.Getpid(), strings.ToLower(rand.Text()[:6]))
	r.topics = make(map[int]string)
	if r.admin, err = sarama.NewClusterAdmin(r.addrs, kafkaConfig()); err != nil {
		return err
	}
	r.guard, err = newMetered()
	return err
}

func (r *kafkaRig) close() error {
	if r.users--; r.users > 0 {
		return nil
	}
	var errs []error
	if r.guard != nil {
		errs = append(errs, r.guard.close())
	}
	if r.admin != nil {
		for _, topic := range r.topics {
			errs = append(errs, r.admin.DeleteTopic(topic))
		}
		errs = append(errs, r.admin.Close())
	}
	*r = kafkaRig{}
	return errors.Join(errs...)
}

// topic makes, once, a topic of n messages of 256 bytes.
func (r *kafkaRig) topic(ctx context.Context, n int) (string, error) {
	if name := r.topics[n]; name != "" {
		return name, nil
	}
	name := fmt.Sprintf("%s-%d", r.prefix, n)
	if err := r.admin.CreateTopic(name, &sarama.TopicDetail{NumPartitions: partitions, ReplicationFactor: -1}, false); err != nil {
		return "", err
	}
	r.topics[n] = name
	p, err := sarama.NewSyncProducer(r.addrs, kafkaConfig())
	if err != nil {
		return "", err
	}
	body := sarama.ByteEncoder(make([]byte, 256))
	batch := make([]*sarama.ProducerMessage, 0, 2000)
	for i := range n {
		batch = append(batch, &sarama.ProducerMessage{Topic: name, Partition: int32(i % partitions), Value: body})
		if len(batch) < cap(batch) && i < n-1 {
			continue
		}
		if err := errors.Join(p.SendMessages(batch), ctx.Err()); err != nil {
			return "", errors.Join(err, p.Close())
		}
		batch = batch[:0]
	}
	return name, p.Close()
}

func (r *kafkaRig) runner(ctx context.Context, n int, busy time.Duration, side kafkaSide) (Runner, error) {
	if n%partitions != 0 {
		return Runner{}, fmt.Errorf("%d messages do not fill %d partitions evenly", n, partitions)
	}
	if err := r.open(ctx); err != nil {
		return Runner{}, err
	}
	topic, err := r.topic(ctx, n)
	if err != nil {
		return Runner{}, errors.Join(err, r.close())
	}
	var turn *kafkaTurn
	return Runner{
		Before: func(ctx context.Context, n int) (err error) {
			r.turns++
			turn, err = r.join(ctx, fmt.Sprintf("%s-turn%d", r.prefix, r.turns), topic, newCourse(partitions, n/partitions, busy), side)
			return err
		},
		Do: func(ctx context.Context, _ int) error { return turn.course.run(ctx, turn.ended) },
		After: func(ctx context.Context) error {
			return errors.Join(turn.leave(), r.guard.scrape(ctx), turn.course.check(), r.committed(turn.name, topic, int64(n/partitions)))
		},
		Close: r.close,
	}, nil
}

// kafkaTurn is a member of a group of its own.
type kafkaTurn struct {
	name   string
	course *course
	group  sarama.ConsumerGroup
	cancel context.CancelFunc
	ended  chan error
}

// join starts to consume, up to the first message.
func (r *kafkaRig) join(ctx context.Context, name, topic string, c *course, side kafkaSide) (*kafkaTurn, error) {
	group, err := sarama.NewConsumerGroup(r.addrs, name, kafkaConfig())
	if err != nil {
		return nil, err
	}
	t := &kafkaTurn{name: name, course: c, group: group, ended: make(chan error, 1)}
	ctx, t.cancel = context.WithCancel(ctx)
	go func() { t.ended <- group.Consume(ctx, []string{topic}, side(c)) }()
	if err := c.ready(ctx, t.ended); err != nil {
		c.abandon()
		return nil, errors.Join(err, t.leave())
	}
	return t, nil
}

// leave ends the session, which commits.
func (t *kafkaTurn) leave() error {
	t.cancel()
	return t.group.Close()
}

// committed checks that a group has settled everything, and forgets the group.
func (r *kafkaRig) committed(group, topic string, want int64) error {
	all := make([]int32, partitions)
	for i := range all {
		all[i] = int32(i)
	}
	got, err := r.admin.ListConsumerGroupOffsets(group, map[string][]int32{topic: all})
	if err != nil {
		return err
	}
	for _, p := range all {
		if b := got.GetBlock(topic, p); b == nil || b.Err != sarama.ErrNoError || b.Offset != want {
			return fmt.Errorf("%s: partition %d is committed up to %+v, not %d", group, p, b, want)
		}
	}
	return r.admin.DeleteConsumerGroup(group)
}
