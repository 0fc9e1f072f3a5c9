// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package chaosrun

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka"
	"github.com/stormguard-mq/stormguard/guard"
)

// onKafka is a topic with one partition for each consumer, its group, and the topic of the
// dead letters.
type onKafka struct {
	addrs              []string
	topic, dead, group string
	consumers          int
	mutant             Mutant
	member             string // static member's name; empty: each process is a new member
	oneByOne           bool   // sends single messages: of several, sarama may write a later one and drop an earlier one

	client   sarama.Client
	admin    sarama.ClusterAdmin
	producer sarama.SyncProducer
}

func newKafka(j Job) *onKafka {
	b := &onKafka{mutant: j.Mutant, consumers: j.Consumers, oneByOne: j.OneByOne, addrs: strings.Split(j.URL, ","), topic: "chaos." + j.ID, dead: "chaos." + j.ID + ".dlq", group: "chaos." + j.ID}
	if j.Static {
		b.member = fmt.Sprint("consumer-", j.Consumer)
	}
	return b
}

func (b *onKafka) config() *sarama.Config {
	c := sarama.NewConfig()
	c.ClientID = "stormguard-chaos"
	c.Version = sarama.V2_8_0_0
	c.Consumer.Offsets.Initial = sarama.OffsetOldest
	c.Producer.Idempotent, c.Producer.RequiredAcks, c.Net.MaxOpenRequests = true, sarama.WaitForAll, 1
	c.Producer.Return.Successes = true
	c.Metadata.AllowAutoTopicCreation = false
	// A static member: the next process of this name takes over from a killed one at once.
	c.Consumer.Group.InstanceId = b.member
	return c
}

func (b *onKafka) lay(context.Context) (err error) {
	if b.client, err = sarama.NewClient(b.addrs, b.config()); err != nil {
		return err
	}
	if b.admin, err = sarama.NewClusterAdminFromClient(b.client); err != nil {
		return err
	}
	for name, partitions := range map[string]int{b.topic: b.consumers, b.dead: 1} {
		if err := b.admin.CreateTopic(name, &sarama.TopicDetail{NumPartitions: int32(partitions), ReplicationFactor: -1}, false); err != nil {
			return fmt.Errorf("create topic %s: %w", name, err)
		}
	}
	b.producer, err = sarama.NewSyncProducerFromClient(b.client)
	return err
}

func (b *onKafka) remove(context.Context) {
	if b.producer != nil {
		_ = b.producer.Close()
	}
	if b.admin != nil {
		_ = b.admin.DeleteTopic(b.topic)
		_ = b.admin.DeleteTopic(b.dead)
		_ = b.admin.DeleteConsumerGroup(b.group)
	}
	if b.client != nil {
		_ = b.client.Close()
	}
}

func (b *onKafka) publish(_ context.Context, ms []message) error {
	all := make([]*sarama.ProducerMessage, len(ms))
	for i, m := range ms {
		all[i] = &sarama.ProducerMessage{Topic: b.topic, Key: sarama.StringEncoder(m.key), Value: sarama.ByteEncoder(m.body)}
	}
	if !b.oneByOne {
		return b.producer.SendMessages(all)
	}
	for _, m := range all {
		if _, _, err := b.producer.SendMessage(m); err != nil {
			return err
		}
	}
	return nil
}

func (b *onKafka) left(context.Context) (left int, err error) {
	partitions := make([]int32, b.consumers)
	for i := range partitions {
		partitions[i] = int32(i)
	}
	offsets, err := b.admin.ListConsumerGroupOffsets(b.group, map[string][]int32{b.topic: partitions})
	if err != nil {
		return 0, err
	}
	for _, p := range partitions {
		end, err := b.client.GetOffset(b.topic, p, sarama.OffsetNewest)
		if err != nil {
			return 0, err
		}
		block := offsets.GetBlock(b.topic, p)
		if block == nil {
			return 0, errors.New("the group's offsets do not name the topic")
		}
		if block.Err != sarama.ErrNoError {
			return 0, block.Err
		}
		left += int(end - max(block.Offset, 0))
	}
	return left, nil
}

func (b *onKafka) letters(ctx context.Context) (all [][]byte, err error) {
	n, err := b.client.GetOffset(b.dead, 0, sarama.OffsetNewest)
	if err != nil || n == 0 {
		return nil, err
	}
	consumer, err := sarama.NewConsumerFromClient(b.client)
	if err != nil {
		return nil, err
	}
	defer func() { _ = consumer.Close() }()
	in, err := consumer.ConsumePartition(b.dead, 0, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = in.Close() }()
	for int64(len(all)) < n {
		select {
		case m := <-in.Messages():
			all = append(all, m.Value)
		case <-time.After(10 * time.Second):
			return nil, fmt.Errorf("the DLQ gave out %d of %d messages", len(all), n)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return all, nil
}

func (b *onKafka) consume(ctx context.Context, g *guard.Guard, handle func(context.Context, []byte) error) error {
	letters, err := patiently(ctx, func() (*guardkafka.DLQ, error) {
		return guardkafka.NewDLQ(b.addrs, b.config(), guardkafka.DLQConfig{Topic: b.dead, Sources: []string{b.topic}})
	})
	if err != nil {
		return err
	}
	group, err := patiently(ctx, func() (sarama.ConsumerGroup, error) {
		return sarama.NewConsumerGroup(b.addrs, b.group, b.config())
	})
	if err != nil {
		return err
	}
	return guardkafka.Consume(ctx, group, []string{b.topic}, guardkafka.Wrap(g, func(ctx context.Context, m *sarama.ConsumerMessage) error {
		return handle(ctx, m.Value)
	}, guardkafka.WithDeadLetters(b.mutant.writer(letters))))
}
