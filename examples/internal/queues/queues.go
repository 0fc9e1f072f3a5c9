// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package queues creates and reads the queues of the RabbitMQ examples. Your program has
// its own queues.
package queues

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/rabbitmq/amqp091-go"
)

// URL returns the value of STORMGUARD_RABBITMQ, or the address of a broker on this
// machine's usual port. The command scripts/brokers start rabbitmq runs one and prints its
// address.
func URL() string {
	return cmp.Or(os.Getenv("STORMGUARD_RABBITMQ"), "amqp://guest:guest@127.0.0.1:5672/")
}

// Queue is a quorum queue that an example made, with a unique name.
type Queue struct {
	Name string
	conn *amqp091.Connection
	ch   *amqp091.Channel
}

// New makes a queue.
func New(name string) (*Queue, error) {
	conn, err := amqp091.Dial(URL())
	if err != nil {
		return nil, fmt.Errorf("no RabbitMQ; run scripts/brokers start rabbitmq and set STORMGUARD_RABBITMQ to what it prints: %w", err)
	}
	q := &Queue{Name: fmt.Sprintf("%s-%d", name, time.Now().UnixNano()), conn: conn}
	if q.ch, err = conn.Channel(); err == nil {
		err = q.ch.Confirm(false)
	}
	if err == nil {
		_, err = q.ch.QueueDeclare(q.Name, true, false, false, false, amqp091.Table{"x-queue-type": "quorum"})
	}
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return q, nil
}

// Publish publishes persistent messages and waits until they are confirmed.
func (q *Queue) Publish(ctx context.Context, bodies ...string) error {
	var waits []*amqp091.DeferredConfirmation
	for _, body := range bodies {
		m := amqp091.Publishing{Body: []byte(body), DeliveryMode: amqp091.Persistent}
		c, err := q.ch.PublishWithDeferredConfirm("", q.Name, true, false, m)
		if err != nil {
			return err
		}
		waits = append(waits, c)
	}
	for _, c := range waits {
		if ok, err := c.WaitContext(ctx); err != nil || !ok {
			return errors.Join(err, fmt.Errorf("confirmed: %t", ok))
		}
	}
	return nil
}

// Get removes and returns all messages of a queue.
func (q *Queue) Get(queue string) (all []amqp091.Delivery, err error) {
	for {
		d, ok, err := q.ch.Get(queue, true)
		if err != nil || !ok {
			return all, err
		}
		all = append(all, d)
	}
}

// Len returns the number of messages that wait in a queue.
func (q *Queue) Len(queue string) (int, error) {
	got, err := q.ch.QueueDeclarePassive(queue, true, false, false, false, nil)
	return got.Messages, err
}

// Close deletes the queue and others, and closes the connection.
func (q *Queue) Close(others ...string) {
	for _, name := range append(others, q.Name) {
		if _, err := q.ch.QueueDelete(name, false, false, false); err != nil {
			break
		}
	}
	_ = q.conn.Close()
}
