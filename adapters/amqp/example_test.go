// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package amqp_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/adapters/amqp"
	"github.com/stormguard-mq/stormguard/guard"
)

var (
	ctx     = context.Background()
	g       *guard.Guard
	cluster = amqp.Dial("amqp://billing:secret@rabbit1/", "amqp://billing:secret@rabbit2/")
	charge  func(order []byte) error
)

func ExampleConsume() {
	letters, err := amqp.NewDLQ(ctx, cluster, amqp.DLQConfig{Queue: "orders.dlq"})
	if err != nil {
		log.Fatal(err)
	}
	handle := func(_ context.Context, d amqp091.Delivery) error {
		if len(d.Body) == 0 {
			return guard.Permanent(fmt.Errorf("order %s is empty", d.MessageId))
		}
		return charge(d.Body)
	}
	err = amqp.Consume(ctx, g, cluster, "orders", handle, amqp.WithDeadLetters(letters), amqp.WithPrefetch(50))
	if err != nil {
		log.Fatal(err)
	}
}

func ExampleDeliveries() {
	var ch *amqp091.Channel // the program's own, with its Qos set
	deliveries, err := ch.Consume("orders", "", false, false, false, false, nil)
	if err != nil {
		log.Fatal(err)
	}
	deliveries, err = amqp.Deliveries(ctx, g, ch, deliveries)
	if err != nil {
		log.Fatal(err)
	}
	for d := range deliveries {
		if err := charge(d.Body); err != nil {
			_ = amqp.Fail(d, err) // or d.Nack, d.Reject
			continue
		}
		_ = d.Ack(false)
	}
}

func ExampleNewDLQ() {
	letters, err := amqp.NewDLQ(ctx, cluster, amqp.DLQConfig{
		Queue: "orders.dlq", Kind: amqp.Stream, Args: amqp091.Table{"x-max-age": "30D"},
	})
	if err != nil {
		log.Fatal(err) // names the command that mends it
	}
	defer func() { _ = letters.Close(ctx) }()
}

func ExampleInspect() {
	findings, err := amqp.Inspect(ctx, amqp.Target{
		API: "http://monitor:secret@rabbit1:15672", Queue: "orders", DLQ: "orders.dlq",
		Prefetch: 50, HandlerTime: 200 * time.Millisecond,
	})
	if err != nil {
		log.Fatal(err)
	}
	for _, f := range findings {
		fmt.Println(f)
	}
}

func ExampleReadDeadLetter() {
	handle := func(_ context.Context, d amqp091.Delivery) error {
		letter, err := amqp.ReadDeadLetter(d)
		if err != nil {
			return err
		}
		fmt.Println(letter.Origin.Source, letter.Reason, letter.Attempts, letter.Error.Message)
		return nil
	}
	_ = amqp.Consume(ctx, g, cluster, "orders.dlq", handle)
}
