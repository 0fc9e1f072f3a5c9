// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

func TestMain(m *testing.M) {
	adaptertest.Main(m, adaptertest.Suite{Parallel: 10, Child: consumeAsChild, End: func() (err error) {
		for _, s := range servers {
			err = errors.Join(err, s.stop())
		}
		http.DefaultClient.CloseIdleConnections()
		return err
	}})
}

// Kind is a type of queue.
type Kind = string

const (
	Quorum  = amqp091.QueueTypeQuorum
	Classic = amqp091.QueueTypeClassic
	Stream  = amqp091.QueueTypeStream
)

// server is the package's own broker of one kind, which all its tests share
// that do not harm it.
type server struct {
	kind   brokers.Kind
	once   sync.Once
	broker *brokers.Broker
	err    error
	api    string
}

var servers = map[brokers.Kind]*server{
	brokers.RabbitMQ:  {kind: brokers.RabbitMQ},
	brokers.RabbitMQ4: {kind: brokers.RabbitMQ4},
}

// kinds runs a test on each kind of broker.
func kinds(t *testing.T, run func(t *testing.T, s *server)) {
	t.Helper()
	for _, k := range []brokers.Kind{brokers.RabbitMQ, brokers.RabbitMQ4} {
		t.Run(string(k), func(t *testing.T) {
			t.Parallel()
			run(t, shared(t, k))
		})
	}
}

func shared(t testing.TB, k brokers.Kind) *server {
	t.Helper()
	s := servers[k]
	s.once.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
		defer cancel()
		if s.broker, s.err = brokers.Start(ctx, k, brokers.Options{}); s.err == nil {
			s.err = s.describe(ctx)
		}
	})
	if s.err != nil {
		s.giveUp(t)
	}
	return s
}

// own is a broker that a test may harm.
func own(t testing.TB, k brokers.Kind, set map[string]string) *server {
	t.Helper()
	s := &server{kind: k, broker: brokers.StartForTest(t, k, brokers.Options{Set: set})}
	if err := s.describe(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *server) giveUp(t testing.TB) {
	t.Helper()
	if errors.Is(s.err, brokers.ErrLeftOut) && (s.kind == brokers.RabbitMQ4 || os.Getenv("CI") != "true") {
		t.Skipf("LEFT OUT: no %s to test with: %v", s.kind, s.err)
	}
	t.Fatal(s.err)
}

func (s *server) describe(ctx context.Context) error {
	info, err := s.broker.Info(ctx)
	if err != nil {
		return err
	}
	s.api = info["management"]
	fmt.Fprintf(os.Stderr, "%s on %s\n", info["version"], s.url())
	return nil
}

func (s *server) stop() error {
	if s.broker == nil {
		return nil
	}
	return s.broker.Stop(context.Background())
}

func (s *server) url() string { return s.broker.Addr() }

// rig is one queue and a connection to work on it.
type rig struct {
	*server
	t     testing.TB
	queue string
	kind  Kind

	mu   sync.Mutex
	conn *amqp091.Connection
}

func newRig(t testing.TB, s *server, kind Kind, args amqp091.Table) *rig {
	t.Helper()
	r := &rig{server: s, t: t, queue: fmt.Sprintf("q-%08x", rand.Uint32()), kind: kind}
	all := amqp091.Table{"x-queue-type": kind}
	maps.Copy(all, args)
	r.on(func(ch *amqp091.Channel) error {
		_, err := ch.QueueDeclare(r.queue, true, false, false, false, all)
		return err
	})
	t.Cleanup(func() {
		if conn, err := r.admin(); err == nil {
			if ch, err := conn.Channel(); err == nil {
				_, _ = ch.QueueDelete(r.queue, false, false, false)
			}
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.conn != nil {
			_ = r.conn.Close()
		}
	})
	return r
}

// admin is the test's own connection.
func (r *rig) admin() (*amqp091.Connection, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.conn == nil || r.conn.IsClosed() {
		var err error
		if r.conn, err = amqp091.Dial(r.url()); err != nil {
			return nil, err
		}
	}
	return r.conn, nil
}

// on runs f on a channel of its own.
func (r *rig) on(f func(*amqp091.Channel) error) {
	r.t.Helper()
	if err := r.do(f); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) do(f func(*amqp091.Channel) error) error {
	conn, err := r.admin()
	if err != nil {
		return err
	}
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	if err := f(ch); err != nil {
		_ = ch.Close()
		return err
	}
	return ch.Close()
}

// publish confirms messages whose bodies are the numbers from to to-1.
func (r *rig) publish(from, to int) {
	r.t.Helper()
	if err := r.tryPublish(from, to); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) tryPublish(from, to int) error {
	var ms []amqp091.Publishing
	for i := from; i < to; i++ {
		ms = append(ms, amqp091.Publishing{Body: []byte(strconv.Itoa(i)), DeliveryMode: amqp091.Persistent, MessageId: "m" + strconv.Itoa(i)})
	}
	return r.send(context.Background(), ms...)
}

func (r *rig) send(ctx context.Context, ms ...amqp091.Publishing) error {
	return r.do(func(ch *amqp091.Channel) error {
		if err := ch.Confirm(false); err != nil {
			return err
		}
		var waits []*amqp091.DeferredConfirmation
		for _, m := range ms {
			c, err := ch.PublishWithDeferredConfirm("", r.queue, false, false, m)
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
	})
}

// ready is how many messages wait in the queue, as of now.
func (r *rig) ready() (n int, err error) {
	err = r.do(func(ch *amqp091.Channel) error {
		q, err := ch.QueueDeclarePassive(r.queue, true, false, false, false, nil)
		n = q.Messages
		return err
	})
	return n, err
}

// get reads all of a queue and puts it back.
func (r *rig) get(queue string) ([]amqp091.Delivery, error) {
	var out []amqp091.Delivery
	err := r.do(func(ch *amqp091.Channel) error {
		for {
			d, ok, err := ch.Get(queue, false)
			if err != nil || !ok {
				return err
			}
			out = append(out, d)
		}
	})
	return out, err
}

func (r *rig) consume(g *guard.Guard, handle func(context.Context, amqp091.Delivery) error, opts ...Option) *adaptertest.Running {
	return r.consumeBy(Dial(r.url()), g, handle, opts...)
}

func (r *rig) consumeBy(d Dialer, g *guard.Guard, handle func(context.Context, amqp091.Delivery) error, opts ...Option) *adaptertest.Running {
	return adaptertest.Run(r.t, func(ctx context.Context) error { return Consume(ctx, g, d, r.queue, handle, opts...) })
}

// deadLetters makes a DLQ that ends with the test.
func (r *rig) deadLetters(kind Kind) *DLQ {
	r.t.Helper()
	d, err := NewDLQ(adaptertest.Context(r.t), Dial(r.url()), DLQConfig{Queue: r.queue + ".dlq", Kind: kind})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		if err := d.Close(adaptertest.Context(r.t)); err != nil {
			r.t.Error(err)
		}
		_ = r.do(func(ch *amqp091.Channel) error {
			_, err := ch.QueueDelete(r.queue+".dlq", false, false, false)
			return err
		})
	})
	return d
}

var errDown = errors.New("connection refused")
