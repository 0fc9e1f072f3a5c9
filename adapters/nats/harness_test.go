// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package nats

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/guard"
)

func TestMain(m *testing.M) {
	if runChild() {
		return
	}
	// The parallel tests mostly wait for an AckWait, so more than one for each
	// processor may run.
	flag.Parse()
	if err := flag.Set("test.parallel", "6"); err != nil {
		panic(err)
	}
	code := m.Run()
	// A fetch of nats.go ends a second after its request has expired, whatever
	// happens to its connection.
	var err error
	for deadline := time.Now().Add(10 * time.Second); code == 0 && time.Now().Before(deadline); {
		if err = goleak.Find(); err == nil {
			break
		}
	}
	if code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, "goleak:", err)
		code = 1
	}
	os.Exit(code)
}

// broker is a real nats-server with JetStream on disk.
type broker struct {
	t    testing.TB
	srv  *server.Server
	port int
	dir  string
}

func newBroker(t testing.TB) *broker {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := &broker{t: t, port: l.Addr().(*net.TCPAddr).Port, dir: t.TempDir()}
	_ = l.Close()
	b.start()
	t.Cleanup(b.stop)
	return b
}

func (b *broker) start() {
	b.t.Helper()
	srv, err := server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: b.port, JetStream: true, StoreDir: b.dir, NoSigs: true, NoLog: true, MaxPayload: 8 << 20,
	})
	if err != nil {
		b.t.Fatal(err)
	}
	srv.Start()
	if !srv.ReadyForConnections(20 * time.Second) {
		b.t.Fatal("the server is not ready")
	}
	b.srv = srv
}

func (b *broker) stop() {
	if b.srv != nil {
		b.srv.Shutdown()
		b.srv.WaitForShutdown()
		b.srv = nil
	}
}

func (b *broker) url() string { return fmt.Sprintf("nats://127.0.0.1:%d", b.port) }

func (b *broker) connect() *nats.Conn {
	b.t.Helper()
	nc, err := nats.Connect(b.url(), nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond))
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
	ctx := testContext(t)
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
	c, err := r.stream.CreateConsumer(testContext(t), cfg)
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
	i, err := r.consumer.Info(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	return i
}

func testContext(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// eventually polls until ok or a deadline that only a failure meets.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(45 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("never: " + what)
		}
	}
}

func newGuard(t testing.TB, cfg guard.Config) *guard.Guard {
	t.Helper()
	g, err := guard.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_, _ = g.Close(ctx)
	})
	return g
}

// consume runs Consume until the test stops it.
type consuming struct {
	cancel context.CancelFunc
	done   chan error
}

func consume(t testing.TB, g *guard.Guard, c jetstream.Consumer, handle func(context.Context, jetstream.Msg) error, opts ...Option) *consuming {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	r := &consuming{cancel: cancel, done: make(chan error, 1)}
	go func() { r.done <- Consume(ctx, g, c, handle, opts...) }()
	t.Cleanup(cancel)
	return r
}

// stop ends it and returns its error.
func (c *consuming) stop(t testing.TB) error {
	t.Helper()
	c.cancel()
	return c.wait(t)
}

func (c *consuming) wait(t testing.TB) error {
	t.Helper()
	select {
	case err := <-c.done:
		c.done <- err
		return err
	case <-time.After(50 * time.Second):
		t.Fatal("Consume does not return")
		return nil
	}
}

var errDown = errors.New("connection refused")
