// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/access"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

var onKafka = platform{
	title: "Kafka", store: "topic",
	unguarded: "five tries in place, then the DLQ, and the mark",
	guarded:   "guardkafka.Wrap(g, handle)",
	address:   access.KafkaForm,
	check:     access.KafkaAddress,
	open: func(_ context.Context, _ Config, address string, a *access.Access) (broker, error) {
		return kafkaCluster{strings.Split(address, ","), a}, nil
	},
	found: brokers.Kafka,
}

// kafkaCluster is a running cluster, and the access to it.
type kafkaCluster struct {
	addrs  []string
	access *access.Access
}

func (kafkaCluster) close() {}

// kafkaRun is the [plumbing] of one run: two topics of one partition, and a
// group.
//
// Goroutines: two pass on the producer's answers, until remove.
type kafkaRun struct {
	kafkaCluster
	topic, dlq, group string
	client            sarama.Client
	admin             sarama.ClusterAdmin
	producer          sarama.AsyncProducer
	answers           sync.WaitGroup
}

// config changes sarama's defaults, so that no published message is skipped,
// doubled or overtaken.
func (b kafkaCluster) config() *sarama.Config {
	c := sarama.NewConfig()
	c.ClientID = "stormguard-demo"
	c.Version = sarama.V2_8_0_0
	c.Net.DialTimeout = 5 * time.Second
	c.Consumer.Offsets.Initial = sarama.OffsetOldest
	c.Producer.Idempotent, c.Producer.RequiredAcks = true, sarama.WaitForAll
	c.Net.MaxOpenRequests = 1
	c.Producer.Return.Successes, c.Producer.Return.Errors = true, true
	c.Metadata.AllowAutoTopicCreation = false
	b.access.Kafka(c)
	return c
}

func (b kafkaCluster) lay(_ context.Context, id string) (plumbing, error) {
	p := &kafkaRun{
		kafkaCluster: b,
		topic:        "stormguard-demo." + id + ".orders", dlq: "stormguard-demo." + id + ".dlq", group: "stormguard-demo." + id,
	}
	return p, p.fit()
}

func (p *kafkaRun) fit() (err error) {
	if p.client, err = sarama.NewClient(p.addrs, p.config()); err != nil {
		return fmt.Errorf("connect to %s: %w", strings.Join(p.addrs, ","), access.KafkaError(err))
	}
	if p.admin, err = sarama.NewClusterAdminFromClient(p.client); err != nil {
		return err
	}
	// In the DLQ a message has the time of its arrival there.
	forever, arrival := "-1", "LogAppendTime"
	for name, config := range map[string]map[string]*string{
		p.topic: {},
		p.dlq:   {"retention.ms": &forever, "message.timestamp.type": &arrival},
	} {
		if err := p.admin.CreateTopic(name, &sarama.TopicDetail{NumPartitions: 1, ReplicationFactor: -1, ConfigEntries: config}, false); err != nil {
			return fmt.Errorf("create topic %s: %w", name, err)
		}
	}
	if p.producer, err = sarama.NewAsyncProducerFromClient(p.client); err != nil {
		return err
	}
	p.answers.Go(func() {
		for m := range p.producer.Successes() {
			m.Metadata.(chan error) <- nil //nolint:forcetypeassert // send's own
		}
	})
	p.answers.Go(func() {
		for e := range p.producer.Errors() {
			e.Msg.Metadata.(chan error) <- e.Err //nolint:forcetypeassert // send's own
		}
	})
	return nil
}

func (p *kafkaRun) send(ctx context.Context, body []byte) (func(context.Context) error, error) {
	answer := make(chan error, 1)
	select {
	case p.producer.Input() <- &sarama.ProducerMessage{Topic: p.topic, Value: sarama.ByteEncoder(body), Metadata: answer}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return func(ctx context.Context) error {
		select {
		case err := <-answer:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}, nil
}

func (p *kafkaRun) joined(context.Context) (bool, error) {
	groups, err := p.admin.DescribeConsumerGroups([]string{p.group})
	return err == nil && len(groups) == 1 && groups[0].State == "Stable" && len(groups[0].Members) > 0, err
}

// idle tells whether the group has committed the end of the log. An offset of -1
// means no commit.
func (p *kafkaRun) idle(context.Context) (bool, error) {
	end, err := p.client.GetOffset(p.topic, 0, sarama.OffsetNewest)
	if err != nil {
		return false, err
	}
	offsets, err := p.admin.ListConsumerGroupOffsets(p.group, map[string][]int32{p.topic: {0}})
	if err != nil {
		return false, err
	}
	b := offsets.GetBlock(p.topic, 0)
	if b == nil {
		return false, errors.New("the group's offsets do not name the topic")
	}
	if b.Err != sarama.ErrNoError {
		return false, b.Err
	}
	return max(b.Offset, 0) == end, nil
}

func (p *kafkaRun) buried(context.Context) (int, error) {
	end, err := p.client.GetOffset(p.dlq, 0, sarama.OffsetNewest)
	return int(end), err
}

func (p *kafkaRun) exhume(ctx context.Context, start time.Time) ([]dead, error) {
	n, err := p.buried(ctx)
	if err != nil || n == 0 {
		return nil, err
	}
	consumer, err := sarama.NewConsumerFromClient(p.client)
	if err != nil {
		return nil, err
	}
	defer func() { _ = consumer.Close() }()
	in, err := consumer.ConsumePartition(p.dlq, 0, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = in.Close() }()
	give := time.NewTimer(patience)
	defer give.Stop()
	out := make([]dead, 0, n)
	for len(out) < n {
		select {
		case m := <-in.Messages():
			o, err := parseOrder(m.Value)
			if err != nil {
				return nil, err
			}
			out = append(out, dead{o.ID, m.Timestamp.Sub(start)})
		case <-give.C:
			return nil, fmt.Errorf("the DLQ gave out %d of %d messages within %s", len(out), n, patience)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return out, nil
}

func (p *kafkaRun) remove(context.Context) {
	if p.producer != nil {
		p.producer.AsyncClose()
		p.answers.Wait()
	}
	if p.admin != nil {
		for _, name := range []string{p.topic, p.dlq} {
			_ = p.admin.DeleteTopic(name) // the topic may not exist
		}
		_ = p.admin.DeleteConsumerGroup(p.group)
	}
	if p.client != nil {
		_ = p.client.Close()
	}
}
