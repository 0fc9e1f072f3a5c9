// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

// mute is a dialer's broker that says nothing any more once it was sent a method.
type mute struct {
	method uint32
	silent atomic.Bool
	healed atomic.Bool // it answers on new connections
}

func (m *mute) dialer(url string) Dialer {
	return Dialer{URLs: []string{url}, Config: amqp091.Config{Heartbeat: time.Minute, Dial: func(network, addr string) (net.Conn, error) {
		c, err := net.Dial(network, addr)
		if m.healed.Load() {
			return c, err
		}
		return &muted{Conn: c, m: m}, err
	}}}
}

type muted struct {
	net.Conn
	m    *mute
	sent frames
}

func (c *muted) Read(p []byte) (int, error) {
	for {
		n, err := c.Conn.Read(p)
		if err != nil || !c.m.silent.Load() {
			return n, err
		}
	}
}

func (c *muted) Write(p []byte) (int, error) {
	c.sent.feed(p, func(_ uint16, method uint32, _ []byte) {
		if method == c.m.method {
			c.m.silent.Store(true)
		}
	})
	return c.Conn.Write(p)
}

// A broker that does not answer keeps nobody longer than its context and a
// little more.
func TestMuteBroker(t *testing.T) {
	t.Parallel()
	const (
		channelOpen  = 20<<16 | 10
		queueDeclare = 50<<16 | 10
		basicConsume = 60<<16 | 20
	)
	s := shared(t, brokers.RabbitMQ4)
	r := newRig(t, s, Quorum, nil)
	for name, method := range map[string]uint32{"channel.open": channelOpen, "basic.qos": basicQos, "basic.consume": basicConsume} {
		t.Run("Consume, "+name, func(t *testing.T) {
			t.Parallel()
			m := &mute{method: method}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			done := make(chan error, 1)
			go func() {
				done <- Consume(ctx, adaptertest.Guard(t, guard.Config{}), m.dialer(r.url()), r.queue, func(context.Context, amqp091.Delivery) error { return nil })
			}()
			adaptertest.Eventually(t, "the broker is mute", m.silent.Load)
			cancel()
			select {
			case err := <-done:
				t.Log(err)
			case <-time.After(3 * closeTimeout):
				t.Fatal("Consume does not return")
			}
		})
	}
	t.Run("NewDLQ", func(t *testing.T) {
		t.Parallel()
		m := &mute{method: queueDeclare}
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		start := time.Now()
		_, err := NewDLQ(ctx, m.dialer(r.url()), DLQConfig{Queue: r.queue + ".dlq"})
		if took := time.Since(start); !errors.Is(err, context.DeadlineExceeded) || took > closeTimeout {
			t.Errorf("%v after %s", err, took)
		}
	})
}

// A dead letter that the broker neither confirms nor refuses is written again, over a
// connection of its own, long before its guard gives it up.
func TestUnconfirmed(t *testing.T) {
	t.Parallel()
	const basicPublish = 60<<16 | 40
	r := newRig(t, shared(t, brokers.RabbitMQ), Quorum, nil)
	m := &mute{method: basicPublish}
	d, err := NewDLQ(adaptertest.Context(t), m.dialer(r.url()), DLQConfig{Queue: r.queue + ".dlq"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), writeTimeout)
	defer cancel()
	if err := d.Write(ctx, letter()); err == nil || ctx.Err() != nil {
		t.Fatalf("%v, and the context: %v", err, ctx.Err())
	}
	m.healed.Store(true)
	for err := d.Write(ctx, letter()); err != nil; err = d.Write(ctx, letter()) { // the end of the old connection may be heard only now
		if ctx.Err() != nil {
			t.Fatal(err)
		}
	}
	if err := d.Close(ctx); err != nil {
		t.Error(err)
	}
}

// writeTimeout is a guard's.
const writeTimeout = 30 * time.Second
