// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package chaosrun

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/adapters/amqp"
	"github.com/stormguard-mq/stormguard/guard"
)

// onRabbitMQ is a quorum queue, and a second one for the dead letters.
type onRabbitMQ struct {
	mutant           Mutant
	url, queue, dead string

	confirmWithin time.Duration // time limit for the confirmation of a batch

	conn *amqp091.Connection
	ch   *amqp091.Channel
	got  [][]byte // dead letters read so far

	returned chan amqp091.Return // messages that no queue took
}

func newRabbitMQ(j Job) *onRabbitMQ {
	return &onRabbitMQ{
		mutant: j.Mutant, url: j.URL, queue: "chaos." + j.ID, dead: "chaos." + j.ID + ".dlq",
		confirmWithin: j.confirmsWithin(10 * time.Second), // a quorum queue may lose a message after a restart
	}
}

// connect opens a new connection if the old one is broken.
func (b *onRabbitMQ) connect() (err error) {
	if b.ch != nil && !b.ch.IsClosed() {
		return nil
	}
	if b.conn != nil {
		_ = b.conn.CloseDeadline(time.Now().Add(time.Second))
	}
	if b.conn, err = amqp091.Dial(b.url); err != nil {
		return err
	}
	if b.ch, err = b.conn.Channel(); err != nil {
		return err
	}
	b.returned = b.ch.NotifyReturn(make(chan amqp091.Return, batch))
	return b.ch.Confirm(false)
}

func (b *onRabbitMQ) lay(context.Context) error {
	if err := b.connect(); err != nil {
		return err
	}
	for _, name := range []string{b.queue, b.dead} {
		// Kills count as deliveries, so a limit would drop messages that were often in flight.
		args := amqp091.Table{amqp091.QueueTypeArg: amqp091.QueueTypeQuorum, "x-delivery-limit": 1_000_000}
		if _, err := b.ch.QueueDeclare(name, true, false, false, false, args); err != nil {
			return fmt.Errorf("declare queue %s: %w", name, err)
		}
	}
	return nil
}

func (b *onRabbitMQ) remove(context.Context) {
	if b.ch != nil {
		_, _ = b.ch.QueueDelete(b.queue, false, false, false)
		_, _ = b.ch.QueueDelete(b.dead, false, false, false)
	}
	if b.conn != nil {
		_ = b.conn.CloseDeadline(time.Now().Add(5 * time.Second))
	}
}

func (b *onRabbitMQ) publish(ctx context.Context, ms []message) error {
	if err := b.connect(); err != nil {
		return err
	}
	var waits []*amqp091.DeferredConfirmation
	for _, m := range ms {
		c, err := b.ch.PublishWithDeferredConfirmWithContext(ctx, "", b.queue, true, false, amqp091.Publishing{DeliveryMode: amqp091.Persistent, Body: m.body})
		if err != nil {
			return err
		}
		waits = append(waits, c)
	}
	limited, cancel := context.WithTimeout(ctx, b.confirmWithin)
	defer cancel()
	for _, c := range waits {
		if ok, err := c.WaitContext(limited); err != nil || !ok {
			_ = b.ch.Close() // connect then opens a new one
			return errors.Join(err, fmt.Errorf("confirmed: %t", ok))
		}
	}
	select {
	case r, open := <-b.returned:
		if open {
			return fmt.Errorf("returned: %s", r.ReplyText)
		}
	default:
	}
	return nil
}

// left sees only ready messages. A consumer's messages are ready again after its end; before,
// the run's own record counts them.
func (b *onRabbitMQ) left(context.Context) (int, error) {
	if err := b.connect(); err != nil {
		return 0, err
	}
	q, err := b.ch.QueueDeclarePassive(b.queue, true, false, false, false, nil)
	return q.Messages, err
}

func (b *onRabbitMQ) letters(context.Context) ([][]byte, error) {
	if err := b.connect(); err != nil {
		return nil, err
	}
	for {
		d, ok, err := b.ch.Get(b.dead, true)
		if err != nil || !ok {
			return b.got, err
		}
		b.got = append(b.got, d.Body) // the queue has deleted the letter: a retry needs it, too
	}
}

func (b *onRabbitMQ) consume(ctx context.Context, g *guard.Guard, handle func(context.Context, []byte) error) error {
	dial := guardamqp.Dial(b.url)
	letters, err := patiently(ctx, func() (*guardamqp.DLQ, error) { return guardamqp.NewDLQ(ctx, dial, guardamqp.DLQConfig{Queue: b.dead}) })
	if err != nil {
		return err
	}
	return guardamqp.Consume(ctx, g, dial, b.queue, func(ctx context.Context, d amqp091.Delivery) error { return handle(ctx, d.Body) },
		guardamqp.WithDeadLetters(b.mutant.writer(letters)), guardamqp.WithDeliveryLimit(1_000_000))
}
