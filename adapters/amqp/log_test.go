// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/adaptertest"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

// logbook keeps what is logged.
type logbook struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *logbook) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *logbook) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(b, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// with are the lines that have all of these.
func (b *logbook) with(parts ...string) (lines []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
next:
	for line := range strings.Lines(b.buf.String()) {
		for _, p := range parts {
			if !strings.Contains(line, p) {
				continue next
			}
		}
		lines = append(lines, strings.TrimSpace(line))
	}
	return lines
}

// A wrong port is told at once by the Guard's logger, and again at distances that
// double up to a minute. An option of its own overrides.
func TestAWrongPortIsToldSparsely(t *testing.T) {
	for _, own := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			var ofGuard, ofOption logbook
			g, err := guard.New(guard.Config{}, guard.WithLogger(ofGuard.logger()))
			if err != nil {
				t.Fatal(err)
			}
			d := Dial("amqp://127.0.0.1:1/")
			dials := 0
			d.Config.Dial = func(string, string) (net.Conn, error) {
				dials++
				return nil, errDown
			}
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
			defer cancel()
			var opts []Option
			in, silent := &ofGuard, &ofOption
			if own {
				opts = append(opts, WithLogger(ofOption.logger()))
				in, silent = silent, in
			}
			go func() {
				time.Sleep(time.Second / 2)
				if n := len(in.with("level=WARN", "not connected", "127.0.0.1:1", errDown.Error())); n != 1 {
					t.Errorf("%d lines in the first half second", n)
				}
			}()
			if err := Consume(ctx, g, d, "q", func(context.Context, amqp091.Delivery) error { return nil }, opts...); err != nil {
				t.Error(err)
			}
			if n := len(in.with("not connected")); n < 12 || n > 16 { // 1, 1, 2, 4 … 32 s, and each minute
				t.Errorf("%d lines for %d tries in 10 minutes: %s", n, dials, in.buf.String())
			}
			if lines := silent.with("not connected"); len(lines) > 0 {
				t.Errorf("%s", lines)
			}
			if _, err := g.Close(context.Background()); err != nil {
				t.Error(err)
			}
		})
	}
}

// The Guard's logger reaches the dead-letter writer, but for one that has its own.
func TestTheGuardsLoggerReachesTheDLQ(t *testing.T) {
	t.Parallel()
	for _, own := range []bool{false, true} {
		var ofGuard, ofWriter logbook
		r := newRig(t, shared(t, brokers.RabbitMQ4), Quorum, nil)
		var l lines
		cfg := DLQConfig{Queue: r.queue + ".dlq", Kind: Classic}
		in := &ofGuard
		if own {
			cfg.Logger, in = ofWriter.logger(), &ofWriter
		}
		letters, err := NewDLQ(t.Context(), l.dialer(r.url()), cfg)
		if err != nil {
			t.Fatal(err)
		}
		before := len(in.with("msg=connected", cfg.Queue))
		g := adaptertest.Guard(t, guard.Config{}, guard.WithLogger(ofGuard.logger()))
		c := r.consume(g, func(context.Context, amqp091.Delivery) error { return guard.Permanent(errDown) }, WithDeadLetters(letters))
		adaptertest.Source(t, g, r.queue)
		l.cut()
		r.publish(0, 1)
		adaptertest.Eventually(t, "it says that it is connected again", func() bool { return len(in.with("msg=connected", cfg.Queue)) > before })
		if err := errors.Join(c.Stop(t), letters.Close(t.Context())); err != nil {
			t.Error(err)
		}
		if own == (len(ofGuard.with("msg=connected", cfg.Queue)) > 0) {
			t.Errorf("with its own %t: %s", own, ofGuard.buf.String())
		}
	}
}

// A dead-letter writer that cannot connect says so, not at each try.
func TestTheDLQTellsThatItCannotConnect(t *testing.T) {
	t.Parallel()
	r := newRig(t, shared(t, brokers.RabbitMQ4), Quorum, nil)
	var log logbook
	var l lines
	d := l.dialer(r.url())
	letters, err := NewDLQ(t.Context(), d, DLQConfig{Queue: r.queue + ".dlq", Kind: Classic, Logger: log.logger()})
	if err != nil {
		t.Fatal(err)
	}
	letters.dialer.URLs = []string{"amqp://127.0.0.1:1/"}
	l.cut()
	begun := time.Now()
	for range 3 {
		if err := letters.Write(t.Context(), &dlq.Record{Body: []byte("x")}); err == nil {
			t.Error("written")
		}
		adaptertest.Eventually(t, "its connection is gone", func() bool { return letters.s == nil || letters.s.over() })
	}
	// After a second the line is due again.
	if lines := log.with("level=WARN", "not connected", r.queue, "127.0.0.1:1"); len(lines) == 0 || len(lines) > 1 && time.Since(begun) < time.Second {
		t.Errorf("%s", lines)
	}
	if err := letters.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
