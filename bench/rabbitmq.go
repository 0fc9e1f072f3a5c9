// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/adapters/amqp"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

var rabbitMQ = newRabbitMQ(20_000, 0.05)

// prefetch is both sides'.
const prefetch = 1000

// newRabbitMQ consumes a quorum queue of n messages, the kind that production
// uses for what must not be lost, and the fastest to ack: with a classic queue
// the broker takes so long that the client hardly matters. An operation is one
// message, from the first handler call until the last. Each turn has a queue of
// its own, filled with confirms before the clock starts; that nothing is left in
// it is checked after the clock has stopped.
//
// Both sides have a connection and a channel, prefetch 1000; the raw one acks
// each message by itself, as most consumers do.
func newRabbitMQ(n int, within float64) Group {
	r := &rabbitRig{}
	c := func(name string, busy time.Duration, side rabbitSide) Case {
		return Case{Name: name, N: n, Open: func(ctx context.Context) (Runner, error) { return r.runner(ctx, busy, side) }}
	}
	return Group{
		Name:   "rabbitmq",
		About:  "adapters/amqp against a bare amqp091-go consumer, on a real RabbitMQ, a quorum queue",
		Rounds: 11,
		Passes: 12, // a turn is noisier than the other brokers': 20,000 messages take a second or two
		Steady: "raw_raw",
		Within: within,
		Cases: []Case{
			c("raw", 0, r.raw),
			c("guarded", 0, r.guarded),
			c("raw_again", 0, r.raw),
			c("raw_10us", busyFor, r.raw),
			c("guarded_10us", busyFor, r.guarded),
		},
		Ratios: []Ratio{
			{Name: "guarded_raw", Kind: Throughput, Ours: "guarded", Theirs: "raw"},
			{Name: "raw_raw", Kind: Throughput, Ours: "raw_again", Theirs: "raw"},
			{Name: "guarded_raw_10us", Kind: Throughput, Ours: "guarded_10us", Theirs: "raw_10us"},
			{Name: "cpu_guarded_raw", Kind: CPU, Ours: "guarded", Theirs: "raw"},
		},
	}
}

// A rabbitSide consumes a queue until ctx ends.
type rabbitSide func(ctx context.Context, queue string, c *course) error

func (r *rabbitRig) raw(ctx context.Context, queue string, c *course) (err error) {
	conn, err := amqp091.Dial(r.addr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	if err := ch.Qos(prefetch, 0, false); err != nil {
		return err
	}
	const tag = "raw"
	deliveries, err := ch.Consume(queue, tag, false, false, false, false, nil)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = ch.Cancel(tag, false) }) // ends the loop
	defer stop()
	for d := range deliveries {
		c.handle(0)
		if err := d.Ack(false); err != nil {
			return err
		}
	}
	return nil
}

func (r *rabbitRig) guarded(ctx context.Context, queue string, c *course) error {
	return guardamqp.Consume(ctx, r.guard.Guard, guardamqp.Dialer{URLs: []string{r.addr}}, queue,
		func(context.Context, amqp091.Delivery) error { c.handle(0); return nil }, guardamqp.WithPrefetch(prefetch))
}

// rabbitRig is what the cases share, from the first to open to the last to close.
type rabbitRig struct {
	users  int
	addr   string
	conn   *amqp091.Connection // fills and checks queues
	guard  *metered
	prefix string
	turns  int
}

