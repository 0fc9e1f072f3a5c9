// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Command rabbitmq guards a RabbitMQ queue: a poison message goes to the DLQ, an
// outage does not.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/adapters/amqp"
	"github.com/stormguard-mq/stormguard/examples/internal/queues"
	"github.com/stormguard-mq/stormguard/guard"
)

const orders = 200

func main() {
	// The guard logs changes of state, never messages: try it with os.Stderr.
	if err := run(os.Stdout, io.Discard); err != nil {
		fmt.Fprintln(os.Stderr, "rabbitmq:", err)
		os.Exit(1)
	}
}

func run(out, logs io.Writer) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	queue, err := queues.New("orders")
	if err != nil {
		return err
	}
	dead := queue.Name + ".dlq"
	defer queue.Close(dead)

	// One guard for the process, one queue of dead letters, created if it is not
	// there, on a connection of its own.
	log := slog.New(slog.NewTextHandler(logs, nil))
	g, err := guard.New(guard.Config{
		Group:  "billing",
		Policy: guard.Policy{Timeout: 5 * time.Second, Retry: guard.Retry{Attempts: 4}},
	}, guard.WithLogger(log))
	if err != nil {
		return err
	}
	broker := amqp.Dial(queues.URL()) // yours: all nodes of the cluster
	letters, err := amqp.NewDLQ(ctx, broker, amqp.DLQConfig{Queue: dead})
	if err != nil {
		return errors.Join(err, closeGuard(g))
	}
	defer func() { _ = letters.Close(ctx) }()

	// A handler acks nothing itself: nil acks, an error retries, and Permanent
	// is for what no retry can mend.
	pay := &payments{done: make(chan struct{})}
	handle := func(_ context.Context, d amqp091.Delivery) error {
		order, err := strconv.Atoi(string(d.Body))
		if err != nil {
			return guard.Permanent(err)
		}
		return pay.charge(order)
	}
	consuming, stopConsuming := context.WithCancel(ctx) // yours: signal.NotifyContext
	defer stopConsuming()
	ended := make(chan error, 1)
	go func() {
		ended <- amqp.Consume(consuming, g, broker, queue.Name, handle, amqp.WithDeadLetters(letters), amqp.WithLogger(log))
	}()

	for i := 1; i <= orders; i++ {
		body := strconv.Itoa(i)
		if i == 13 {
			body = "thirteen"
		}
		if err := queue.Publish(ctx, body); err != nil {
			return errors.Join(err, closeGuard(g))
		}
	}
	select {
	case <-pay.done:
	case err := <-ended:
		return errors.Join(err, closeGuard(g))
	}

	// A graceful stop: no more intake, what runs finishes, the channel is closed
	// and the rest goes back to the queue.
	stopConsuming()
	if err := errors.Join(<-ended, closeGuard(g)); err != nil {
		return err
	}
	return check(out, queue, dead, pay)
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

// charge is called by one goroutine at a time: the default order is the queue's.
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
func check(out io.Writer, queue *queues.Queue, dead string, pay *payments) error {
	fmt.Fprintf(out, "%d orders charged, in order: %t\n", pay.charged, !pay.disorder)
	fmt.Fprintf(out, "an outage of a second cost 20 calls at most: %t\n", pay.calls <= 20)
	all, err := queue.Get(dead)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "dead letters: %d\n", len(all))
	if len(all) != 1 {
		return errors.New("that is not what should have happened")
	}
	letter, err := amqp.ReadDeadLetter(all[0])
	if err != nil {
		return err
	}
	source, _, _ := strings.Cut(letter.Origin.Source, "-")
	fmt.Fprintf(out, "%s, %q, after %d attempt: %s\n", source, letter.Body, letter.Attempts, letter.Error.Message)
	if pay.charged != orders-1 || pay.disorder || pay.calls > 20 || string(letter.Body) != "thirteen" {
		return errors.New("that is not what should have happened")
	}
	return nil
}
