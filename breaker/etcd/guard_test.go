// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package etcd_test

import (
	"context"
	"errors"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/breaker/etcd"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/guard/guardtest"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

var errDown = errors.New("dependency down")

// guarded is a process with a Guard in place of the rig's own driver.
type guarded struct {
	r      *rig
	broker *guardtest.Broker
	g      *guard.Guard
	a      *etcd.Authority
	epochs []*guardtest.Epoch
	close  func()

	mu    sync.Mutex
	calls []time.Time
}

func (r *rig) guard(name string, broker *guardtest.Broker) *guarded {
	r.t.Helper()
	return r.guardAt(name, broker, r.addr, "")
}

// guardAt is a process that looks for etcd at an address, and has a state directory.
func (r *rig) guardAt(name string, broker *guardtest.Broker, addr, state string) *guarded {
	r.t.Helper()
	p := &guarded{r: r, broker: broker}
	client := dial(r.t, addr)
	cfg := r.cfg
	cfg.Name = name
	var err error
	if p.a, err = etcd.New(client, cfg); err != nil {
		r.t.Fatal(err)
	}
	if p.g, err = guard.New(guard.Config{Group: "g", StateDir: state}, guard.WithFleet(p.a)); err != nil {
		r.t.Fatal(err)
	}
	p.close = sync.OnceFunc(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 60*sec)
		defer cancel()
		if _, err := p.g.Close(ctx); err != nil {
			r.t.Errorf("%s: %v", name, err)
		}
		p.a.Close()
		for _, e := range p.epochs {
			e.Close()
		}
		_ = client.Close()
	})
	r.t.Cleanup(p.close)
	return p
}

func (p *guarded) open(ctx context.Context, topic, partition string) (s *guard.Source[*guardtest.Message], end func()) {
	p.r.t.Helper()
	queue := topic + "/" + partition
	e, err := p.broker.Consume(ctx, queue, guardtest.ConsumerConfig{Prefetch: 64})
	if err != nil {
		p.r.t.Fatal(err)
	}
	p.epochs = append(p.epochs, e)
	s, err = guard.Open(p.g, guard.SourceConfig{
		Name: queue, System: "guardtest", Destination: topic, Partition: partition, DeadLetters: p.broker.DeadLetters(queue),
	}, e.Limits(), e.Port(), func(context.Context, *guardtest.Message) error {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.calls = append(p.calls, time.Now())
		if p.r.down.Load() {
			return errDown
		}
		return nil
	})
	if err != nil {
		p.r.t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Run(e.Context(), e.Messages())
	}()
	return s, func() {
		stop, cancel := context.WithTimeout(context.Background(), 5*sec)
		defer cancel()
		s.End(stop, guard.ReasonRebalance)
		e.Close()
		<-done
	}
}

func (p *guarded) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.calls)
}

// A partition whose dependency is down goes from one process to the next: its new
// owner's first handler call is a probe, after the rest of the open period, whether
// that process has run for a while or has only just started.
func TestGuardTakesOver(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r := newRig(t, brokers.ForTest(t, brokers.Etcd), long, "a", "b", "c")
	r.cfg.Fleet.Base, r.cfg.Fleet.Cap = 20*sec, 20*sec // b has a part of it to take over, and a second
	r.down.Store(true)
	broker := guardtest.NewBroker()
	for i := range 400 {
		broker.Publish("orders/7", guardtest.Message{Body: guardtest.Body(uint64(i+1), 0)})
	}
	a, b := r.guard("a", broker), r.guard("b", broker)
	r.until("reached", func() bool { return a.a.Err() == nil && b.a.Err() == nil })
	s, end := a.open(ctx, "orders", "7")
	r.until("trips", func() bool { return s.State().Breaker.State != breaker.Closed })
	r.until("word is left", func() bool { return r.count("scope/g%2Forders%2F7/last") == 1 })
	end()
	// Until its vote is gone the last owner may be sharing the scope, and the next
	// one begins half-open.
	r.until("a has left", func() bool { return r.count("scope/g%2Forders%2F7/vote")+r.count("scope/g%2Forders/vote") == 0 })

	r.settle(b.a)
	at := time.Now()
	s, end = b.open(ctx, "orders", "7")
	if st := s.State(); st.Breaker.State == breaker.Closed || !st.Breaker.Held {
		t.Errorf("b begins %v, held %v", st.Breaker.State, st.Breaker.Held)
	}
	time.Sleep(sec)
	if n := b.count(); n != 0 {
		t.Errorf("b: %d handler calls in its first second", n)
	}
	end()

	// One that does not hear etcd yet begins held, and half-open if that lasts.
	c := r.guard("c", broker)
	r.until("reached", func() bool { return c.a.Err() == nil })
	r.settle(c.a)
	before := time.Now()
	s, end = c.open(ctx, "orders", "7")
	if st := s.State(); st.Breaker.State == breaker.Closed || !st.Breaker.Held {
		t.Errorf("c begins %v, held %v", st.Breaker.State, st.Breaker.Held)
	}
	time.Sleep(sec)
	if n := c.count(); n != 0 {
		t.Errorf("c: %d handler calls in its first second, %v after b took over", n, before.Sub(at))
	}
	r.down.Store(false)
	r.until("drains", func() bool { return c.count() > 100 })
	if s.State().Breaker.State != breaker.Closed {
		t.Errorf("not closed after %d", c.count())
	}
	end()
}

// A process that starts again in an outage never begins closed. etcd tells it so; while etcd
// is away it waits for word, and its backoff is at the level that it had written down. It goes
// on when the dependency is back.
func TestGuardStartsAgain(t *testing.T) {
	t.Parallel()
	for _, away := range []bool{false, true} {
		t.Run(map[bool]string{false: "etcd is there", true: "etcd is away"}[away], func(t *testing.T) {
			t.Parallel()
			r := newRig(t, brokers.ForTest(t, brokers.Etcd), long, "a", "b", "c")
			r.down.Store(true)
			broker, state := guardtest.NewBroker(), filepath.Join(t.TempDir(), "state")
			for i := range 400 {
				broker.Publish("orders/7", guardtest.Message{Body: guardtest.Body(uint64(i+1), 0)})
			}
			a := r.guardAt("a", broker, r.addr, state)
			r.until("reached", func() bool { return a.a.Err() == nil })
			s, end := a.open(t.Context(), "orders", "7")
			r.until("trips", func() bool { return s.State().Breaker.State != breaker.Closed })
			end()
			a.close()

			addr := r.addr
			if away {
				proxy := newProxy(t, r.addr)
				defer proxy.close()
				proxy.freeze()
				addr = proxy.addr()
			}
			a = r.guardAt("a", broker, addr, state)
			if !away {
				r.until("reached", func() bool { return a.a.Err() == nil })
			}
			s, end = a.open(t.Context(), "orders", "7")
			defer end()
			if st := s.State().Breaker; st.State == breaker.Closed || st.BackoffLevel < 1 {
				t.Errorf("it begins %v, level %d", st.State, st.BackoffLevel)
			}
			r.until("probes", func() bool { return a.count() > 0 })
			if st := s.State().Breaker; st.State == breaker.Closed {
				t.Errorf("it is %v after a probe that failed", st.State)
			}
			r.down.Store(false)
			r.until("drains", func() bool { return a.count() > 300 })
		})
	}
}
