// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Command jetstream-dlq works a JetStream DLQ off at a rate, and keeps
// MaxDeliver from filling one at full speed.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/adapters/nats"
	"github.com/stormguard-mq/stormguard/examples/internal/embedded"
	"github.com/stormguard-mq/stormguard/guard"
)

func main() {
	if err := run(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "jetstream-dlq:", err)
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
	if err := throttle(ctx, out, js); err != nil {
		return fmt.Errorf("throttle: %w", err)
	}
	if err := mover(ctx, out, js); err != nil {
		return fmt.Errorf("mover: %w", err)
	}
	return nil
}

// throttle works a DLQ that is there already off at 50 letters a second, so that
// what just came back is not knocked over by its own dead letters.
func throttle(ctx context.Context, out io.Writer, js jetstream.JetStream) error {
	const letters, perSecond, burst = 60, 50, 5
	consumer, err := fill(ctx, js, "OLD_DLQ", letters, jetstream.ConsumerConfig{Durable: "repair"})
	if err != nil {
		return err
	}
	g, err := guard.New(guard.Config{Group: "repair"})
	if err != nil {
		return err
	}
	rate, err := nats.NewRate(perSecond, burst)
	if err != nil {
		return errors.Join(err, closeGuard(g))
	}
	working, done := context.WithCancel(ctx)
	defer done()
	repaired := 0
	var first, last time.Time
	err = nats.Throttle(working, g, consumer, rate, func(context.Context, jetstream.Msg) error {
		if last = time.Now(); repaired == 0 {
			first = last
		}
		if repaired++; repaired == letters {
			done()
		}
		return nil
	})
	if err = errors.Join(err, closeGuard(g)); err != nil {
		return err
	}
	kept := last.Sub(first) >= (letters-burst-1)*time.Second/perSecond
	fmt.Fprintf(out, "%d letters worked off, never more than %d/s and a burst of %d: %t\n", repaired, perSecond, burst, kept)
	if repaired != letters || !kept {
		return errors.New("that is not what should have happened")
	}
	return nil
}

// mover looks after a consumer that is not guarded. JetStream gives a message up
// after MaxDeliver deliveries, and nobody is given it again. The mover parks each
// of them at once, and lets them into the DLQ as the budget allows.
func mover(ctx context.Context, out io.Writer, js jetstream.JetStream) (err error) {
	const messages = 30
	consumer, err := fill(ctx, js, "ORDERS", messages, jetstream.ConsumerConfig{Durable: "billing", MaxDeliver: 2})
	if err != nil {
		return err
	}
	letters, err := nats.NewDLQ(ctx, js, nats.DLQConfig{Stream: "ORDERS_DLQ"})
	if err != nil {
		return err
	}
	m, err := nats.NewMover(ctx, js, nats.MoverConfig{Stream: "ORDERS", Consumer: "billing", DLQ: letters})
	if err != nil {
		return err
	}
	moving, stopMoving := context.WithCancel(ctx)
	moved := make(chan error, 1)
	go func() { moved <- m.Run(moving) }()
	defer func() { stopMoving(); err = errors.Join(err, <-moved) }()

	// The unguarded consumer fails every message.
	cc, err := consumer.Consume(func(m jetstream.Msg) { _ = m.Nak() })
	if err != nil {
		return err
	}
	defer func() { cc.Stop(); <-cc.Closed() }()

	counts, err := await(ctx, m, func(c nats.MoverCounts) bool { return c.Parked == messages && c.Refused > 0 })
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%d messages given up on: %d in the DLQ, %d parked\n", counts.Parked, counts.Released, counts.Parked-counts.Released)
	m.Grant(10) // an operator looked at them
	after, err := await(ctx, m, func(c nats.MoverCounts) bool { return c.Released == messages })
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "after a grant of 10: %d in the DLQ, %d parked\n", after.Released, after.Parked-after.Released)
	if counts.Released != 20 { // the balance that a budget starts with
		return errors.New("that is not what should have happened")
	}
	return nil
}

// fill makes a stream of n messages with a consumer.
func fill(ctx context.Context, js jetstream.JetStream, name string, n int, c jetstream.ConsumerConfig) (jetstream.Consumer, error) {
	stream, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: name, Subjects: []string{name}})
	if err != nil {
		return nil, err
	}
	for i := range n {
		if _, err := js.Publish(ctx, name, fmt.Appendf(nil, "order %d", i+1)); err != nil {
			return nil, err
		}
	}
	return stream.CreateConsumer(ctx, c)
}

// await polls the mover until ok.
func await(ctx context.Context, m *nats.Mover, ok func(nats.MoverCounts) bool) (nats.MoverCounts, error) {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if c := m.Counts(); ok(c) {
			return c, nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return m.Counts(), fmt.Errorf("%w: %+v", ctx.Err(), m.Counts())
		}
	}
}

func closeGuard(g *guard.Guard) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, err := g.Close(ctx)
	return err
}
