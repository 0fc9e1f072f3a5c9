// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/guard/guardtest"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

func TestExercise(t *testing.T) { //nolint:tparallel // beside nothing but its own shapes
	for _, c := range []struct {
		name    string
		order   guard.Order
		workers int
		passive bool
	}{
		{"source", guard.OrderSource, 1, false},
		{"key", guard.OrderKey, 4, false},
		// What the user holds at a stop comes again after what was behind it.
		{"passive", guard.OrderNone, 4, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel() // mostly waiting; each has a server of its own
			guardtest.Exercise(t, guardtest.Features{
				RealTime: true, Passive: c.passive, Order: c.order, Workers: c.workers, Keys: true,
				Headers: guardtest.HeaderText, EmptyBody: true, AckWait: !c.passive, // a wrapped message has that long to be settled
				MaxDeliver: true, OneDelivery: true, Dedup: true,
			}, func(t testing.TB, s guardtest.Setup) guardtest.Subject { return newExercised(t, s, c.passive) })
		})
	}
}

// exercised is a JetStream consumer as a Subject.
type exercised struct {
	*rig
	passive bool
	letters *DLQ
	started guardtest.Consumer
	cfg     jetstream.ConsumerConfig

	conn   *nats.Conn // the consumer's
	cancel context.CancelFunc
	done   chan error

	mu     sync.Mutex
	acks   map[string]int
	refuse error // acks
}

func newExercised(t testing.TB, s guardtest.Setup, passive bool) *exercised {
	cfg := jetstream.ConsumerConfig{Durable: "C", AckWait: s.AckWait, MaxDeliver: s.MaxDeliver}
	if cfg.AckWait == 0 {
		cfg.AckWait = 5 * time.Second // a busy machine extends late, and still in time
	}
	e := &exercised{rig: newRig(t, cfg), passive: passive, cfg: cfg, acks: make(map[string]int)}
	var err error
	if e.letters, err = NewDLQ(adaptertest.Context(t), e.js, DLQConfig{Stream: "DLQ"}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.check(); err != nil {
			t.Error(err)
		}
	})
	if _, err := e.nc.Subscribe("$JS.ACK.>", func(m *nats.Msg) {
		if string(m.Data) == "+ACK" {
			e.mu.Lock()
			e.acks[m.Subject]++
			e.mu.Unlock()
		}
	}); err != nil {
		t.Fatal(err)
	}
	return e
}

