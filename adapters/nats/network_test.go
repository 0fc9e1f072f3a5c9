// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
)

// logged is what a test's logger was told.
type logged struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logged) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

// lines are those that have all the parts.
func (l *logged) lines(parts ...string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
next:
	for line := range strings.Lines(l.text.String()) {
		for _, part := range parts {
			if !strings.Contains(line, part) {
				continue next
			}
		}
		n++
	}
	return n
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// logging makes a guard that logs to what it returns.
func logging(t testing.TB, cfg guard.Config) (*guard.Guard, *logged) {
	l := new(logged)
	return adaptertest.Guard(t, cfg, guard.WithLogger(slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug})))), l
}

func none(context.Context, jetstream.Msg) error { return nil }

// A server that is away at the start is waited for, with one line at WARN, which the
// Guard's logger gets.
func TestConsumeWaitsForTheServer(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	r.publish(t, subject, 0, 3)
	impatient, err := jetstream.New(r.nc, jetstream.WithDefaultTimeout(200*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	consumer, err := impatient.Consumer(adaptertest.Context(t), "S", "C")
	if err != nil {
		t.Fatal(err)
	}
	gone := func() { // another error would be another line
		r.stop()
		adaptertest.Eventually(t, "the client knows of it", func() bool { return !r.nc.IsConnected() })
	}
	gone()
	g, log := logging(t, guard.Config{})
	var handled atomic.Int64
	c := consume(t, g, consumer, func(context.Context, jetstream.Msg) error { handled.Add(1); return nil })
	adaptertest.Eventually(t, "it says that it waits", func() bool { return log.lines("level=WARN", "the server is away", "source=S/C") > 0 })
	time.Sleep(300 * time.Millisecond)
	r.start()
	adaptertest.Eventually(t, "all handled", func() bool { return handled.Load() == 3 })
	if err := c.Stop(t); err != nil {
		t.Fatal(err)
	}
	if n := log.lines("the server is away"); n != 1 {
		t.Errorf("%d lines:\n%s", n, log)
	}

	gone()
	c = consume(t, g, consumer, none)
	adaptertest.Eventually(t, "it waits again", func() bool { return log.lines("the server is away") == 2 })
	if err := c.Stop(t); err != nil {
		t.Errorf("stopped while it waits: %v", err)
	}
}

// A connection that is dead and says nothing is made anew, without any option.
func TestDeadConnectionIsNoticed(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{AckWait: 5 * time.Second})
	p := r.lossy(t, func(frame) bool { return false })
	consumer := p.consumer(t)
	g, log := logging(t, guard.Config{})
	var handled atomic.Int64
	c := consume(t, g, consumer, func(context.Context, jetstream.Msg) error { handled.Add(1); return nil })
	r.publish(t, subject, 0, 10)
	adaptertest.Eventually(t, "handled", func() bool { return handled.Load() == 10 })
	p.freeze()
	r.publish(t, subject, 10, 20)
	start := time.Now()
	adaptertest.Eventually(t, "handled over a new connection", func() bool { return r.info(t).AckFloor.Stream == 20 })
	if d := time.Since(start); d > 40*time.Second {
		t.Errorf("after %s", d)
	}
	if handled.Load() != 20 || log.lines("level=WARN", "the connection was dead", "source=S/C") != 1 {
		t.Errorf("%d handled\n%s", handled.Load(), log)
	}
	if err := c.Stop(t); err != nil {
		t.Fatal(err)
	}
}

// A stop ends within its timeout and 5s, whatever the network does, and says what was
// left.
func TestStopIsBounded(t *testing.T) {
	t.Parallel()
	for name, blocked := range map[string]bool{"silence": false, "blocked writes": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, jetstream.ConsumerConfig{})
			p := r.lossy(t, func(frame) bool { return false })
			consumer := p.consumer(t)
			g, log := logging(t, guard.Config{})
			c := consume(t, g, consumer, none, WithStopTimeout(time.Second))
			src := adaptertest.Source(t, g, "S/C")
			if err := src.ForceOpen(0); err != nil {
				t.Fatal(err)
			}
			r.publish(t, subject, 0, 50)
			adaptertest.Eventually(t, "held", func() bool { return src.Account().Held == 50 })
			p.freeze()
			if blocked {
				conn := connOf(consumer)
				full := make(chan struct{})
				var wg sync.WaitGroup
				defer wg.Wait()
				defer p.close() // it frees the writer
				wg.Go(func() {
					body := make([]byte, 1<<20)
					for range 64 {
						stuck := time.AfterFunc(500*time.Millisecond, func() { close(full) })
						if err := conn.Publish("elsewhere", body); err != nil || !stuck.Stop() {
							return
						}
					}
				})
				<-full // a write holds the connection's lock
			}
			start := time.Now()
			err := c.Stop(t)
			if d := time.Since(start); d > 20*time.Second { // 6s, and what a busy machine needs
				t.Errorf("it took %s", d)
			}
			if err == nil || !strings.Contains(err.Error(), "50 messages") {
				t.Errorf("%v", err)
			}
			if log.lines("msg=\"source ended\"", "reason=shutdown") != 1 {
				t.Errorf("no true reason:\n%s", log)
			}
		})
	}
}

