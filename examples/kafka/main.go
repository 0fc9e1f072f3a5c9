// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Command kafka is a sarama consumer group behind the guard. A poison message goes to the
// DLQ topic orders.dlq; messages that fail in an outage of a dependency do not. The program
// runs until it is interrupted.
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
	groupID := flag.String("group", "billing", "the consumer group")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, strings.Split(*brokers, ","), *topic, *groupID, charge)
	stop()
	if err != nil {
		log.Fatal(err)
	}
}

// charge stands for your program's call of its dependency.
func charge(order int) error {
	log.Print("charged order ", order)
	return nil
}

func run(ctx context.Context, brokers []string, topic, groupID string, charge func(order int) error) (err error) {
	config := sarama.NewConfig()
	config.Consumer.Offsets.Initial = sarama.OffsetOldest // do not skip waiting messages
	config.Consumer.Return.Errors = true                  // for WatchErrors

	// The topic of dead letters, topic.dlq, is created if it does not exist.
	letters, err := guardkafka.NewDLQ(brokers, config, guardkafka.DLQConfig{Sources: []string{topic}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, letters.Close()) }()
	g, err := guard.New(guard.Config{Group: groupID}, guard.WithLogger(slog.Default()))
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		_, closeErr := g.Close(ctx)
		err = errors.Join(err, closeErr)
	}()
	group, err := sarama.NewConsumerGroup(brokers, groupID, config)
	if err != nil {
		return err
	}
	go guardkafka.WatchErrors(ctx, group, slog.Default())

	// A handler does not mark: nil marks, an error retries, Permanent is for errors that no
	// retry can fix.
	handle := func(_ context.Context, m *sarama.ConsumerMessage) error {
		order, err := strconv.Atoi(string(m.Value))
		if err != nil {
			return guard.Permanent(err)
		}
		return charge(order)
	}
	h := guardkafka.Wrap(g, handle, guardkafka.WithDeadLetters(letters))
	return guardkafka.Consume(ctx, group, []string{topic}, h) // Consume closes the group
}
