// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Command jetstream-callback is a program that calls Consume of nats.go and settles
// messages itself. One line puts the guard in front of it. It runs until it is interrupted.
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
	consumer, err = guardnats.WrapConsumer(g, consumer, guardnats.WithDeadLetters(letters)) // the new line
	if err != nil {
		return err
	}

	// The program as it was before. One goroutine calls the function, as in nats.go.
	consuming, err := consumer.Consume(func(m jetstream.Msg) {
		order, err := strconv.Atoi(string(m.Data()))
		if err == nil {
			err = charge(order)
		}
		if err != nil {
			_ = guardnats.Fail(m, err) // a failure: the guard retries or holds; the server gets no answer
			return
		}
		_ = m.Ack()
	})
	if err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		consuming.Drain()
		<-consuming.Closed()
		return nil
	case <-consuming.Closed():
		return errors.New("the consumer is gone")
	}
}
