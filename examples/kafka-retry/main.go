// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Command kafka-retry is a sarama consumer group with retry topics. If only one order
// fails, such as that of a customer who does not exist yet, it is parked for a minute, ten
// minutes and an hour. Later orders of its customer follow it. If it still fails, it goes
// to the DLQ topic orders.dlq. The program runs until it is interrupted.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"log"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka"
	"github.com/stormguard-mq/stormguard/guard"
)

func main() {
	brokers := flag.String("brokers", cmp.Or(os.Getenv("STORMGUARD_KAFKA"), "127.0.0.1:9092"), "addresses, separated by commas")
	topic := flag.String("topic", "orders", "the topic to consume; it must be there")
	group := flag.String("group", "billing", "the consumer group")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, strings.Split(*brokers, ","), *topic, *group, []time.Duration{time.Minute, 10 * time.Minute, time.Hour}, charge)
	stop()
	if err != nil {
		log.Fatal(err)
	}
}

// charge stands for your program's call of its dependency.
func charge(customer string, order int) error {
	log.Print("charged order ", order, " of ", customer)
	return nil
}

func run(ctx context.Context, brokers []string, topic, group string, delays []time.Duration, charge func(customer string, order int) error) (err error) {
	config := sarama.NewConfig()
	config.Consumer.Offsets.Initial = sarama.OffsetOldest // do not skip waiting messages
	config.Consumer.Return.Errors = true                  // for WatchErrors

	// The topics of dead letters (topic.dlq) and of each delay (topic.group.retry.1 and so
	// on) are created if they do not exist.
	letters, err := guardkafka.NewDLQ(brokers, config, guardkafka.DLQConfig{Sources: []string{topic}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, letters.Close()) }()
	retries, err := guardkafka.NewRetryTopics(brokers, config, guardkafka.RetryConfig{Sources: []string{topic}, Group: group, Delays: delays})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, retries.Close()) }()

	// The orders of a customer, who is the key, stay in order. Orders of others do not wait
	// for them.
	policy := guard.Policy{Order: guard.OrderKey, Workers: 4}
	g, err := guard.New(guard.Config{Group: group, Policy: policy}, guard.WithLogger(slog.Default()))
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		_, closeErr := g.Close(ctx)
		err = errors.Join(err, closeErr)
	}()
	consumers, err := sarama.NewConsumerGroup(brokers, group, config)
	if err != nil {
		return err
	}
	go guardkafka.WatchErrors(ctx, consumers, slog.Default())

	// A parked message comes back unchanged: with its topic, offset, time and headers.
	// Permanent is dead-lettered at once.
	handle := func(_ context.Context, m *sarama.ConsumerMessage) error {
		order, err := strconv.Atoi(string(m.Value))
		if err != nil {
			return guard.Permanent(err)
		}
		return charge(string(m.Key), order)
	}
	h := guardkafka.Wrap(g, handle, guardkafka.WithDeadLetters(letters), guardkafka.WithRetryTopics(retries))
	return guardkafka.Consume(ctx, consumers, []string{topic}, h) // Consume closes the group
}
