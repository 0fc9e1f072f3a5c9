// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/adapters/nats"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/limiter"
)

// demo starts a server for an example, with a stream ORDERS of three messages
// and a durable "billing".
func demo() (js jetstream.JetStream, consumer jetstream.Consumer, stop func()) {
	dir, err := os.MkdirTemp("", "jetstream")
	if err != nil {
		log.Fatal(err)
	}
	srv, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: dir, NoSigs: true, NoLog: true})
	if err != nil {
		log.Fatal(err)
	}
	srv.Start()
	if !srv.ReadyForConnections(2 * time.Minute) {
		log.Fatal("the server is not ready")
	}
	nc, err := natsgo.Connect(srv.ClientURL(), natsgo.MaxReconnects(-1))
	if err != nil {
		log.Fatal(err)
	}
	if js, err = jetstream.New(nc); err != nil {
		log.Fatal(err)
	}
	ctx := context.Background()
	stream, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "ORDERS", Subjects: []string{"orders.>"}})
	if err != nil {
		log.Fatal(err)
	}
	for _, body := range []string{"one", "bad", "three"} {
		if _, err := js.Publish(ctx, "orders.new", []byte(body)); err != nil {
			log.Fatal(err)
		}
	}
	if consumer, err = stream.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "billing"}); err != nil {
		log.Fatal(err)
	}
	return js, consumer, func() {
		nc.Close()
		srv.Shutdown()
		srv.WaitForShutdown()
		_ = os.RemoveAll(dir)
	}
}

// A consumer whose hopeless messages go to a stream of dead letters.
func ExampleConsume() {
	js, consumer, stop := demo()
	defer stop()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()

	g, err := guard.New(guard.Config{Group: "billing"})
	if err != nil {
		log.Fatal(err)
	}
	dead, err := guardnats.NewDLQ(ctx, js, guardnats.DLQConfig{Stream: "DEAD"})
	if err != nil {
		log.Fatal(err)
	}
	err = guardnats.Consume(ctx, g, consumer, func(_ context.Context, m jetstream.Msg) error {
		if string(m.Data()) == "bad" {
			return guard.Permanent(errors.New("not an order"))
		}
		fmt.Println("billed", string(m.Data()))
		if string(m.Data()) == "three" {
			cancel() // a program waits for a signal instead
		}
		return nil
	}, guardnats.WithDeadLetters(dead))
	if err != nil {
		log.Fatal(err)
	}
	if _, err := g.Close(context.Background()); err != nil {
		log.Fatal(err)
	}
	// Output:
	// billed one
	// billed three
}

// A program with a loop of its own changes by one line.
func ExampleWrapConsumer() {
	_, consumer, stop := demo()
	defer stop()
	g, err := guard.New(guard.Config{Group: "billing"})
	if err != nil {
		log.Fatal(err)
	}

	consumer, err = guardnats.WrapConsumer(g, consumer)
	if err != nil {
		log.Fatal(err)
	}

	for range 3 {
		m, err := consumer.Next()
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println("billed", string(m.Data()))
		if err := m.Ack(); err != nil {
			log.Fatal(err)
		}
	}
	if _, err := g.Close(context.Background()); err != nil {
		log.Fatal(err)
	}
	// Output:
	// billed one
	// billed bad
	// billed three
}