func (r *rabbitRig) open(ctx context.Context) (err error) {
	if r.users++; r.users > 1 {
		return nil
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	if r.addr, err = brokers.Find(ctx, brokers.RabbitMQ); err != nil {
		return err
	}
	r.prefix = fmt.Sprintf("stormguard-bench-%d-%s", os.Getpid(), strings.ToLower(rand.Text()[:6]))
	if r.conn, err = amqp091.Dial(r.addr); err != nil {
		return err
	}
	r.guard, err = newMetered()
	return err
}

func (r *rabbitRig) close() error {
	if r.users--; r.users > 0 {
		return nil
	}
	var errs []error
	if r.guard != nil {
		errs = append(errs, r.guard.close())
	}
	if r.conn != nil {
		errs = append(errs, r.conn.Close())
	}
	*r = rabbitRig{}
	return errors.Join(errs...)
}

func (r *rabbitRig) runner(ctx context.Context, busy time.Duration, side rabbitSide) (Runner, error) {
	if err := r.open(ctx); err != nil {
		return Runner{}, err
	}
	var turn *rabbitTurn
	return Runner{
		Before: func(ctx context.Context, n int) (err error) {
			r.turns++
			turn, err = r.subscribe(ctx, fmt.Sprintf("%s-%d", r.prefix, r.turns), n, newCourse(1, n, busy), side)
			return err
		},
		Do: func(ctx context.Context, _ int) error { return turn.course.run(ctx, turn.ended) },
		After: func(ctx context.Context) error {
			return errors.Join(turn.leave(), r.guard.scrape(ctx), turn.course.check(), r.drained(ctx, turn.queue))
		},
		Close: r.close,
	}, nil
}

// fill makes a queue of n messages of 256 bytes, all confirmed.
func (r *rabbitRig) fill(ctx context.Context, queue string, n int) (err error) {
	ch, err := r.conn.Channel()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ch.Close()) }()
	if _, err := ch.QueueDeclare(queue, true, false, false, false, amqp091.Table{"x-queue-type": "quorum"}); err != nil {
		return err
	}
	if err := ch.Confirm(false); err != nil {
		return err
	}
	m := amqp091.Publishing{DeliveryMode: amqp091.Persistent, Body: make([]byte, 256)}
	const window = 2000
	pending := make([]*amqp091.DeferredConfirmation, 0, window)
	for i := range n {
		confirmation, err := ch.PublishWithDeferredConfirmWithContext(ctx, "", queue, true, false, m)
		if err != nil {
			return err
		}
		if pending = append(pending, confirmation); len(pending) < window && i < n-1 {
			continue
		}
		for _, p := range pending {
			if ok, err := p.WaitContext(ctx); err != nil || !ok {
				return errors.Join(err, fmt.Errorf("%s: a message was not confirmed", queue))
			}
		}
		pending = pending[:0]
	}
	return nil
}

// drained checks that the messages of a queue were acked, and deletes the queue.
// The consumer's channel is closed: what it did not ack is ready again.
func (r *rabbitRig) drained(ctx context.Context, queue string) (err error) {
	ch, err := r.conn.Channel()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ch.Close()) }()
	left := -1
	for deadline := time.Now().Add(10 * time.Second); left != 0 && time.Now().Before(deadline) && ctx.Err() == nil; {
		q, err := ch.QueueDeclarePassive(queue, true, false, false, false, nil)
		if err != nil {
			return err
		}
		left = q.Messages
		if left > 0 {
			time.Sleep(20 * time.Millisecond)
		}
	}
	purged, err := ch.QueueDelete(queue, false, false, false)
	if max(left, purged) > 0 {
		err = errors.Join(err, fmt.Errorf("%s: %d messages were not acked, %d when it was deleted", queue, left, purged))
	}
	return err
}

// rabbitTurn is one consumer of one queue.
type rabbitTurn struct {
	queue  string
	course *course
	cancel context.CancelFunc
	ended  chan error
}

// subscribe fills a queue and starts to consume it, up to the first message.
func (r *rabbitRig) subscribe(ctx context.Context, queue string, n int, c *course, side rabbitSide) (*rabbitTurn, error) {
	if err := r.fill(ctx, queue, n); err != nil {
		return nil, err
	}
	t := &rabbitTurn{queue: queue, course: c, ended: make(chan error, 1)}
	ctx, t.cancel = context.WithCancel(ctx)
	go func() { t.ended <- side(ctx, queue, c) }()
	if err := c.ready(ctx, t.ended); err != nil {
		c.abandon()
		t.cancel()
		return nil, err
	}
	return t, nil
}

// leave stops consuming.
func (t *rabbitTurn) leave() error {
	t.cancel()
	return <-t.ended
}
