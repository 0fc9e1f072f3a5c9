// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Command jetstream-dlq handles the dead letters of an unguarded consumer. JetStream gives
// up a message after MaxDeliver deliveries, and delivers it to nobody again. A mover takes
// such messages to the stream ORDERS_DLQ, as far as a budget allows. From there they are
// repaired at 50 a second. The program runs until it is interrupted.
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
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/adapters/nats"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/limiter"
)

func main() {
	url := flag.String("url", cmp.Or(os.Getenv("STORMGUARD_NATS"), "nats://127.0.0.1:4222"), "the server, with JetStream")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *url, repair)
	stop()
	if err != nil {
		log.Fatal(err)
	}
}

// repair stands for the repair by your program. An error puts the letter into the stream
// UNREPAIRED.
func repair(body []byte) error {
	log.Printf("repaired %q", body)
	return nil
}

func run(ctx context.Context, url string, repair func(body []byte) error) (err error) {
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
	if _, err := stream.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "shipping", MaxDeliver: 2}); err != nil {
		return err
	}
	letters, err := guardnats.NewDLQ(ctx, js, guardnats.DLQConfig{Stream: "ORDERS_DLQ"})
	if err != nil {
		return err
	}
	mover, err := guardnats.NewMover(ctx, js, guardnats.MoverConfig{Stream: "ORDERS", Consumer: "shipping", DLQ: letters},
		guardnats.WithLogger(slog.Default()))
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	moved := make(chan error, 1)
	go func() { defer stop(); moved <- mover.Run(ctx) }()
	defer func() { stop(); err = errors.Join(err, <-moved) }()
	return workOff(ctx, js, repair)
}

// workOff repairs dead letters at a limited rate, so that they do not overload a dependency
// that came back a moment ago.
func workOff(ctx context.Context, js jetstream.JetStream, repair func(body []byte) error) (err error) {
	consumer, err := js.CreateConsumer(ctx, "ORDERS_DLQ", jetstream.ConsumerConfig{Durable: "repair"})
	if err != nil {
		return err
	}
	unrepaired, err := guardnats.NewDLQ(ctx, js, guardnats.DLQConfig{Stream: "UNREPAIRED", Subject: "unrepaired.{stream}"})
	if err != nil {
		return err
	}
	rate, err := limiter.Local(limiter.Limit{Rate: 50, Burst: 5})
	if err != nil {
		return err
	}
	g, err := guard.New(guard.Config{Group: "repair"}, guard.WithLogger(slog.Default()))
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		_, closeErr := g.Close(ctx)
		err = errors.Join(err, closeErr)
	}()
	return guardnats.Consume(ctx, g, consumer, func(_ context.Context, m jetstream.Msg) error {
		letter, err := guardnats.ReadDeadLetter(m)
		if err != nil {
			return guard.Permanent(err)
		}
		return repair(letter.Body)
	}, guardnats.WithLimiter(rate), guardnats.WithDeadLetters(unrepaired), guardnats.WithLogger(slog.Default()))
}