// A stream of dead letters is read whoever wrote it.
func ExampleReadDeadLetter() {
	js, consumer, stop := demo()
	defer stop()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	g, err := guard.New(guard.Config{Group: "billing"})
	if err != nil {
		log.Fatal(err)
	}
	dead, err := guardnats.NewDLQ(ctx, js, guardnats.DLQConfig{Stream: "DEAD"})
	if err != nil {
		log.Fatal(err)
	}
	done := make(chan error)
	go func() {
		done <- guardnats.Consume(ctx, g, consumer, func(_ context.Context, m jetstream.Msg) error {
			if string(m.Data()) == "bad" {
				return guard.Permanent(errors.New("not an order"))
			}
			return nil
		}, guardnats.WithDeadLetters(dead))
	}()

	letters, err := js.CreateConsumer(ctx, "DEAD", jetstream.ConsumerConfig{Durable: "reader"})
	if err != nil {
		log.Fatal(err)
	}
	m, err := letters.Next()
	if err != nil {
		log.Fatal(err)
	}
	r, err := guardnats.ReadDeadLetter(m)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(m.Subject(), r.ID(), r.Reason, r.Error.Message, string(r.Body))

	cancel()
	if err := <-done; err != nil {
		log.Fatal(err)
	}
	if _, err := g.Close(context.Background()); err != nil {
		log.Fatal(err)
	}
	// Output:
	// dlq.DEAD.ORDERS.billing nats/ORDERS/billing/-/s2 permanent not an order bad
}

// An existing consumer of a DLQ gets a rate and a breaker.
func ExampleWithLimiter() {
	_, letters, stop := demo()
	defer stop()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	g, err := guard.New(guard.Config{Group: "dlq"})
	if err != nil {
		log.Fatal(err)
	}
	rate, err := limiter.Local(limiter.Limit{Rate: 50, Burst: 10})
	if err != nil {
		log.Fatal(err)
	}
	err = guardnats.Consume(ctx, g, letters, func(_ context.Context, m jetstream.Msg) error {
		fmt.Println("again", string(m.Data()))
		if string(m.Data()) == "three" {
			cancel()
		}
		return nil
	}, guardnats.WithLimiter(rate))
	if err != nil {
		log.Fatal(err)
	}
	if _, err := g.Close(context.Background()); err != nil {
		log.Fatal(err)
	}
	// Output:
	// again one
	// again bad
	// again three
}

// A consumer that has a MaxDeliver all the same has a Mover beside it.
func ExampleNewMover() {
	js, _, stop := demo()
	defer stop()
	ctx := context.Background()
	dead, err := guardnats.NewDLQ(ctx, js, guardnats.DLQConfig{Stream: "DEAD"})
	if err != nil {
		log.Fatal(err)
	}
	mover, err := guardnats.NewMover(ctx, js, guardnats.MoverConfig{Stream: "ORDERS", Consumer: "billing", DLQ: dead})
	if err != nil {
		log.Fatal(err)
	}
	running, cancel := context.WithTimeout(ctx, 10*time.Millisecond) // a program runs it as long as its consumer
	defer cancel()
	if err := mover.Run(running); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%+v\n", mover.Counts())
	// Output:
	// {Parked:0 Gone:0 Released:0 Refused:0}
}

// What is wrong with a stream is said with the command that mends it.
func ExampleNewDLQ() {
	js, _, stop := demo()
	defer stop()
	_, err := guardnats.NewDLQ(context.Background(), js, guardnats.DLQConfig{Stream: "DEAD", NoCreate: true})
	fmt.Println(errors.Is(err, guardnats.ErrUnsuitable))
	fmt.Println(strings.TrimPrefix(err.Error(), guardnats.ErrUnsuitable.Error()+": "))
	// Output:
	// true
	// stream DEAD does not exist: nats stream add DEAD --subjects 'dlq.DEAD.*.*' --storage file --retention limits --replicas 1 --dupe-window 10m0s --discard new --defaults
}

// The configuration of a fleet in a bucket of JetStream.
func ExampleNewRegister() { //nolint:testableexamples // it needs a server
	nc, err := natsgo.Connect("nats://127.0.0.1:4222", natsgo.MaxReconnects(-1))
	if err != nil {
		log.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		log.Print(err)
		return
	}
	r, err := guardnats.NewRegister(js, guardnats.RegisterConfig{Bucket: "payments", Replicas: 3})
	if err != nil {
		log.Print(err)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	fmt.Println(r.CompareAndSet(ctx, 1, []byte("rate: 1000")))
}
