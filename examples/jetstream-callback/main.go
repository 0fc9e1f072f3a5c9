// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Command jetstream-callback is a program that calls Consume of nats.go and
// settles by itself, guarded by one line.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/adapters/nats"
	"github.com/stormguard-mq/stormguard/examples/internal/embedded"
	"github.com/stormguard-mq/stormguard/guard"
)

const orders = 100

func main() {
	if err := run(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "jetstream-callback:", err)
		os.Exit(1)
	}
}

func run(out io.Writer) error {
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
	var consumer jetstream.Consumer
	consumer, err = stream.CreateConsumer(ctx, jetstream.ConsumerConfig{Durable: "billing"})
	if err != nil {
		return err
	}
	for i := 1; i <= orders; i++ {
		if _, err := js.Publish(ctx, "orders.new", []byte(strconv.Itoa(i))); err != nil {
			return err
		}
	}

	g, err := guard.New(guard.Config{Group: "billing"})
	if err != nil {
		return err
	}
	consumer, err = nats.WrapConsumer(g, consumer) // the new line
	if err != nil {
		return errors.Join(err, closeGuard(g))
	}

	b := &billing{charged: make(map[int]int), done: make(chan struct{})}
	consuming, err := consumer.Consume(b.handle)
	if err != nil {
		return errors.Join(err, closeGuard(g))
	}
	select {
	case <-b.done:
	case <-ctx.Done():
		err = ctx.Err()
	}
	consuming.Drain()
	<-consuming.Closed()
	if err := errors.Join(err, closeGuard(g)); err != nil {
		return err
	}

	info, err := stream.Consumer(ctx, "billing")
	if err != nil {
		return err
	}
	twice := 0
	for _, n := range b.charged {
		twice += n - 1
	}
	left := info.CachedInfo().NumAckPending + int(info.CachedInfo().NumPending)
	fmt.Fprintf(out, "%d orders charged, %d of them twice, %d left at the server\n", len(b.charged), twice, left)
	fmt.Fprintf(out, "an outage of a second cost 20 calls at most: %t\n", b.failed <= 20)
	if len(b.charged) != orders || twice > 0 || left > 0 || b.failed > 20 {
		return errors.New("that is not what should have happened")
	}
	return nil
}

func closeGuard(g *guard.Guard) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, err := g.Close(ctx)
	return err
}

// billing is the program as it was. Its database is away for a second.
type billing struct {
	until   time.Time
	failed  int
	charged map[int]int
	done    chan struct{}
}

// handle is called by one goroutine, as nats.go has it.
func (b *billing) handle(m jetstream.Msg) {
	order, err := strconv.Atoi(string(m.Data()))
	if err == nil {
		err = b.charge(order)
	}
	if err != nil {
		_ = m.Nak() // a failure: the guard waits, holds or retries; the server hears nothing
		return
	}
	if err := m.Ack(); err == nil && len(b.charged) == orders {
		close(b.done)
	}
}

func (b *billing) charge(order int) error {
	if order == 50 && b.until.IsZero() {
		b.until = time.Now().Add(time.Second)
	}
	if time.Now().Before(b.until) {
		b.failed++
		return errors.New("billing: connection refused")
	}
	b.charged[order]++
	return nil
}
