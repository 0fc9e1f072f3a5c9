// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Command jetstream is a JetStream consumer behind the guard. A poison message goes to the
// stream ORDERS_DLQ; messages that fail in an outage of a dependency do not. The program
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

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/adapters/nats"
	"github.com/stormguard-mq/stormguard/guard"
)

func main() {
	url := flag.String("url", cmp.Or(os.Getenv("STORMGUARD_NATS"), "nats://127.0.0.1:4222"), "the server, with JetStream")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *url, charge)
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

func run(ctx context.Context, url string, charge func(order int) error) (err error) {
	nc, err := nats.Connect(url, nats.MaxReconnects(-1), nats.IgnoreAuthErrorAbort(),
		nats.PingInterval(10*time.Second), nats.FlusherTimeout(5*time.Second)) // by default nats.go gives up after two minutes
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	stream, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "ORDERS", Subjects: []string{"orders.>"}})
	if err != nil {
		return err // a stream of that name with other settings exists
	}
	consumer, err := stream.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "billing"})
	if err != nil {
		return err
	}
	letters, err := guardnats.NewDLQ(ctx, js, guardnats.DLQConfig{Stream: "ORDERS_DLQ"})
	if err != nil {
		return err
	}
	g, err := guard.New(guard.Config{Group: "billing"}, guard.WithLogger(slog.Default()))
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		_, closeErr := g.Close(ctx)
		err = errors.Join(err, closeErr)
	}()

	// A handler does not ack: nil acks, an error retries, Permanent is for errors that no
	// retry can fix.
	handle := func(_ context.Context, m jetstream.Msg) error {
		order, err := strconv.Atoi(string(m.Data()))
		if err != nil {
			return guard.Permanent(err)
		}
		return charge(order)
	}
	return guardnats.Consume(ctx, g, consumer, handle, guardnats.WithDeadLetters(letters), guardnats.WithLogger(slog.Default()))
}
