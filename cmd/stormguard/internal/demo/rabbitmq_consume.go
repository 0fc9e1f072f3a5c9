// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/adapters/amqp"
	"github.com/stormguard-mq/stormguard/guard"
)

// unguarded acks, requeues by nack, and at the last delivery publishes to the
// DLQ.
func (p *rabbitRun) unguarded(ctx context.Context, handle handler) error {
	conn, err := p.connect(ctx, "consumer")
	if err != nil {
		return err
	}
	defer func() { _ = conn.CloseDeadline(time.Now().Add(stopTimeout)) }()
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	letters, err := conn.Channel()
	if err != nil {
		return err
	}
	if err := errors.Join(ch.Qos(inFlight, 0, false), letters.Confirm(false)); err != nil {
		return err
	}
	closed := ch.NotifyClose(make(chan *amqp091.Error, 1))
	in, err := ch.Consume(p.queue, "", false, false, false, false, nil)
	if err != nil {
		return err
	}
	confirms := letters.NotifyPublish(make(chan amqp091.Confirmation, lettersInFlight))
	var pending []amqp091.Delivery // deliveries whose dead letters are not confirmed, in the order of the confirms
	for {
		next := in
		if len(pending) == lettersInFlight {
			next = nil
		}
		select {
		case d, open := <-next:
			if !open {
				select {
				case why := <-closed:
					return fmt.Errorf("the broker closed the channel: %w", why)
				default:
					return errors.New("the broker cancelled the consumer")
				}
			}
			buried, err := p.settle(ctx, d, handle(ctx, d.Body), letters)
			if err != nil {
				return err
			}
			if buried {
				pending = append(pending, d)
			}
		case c, open := <-confirms:
			if !open || !c.Ack {
				return errors.New("the broker did not take a dead letter")
			}
			if err := pending[0].Ack(false); err != nil {
				return err
			}
			pending = pending[1:]
		case <-ctx.Done():
			return nil
		}
	}
}

// settle acks, requeues or dead-letters a delivery, by its handler's error. If
// buried is true, the caller acks the delivery when its dead letter is confirmed.
func (p *rabbitRun) settle(ctx context.Context, d amqp091.Delivery, failed error, letters *amqp091.Channel) (buried bool, err error) {
	switch {
	case failed == nil:
		return false, d.Ack(false)
	case ctx.Err() != nil:
		return false, nil //nolint:nilerr // it is delivered again
	case deliveries(d) < maxDeliver:
		return false, d.Nack(false, true)
	}
	err = letters.PublishWithContext(ctx, "", p.dlq, false, false, amqp091.Publishing{
		DeliveryMode: amqp091.Persistent, ContentType: d.ContentType, Body: d.Body,
		Headers: amqp091.Table{"error": failed.Error(), diedHeader: time.Now().Format(time.RFC3339Nano)},
	})
	return true, err
}

// deliveries is how often a quorum queue has delivered the message, including this
// time. From RabbitMQ 4.3 on only the second header counts nacks; before, the
// first one does.
func deliveries(d amqp091.Delivery) int64 {
	var most int64
	for _, name := range []string{"x-delivery-count", "x-acquired-count"} {
		if n, ok := d.Headers[name].(int64); ok {
			most = max(most, n)
		}
	}
	return most + 1
}

func (p *rabbitRun) guarded(ctx context.Context, g *guard.Guard, handle handler) (err error) {
	letters, err := guardamqp.NewDLQ(ctx, p.dialer, guardamqp.DLQConfig{Queue: p.dlq})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeLetters(ctx, letters)) }()
	return guardamqp.Consume(ctx, g, p.dialer, p.queue, func(ctx context.Context, d amqp091.Delivery) error { return handle(ctx, d.Body) },
		guardamqp.WithDeadLetters(letters), guardamqp.WithPrefetch(inFlight), guardamqp.WithDeliveryLimit(deliveryLimit), guardamqp.WithStopTimeout(stopTimeout))
}

func closeLetters(ctx context.Context, letters *guardamqp.DLQ) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	return letters.Close(ctx)
}
