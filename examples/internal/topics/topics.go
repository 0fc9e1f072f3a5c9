// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package topics creates and reads the topics of the Kafka examples. Your program has its
// own topics.
package topics

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/IBM/sarama"
)

// Addrs returns the value of STORMGUARD_KAFKA, or the address of a broker on this machine's
// usual port. The command scripts/brokers start kafka runs one and prints its address.
func Addrs() []string {
	return strings.Split(cmp.Or(os.Getenv("STORMGUARD_KAFKA"), "127.0.0.1:9092"), ",")
}

// Config returns sarama's default configuration, changed to notice events sooner than
// production needs.
func Config() *sarama.Config {
	c := sarama.NewConfig()
	c.Version = sarama.V3_6_0_0
	c.ClientID = "stormguard-example"
	c.Consumer.Offsets.Initial = sarama.OffsetOldest
	c.Consumer.Return.Errors = true
	c.Consumer.Group.Heartbeat.Interval = time.Second
	c.Metadata.Retry.Max = 20
	c.Admin.Timeout = 30 * time.Second // a busy broker may need more than the default 3s
	return c
}

// Topic is a topic that an example made.
type Topic struct {
	Name  string
	Group string

	client   sarama.Client
	admin    sarama.ClusterAdmin
	producer sarama.SyncProducer
}

// New creates a topic of one partition and a group for it, each with a unique name.
func New(name string) (*Topic, error) {
	c := Config()
	c.Producer.Return.Successes = true
	client, err := sarama.NewClient(Addrs(), c)
	if err != nil {
		return nil, fmt.Errorf("no Kafka at %v; run scripts/brokers start kafka and set STORMGUARD_KAFKA to what it prints: %w", Addrs(), err)
	}
	name = fmt.Sprintf("%s-%d", name, time.Now().UnixNano())
	t := &Topic{Name: name, Group: "billing-" + name, client: client}
	if t.admin, err = sarama.NewClusterAdminFromClient(client); err == nil {
		err = t.admin.CreateTopic(name, &sarama.TopicDetail{NumPartitions: 1, ReplicationFactor: -1}, false)
	}
	for wait := 0; err == nil && wait < 100; wait++ {
		if _, err := client.Leader(name, 0); err == nil {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	if err == nil {
		t.producer, err = sarama.NewSyncProducerFromClient(client)
	}
	if err != nil {
		return nil, errors.Join(err, client.Close())
	}
	return t, nil
}

// Publish appends a message to the topic.
func (t *Topic) Publish(body string) error {
	_, _, err := t.producer.SendMessage(&sarama.ProducerMessage{Topic: t.Name, Value: sarama.StringEncoder(body)})
	return err
}

// PublishKey appends a message with a key.
func (t *Topic) PublishKey(key, body string) error {
	_, _, err := t.producer.SendMessage(&sarama.ProducerMessage{Topic: t.Name, Key: sarama.StringEncoder(key), Value: sarama.StringEncoder(body)})
	return err
}

// Read returns all messages of a topic.
func (t *Topic) Read(ctx context.Context, topic string) ([]*sarama.ConsumerMessage, error) {
	end, err := t.client.GetOffset(topic, 0, sarama.OffsetNewest)
	if err != nil || end == 0 {
		return nil, err
	}
	consumer, err := sarama.NewConsumerFromClient(t.client)
	if err != nil {
		return nil, err
	}
	part, err := consumer.ConsumePartition(topic, 0, sarama.OffsetOldest)
	if err != nil {
		return nil, err
	}
	defer func() { _ = part.Close() }()
	var all []*sarama.ConsumerMessage
	for int64(len(all)) < end {
		select {
		case m := <-part.Messages():
			all = append(all, m)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return all, nil
}

// Close deletes the topic and the topics in also.
func (t *Topic) Close(also ...string) {
	_ = t.producer.Close()
	for _, name := range append(also, t.Name) {
		_ = t.admin.DeleteTopic(name)
	}
	_ = t.client.Close()
}