func (e *exercised) Publish(ctx context.Context, ps ...guardtest.Publication) error {
	for _, p := range ps {
		m := &nats.Msg{Subject: "s.k" + hex.EncodeToString([]byte(p.Key)), Data: p.Body, Header: nats.Header{}}
		for _, h := range p.Headers {
			m.Header[h.Name] = append(m.Header[h.Name], headerText(h.Value))
		}
		if _, err := e.js.PublishMsgAsync(m); err != nil {
			return err
		}
	}
	select {
	case <-e.js.PublishAsyncComplete():
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (e *exercised) Start(c guardtest.Consumer) error {
	e.started = c
	nc, err := nats.Connect(e.url(), nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond), nats.Timeout(connectTimeout))
	if err != nil {
		return err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	native, err := js.Consumer(adaptertest.Context(e.t), "S", "C")
	if err != nil {
		return err
	}
	consumer := &refusing{Consumer: native, e: e}
	consumer.js.conn = nc
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	e.conn, e.cancel, e.done = nc, cancel, done
	opts := []Option{WithPolicy(c.Policy), WithDeadLetters(c.Writer(e.letters)), WithStopTimeout(3 * time.Second)}
	handle := func(ctx context.Context, m jetstream.Msg) error {
		key, err := hex.DecodeString(strings.TrimPrefix(m.Subject(), "s.k"))
		if err != nil {
			return err
		}
		return c.Handler(ctx, string(key), m.Data())
	}
	if !e.passive {
		go func() { done <- Consume(ctx, c.Guard, consumer, handle, opts...) }()
		return nil
	}
	w, err := WrapConsumer(c.Guard, consumer, opts...)
	if err != nil {
		cancel()
		nc.Close()
		return err
	}
	src := w.(*wrapped).src
	cc, err := w.Consume(func(m jetstream.Msg) {
		handled := make(chan struct{})
		var alive sync.WaitGroup
		alive.Go(func() { // a program that takes longer than the AckWait says so
			tick := time.NewTicker(e.cfg.AckWait / 3)
			defer tick.Stop()
			for {
				select {
				case <-tick.C:
					_ = m.InProgress()
				case <-handled:
					return
				}
			}
		})
		err := handle(ctx, m)
		close(handled)
		alive.Wait()
		if ctx.Err() != nil && errors.Is(err, context.Canceled) {
			err = guard.Backoff(err, time.Time{}) // the program stops: nobody's fault
		}
		settle := func() error { return Fail(m, err) }
		if err == nil {
			settle = m.Ack
		}
		_ = settle()
		if c.Twice {
			if err := settle(); !errors.Is(err, jetstream.ErrMsgAlreadyAckd) {
				panic(fmt.Sprint("settled twice: ", err))
			}
		}
	}, jetstream.PullExpiry(pullExpiry), jetstream.PullHeartbeat(pullHeartbeat))
	if err != nil {
		cancel()
		nc.Close()
		return err
	}
	go func() {
		<-ctx.Done()
		cc.Stop()
		select {
		case <-cc.Closed():
		case <-time.After(time.Second): // a user's handler that heeds nothing
		}
		end, stop := context.WithTimeout(context.Background(), 10*time.Second)
		defer stop()
		src.End(end, guard.ReasonShutdown)
		_ = nc.Flush()
		done <- nil
	}()
	return nil
}

func (e *exercised) Stop(ctx context.Context) error {
	e.cancel()
	select {
	case err := <-e.done:
		e.conn.Close()
		if errors.Is(err, guard.ErrClosed) || errors.Is(err, ErrConnectionClosed) {
			return nil
		}
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (e *exercised) Kill(ctx context.Context) error {
	e.conn.Close()
	if err := e.Stop(ctx); err != nil {
		return err
	}
	return e.Start(e.started)
}

// Revoke stops the consumer and starts it anew: JetStream takes nothing away.
func (e *exercised) Revoke(ctx context.Context) error {
	if err := e.Stop(ctx); err != nil {
		return err
	}
	return e.Start(e.started)
}

// RefuseAcks makes acks fail in the client. The server delivers the messages again after
// their AckWait.
func (e *exercised) RefuseAcks(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.refuse = err
}

func (e *exercised) refused() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.refuse
}

// refusing is a consumer whose messages' acks can be made to fail.
type refusing struct {
	jetstream.Consumer

	e  *exercised
	js struct{ conn *nats.Conn } // as nats.go's own has it, for connOf
}

func (c *refusing) Consume(handle jetstream.MessageHandler, opts ...jetstream.PullConsumeOpt) (jetstream.ConsumeContext, error) {
	return c.Consumer.Consume(func(m jetstream.Msg) { handle(&refusingMsg{m, c.e}) }, opts...)
}

type refusingMsg struct {
	jetstream.Msg

	e *exercised
}

func (m *refusingMsg) Ack() error {
	if err := m.e.refused(); err != nil {
		return err
	}
	return m.Msg.Ack()
}

func (e *exercised) Restart(context.Context) error {
	e.stop()
	time.Sleep(200 * time.Millisecond)
	e.start()
	return nil
}

func (e *exercised) DeadLetters(ctx context.Context) ([]dlq.Record, error) {
	s, err := e.js.Stream(ctx, "DLQ")
	if err != nil {
		return nil, err
	}
	c, err := s.CreateConsumer(ctx, jetstream.ConsumerConfig{AckPolicy: jetstream.AckExplicitPolicy, InactiveThreshold: time.Minute})
	if err != nil {
		return nil, err
	}
	defer func() { _ = s.DeleteConsumer(ctx, c.CachedInfo().Name) }()
	var out []dlq.Record
	for n := c.CachedInfo().NumPending; n > 0; n-- {
		m, err := c.Next()
		if err != nil {
			return nil, err
		}
		r, err := ReadDeadLetter(m)
		if err != nil {
			return nil, err
		}
		if token, ok := strings.CutPrefix(r.Origin.Subject, "s.k"); ok { // NATS has no keys; these are in the subject
			key, err := hex.DecodeString(token)
			if err != nil {
				return nil, err
			}
			r.Key = key
		}
		out = append(out, r)
	}
	return out, nil
}

func (e *exercised) Backlog(ctx context.Context) (guardtest.Backlog, error) {
	i, err := e.consumer.Info(ctx)
	if err != nil {
		return guardtest.Backlog{}, err
	}
	return guardtest.Backlog{Pending: int(i.NumPending) + i.NumAckPending, Delivered: int(i.Delivered.Consumer)}, nil
}

// check reports a delivery that was acked more than once.
func (e *exercised) check() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	for reply, n := range e.acks {
		if n > 1 {
			return fmt.Errorf("%s was acked %d times", reply, n)
		}
	}
	return nil
}
