// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/internal/brokers"
)

// on runs a test on each kind of broker, with the configuration that reaches it.
func on(t *testing.T, test func(t *testing.T, cfg Config)) {
	t.Helper()
	if testing.Short() {
		t.Skip("needs brokers and seconds; run without -short")
	}
	for _, k := range Kinds() {
		t.Run(string(k), func(t *testing.T) {
			cfg := Config{Broker: k}
			if found := cfg.platform().found; found != "" {
				cfg.URL = brokers.ForTest(t, found)
			}
			test(t, cfg)
		})
	}
}

// lay removes what it laid, at the latest when the test ends.
func lay(ctx context.Context, t *testing.T, b broker, id string) (plumbing, func()) {
	t.Helper()
	p, err := b.lay(ctx, id)
	if p == nil {
		t.Fatal(err)
	}
	remove := sync.OnceFunc(func() { p.remove(ctx) })
	t.Cleanup(remove)
	if err != nil {
		t.Fatal(err)
	}
	return p, remove
}

// layAgain lays what was removed a moment ago. A NATS server goes on removing the
// files of a stream after it said that the stream is gone, and cannot make one of
// that name before it is through.
func layAgain(ctx context.Context, t *testing.T, b broker, id string) plumbing {
	t.Helper()
	const cannotMake jetstream.ErrorCode = 10049
	for {
		p, err := b.lay(ctx, id)
		if p == nil {
			t.Fatal(err)
		}
		if api := (*jetstream.APIError)(nil); errors.As(err, &api) && api.ErrorCode == cannotMake && ctx.Err() == nil {
			p.remove(ctx)
			continue
		}
		t.Cleanup(func() { p.remove(ctx) })
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
}

// Every method of each broker's plumbing, with each of its ways to consume.
func TestPlumbing(t *testing.T) { //nolint:tparallel // one broker after another
	t.Parallel()
	on(t, func(t *testing.T, cfg Config) {
		for _, way := range []string{"unguarded", "guarded"} {
			t.Run(way, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
				defer cancel()
				b, err := open(ctx, cfg, t.Output())
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(b.close)
				id := strings.ToUpper(rand.Text()[:8])
				p, remove := lay(ctx, t, b, id)
				exercise(ctx, t, p, way)
				publishOne(ctx, t, p, 0)
				remove()
				// What was left behind would be found by the next of the same name.
				p = layAgain(ctx, t, b, id)
				if err := acked(ctx, p, time.Minute); err != nil {
					t.Error("remove left messages behind:", err)
				}
				if buried, err := p.buried(ctx); buried != 0 || err != nil {
					t.Errorf("remove left %d dead letters behind, %v", buried, err)
				}
			})
		}
	})
}

func exercise(ctx context.Context, t *testing.T, p plumbing, way string) {
	t.Helper()
	const n, first, last = 40, 7, 39 // the poison, in between and at the end
	want := func(what string, is bool, ask func(context.Context) (bool, error)) {
		t.Helper()
		ok, err := poll(ctx, 1, func(ctx context.Context) (bool, error) {
			got, err := ask(ctx)
			return got == is, err
		})
		if !ok || err != nil {
			t.Fatalf("%s is not %t: %v", what, is, err)
		}
	}
	want("joined, before there is a consumer,", false, p.joined)
	for i := range n {
		publishOne(ctx, t, p, i)
	}
	want("idle, with messages to deliver,", false, p.idle)

	var mu sync.Mutex
	var handled []int
	handle := func(_ context.Context, body []byte) error {
		o, err := parseOrder(body)
		if err != nil {
			return err
		}
		if o.ID == first || o.ID == last {
			return guard.Permanent(errors.New("poison"))
		}
		mu.Lock()
		defer mu.Unlock()
		handled = append(handled, o.ID)
		return nil
	}
	var s side = unguarded{}
	if way == "guarded" {
		s = newGuarded(platform{}, false, "")
	}
	start := time.Now()
	consuming, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- s.consume(consuming, p, handle) }()
	defer stop()
	want("joined", true, p.joined)
	want("everything handled", true, func(context.Context) (bool, error) {
		mu.Lock()
		defer mu.Unlock()
		return len(handled) >= n-2, nil
	})
	want("both buried", true, func(ctx context.Context) (bool, error) {
		buried, err := p.buried(ctx)
		return buried == 2, err
	})
	want("idle", true, p.idle)
	stop()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if err := acked(ctx, p, time.Minute); err != nil {
		t.Error(err)
	}
	if !slices.IsSorted(handled) || len(handled) != n-2 {
		t.Error("handled:", handled)
	}
	graves, err := p.exhume(ctx, start)
	if err != nil || len(graves) != 2 || graves[0].id != first || graves[1].id != last {
		t.Errorf("DLQ: %+v, %v", graves, err)
	}
	for _, g := range graves {
		if g.at < -time.Second || g.at > time.Since(start) {
			t.Errorf("%d died at %s after the start, which was %s ago", g.id, g.at, time.Since(start))
		}
	}
}

func publishOne(ctx context.Context, t *testing.T, p plumbing, id int) {
	t.Helper()
	body, err := json.Marshal(order{ID: id})
	if err != nil {
		t.Fatal(err)
	}
	wait, err := p.send(ctx, body)
	if err != nil {
		t.Fatal(err)
	}
	if err := wait(ctx); err != nil {
		t.Fatal(err)
	}
}

// What was handled and not settled comes to light when the consumer ends.
func TestHandledButNeverSettled(t *testing.T) { //nolint:tparallel // one broker after another
	t.Parallel()
	on(t, func(t *testing.T, cfg Config) {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
		defer cancel()
		b, err := open(ctx, cfg, t.Output())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(b.close)
		p, _ := lay(ctx, t, b, strings.ToUpper(rand.Text()[:8]))
		publishOne(ctx, t, p, 0)
		consuming, stop := context.WithCancel(ctx)
		defer stop()
		err = p.unguarded(consuming, func(context.Context, []byte) error {
			stop() // and so it is neither acked nor requeued
			return context.Canceled
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := acked(ctx, p, time.Second); err == nil || ctx.Err() != nil {
			t.Error("the broker has a message that was never settled, and nobody noticed:", err)
		}
	})
}

func TestNowhereToConnect(t *testing.T) {
	for _, cfg := range []Config{
		{Broker: NATS, URL: "nats://me:secret@127.0.0.1:1"},
		{Broker: NATS, URL: "me:secret@127.0.0.1:1"},
		{Broker: Kafka, URL: "127.0.0.1:1"},
		{Broker: RabbitMQ, URL: "amqp://me:secret@127.0.0.1:1/"},
	} {
		t.Run(string(cfg.Broker), func(t *testing.T) {
			cfg.Rate = 100
			err := Run(t.Context(), cfg, t.Output(), t.Output())
			if err == nil || !strings.Contains(err.Error(), "127.0.0.1:1") || strings.Contains(err.Error(), "secret") {
				t.Error(err)
			}
		})
	}
}

func TestOutsideACheckout(t *testing.T) {
	for _, k := range []Kind{Kafka, RabbitMQ} {
		t.Run(string(k), func(t *testing.T) {
			t.Chdir(t.TempDir())
			cfg := Config{Broker: k, Rate: 100}
			t.Setenv(cfg.platform().found.Env(), "")
			err := Run(t.Context(), cfg, t.Output(), t.Output())
			if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("--url, %s: ", cfg.platform().address)) {
				t.Error(err)
			}
		})
	}
}
