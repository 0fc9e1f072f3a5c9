// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Command rabbitmq-range guards an existing consumer: a loop over deliveries that acks and
// rejects itself. It runs until it is interrupted.
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
	g, err := guard.New(guard.Config{Group: "billing"}, guard.WithLogger(slog.Default()))
	if err != nil {
		return err
	}
	letters, err := guardamqp.NewDLQ(ctx, guardamqp.Dial(url), guardamqp.DLQConfig{Queue: queue + ".dlq", Logger: slog.Default()})
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		_, closeErr := g.Close(ctx)
		err = errors.Join(err, closeErr, letters.Close(ctx))
	}()
	return consume(ctx, g, letters, url, queue, charge)
}

// consume is the program as it was before, except for two lines: guardamqp.Deliveries is
// new, and guardamqp.Fail replaces d.Reject(false). Without the guard an outage moves the
// whole queue to its dead-letter exchange.
func consume(ctx context.Context, g *guard.Guard, letters *guardamqp.DLQ, url, queue string, charge func(order int) error) error {
	conn, err := amqp091.Dial(url)
	if err != nil {
		return err
	}
	defer conn.Close() //nolint:errcheck // the connection ends with the program
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	if _, err := ch.QueueDeclare(queue, true, false, false, false, amqp091.Table{"x-queue-type": "quorum"}); err != nil {
		return err
	}
	if err := ch.Qos(50, 0, false); err != nil {
		return err
	}
	deliveries, err := ch.Consume(queue, "billing", false, false, false, false, nil)
	if err != nil {
		return err
	}
	deliveries, err = guardamqp.Deliveries(ctx, g, ch, deliveries, guardamqp.WithDeadLetters(letters)) // the new line
	if err != nil {
		return err
	}
	for d := range deliveries {
		order, err := strconv.Atoi(string(d.Body))
		if err == nil {
			err = charge(order)
		}
		if err != nil {
			_ = guardamqp.Fail(d, err) // a failure: the guard decides what follows
			continue
		}
		_ = d.Ack(false)
	}
	if ctx.Err() == nil {
		return errors.New("the channel was closed: start again")
	}
	return nil
}
