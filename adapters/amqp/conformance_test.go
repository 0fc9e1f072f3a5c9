// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/guard/guardtest"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

func TestExercise(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		for _, c := range []struct {
			name    string
			queue   Kind
			order   guard.Order
			workers int
			passive bool
		}{
			{"quorum", Quorum, guard.OrderSource, 1, false},
			{"quorum-key", Quorum, guard.OrderKey, 4, false},
			{"classic", Classic, guard.OrderSource, 1, false},
			{"quorum-passive", Quorum, guard.OrderNone, 4, true},
			{"classic-passive", Classic, guard.OrderNone, 4, true},
		} {
			t.Run(c.name, func(t *testing.T) {
				t.Parallel()
				guardtest.Exercise(t, guardtest.Features{
					RealTime: true, Passive: c.passive, Order: c.order, Workers: c.workers, Keys: true,
					Headers: guardtest.HeaderNative, EmptyBody: true,
					// A classic queue does not count deliveries. No queue has an
					// AckWait, recognises twins, or tells how often it delivered.
					MaxDeliver: c.queue == Quorum,
				}, func(t testing.TB, set guardtest.Setup) guardtest.Subject {
					return newExercised(t, s, c.queue, set, c.passive)
				})
			})
		}
	})
}

// exercised is a queue as a Subject. AMQP has no keys; these are in the routing
// key of a topic exchange.
type exercised struct {
	*rig
	passive bool
	letters *DLQ
	limit   int
	lines   lines
	started guardtest.Consumer
	cancel  context.CancelFunc
	done    chan error
}

func newExercised(t testing.TB, s *server, kind Kind, set guardtest.Setup, passive bool) *exercised {
	args := amqp091.Table{}
	e := &exercised{passive: passive}
	if set.MaxDeliver > 0 {
		e.limit = set.MaxDeliver - 1 // that many deliveries and one more
		args["x-delivery-limit"] = int64(e.limit)
	}
	e.rig = newRig(t, s, kind, args)
	e.letters = e.deadLetters(Classic)
	t.Cleanup(func() { // nobody consumes any more
		if !t.Failed() {
			adaptertest.Eventually(t, "the queue is empty", func() bool { n, err := e.ready(); return n == 0 && err == nil })
		}
		if err := e.lines.check(); err != nil {
			t.Error(err)
		}
	})
	e.on(func(ch *amqp091.Channel) error {
		if err := ch.ExchangeDeclare(e.queue, "topic", false, true, false, false, nil); err != nil {
			return err
		}
		return ch.QueueBind(e.queue, "#", e.queue, false, nil)
	})
	return e
}

func (e *exercised) Publish(ctx context.Context, ps ...guardtest.Publication) error {
	return e.do(func(ch *amqp091.Channel) error {
		if err := ch.Confirm(false); err != nil {
			return err
		}
		var waits []*amqp091.DeferredConfirmation
		for _, p := range ps {
			m := amqp091.Publishing{Headers: toTable(p.Headers), Body: p.Body, DeliveryMode: amqp091.Persistent}
			c, err := ch.PublishWithDeferredConfirm(e.queue, "k"+hex.EncodeToString([]byte(p.Key)), true, false, m)
			if err != nil {
				return err
			}
			waits = append(waits, c)
		}
		for _, c := range waits {
			if ok, err := c.WaitContext(ctx); err != nil || !ok {
				return fmt.Errorf("confirmed: %t, %w", ok, err)
			}
		}
		return nil
	})
}

func keyOf(routing string) (string, error) {
	if routing == "" {
		return "", nil
	}
	key, err := hex.DecodeString(routing[1:])
	return string(key), err
}

