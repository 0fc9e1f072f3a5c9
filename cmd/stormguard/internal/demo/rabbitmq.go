// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/adapters/amqp"
	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/access"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

// deliveryLimit is the default limit of quorum queues from RabbitMQ 4.0 on. With a
// limit a requeued message returns to its place. Earlier versions have no default
// limit: there a requeued message goes to the queue's end.
const deliveryLimit = 20

var onRabbitMQ = platform{
	title: "RabbitMQ", store: "queue",
	unguarded: "Nack and requeue on error, at the fifth failure the DLQ",
	guarded:   "guardamqp.Consume(ctx, g, dial, q, handle)",
	address:   "amqp://user:password@host:port/ (or amqps)",
	check: func(address string) bool {
		_, err := amqp091.ParseURI(address)
		return err == nil
	},
	open: func(_ context.Context, _ Config, address string, a *access.Access) (broker, error) {
		address, err := a.URL(address)
		dialer := guardamqp.Dial(address)
		dialer.Config.TLSClientConfig = a.TLS()
		return rabbitServer{dialer}, err
	},
	found: brokers.RabbitMQ,
}

// rabbitServer is a running RabbitMQ.
type rabbitServer struct{ dialer guardamqp.Dialer }

func (rabbitServer) close() {}

// rabbitRun is the [plumbing] of one run: two quorum queues, read and written
// through the default exchange.
type rabbitRun struct {
	rabbitServer
	queue, dlq string
	conns      []*amqp091.Connection
	publisher  *amqp091.Channel // only send's goroutine uses it

	mu   sync.Mutex       // guards asks: a channel has one request at a time
	asks *amqp091.Channel // for all requests except publishing
}

func (b rabbitServer) lay(ctx context.Context, id string) (plumbing, error) {
	p := &rabbitRun{rabbitServer: b, queue: "stormguard-demo." + id + ".orders", dlq: "stormguard-demo." + id + ".dlq"}
	return p, p.fit(ctx)
}

func (p *rabbitRun) fit(ctx context.Context) error {
	for _, c := range []struct {
		name string
		ch   **amqp091.Channel
	}{{"oracle", &p.asks}, {"publisher", &p.publisher}} {
		conn, err := p.connect(ctx, c.name)
		if err != nil {
			return err
		}
		p.conns = append(p.conns, conn)
		if *c.ch, err = conn.Channel(); err != nil {
			return fmt.Errorf("open a channel: %w", err)
		}
	}
	for _, name := range []string{p.queue, p.dlq} {
		args := amqp091.Table{amqp091.QueueTypeArg: amqp091.QueueTypeQuorum}
		if name == p.queue {
			args["x-delivery-limit"] = deliveryLimit
		}
		if _, err := p.asks.QueueDeclare(name, true, false, false, false, args); err != nil {
			return fmt.Errorf("declare queue %s: %w", name, err)
		}
	}
	if err := p.publisher.Confirm(false); err != nil {
		return fmt.Errorf("turn on confirms: %w", err)
	}
	return nil
}

// connect opens a connection. The client's own dialling takes no context.
func (b rabbitServer) connect(ctx context.Context, name string) (*amqp091.Connection, error) {
	url := b.dialer.URLs[0]
	properties := amqp091.NewConnectionProperties()
	properties.SetClientConnectionName("stormguard demo: " + name)
	conn, err := amqp091.DialConfig(url, amqp091.Config{
		Properties: properties, Dial: amqp091.DefaultDial(10 * time.Second), TLSClientConfig: b.dialer.Config.TLSClientConfig.Clone(),
	})
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", access.Redact(url), err)
	}
	return conn, ctx.Err()
}

func (p *rabbitRun) send(ctx context.Context, body []byte) (func(context.Context) error, error) {
	confirm, err := p.publisher.PublishWithDeferredConfirmWithContext(ctx, "", p.queue, false, false,
		amqp091.Publishing{DeliveryMode: amqp091.Persistent, ContentType: "application/json", Body: body})
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		ok, err := confirm.WaitContext(ctx)
		if err == nil && !ok {
			err = errors.New("the broker refused it, or the connection broke")
		}
		return err
	}, nil
}

// ask returns a queue's number of ready messages and consumers. AMQP does not
// count unacked messages. The ledger counts them, and after the consumer's end
// they are ready again.
func (p *rabbitRun) ask(queue string) (amqp091.Queue, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.asks.QueueDeclarePassive(queue, true, false, false, false, nil)
}

func (p *rabbitRun) joined(context.Context) (bool, error) {
	q, err := p.ask(p.queue)
	return q.Consumers > 0, err
}

func (p *rabbitRun) idle(context.Context) (bool, error) {
	q, err := p.ask(p.queue)
	return err == nil && q.Messages == 0, err
}

func (p *rabbitRun) buried(context.Context) (int, error) {
	q, err := p.ask(p.dlq)
	return q.Messages, err
}

// exhume takes the messages out of the DLQ, with automatic acks: the broker delivers
// at most 2,000 unacked messages.
func (p *rabbitRun) exhume(ctx context.Context, start time.Time) ([]dead, error) {
	n, err := p.buried(ctx)
	if err != nil || n == 0 {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	in, err := p.asks.Consume(p.dlq, "", true, false, false, false, nil)
	if err != nil {
		return nil, err
	}
	give := time.NewTimer(patience)
	defer give.Stop()
	out := make([]dead, 0, n)
	for len(out) < n {
		select {
		case d, open := <-in:
			if !open {
				return nil, errors.New("the channel was closed")
			}
			o, err := parseOrder(d.Body)
			if err != nil {
				return nil, err
			}
			at, err := died(d.Headers)
			if err != nil {
				return nil, err
			}
			out = append(out, dead{o.ID, at.Sub(start)})
		case <-give.C:
			return nil, fmt.Errorf("the DLQ gave out %d of %d messages within %s", len(out), n, patience)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return out, nil
}

// diedHeader is the unguarded side's header for the time of a dead letter: AMQP
// keeps no time of arrival.
const diedHeader = "died"

// died is when a message became a dead letter, by the header of either side.
func died(headers amqp091.Table) (time.Time, error) {
	for _, name := range []string{diedHeader, "stormguard-last-failed"} {
		if text, ok := headers[name].(string); ok {
			return time.Parse(time.RFC3339Nano, text)
		}
	}
	return time.Time{}, errors.New("demo: a dead letter without a time")
}

func (p *rabbitRun) remove(context.Context) {
	if p.asks != nil {
		p.mu.Lock()
		for _, name := range []string{p.queue, p.dlq} {
			_, _ = p.asks.QueueDelete(name, false, false, false) // the queue may not exist
		}
		p.mu.Unlock()
	}
	for _, conn := range p.conns {
		_ = conn.CloseDeadline(time.Now().Add(stopTimeout))
	}
}
