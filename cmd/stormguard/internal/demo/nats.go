// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/access"
)

// ackWait is AckWait of the consumers of both sides.
const ackWait = 30 * time.Second

var onNATS = platform{
	title: "NATS JetStream", store: "stream",
	unguarded: "Nak on error, MaxDeliver 5, then the DLQ",
	guarded:   "guardnats.Consume(ctx, g, c, handle)",
	address:   access.NATSForm,
	check:     access.NATSAddress,
	open:      openNATS,
}

// natsServer is the NATS server of a demo: embedded, or the user's own.
type natsServer struct {
	url  string
	opts []nats.Option  // creds, TLS, user
	srv  *server.Server // nil with the user's own server
	dir  string         // files of the embedded server
}

func openNATS(ctx context.Context, cfg Config, address string, a *access.Access) (broker, error) {
	if address != "" {
		b := &natsServer{url: address, opts: a.NATS()}
		if cfg.Creds != "" {
			b.opts = append(b.opts, nats.UserCredentials(cfg.Creds))
		}
		return b, nil
	}
	dir, err := os.MkdirTemp("", "stormguard-demo-")
	if err != nil {
		return nil, fmt.Errorf("demo: %w", err)
	}
	b := &natsServer{dir: dir}
	b.srv, err = server.NewServer(&server.Options{
		ServerName: "stormguard-demo", Host: "127.0.0.1", Port: server.RANDOM_PORT,
		JetStream: true, StoreDir: dir, NoSigs: true, NoLog: true,
	})
	if err != nil {
		b.close()
		return nil, fmt.Errorf("demo: embedded server: %w", err)
	}
	b.srv.Start()
	for !b.srv.ReadyForConnections(250 * time.Millisecond) {
		if ctx.Err() != nil {
			b.close()
			return nil, ctx.Err()
		}
	}
	b.url = b.srv.ClientURL()
	return b, nil
}

// close stops the embedded server and removes its files.
func (b *natsServer) close() {
	if b.srv != nil {
		b.srv.Shutdown()
		b.srv.WaitForShutdown()
	}
	if b.dir != "" {
		_ = os.RemoveAll(b.dir)
	}
}

func (b *natsServer) connect(name string) (*nats.Conn, jetstream.JetStream, error) {
	opts := append([]nats.Option{nats.Name("stormguard demo: " + name), nats.MaxReconnects(-1), nats.IgnoreAuthErrorAbort()}, b.opts...)
	nc, err := nats.Connect(b.url, opts...)
	if err != nil {
		return nil, nil, fmt.Errorf("connect to %s: %w", access.Redact(b.url), err)
	}
	// The load is an open loop: messages wait in the client if the server is slow.
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(1<<16), jetstream.WithPublishAsyncTimeout(20*time.Second))
	if err != nil {
		nc.Close()
		return nil, nil, err
	}
	return nc, js, nil
}

// natsRun is the [plumbing] of one run.
type natsRun struct {
	stream, subject       string
	dlqStream, dlqSubject string
	js                    jetstream.JetStream // administers the streams
	consumer              jetstream.Consumer  // on the consuming side's connection
	consumerJS            jetstream.JetStream // publishes the consuming side's dead letters
	publishJS             jetstream.JetStream // publishes the run's messages
	conns                 []*nats.Conn
}

func (b *natsServer) lay(ctx context.Context, id string) (plumbing, error) {
	p := &natsRun{
		stream: "STORMGUARD_DEMO_" + id, subject: "stormguard-demo." + id + ".orders",
		dlqStream: "STORMGUARD_DEMO_" + id + "_DLQ", dlqSubject: "stormguard-demo." + id + ".dlq",
	}
	return p, b.fit(ctx, p)
}

func (b *natsServer) fit(ctx context.Context, p *natsRun) error {
	for _, c := range []struct {
		name string
		js   *jetstream.JetStream
	}{{"oracle", &p.js}, {"publisher", &p.publishJS}, {"consumer", &p.consumerJS}} {
		nc, js, err := b.connect(c.name)
		if err != nil {
			return err
		}
		p.conns, *c.js = append(p.conns, nc), js
	}
	for _, s := range []jetstream.StreamConfig{
		{Name: p.stream, Subjects: []string{p.subject}},
		{Name: p.dlqStream, Subjects: []string{p.dlqSubject}},
	} {
		if _, err := p.js.CreateStream(ctx, s); err != nil {
			return fmt.Errorf("create stream %s: %w", s.Name, err)
		}
	}
	var err error
	p.consumer, err = p.consumerJS.CreateConsumer(ctx, p.stream, jetstream.ConsumerConfig{
		Durable: "orders", AckPolicy: jetstream.AckExplicitPolicy,
		AckWait: ackWait, MaxDeliver: maxDeliver, MaxAckPending: inFlight,
	})
	if err != nil {
		return fmt.Errorf("create consumer: %w", err)
	}
	return nil
}

func (p *natsRun) remove(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if p.js != nil {
		for _, name := range []string{p.stream, p.dlqStream} {
			_ = p.js.DeleteStream(ctx, name) // the stream may not exist
		}
	}
	for _, nc := range p.conns {
		nc.Close()
	}
}

func (p *natsRun) info(ctx context.Context) (*jetstream.ConsumerInfo, error) {
	c, err := p.js.Consumer(ctx, p.stream, "orders")
	if err != nil {
		return nil, err
	}
	return c.CachedInfo(), nil
}

func (p *natsRun) joined(ctx context.Context) (bool, error) {
	info, err := p.info(ctx)
	return err == nil && info.NumWaiting > 0, err
}

func (p *natsRun) idle(ctx context.Context) (bool, error) {
	info, err := p.info(ctx)
	return err == nil && info.NumPending == 0 && info.NumAckPending == 0, err
}

func (p *natsRun) send(_ context.Context, body []byte) (func(context.Context) error, error) {
	future, err := p.publishJS.PublishAsync(p.subject, body)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		select {
		case <-future.Ok():
			return nil
		case err := <-future.Err():
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}, nil
}

func (p *natsRun) buried(ctx context.Context) (int, error) {
	s, err := p.js.Stream(ctx, p.dlqStream)
	if err != nil {
		return 0, err
	}
	return int(s.CachedInfo().State.Msgs), nil
}

func (p *natsRun) exhume(ctx context.Context, start time.Time) ([]dead, error) {
	n, err := p.buried(ctx)
	if err != nil || n == 0 {
		return nil, err
	}
	c, err := p.js.OrderedConsumer(ctx, p.dlqStream, jetstream.OrderedConsumerConfig{})
	if err != nil {
		return nil, err
	}
	out := make([]dead, 0, n)
	for len(out) < n {
		batch, err := c.Fetch(min(1000, n-len(out)), jetstream.FetchMaxWait(5*time.Second))
		if err != nil {
			return nil, err
		}
		got := len(out)
		for m := range batch.Messages() {
			o, err := parseOrder(m.Data())
			if err != nil {
				return nil, err
			}
			md, err := m.Metadata()
			if err != nil {
				return nil, err
			}
			out = append(out, dead{o.ID, md.Timestamp.Sub(start)})
		}
		if err := batch.Error(); err != nil {
			return nil, err
		}
		if len(out) == got {
			return nil, errors.New("the DLQ stream does not give out what it has")
		}
	}
	return out, nil
}