func (e *exercised) Start(c guardtest.Consumer) error {
	e.started = c
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	e.cancel, e.done = cancel, done
	policy := c.Policy
	if policy.NoTimeout { // the broker's consumer timeout needs one
		policy.NoTimeout, policy.Timeout = false, 2*time.Hour
	}
	opts := []Option{
		WithPolicy(policy), WithPrefetch(100), WithDeadLetters(c.Writer(e.letters)), WithStopTimeout(3 * time.Second),
		WithQueue(e.queue), WithConsumerTimeout(5 * time.Hour),
	}
	if e.limit > 0 {
		opts = append(opts, WithDeliveryLimit(e.limit))
	}
	handle := func(ctx context.Context, d amqp091.Delivery) error {
		key, err := keyOf(d.RoutingKey)
		if err != nil {
			return err
		}
		return c.Handler(ctx, key, d.Body)
	}
	dialer := e.lines.dialer(e.url())
	if !e.passive {
		go func() { done <- Consume(ctx, c.Guard, dialer, e.queue, handle, opts...) }()
		return nil
	}
	go func() { done <- e.loop(ctx, dialer, c, handle, opts) }()
	return nil
}

// loop is a program that consumes by itself: it dials again whenever its
// deliveries end.
func (e *exercised) loop(ctx context.Context, dialer Dialer, c guardtest.Consumer, handle func(context.Context, amqp091.Delivery) error, opts []Option) error {
	for ctx.Err() == nil {
		err := e.session(ctx, dialer, c, handle, opts)
		if errors.Is(err, guard.ErrClosed) {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
	return nil
}

func (e *exercised) session(ctx context.Context, dialer Dialer, c guardtest.Consumer, handle func(context.Context, amqp091.Delivery) error, opts []Option) error {
	conn, err := amqp091.DialConfig(e.url(), dialer.Config)
	if err != nil {
		return err
	}
	defer conn.Close()
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	if err := ch.Qos(100, 0, false); err != nil {
		return err
	}
	in, err := ch.Consume(e.queue, "program", false, false, false, false, nil)
	if err != nil {
		return err
	}
	defer func() { _ = ch.Cancel("program", false) }() // a quorum queue then takes in every ack
	out, err := Deliveries(ctx, c.Guard, ch, in, opts...)
	if err != nil {
		return err
	}
	for d := range out {
		err := handle(ctx, d)
		settle := func() error { return Fail(d, err) }
		if err == nil {
			settle = func() error { return d.Ack(false) }
		}
		_ = settle()
		if c.Twice {
			if err := settle(); !errors.Is(err, errSettled) {
				panic(fmt.Sprint("settled twice: ", err))
			}
		}
	}
	return nil
}

func (e *exercised) Stop(ctx context.Context) error {
	e.cancel()
	select {
	case err := <-e.done:
		if errors.Is(err, guard.ErrClosed) {
			return nil
		}
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (e *exercised) Kill(context.Context) error {
	e.lines.cut()
	return nil
}

// Revoke stops the consumer and starts it anew: RabbitMQ takes no queue away.
func (e *exercised) Revoke(ctx context.Context) error {
	if err := e.Stop(ctx); err != nil {
		return err
	}
	return e.Start(e.started)
}

// RefuseAcks makes the network fail when it is to carry an ack: the connection ends, and
// the broker delivers again what it has not heard of.
func (e *exercised) RefuseAcks(err error) { e.lines.refuseAcks(err) }

func (e *exercised) DeadLetters(context.Context) ([]dlq.Record, error) {
	all, err := e.get(e.queue + ".dlq")
	if err != nil {
		return nil, err
	}
	var out []dlq.Record
	for _, d := range all {
		r, err := ReadDeadLetter(d)
		if err != nil {
			return nil, err
		}
		key, err := keyOf(r.Origin.Subject)
		if err != nil {
			return nil, err
		}
		r.Key = []byte(key)
		out = append(out, r)
	}
	return out, nil
}

func (e *exercised) Backlog(context.Context) (guardtest.Backlog, error) {
	ready, err := e.ready() // first: what is delivered meanwhile counts twice
	return guardtest.Backlog{Pending: ready + e.lines.unacked(), Delivered: -1}, err
}