// What a connection lacks is one line, which names the options.
func TestConnectionsOptions(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	for name, c := range map[string]struct {
		opts []nats.Option
		want []string
	}{
		"none": {nil, []string{"nats.MaxReconnects(-1)", "nats.IgnoreAuthErrorAbort()", "nats.PingInterval(10*time.Second)", "nats.FlusherTimeout(5*time.Second)"}},
		"all":  {[]nats.Option{nats.MaxReconnects(-1), nats.IgnoreAuthErrorAbort(), nats.PingInterval(10 * time.Second), nats.FlusherTimeout(5 * time.Second)}, nil},
		"some": {[]nats.Option{nats.MaxReconnects(-1), nats.IgnoreAuthErrorAbort(), nats.FlusherTimeout(time.Second)}, []string{"nats.PingInterval(10*time.Second)"}},
		"no reconnect": {[]nats.Option{nats.MaxReconnects(-1), nats.PingInterval(time.Second), nats.FlusherTimeout(time.Second), nats.IgnoreAuthErrorAbort(), nats.NoReconnect()},
			[]string{"nats.MaxReconnects(-1)"}},
	} {
		for _, passive := range []bool{false, true} {
			nc, err := nats.Connect(r.url(), append(c.opts, nats.Timeout(connectTimeout))...)
			if err != nil {
				t.Fatal(err)
			}
			defer nc.Close()
			js, err := jetstream.New(nc)
			if err != nil {
				t.Fatal(err)
			}
			consumer, err := js.Consumer(adaptertest.Context(t), "S", "C")
			if err != nil {
				t.Fatal(err)
			}
			g, log := logging(t, guard.Config{})
			if passive {
				wrap(t, g, consumer)
			} else {
				running := consume(t, g, consumer, none)
				adaptertest.Source(t, g, "S/C")
				if err := running.Stop(t); err != nil {
					t.Error(err)
				}
			}
			lines := 0
			if len(c.want) > 0 {
				lines = 1
			}
			if n := log.lines("level=WARN", "the connection is not set up for outages"); n != lines {
				t.Errorf("%s: %d lines\n%s", name, n, log)
			}
			for _, option := range []string{"nats.MaxReconnects", "nats.IgnoreAuthErrorAbort", "nats.PingInterval", "nats.FlusherTimeout"} {
				wanted := strings.Contains(strings.Join(c.want, " "), option)
				if (log.lines(option) == 1) != wanted {
					t.Errorf("%s: %s named: %v\n%s", name, option, !wanted, log)
				}
			}
		}
	}
}

// What passes by itself is waited out, and nothing else is.
func TestAway(t *testing.T) {
	t.Parallel()
	for err, want := range map[error]bool{
		&jetstream.APIError{Code: 503, ErrorCode: jetstream.JSErrCodeJetStreamNotEnabled}: true,
		&jetstream.APIError{Code: 500, ErrorCode: 10119}:                                  true, // the consumer's servers are offline
		fmt.Errorf("nats: %w", &net.OpError{Op: "write", Err: syscall.EPIPE}):             true,
		nats.ErrTimeout: true,
		&jetstream.APIError{Code: 404, ErrorCode: jetstream.JSErrCodeConsumerNotFound}: false,
		nats.ErrConnectionClosed: false,
	} {
		if away(err) != want {
			t.Errorf("%v: %t", err, !want)
		}
	}
}

// An adapter's own logger goes before the Guard's.
func TestOwnLogger(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	nc, err := nats.Connect(r.url(), nats.Timeout(connectTimeout))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	consumer, err := js.Consumer(adaptertest.Context(t), "S", "C")
	if err != nil {
		t.Fatal(err)
	}
	g, guards := logging(t, guard.Config{})
	own := new(logged)
	wrap(t, g, consumer, WithLogger(slog.New(slog.NewTextHandler(own, nil))))
	if guards.lines("the connection") != 0 || own.lines("the connection") != 1 {
		t.Errorf("the Guard's:\n%s\nits own:\n%s", guards, own)
	}
}

// A source whose consumer is deleted has not ended by a shutdown.
func TestReasonOfAnEnd(t *testing.T) {
	t.Parallel()
	r := newRig(t, jetstream.ConsumerConfig{})
	g, log := logging(t, guard.Config{})
	c := consume(t, g, r.consumer, none)
	adaptertest.Source(t, g, "S/C")
	adaptertest.Eventually(t, "a pull is open", func() bool { return r.info(t).NumWaiting > 0 })
	if err := r.stream.DeleteConsumer(adaptertest.Context(t), "C"); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(t); err == nil {
		t.Fatal("no error")
	}
	if log.lines("msg=\"source ended\"", "reason=lost") != 1 {
		t.Errorf("%s", log)
	}
}
