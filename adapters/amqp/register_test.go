// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/internal/brokers"
	"github.com/stormguard-mq/stormguard/internal/registertest"
)

// registerAt is an empty register in a stream of its own.
func registerAt(at string) registertest.Place {
	stream := fmt.Sprintf("register-%016x", rand.Uint64())
	return registertest.Place{Open: func(t *testing.T) register.Register {
		d := Dial(at)
		d.Timeout = 5 * time.Second
		r, err := NewRegister(d, RegisterConfig{Stream: stream})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = r.Close() })
		return r
	}}
}

func TestRegister(t *testing.T) {
	t.Parallel()
	kinds(t, func(t *testing.T, s *server) {
		registertest.Run(t, func(*testing.T) registertest.Place { return registerAt(s.url()) })
	})
}

func TestRegisterFaults(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]func(*registertest.Relay, *testing.T){
		"Cut":    (*registertest.Relay).Cut,
		"Frozen": (*registertest.Relay).Freeze,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			u, err := url.Parse(shared(t, brokers.RabbitMQ4).url())
			if err != nil {
				t.Fatal(err)
			}
			relay := registertest.NewRelay(t, u.Host)
			u.Host = relay.Addr()
			p := registerAt(u.String())
			p.Break = func(t *testing.T) { fault(relay, t) }
			p.Mend = relay.Mend
			registertest.Fault(t, p)
		})
	}
	t.Run("Killed", func(t *testing.T) {
		t.Parallel()
		b := brokers.StartForTest(t, brokers.RabbitMQ4, brokers.Options{})
		p := registerAt(b.Addr())
		p.Break, p.Mend = registertest.Killed(b)
		registertest.Fault(t, p)
	})
}

// A queue that is no stream, or a stream that may forget, is refused.
func TestRegisterUnsuitable(t *testing.T) {
	t.Parallel()
	for name, args := range map[string]amqp091.Table{
		"a queue":             {"x-queue-type": "quorum"},
		"a stream with limit": {"x-queue-type": "stream", "x-max-age": "1h"},
	} {
		rig := newRig(t, shared(t, brokers.RabbitMQ4), args["x-queue-type"].(string), args)
		reg, err := NewRegister(Dial(rig.url()), RegisterConfig{Stream: rig.queue})
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := reg.Read(t.Context()); !errors.Is(err, ErrUnsuitable) || !strings.Contains(err.Error(), rig.queue) {
			t.Errorf("%s: %v, want ErrUnsuitable", name, err)
		}
		if err := reg.CompareAndSet(t.Context(), 1, []byte("x")); !errors.Is(err, ErrUnsuitable) {
			t.Errorf("%s: a write returns %v", name, err)
		}
		_ = reg.Close()
		if _, _, err := reg.Read(t.Context()); !errors.Is(err, errRegisterClosed) {
			t.Errorf("after Close: %v", err)
		}
	}
	at := shared(t, brokers.RabbitMQ4).url()
	reg, err := NewRegister(Dial(at), RegisterConfig{Stream: "none", NoCreate: true})
	if err != nil {
		t.Fatal(err)
	}
	defer reg.Close()
	if _, _, err := reg.Read(t.Context()); !errors.Is(err, ErrUnsuitable) || !strings.Contains(err.Error(), "rabbitmqadmin declare queue name=none") {
		t.Errorf("a stream that does not exist: %v", err)
	}
	if _, err := NewRegister(Dialer{}, RegisterConfig{}); err == nil || strings.Count(err.Error(), "\n") != 1 {
		t.Errorf("a configuration that is all wrong: %v", err)
	}
}

// A stream that was deleted and made again has another history: that is said, and
// nothing is written as if it was the first.
func TestRegisterMadeAnew(t *testing.T) {
	t.Parallel()
	rig := newRig(t, shared(t, brokers.RabbitMQ4), Stream, nil)
	p := func() *Register {
		r, err := NewRegister(Dial(rig.url()), RegisterConfig{Stream: rig.queue})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = r.Close() })
		return r
	}
	old := p()
	for n := range uint64(3) {
		if err := old.CompareAndSet(t.Context(), n+1, []byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	rig.on(func(ch *amqp091.Channel) error {
		_, err := ch.QueueDelete(rig.queue, false, false, false)
		return err
	})
	anew := p()
	if err := anew.CompareAndSet(t.Context(), 1, []byte("y")); err != nil {
		t.Fatal(err)
	}
	if n, _, err := old.Read(shortly(t)); err == nil {
		t.Errorf("the old handle reads number %d of a stream that was made anew", n)
	}
	if err := old.CompareAndSet(shortly(t), 4, []byte("x")); err == nil {
		t.Error("the old handle goes on writing")
	}
	if n, doc, err := anew.Read(t.Context()); n != 1 || string(doc) != "y" || err != nil {
		t.Errorf("the new stream has number %d, %q, %v", n, doc, err)
	}
}

func shortly(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	t.Cleanup(cancel)
	return ctx
}
