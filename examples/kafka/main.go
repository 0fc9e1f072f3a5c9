// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Command kafka guards a sarama consumer group: a poison message goes to the DLQ,
// an outage does not.
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

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka"
	"github.com/stormguard-mq/stormguard/examples/internal/topics"
	"github.com/stormguard-mq/stormguard/guard"
)

const orders = 200

func main() {
	// The guard logs changes of state, never messages: try it with os.Stderr.
	if err := run(os.Stdout, io.Discard); err != nil {
		fmt.Fprintln(os.Stderr, "kafka:", err)
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

	// One guard for the process, one DLQ topic for each source, created if it is
	// not there.
	log := slog.New(slog.NewTextHandler(logs, nil))
	g, err := guard.New(guard.Config{
		Group:  "billing",
		Policy: guard.Policy{Timeout: 5 * time.Second, Retry: guard.Retry{Attempts: 4}},
	}, guard.WithLogger(log))
	if err != nil {
		return err
	}
	letters, err := kafka.NewDLQ(topics.Addrs(), topics.Config(), kafka.DLQConfig{Sources: []string{topic.Name}})
	if err != nil {
		return errors.Join(err, closeGuard(g))
	}
	defer func() { _ = letters.Close() }()

	// A handler marks nothing itself: nil marks, an error retries, and Permanent
	// is for what no retry can mend.
	pay := &payments{done: make(chan struct{})}
	handle := func(_ context.Context, m *sarama.ConsumerMessage) error {
		order, err := strconv.Atoi(string(m.Value))
		if err != nil {
			return guard.Permanent(err)
		}
		return pay.charge(order)
	}
	group, err := sarama.NewConsumerGroup(topics.Addrs(), topic.Group, topics.Config())
	if err != nil {
		return errors.Join(err, closeGuard(g))
	}
	go kafka.WatchErrors(ctx, group, log)
	consuming, stopConsuming := context.WithCancel(ctx) // yours: signal.NotifyContext
	defer stopConsuming()
	ended := make(chan error, 1)
	go func() {
		ended <- consume(consuming, group, topic.Name, kafka.Wrap(g, handle, kafka.WithDeadLetters(letters)))
	}()

	for i := 1; i <= orders; i++ {
		body := strconv.Itoa(i)
		if i == 13 {
			body = "thirteen"
		}
		if err := topic.Publish(body); err != nil {
			return errors.Join(err, closeGuard(g))
		}
	}
	select {
	case <-pay.done:
	case err := <-ended:
		return errors.Join(err, closeGuard(g))
	}

	// A graceful stop: what runs finishes, what is settled is committed, the
	// group is left, and then the guard ends.
	stopConsuming()
	if err := errors.Join(<-ended, group.Close(), closeGuard(g)); err != nil {
		return err
	}
	return check(ctx, out, topic, pay)
}

// consume joins the group again after each rebalance, until ctx ends or Setup
// refuses the configuration.
func consume(ctx context.Context, group sarama.ConsumerGroup, topic string, h sarama.ConsumerGroupHandler) error {
	for ctx.Err() == nil {
		err := group.Consume(ctx, []string{topic}, h)
		if errors.Is(err, kafka.ErrUnsuitable) || errors.Is(err, guard.ErrClosed) {
			return err
		}
		if err != nil { // the broker is away: try again
			time.Sleep(time.Second)
		}
	}
	return nil
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

// charge is called by one goroutine at a time: the default order is the
// partition's, and there is one.
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
func check(ctx context.Context, out io.Writer, topic *topics.Topic, pay *payments) error {
	fmt.Fprintf(out, "%d orders charged, in order: %t\n", pay.charged, !pay.disorder)
	fmt.Fprintf(out, "an outage of a second cost 20 calls at most: %t\n", pay.calls <= 20)
	dead, err := topic.Read(ctx, topic.Name+".dlq")
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "dead letters: %d\n", len(dead))
	if len(dead) != 1 || pay.charged != orders-1 || pay.disorder || pay.calls > 20 {
		return errors.New("that is not what should have happened")
	}
	letter, err := kafka.ReadDeadLetter(dead[0])
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "offset %d, %q, after %d attempt: %s\n", letter.Origin.Offset, letter.Body, letter.Attempts, letter.Error.Message)
	return nil
}
