// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Command rabbitmq consumes a RabbitMQ queue behind the guard. A poison message goes to the
// queue orders.dlq; messages that fail in an outage of a dependency do not. The program
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
	"syscall"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/adapters/amqp"
	"github.com/stormguard-mq/stormguard/guard"
)

func main() {
	url := flag.String("url", cmp.Or(os.Getenv("STORMGUARD_RABBITMQ"), "amqp://guest:guest@127.0.0.1:5672/"), "the broker")
	queue := flag.String("queue", "orders", "the queue to consume; a quorum queue is made if it is not there")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *url, *queue, charge)
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

func run(ctx context.Context, url, queue string, charge func(order int) error) (err error) {
	if err := declare(url, queue); err != nil {
		return err
	}
	g, err := guard.New(guard.Config{Group: "billing"}, guard.WithLogger(slog.Default()))
	if err != nil {
		return err
	}
	dialer := guardamqp.Dial(url) // or all nodes of a cluster
	letters, err := guardamqp.NewDLQ(ctx, dialer, guardamqp.DLQConfig{Queue: queue + ".dlq", Logger: slog.Default()})
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		_, closeErr := g.Close(ctx)
		err = errors.Join(err, closeErr, letters.Close(ctx))
	}()

	// A handler does not ack: nil acks, an error retries, Permanent is for errors that no
	// retry can fix.
	handle := func(_ context.Context, d amqp091.Delivery) error {
		order, err := strconv.Atoi(string(d.Body))
		if err != nil {
			return guard.Permanent(err)
		}
		return charge(order)
	}
	return guardamqp.Consume(ctx, g, dialer, queue, handle, guardamqp.WithDeadLetters(letters), guardamqp.WithLogger(slog.Default()))
}

// declare creates the queue if it does not exist.
func declare(url, queue string) error {
	conn, err := amqp091.Dial(url)
	if err != nil {
		return err
	}
	ch, err := conn.Channel()
	if err == nil {
		_, err = ch.QueueDeclare(queue, true, false, false, false, amqp091.Table{"x-queue-type": "quorum"})
	}
	return errors.Join(err, conn.Close())
}
