// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/adapters/nats"
)

var jetStream = newJetStream(25_000, 0.05)

const (
	stream     = "BENCH"
	ackPending = 1000 // both sides' window
)

// newJetStream consumes a stream of n messages, with a no-op handler and with
// one that is busy for 10 µs. An operation is one message, from the start of
// Consume until the server has its ack and all before it. All turns read the
// same stream from its first message: with two, the turn after a change of
// streams would find the server's cache cold.
//
// Both sides have one server, one connection, a fresh durable for each turn with
// the same limits, and nats.go's Consume at its default pull of 500: ours finds
// it by halving the window. Both ack without waiting for an answer.
func newJetStream(n int, within float64) Group {
	r := &rig{}
	c := func(name string, busy time.Duration, consume consumer) Case {
		return Case{Name: name, N: n, Open: func(ctx context.Context) (Runner, error) { return r.runner(ctx, n, busy, consume) }}
	}
	return Group{
		Name:   "jetstream",
		About:  "adapters/nats against nats.go's own Consume, on an embedded server with its store on disk",
		Rounds: 11,
		Passes: 8,
		Steady: "raw_raw",
		Within: within,
		Cases: []Case{
			c("raw", 0, consumeRaw),
			c("guarded", 0, r.consumeGuarded),
			c("raw_again", 0, consumeRaw),
			c("raw_10us", busyFor, consumeRaw),
			c("guarded_10us", busyFor, r.consumeGuarded),
		},
		Ratios: []Ratio{
			{Name: "guarded_raw", Kind: Throughput, Ours: "guarded", Theirs: "raw"},
			{Name: "raw_raw", Kind: Throughput, Ours: "raw_again", Theirs: "raw"},
			{Name: "guarded_raw_10us", Kind: Throughput, Ours: "guarded_10us", Theirs: "raw_10us"},
		},
	}
}

// A consumer starts to consume and returns how to stop.
type consumer func(context.Context, jetstream.Consumer, func(jetstream.Msg)) (stop func() error, err error)

func consumeRaw(_ context.Context, c jetstream.Consumer, work func(jetstream.Msg)) (func() error, error) {
	var failed error
	cc, err := c.Consume(func(m jetstream.Msg) {
		work(m)
		if err := m.Ack(); err != nil {
			failed = err
		}
	})
	if err != nil {
		return nil, err
	}
	return func() error { cc.Stop(); <-cc.Closed(); return failed }, nil
}

func (r *rig) consumeGuarded(ctx context.Context, c jetstream.Consumer, work func(jetstream.Msg)) (func() error, error) {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		ended <- guardnats.Consume(ctx, r.guard.Guard, c, func(_ context.Context, m jetstream.Msg) error { work(m); return nil })
	}()
	return func() error { cancel(); return <-ended }, nil
}

// rig is the server that the cases share, from the first to open to the last to
// close, and its stream.
type rig struct {
	users  int
	dir    string
	server *server.Server
	conn   *nats.Conn
	js     jetstream.JetStream
	guard  *metered
	turns  int
}

func (r *rig) open(ctx context.Context, n int) (err error) {
	if r.users++; r.users > 1 {
		return nil
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	if r.dir, err = os.MkdirTemp("", "stormguard-bench-"); err != nil {
		return err
	}
	r.server, err = server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: r.dir, NoSigs: true, NoLog: true,
	})
	if err != nil {
		return err
	}
	r.server.Start()
	if !r.server.ReadyForConnections(20 * time.Second) {
		return errors.New("nats-server is not ready after 20s")
	}
	if r.conn, err = nats.Connect(r.server.ClientURL()); err != nil {
		return err
	}
	if r.js, err = jetstream.New(r.conn); err != nil {
		return err
	}
	if r.guard, err = newMetered(); err != nil {
		return err
	}
	return r.fill(ctx, n)
}

func (r *rig) close() error {
	if r.users--; r.users > 0 {
		return nil
	}
	var err error
	if r.guard != nil {
		err = r.guard.close()
	}
	if r.conn != nil {
		r.conn.Close()
	}
	if r.server != nil {
		r.server.Shutdown()
		r.server.WaitForShutdown()
	}
	err = errors.Join(err, os.RemoveAll(r.dir))
	*r = rig{}
	return err
}

// fill makes the stream, of n messages of 256 bytes.
func (r *rig) fill(ctx context.Context, n int) error {
	s, err := r.js.CreateStream(ctx, jetstream.StreamConfig{Name: stream, Subjects: []string{stream}, Storage: jetstream.FileStorage})
	if err != nil {
		return err
	}
	body := make([]byte, 256)
	for i := range n {
		if _, err := r.js.PublishAsync(stream, body); err != nil {
			return err
		}
		if i%1000 == 999 || i == n-1 {
			select {
			case <-r.js.PublishAsyncComplete():
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
	info, err := s.Info(ctx)
	if err == nil && info.State.Msgs != uint64(n) {
		err = fmt.Errorf("the stream has %d messages, not %d", info.State.Msgs, n)
	}
	return err
}

func (r *rig) runner(ctx context.Context, n int, busy time.Duration, consume consumer) (Runner, error) {
	if err := r.open(ctx, n); err != nil {
		return Runner{}, err
	}
	var durable jetstream.Consumer
	stop := func() error { return nil }
	return Runner{
		Before: func(ctx context.Context, _ int) (err error) {
			r.turns++
			durable, err = r.js.CreateConsumer(ctx, stream, jetstream.ConsumerConfig{
				Durable: fmt.Sprintf("turn%d", r.turns), AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: ackPending,
			})
			return err
		},
		Do: func(ctx context.Context, n int) (err error) {
			left, done := n, make(chan struct{})
			stop, err = consume(ctx, durable, func(jetstream.Msg) {
				work(busy)
				if left--; left == 0 {
					close(done)
				}
			})
			if err != nil {
				stop = func() error { return nil }
				return err
			}
			select {
			case <-done:
			case <-ctx.Done():
				return ctx.Err()
			}
			return r.acked(ctx, durable, uint64(n))
		},
		After: func(ctx context.Context) error {
			return errors.Join(stop(), r.guard.scrape(ctx), r.js.DeleteConsumer(ctx, stream, durable.CachedInfo().Name))
		},
		Close: r.close,
	}, nil
}

// acked waits until the server has all n acks.
func (r *rig) acked(ctx context.Context, c jetstream.Consumer, n uint64) error {
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(100 * time.Microsecond) {
		info, err := c.Info(ctx)
		if err != nil {
			return err
		}
		if info.AckFloor.Consumer == n && info.NumAckPending == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the ack floor stands at %d of %d", info.AckFloor.Consumer, n)
		}
	}
}
