// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package redis

import (
	"context"
	"errors"
	"flag"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/internal/brokers"
	"github.com/stormguard-mq/stormguard/limiter"
)

func TestMain(m *testing.M) {
	if err := flag.Set("rapid.checks", "20"); err != nil { // each is a hundred round trips; a flag on the command line still wins
		panic(err)
	}
	goleak.VerifyTestMain(m)
}

const ms = time.Millisecond

func dial(t testing.TB, url string) *goredis.Client {
	t.Helper()
	o, err := goredis.ParseURL(url)
	if err != nil {
		t.Fatal(err)
	}
	o.ContextTimeoutEnabled = true
	// By default the client asks once more after 5 s, and what Redis did late is done twice.
	o.ReadTimeout, o.WriteTimeout = time.Minute, time.Minute
	c := goredis.NewClient(o)
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// patient is a configuration for tests that are not about time: the machine may be
// busy.
func patient(l limiter.Limit) Config {
	return Config{Limit: l, Timeout: 10 * time.Second}
}

// open is a store with a prefix of its own at the shared Redis.
func open(t testing.TB, cfg Config) (*Store, *goredis.Client) {
	t.Helper()
	c := dial(t, brokers.ForTest(t, brokers.Redis))
	if cfg.Prefix == "" {
		cfg.Prefix = "test:" + t.Name() + time.Now().Format(":150405.000000:")
	}
	return at(t, c, cfg), c
}

func at(t testing.TB, c goredis.Scripter, cfg Config, opts ...Option) *Store {
	t.Helper()
	s, err := New(c, cfg, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func soon(t testing.TB, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !f(); time.Sleep(ms) {
		if time.Now().After(end) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

// idle waits until nothing is on its way to Redis for h.Admit.
func idle(t testing.TB, h *Handle) {
	t.Helper()
	soon(t, "nothing is fetched", func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return !h.prefetcher
	})
}

func serverTime(t testing.TB, c *goredis.Client) time.Time {
	t.Helper()
	now, err := c.Time(context.Background()).Result()
	if err != nil {
		t.Fatal(err)
	}
	return now
}

func is(t testing.TB, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%v, want %v", err, want)
	}
}
