// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
	"github.com/stormguard-mq/stormguard/internal/oncetest"
)

func TestMain(m *testing.M) {
	oncetest.Main(onceAsChild)
	adaptertest.Main(m, adaptertest.Suite{Parallel: 6, Child: consumeAsChild})
}

// broker is a real nats-server with JetStream on disk.
type broker struct {
	t       testing.TB
	srv     *server.Server
	port    int
	dir     string
	payload int32 // the server's max_payload, from its next start
}

func newBroker(t testing.TB) *broker {
	t.Helper()
	b := &broker{t: t, port: server.RANDOM_PORT, dir: t.TempDir(), payload: 8 << 20}
	b.start()
	t.Cleanup(b.stop)
	return b
}

func (b *broker) start() {
	b.t.Helper()
	srv, err := server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: b.port, JetStream: true, StoreDir: b.dir, NoSigs: true, NoLog: true, MaxPayload: b.payload,
	})
	if err != nil {
		b.t.Fatal(err)
	}
	srv.Start()
	if !srv.ReadyForConnections(2 * time.Minute) {
		b.t.Fatal("the server is not ready")
	}
	b.srv = srv
	b.port = srv.Addr().(*net.TCPAddr).Port // also after a restart
}

func (b *broker) stop() {
	if b.srv != nil {
		b.srv.Shutdown()
		b.srv.WaitForShutdown()
		b.srv = nil
	}
}

func (b *broker) url() string { return fmt.Sprintf("nats://127.0.0.1:%d", b.port) }

// connectTimeout is one that only a failure meets; nats.go's own is 2s.
const connectTimeout = 20 * time.Second

func (b *broker) connect() *nats.Conn {
	b.t.Helper()
	nc, err := nats.Connect(b.url(), nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond), nats.Timeout(connectTimeout))
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(nc.Close)
	return nc
}

// rig is a broker with one stream, one durable, and a connection.
type rig struct {
	*broker
	nc       *nats.Conn
	js       jetstream.JetStream
	stream   jetstream.Stream
	consumer jetstream.Consumer
}

func newRig(t testing.TB, cfg jetstream.ConsumerConfig) *rig {
	t.Helper()
	r := &rig{broker: newBroker(t)}
	r.nc = r.connect()
	ctx := adaptertest.Context(t)
	var err error
	if r.js, err = jetstream.New(r.nc); err != nil {
		t.Fatal(err)
	}
	if r.stream, err = r.js.CreateStream(ctx, jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}}); err != nil {
		t.Fatal(err)
	}
	r.consumer = r.durable(t, cfg)
	return r
}

func (r *rig) durable(t testing.TB, cfg jetstream.ConsumerConfig) jetstream.Consumer {
	t.Helper()
	if cfg.Durable == "" {
		cfg.Durable = "C"
	}
	c, err := r.stream.CreateConsumer(adaptertest.Context(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (r *rig) publish(t testing.TB, subject func(i int) string, from, to int) {
	t.Helper()
	for i := from; i < to; i++ {
		if _, err := r.js.PublishAsync(subject(i), fmt.Appendf(nil, "%d", i)); err != nil {
			t.Fatal(err)
		}
		if i%1000 == 999 { // the client's own limit is 4000
			<-r.js.PublishAsyncComplete()
		}
	}
	select {
	case <-r.js.PublishAsyncComplete():
	case <-time.After(30 * time.Second):
		t.Fatal("publishing does not end")
	}
}

func subject(int) string { return "s.x" }

func (r *rig) info(t testing.TB) *jetstream.ConsumerInfo {
	t.Helper()
	i, err := r.consumer.Info(adaptertest.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	return i
}

func consume(t testing.TB, g *guard.Guard, c jetstream.Consumer, handle func(context.Context, jetstream.Msg) error, opts ...Option) *adaptertest.Running {
	t.Helper()
	return adaptertest.Run(t, func(ctx context.Context) error { return Consume(ctx, g, c, handle, opts...) })
}

var errDown = errors.New("connection refused")
