// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package chaosrun

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/adapters/nats"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/once"
)

// natsMarks opens a store of marks in NATS, for several consumers.
func natsMarks(url, bucket string, d dialer) (once.Store, func() error, error) {
	nc, err := natsgo.Connect(url, natsgo.MaxReconnects(-1), natsgo.SetCustomDialer(d))
	if err != nil {
		return nil, nil, err
	}
	end := func() error { nc.Close(); return nil }
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, nil, errors.Join(err, end())
	}
	marks, err := guardnats.NewOnce(js, guardnats.OnceConfig{Bucket: bucket, Lease: natsAckWait})
	if err != nil {
		return nil, nil, errors.Join(err, end())
	}
	return marks, end, nil
}

// startNATS starts a server in this process. No fault kills it.
func startNATS(ctx context.Context) (url string, stop func(), err error) {
	dir, err := os.MkdirTemp("", "stormguard-chaos-")
	if err != nil {
		return "", nil, err
	}
	srv, err := server.NewServer(&server.Options{
		ServerName: "stormguard-chaos", Host: "127.0.0.1", Port: server.RANDOM_PORT,
		JetStream: true, StoreDir: dir, NoSigs: true, NoLog: true,
	})
	if err != nil {
		return "", nil, errors.Join(err, os.RemoveAll(dir))
	}
	srv.Start()
	stop = func() {
		srv.Shutdown()
		srv.WaitForShutdown()
		_ = os.RemoveAll(dir)
	}
	for !srv.ReadyForConnections(250 * time.Millisecond) {
		if ctx.Err() != nil {
			stop()
			return "", nil, ctx.Err()
		}
	}
	return srv.ClientURL(), stop, nil
}

// onNATS is a stream, its durable consumer, and the stream of the dead letters.
type onNATS struct {
	mutant                     Mutant
	url, stream, subject, dead string
	confirmWithin              time.Duration // time limit for the confirmation of a batch

	nc *natsgo.Conn
	js jetstream.JetStream
}

// natsAckWait is short, so that a killed process's messages are redelivered soon.
const natsAckWait = time.Second

func newNATS(j Job) *onNATS {
	return &onNATS{
		mutant: j.Mutant, url: j.URL, stream: "CHAOS_" + j.ID, subject: "chaos." + j.ID, dead: "CHAOS_" + j.ID + "_DLQ",
		confirmWithin: j.confirmsWithin(5 * time.Second), // a broken connection loses an answer without an error
	}
}

func (b *onNATS) connect() (err error) {
	if b.nc != nil {
		return nil
	}
	b.nc, err = natsgo.Connect(b.url, natsgo.MaxReconnects(-1), natsgo.IgnoreAuthErrorAbort(), natsgo.ReconnectWait(100*time.Millisecond), natsgo.PingInterval(10*time.Second), natsgo.FlusherTimeout(5*time.Second))
	if err == nil {
		b.js, err = jetstream.New(b.nc, jetstream.WithPublishAsyncMaxPending(1<<14))
	}
	return err
}

func (b *onNATS) lay(ctx context.Context) error {
	if err := b.connect(); err != nil {
		return err
	}
	for name, subject := range map[string]string{b.stream: b.subject, b.dead: b.subject + ".dead"} {
		if _, err := b.js.CreateStream(ctx, jetstream.StreamConfig{Name: name, Subjects: []string{subject}}); err != nil {
			return fmt.Errorf("create stream %s: %w", name, err)
		}
	}
	_, err := b.js.CreateConsumer(ctx, b.stream, jetstream.ConsumerConfig{
		Durable: "orders", AckPolicy: jetstream.AckExplicitPolicy, AckWait: natsAckWait, MaxDeliver: -1, MaxAckPending: 2000,
	})
	return err
}

func (b *onNATS) remove(ctx context.Context) {
	if b.js != nil {
		_ = b.js.DeleteStream(ctx, b.stream)
		_ = b.js.DeleteStream(ctx, b.dead)
	}
	if b.nc != nil {
		b.nc.Close()
	}
}

func (b *onNATS) publish(ctx context.Context, ms []message) error {
	var futures []jetstream.PubAckFuture
	for _, m := range ms {
		f, err := b.js.PublishAsync(b.subject, m.body, jetstream.WithMsgID(m.id))
		if err != nil {
			return err
		}
		futures = append(futures, f)
	}
	late := time.After(b.confirmWithin)
	for _, f := range futures {
		select {
		case <-f.Ok():
		case err := <-f.Err():
			return err
		case <-late:
			return errors.New("no answer")
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func (b *onNATS) left(ctx context.Context) (int, error) {
	c, err := b.js.Consumer(ctx, b.stream, "orders")
	if err != nil {
		return 0, err
	}
	info := c.CachedInfo()
	return int(info.NumPending) + info.NumAckPending, nil
}

func (b *onNATS) letters(ctx context.Context) (all [][]byte, err error) {
	s, err := b.js.Stream(ctx, b.dead)
	if err != nil {
		return nil, err
	}
	n := int(s.CachedInfo().State.Msgs)
	if n == 0 {
		return nil, nil
	}
	c, err := s.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{})
	if err != nil {
		return nil, err
	}
	for len(all) < n {
		m, err := c.Next(jetstream.FetchMaxWait(10 * time.Second))
		if err != nil {
			return nil, err
		}
		all = append(all, m.Data())
	}
	return all, nil
}

func (b *onNATS) consume(ctx context.Context, g *guard.Guard, handle func(context.Context, []byte) error) error {
	if _, err := patiently(ctx, func() (any, error) { return nil, b.connect() }); err != nil {
		return err
	}
	c, err := patiently(ctx, func() (jetstream.Consumer, error) { return b.js.Consumer(ctx, b.stream, "orders") })
	if err != nil {
		return err
	}
	letters, err := patiently(ctx, func() (*guardnats.DLQ, error) {
		return guardnats.NewDLQ(ctx, b.js, guardnats.DLQConfig{Stream: b.dead, Subject: b.subject + ".dead"})
	})
	if err != nil {
		return err
	}
	return guardnats.Consume(ctx, g, c, func(ctx context.Context, m jetstream.Msg) error { return handle(ctx, m.Data()) },
		guardnats.WithDeadLetters(b.mutant.writer(letters)))
}
