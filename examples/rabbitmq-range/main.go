// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Command rabbitmq-range guards a consumer that exists: a loop over deliveries
// that acks and rejects by itself. One line is new.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/adapters/amqp"
	"github.com/stormguard-mq/stormguard/examples/internal/queues"
	"github.com/stormguard-mq/stormguard/guard"
)

const orders = 200

func main() {
	if err := run(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "rabbitmq-range:", err)
		os.Exit(1)
	}
}

// consume is the program as it was, but for the line with amqp.Deliveries: it
// rejects whatever fails, so that an outage would empty the queue into its
// dead-letter exchange.
func consume(ctx context.Context, g *guard.Guard, letters *amqp.DLQ, queue string, bill func(order string) error) error {
	conn, err := amqp091.Dial(queues.URL())
	if err != nil {
		return err
	}
	defer conn.Close() //nolint:errcheck // it ends with the program
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	if err := ch.Qos(50, 0, false); err != nil {
		return err
	}
	deliveries, err := ch.Consume(queue, "billing", false, false, false, false, nil)
	if err != nil {
		return err
	}
	deliveries, err = amqp.Deliveries(ctx, g, ch, deliveries, amqp.WithDeadLetters(letters)) // the new line
	if err != nil {
		return err
	}
	for d := range deliveries {
		if err := bill(string(d.Body)); err != nil {
			_ = d.Reject(false)
			continue
		}
		_ = d.Ack(false)
	}
	return nil
}

func run(out io.Writer) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	queue, err := queues.New("orders")
	if err != nil {
		return err
	}
	dead := queue.Name + ".dlq"
	defer queue.Close(dead)
	g, err := guard.New(guard.Config{Group: "billing", Policy: guard.Policy{Retry: guard.Retry{Attempts: 3}}})
	if err != nil {
		return err
	}
	defer func() { _, _ = g.Close(ctx) }()
	letters, err := amqp.NewDLQ(ctx, amqp.Dial(queues.URL()), amqp.DLQConfig{Queue: dead})
	if err != nil {
		return err
	}
	defer func() { _ = letters.Close(ctx) }()

	// The dependency dies at the 50th order, for a second; order 13 is poison.
	billed, calls := map[string]bool{}, 0
	var down time.Time
	done := make(chan struct{})
	bill := func(order string) error {
		if order == "13" {
			return errors.New("billing: no such customer")
		}
		if order == "50" && down.IsZero() {
			down = time.Now()
		}
		if !down.IsZero() && time.Since(down) < time.Second {
			calls++
			return errors.New("billing: connection refused")
		}
		if billed[order] = true; len(billed) == orders-1 {
			close(done)
		}
		return nil
	}

	consuming, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- consume(consuming, g, letters, queue.Name, bill) }()
	for i := 1; i <= orders; i++ {
		if err := queue.Publish(ctx, strconv.Itoa(i)); err != nil {
			return err
		}
	}
	for finished := done; ; {
		select {
		case err := <-ended:
			return errors.Join(err, errors.New("the loop ended too early"))
		case <-finished:
			finished = nil
		case <-time.After(100 * time.Millisecond):
		}
		if s := g.Source(queue.Name); finished == nil && s.Account().DeadLettered == 1 {
			break
		}
	}
	stop()
	if err := <-ended; err != nil {
		return err
	}

	all, err := queue.Get(dead)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%d orders billed\n", len(billed))
	fmt.Fprintf(out, "an outage of a second cost %d calls at most: %t\n", 2*50, calls <= 2*50)
	fmt.Fprintf(out, "dead letters: %d\n", len(all))
	if len(all) != 1 || string(all[0].Body) != "13" || calls > 2*50 {
		return errors.New("that is not what should have happened")
	}
	return nil
}
