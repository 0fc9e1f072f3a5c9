// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Command jetstream guards a JetStream consumer: a poison message goes to the
// DLQ, an outage does not.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/adapters/nats"
	"github.com/stormguard-mq/stormguard/examples/internal/embedded"
	"github.com/stormguard-mq/stormguard/guard"
)

const orders = 200

func main() {
	// The guard logs changes of state, never messages: try it with os.Stderr.
	if err := run(os.Stdout, io.Discard); err != nil {
		fmt.Fprintln(os.Stderr, "jetstream:", err)
		os.Exit(1)
	}
}

func run(out, logs io.Writer) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	nc, stop, err := embedded.Connect() // yours: nats.Connect(url, nats.MaxReconnects(-1))
	if err != nil {
		return err
	}
	defer stop()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	stream, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "ORDERS", Subjects: []string{"orders.>"}})
	if err != nil {
		return err
	}
	consumer, err := stream.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "billing"})
	if err != nil {
		return err
	}

	// One guard for the process, one DLQ stream, created if it is not there.
	log := slog.New(slog.NewTextHandler(logs, nil))
	g, err := guard.New(guard.Config{
		Group:  "billing",
		Policy: guard.Policy{Timeout: 5 * time.Second, Retry: guard.Retry{Attempts: 4}},
	}, guard.WithLogger(log))
	if err != nil {
		return err
	}
	letters, err := nats.NewDLQ(ctx, js, nats.DLQConfig{Stream: "ORDERS_DLQ"})
	if err != nil {
		return errors.Join(err, closeGuard(g))
	}

	// A handler acks nothing itself: nil acks, an error retries, and Permanent
	// is for what no retry can mend.
	pay := &payments{done: make(chan struct{})}
	handle := func(_ context.Context, m jetstream.Msg) error {
		order, err := strconv.Atoi(string(m.Data()))
		if err != nil {
			return guard.Permanent(err)
		}
		return pay.charge(order)
	}
	consuming, stopConsuming := context.WithCancel(ctx) // yours: signal.NotifyContext
	defer stopConsuming()
	ended := make(chan error, 1)
	go func() {
		ended <- nats.Consume(consuming, g, consumer, handle, nats.WithDeadLetters(letters), nats.WithLogger(log))
	}()

	for i := 1; i <= orders; i++ {
		body := strconv.Itoa(i)
		if i == 13 {
			body = "thirteen"
		}
		if _, err := js.Publish(ctx, "orders.new", []byte(body)); err != nil {
			return errors.Join(err, closeGuard(g))
		}
	}
	select {
	case <-pay.done:
	case err := <-ended:
		return errors.Join(err, closeGuard(g))
	}

	// A graceful stop: no more intake, what runs finishes, what is left goes
	// back to the server.
	stopConsuming()
	if err := errors.Join(<-ended, closeGuard(g)); err != nil {
		return err
	}
	return check(ctx, out, js, pay)
}

func closeGuard(g *guard.Guard) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, err := g.Close(ctx)
	return err
}

// payments is the dependency. It dies at the 50th order, for a second.
type payments struct {
	down, used  bool
	back        atomic.Bool
	calls, last int // calls while down; the latest order charged
	charged     int
	disorder    bool
	done        chan struct{}
}

// charge is called by one goroutine at a time: the default order is the stream's.
func (p *payments) charge(order int) error {
	if order == 50 && !p.used {
		p.down, p.used = true, true
		time.AfterFunc(time.Second, func() { p.back.Store(true) })
	}
	if p.down && !p.back.Load() {
		p.calls++
		return errors.New("payments: connection refused")
	}
	p.down = false
	p.disorder = p.disorder || order <= p.last
	p.last = order
	if p.charged++; p.charged == orders-1 {
		close(p.done)
	}
	return nil
}

// check prints what happened, and fails if it is not what should have.
func check(ctx context.Context, out io.Writer, js jetstream.JetStream, pay *payments) error {
	fmt.Fprintf(out, "%d orders charged, in order: %t\n", pay.charged, !pay.disorder)
	fmt.Fprintf(out, "an outage of a second cost 20 calls at most: %t\n", pay.calls <= 20)

	dead, err := js.Stream(ctx, "ORDERS_DLQ")
	if err != nil {
		return err
	}
	n := dead.CachedInfo().State.Msgs
	fmt.Fprintf(out, "dead letters: %d\n", n)
	reader, err := dead.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{})
	if err != nil {
		return err
	}
	m, err := reader.Next(jetstream.FetchMaxWait(5 * time.Second))
	if err != nil {
		return err
	}
	letter, err := nats.ReadDeadLetter(m)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%s message %d, %q, after %d attempt: %s\n",
		letter.Origin.Source, letter.Origin.Sequence, letter.Body, letter.Attempts, letter.Error.Message)
	if pay.charged != orders-1 || pay.disorder || pay.calls > 20 || n != 1 || string(letter.Body) != "thirteen" {
		return errors.New("that is not what should have happened")
	}
	return nil
}
