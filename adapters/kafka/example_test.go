// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"strings"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

// demo makes a topic of three messages for an example, and a group.
func demo() (addrs []string, config *sarama.Config, topic string, group sarama.ConsumerGroup, stop func()) {
	addr, err := brokers.Find(context.Background(), brokers.Kafka)
	if err != nil {
		log.Fatal(err)
	}
	addrs, topic = strings.Split(addr, ","), fmt.Sprintf("example-%d", time.Now().UnixNano())
	config = sarama.NewConfig()
	config.Version = sarama.V3_6_0_0
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	config.Consumer.Return.Errors = true
	config.Producer.Return.Successes = true
	config.Metadata.Retry.Max = 40
	client, err := sarama.NewClient(addrs, config)
	if err != nil {
		log.Fatal(err)
	}
	admin, err := sarama.NewClusterAdminFromClient(client)
	if err != nil {
		log.Fatal(err)
	}
	if err := admin.CreateTopic(topic, &sarama.TopicDetail{NumPartitions: 1, ReplicationFactor: -1}, false); err != nil {
		log.Fatal(err)
	}
	producer, err := sarama.NewSyncProducerFromClient(client)
	if err != nil {
		log.Fatal(err)
	}
	for _, body := range []string{"one", "bad", "three"} {
		if _, _, err := producer.SendMessage(&sarama.ProducerMessage{Topic: topic, Value: sarama.StringEncoder(body)}); err != nil {
			log.Fatal(err)
		}
	}
	if group, err = sarama.NewConsumerGroup(addrs, "billing-"+topic, config); err != nil {
		log.Fatal(err)
	}
	return addrs, config, topic, group, func() {
		_ = group.Close()
		_ = producer.Close()
		_ = admin.DeleteTopic(topic)
		_ = admin.DeleteTopic(topic + ".dlq")
		_ = client.Close()
	}
}

// A consumer group whose hopeless messages go to a topic of dead letters.
func ExampleWrap() {
	addrs, config, topic, group, stop := demo()
	defer stop()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()

	g, err := guard.New(guard.Config{Group: "billing"})
	if err != nil {
		log.Fatal(err)
	}
	dead, err := guardkafka.NewDLQ(addrs, config, guardkafka.DLQConfig{Sources: []string{topic}})
	if err != nil {
		log.Fatal(err)
	}
	handle := func(_ context.Context, m *sarama.ConsumerMessage) error {
		if string(m.Value) == "bad" {
			return guard.Permanent(errors.New("not an order"))
		}
		fmt.Println("billed", string(m.Value))
		if string(m.Value) == "three" {
			cancel() // a program waits for a signal instead
		}
		return nil
	}
	h := guardkafka.Wrap(g, handle, guardkafka.WithDeadLetters(dead))
	for ctx.Err() == nil {
		if err := group.Consume(ctx, []string{topic}, h); err != nil {
			log.Fatal(err)
		}
	}
	if _, err := g.Close(context.Background()); err != nil {
		log.Fatal(err)
	}
	if err := dead.Close(); err != nil {
		log.Fatal(err)
	}
	// Output:
	// billed one
	// billed three
}

// biller is a handler that exists already.
type biller struct{ done func() }

func (biller) Setup(sarama.ConsumerGroupSession) error   { return nil }
func (biller) Cleanup(sarama.ConsumerGroupSession) error { return nil }

func (b biller) ConsumeClaim(session sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	for m := range claim.Messages() {
		fmt.Println("billed", string(m.Value))
		session.MarkMessage(m, "")
		if string(m.Value) == "three" {
			b.done()
		}
	}
	return nil
}

