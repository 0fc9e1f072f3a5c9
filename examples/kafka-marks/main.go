// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Command kafka-marks puts the guard in front of an existing consumer group's handler,
// which marks messages itself. It runs until it is interrupted.
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

// biller is the program's own handler, as it was before. It does not know the guard.
type biller struct{ charge func(order int) error }

func (*biller) Setup(sarama.ConsumerGroupSession) error   { return nil }
func (*biller) Cleanup(sarama.ConsumerGroupSession) error { return nil }

func (b *biller) ConsumeClaim(session sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	for {
		select {
		case m, ok := <-claim.Messages():
			if !ok {
				return nil
			}
			order, err := strconv.Atoi(string(m.Value))
			if err == nil {
				err = b.charge(order)
			}
			if err != nil {
				return err // without a guard: a rebalance, and then the same error again at full speed
			}
			session.MarkMessage(m, "")
		case <-session.Context().Done():
			return nil
		}
	}
}

func main() {
	brokers := flag.String("brokers", cmp.Or(os.Getenv("STORMGUARD_KAFKA"), "127.0.0.1:9092"), "addresses, separated by commas")
	topic := flag.String("topic", "orders", "the topic to consume; it must be there")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, strings.Split(*brokers, ","), *topic, charge)
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

func run(ctx context.Context, brokers []string, topic string, charge func(order int) error) (err error) {
	config := sarama.NewConfig()
	config.Consumer.Offsets.Initial = sarama.OffsetOldest // do not skip waiting messages
	config.Consumer.Return.Errors = true                  // for WatchErrors

	letters, err := guardkafka.NewDLQ(brokers, config, guardkafka.DLQConfig{Sources: []string{topic}}) // topic.dlq
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, letters.Close()) }()
	// The loop handles one message at a time, so a retry comes before the messages behind
	// it.
	g, err := guard.New(guard.Config{Group: "invoices"}, guard.WithLogger(slog.Default()))
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		_, closeErr := g.Close(ctx)
		err = errors.Join(err, closeErr)
	}()
	group, err := sarama.NewConsumerGroup(brokers, "invoices", config)
	if err != nil {
		return err
	}
	go guardkafka.WatchErrors(ctx, group, slog.Default())

	// This line was: h := &biller{charge}
	h := guardkafka.WrapHandler(g, &biller{charge}, guardkafka.WithDeadLetters(letters))
	return guardkafka.Consume(ctx, group, []string{topic}, h) // Consume closes the group
}
