// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Command kafka-marks puts the guard in front of a consumer group's handler that
// exists already and marks by itself. One line of main changes.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka"
	"github.com/stormguard-mq/stormguard/examples/internal/topics"
	"github.com/stormguard-mq/stormguard/guard"
)

const orders = 100

// biller is the program's own handler, as it was before. It knows no guard.
type biller struct {
	mu     sync.Mutex
	down   time.Time // the dependency is down until then
	calls  int       // made while it was
	billed []int
	done   chan struct{}
}

func (*biller) Setup(sarama.ConsumerGroupSession) error   { return nil }
func (*biller) Cleanup(sarama.ConsumerGroupSession) error { return nil }

func (b *biller) ConsumeClaim(session sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	for {
		select {
		case m, ok := <-claim.Messages():
			if !ok {
				return nil
			}
			if err := b.bill(m); err != nil {
				return err // without a guard: a rebalance, and the same again at full speed
			}
			session.MarkMessage(m, "")
		case <-session.Context().Done():
			return nil
		}
	}
}

// bill charges one order. The dependency dies at the 50th, for a second.
func (b *biller) bill(m *sarama.ConsumerMessage) error {
	order, err := strconv.Atoi(string(m.Value))
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if order == 50 && b.down.IsZero() {
		b.down = time.Now().Add(time.Second)
	}
	if time.Now().Before(b.down) {
		b.calls++
		return errors.New("payments: connection refused")
	}
	if b.billed = append(b.billed, order); len(b.billed) == orders-1 {
		close(b.done)
	}
	return nil
}

func main() {
	// The guard logs changes of state, never messages: try it with os.Stderr.
	if err := run(os.Stdout, io.Discard); err != nil {
		fmt.Fprintln(os.Stderr, "kafka-marks:", err)
		os.Exit(1)
	}
}

func run(out, logs io.Writer) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	topic, err := topics.New("orders")
	if err != nil {
		return err
	}
	defer topic.Close(topic.Name + ".dlq")
	log := slog.New(slog.NewTextHandler(logs, nil))

	// With one worker the loop has one message at a time, so that a retry comes
	// before what was behind it.
	g, err := guard.New(guard.Config{
		Group:  "billing",
		Policy: guard.Policy{Workers: 1, Retry: guard.Retry{Attempts: 3}},
	}, guard.WithLogger(log))
	if err != nil {
		return err
	}
	letters, err := kafka.NewDLQ(topics.Addrs(), topics.Config(), kafka.DLQConfig{Sources: []string{topic.Name}})
	if err != nil {
		return errors.Join(err, closeGuard(g))
	}
	defer func() { _ = letters.Close() }()
	group, err := sarama.NewConsumerGroup(topics.Addrs(), topic.Group, topics.Config())
	if err != nil {
		return errors.Join(err, closeGuard(g))
	}
	go kafka.WatchErrors(ctx, group, log)

	for i := 1; i <= orders; i++ {
		body := strconv.Itoa(i)
		if i == 13 {
			body = "thirteen"
		}
		if err := topic.Publish(body); err != nil {
			return errors.Join(err, closeGuard(g))
		}
	}
	b := &biller{done: make(chan struct{})}
	consuming, stopConsuming := context.WithCancel(ctx) // yours: signal.NotifyContext
	defer stopConsuming()
	ended := make(chan error, 1)
	go func() {
		var err error
		for consuming.Err() == nil && err == nil {
			// This line was: group.Consume(consuming, []string{topic.Name}, b)
			err = group.Consume(consuming, []string{topic.Name}, kafka.WrapHandler(g, b, kafka.WithDeadLetters(letters)))
		}
		ended <- err
	}()
	select {
	case <-b.done:
	case err := <-ended:
		return errors.Join(err, closeGuard(g))
	}
	stopConsuming()
	if err := errors.Join(<-ended, group.Close(), closeGuard(g)); err != nil {
		return err
	}
	return check(ctx, out, topic, b)
}

func closeGuard(g *guard.Guard) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, err := g.Close(ctx)
	return err
}

// check prints what happened, and fails if it is not what should have.
func check(ctx context.Context, out io.Writer, topic *topics.Topic, b *biller) error {
	ordered := slices.IsSorted(b.billed) && len(slices.Compact(slices.Clone(b.billed))) == len(b.billed)
	fmt.Fprintf(out, "%d orders billed, in order: %t\n", len(b.billed), ordered)
	fmt.Fprintf(out, "an outage of a second cost 20 calls at most: %t\n", b.calls <= 20)
	dead, err := topic.Read(ctx, topic.Name+".dlq")
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "dead letters: %d\n", len(dead))
	if len(dead) != 1 || len(b.billed) != orders-1 || !ordered || b.calls > 20 {
		return errors.New("that is not what should have happened")
	}
	letter, err := kafka.ReadDeadLetter(dead[0])
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "offset %d, %q: %s\n", letter.Origin.Offset, letter.Body, letter.Error.Message)
	return nil
}