// What fails alone is parked for a while, and the later messages of its key follow
// it.
func ExampleWithRetryTopics() {
	addrs, config, topic, group, stop := demo()
	defer stop()
	letters, err := guardkafka.NewDLQ(addrs, config, guardkafka.DLQConfig{Sources: []string{topic}})
	if err != nil {
		log.Fatal(err)
	}
	defer letters.Close()
	retries, err := guardkafka.NewRetryTopics(addrs, config, guardkafka.RetryConfig{
		Sources: []string{topic}, Group: "billing-" + topic, Delays: []time.Duration{300 * time.Millisecond, time.Hour},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer retries.Close()
	policy := guard.Policy{Order: guard.OrderKey, Retry: guard.Retry{Attempts: 2, Base: time.Millisecond, Max: time.Millisecond, Patience: time.Millisecond}}
	g, err := guard.New(guard.Config{Group: "billing", Policy: policy})
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var parked time.Time
	handle := func(_ context.Context, m *sarama.ConsumerMessage) error {
		switch {
		case string(m.Value) != "bad":
			fmt.Println("billed", string(m.Value))
		case parked.IsZero():
			parked = time.Now()
			return errors.New("no such customer")
		case time.Since(parked) < 200*time.Millisecond:
			return errors.New("no such customer")
		default:
			fmt.Println("billed what was bad, offset", m.Offset)
			cancel()
		}
		return nil
	}
	err = group.Consume(ctx, []string{topic}, guardkafka.Wrap(g, handle, guardkafka.WithDeadLetters(letters), guardkafka.WithRetryTopics(retries)))
	if err != nil {
		log.Fatal(err)
	}
	if _, err := g.Close(context.Background()); err != nil {
		log.Fatal(err)
	}
	// Output:
	// billed one
	// billed three
	// billed what was bad, offset 1
}

// A program with a handler of its own changes by one line.
func ExampleWrapHandler() {
	_, _, topic, group, stop := demo()
	defer stop()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	g, err := guard.New(guard.Config{Group: "billing"})
	if err != nil {
		log.Fatal(err)
	}

	err = group.Consume(ctx, []string{topic}, guardkafka.WrapHandler(g, biller{cancel}))
	if err != nil {
		log.Fatal(err)
	}
	if _, err := g.Close(context.Background()); err != nil {
		log.Fatal(err)
	}
	// Output:
	// billed one
	// billed bad
	// billed three
}

// What a configuration would lose is known before the group is joined.
func ExampleCheck() {
	g, err := guard.New(guard.Config{Policy: guard.Policy{Timeout: 2 * time.Minute}})
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _, _ = g.Close(context.Background()) }()
	config := sarama.NewConfig()
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	fmt.Println(guardkafka.Check(g, config))
	config.Consumer.Group.Rebalance.Timeout = 3 * time.Minute
	fmt.Println(guardkafka.Check(g, config))
	// Output:
	// kafka: unsuitable configuration: Policy.Timeout: 2m0s is more than the 55s that Consumer.Group.Rebalance.Timeout of 1m0s leaves; a handler that heeds nothing else would outlive the claim: lower it, or set the rebalance timeout to 2m5s
	// <nil>
}

// A dead letter is read whoever wrote it.
func ExampleReadDeadLetter() {
	letter, err := guardkafka.ReadDeadLetter(&sarama.ConsumerMessage{
		Topic: "orders.dlq", Value: []byte("bad"),
		Headers: []*sarama.RecordHeader{
			{Key: []byte("__connect.errors.topic"), Value: []byte("orders")},
			{Key: []byte("__connect.errors.partition"), Value: []byte("2")},
			{Key: []byte("__connect.errors.offset"), Value: []byte("1042")},
			{Key: []byte("__connect.errors.exception.message"), Value: []byte("not an order")},
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(letter.ID(), letter.Error.Message, string(letter.Body))
	// Output:
	// kafka/orders/-/2/o1042 not an order bad
}

// Inspect says what works against the guard and is not refused.
func ExampleInspect() {
	addrs, config, topic, _, stop := demo()
	defer stop()
	config.Consumer.Return.Errors = false
	client, err := sarama.NewClient(addrs, config)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	findings, err := guardkafka.Inspect(client, guardkafka.Target{DLQ: guardkafka.DLQConfig{Sources: []string{topic}}})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(findings[0].Where, "→", findings[0].Fix)
	// Output:
	// client → Consumer.Return.Errors = true, and go guardkafka.WatchErrors(ctx, group, log)
}

// The configuration of a fleet in a topic of one partition.
func ExampleNewRegister() {
	addrs, config, topic, _, stop := demo()
	defer stop()
	r, err := guardkafka.NewRegister(addrs, config, guardkafka.RegisterConfig{Topic: topic + ".configuration"})
	if err != nil {
		log.Fatal(err)
	}
	defer r.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	fmt.Println(r.CompareAndSet(ctx, 1, []byte("rate: 1000")))
	fmt.Println(r.CompareAndSet(ctx, 1, []byte("rate: 2000")))
	number, document, err := r.Read(ctx)
	fmt.Println(number, string(document), err)
	// Output:
	// <nil>
	// register: conflict: the newest document is number 1
	// 1 rate: 1000 <nil>
}
