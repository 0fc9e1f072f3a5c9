// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package adaptertest

import (
	"context"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// Context returns a context that ends with the test, or after 3 minutes, which only a
// failure takes.
func Context(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// Eventually polls until ok returns true. After 3 minutes, which only a failure takes, it
// fails the test.
func Eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(3 * time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("never: " + what)
		}
	}
}

// Guard makes a guard that is closed at the end of the test. It logs to [Log].
func Guard(t testing.TB, cfg guard.Config, opts ...guard.Option) *guard.Guard {
	t.Helper()
	g, err := guard.New(cfg, append([]guard.Option{guard.WithLogger(Log())}, opts...)...)
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

// Log returns a logger that is silent unless STORMGUARD_TEST_LOG is set.
func Log() *slog.Logger {
	if os.Getenv("STORMGUARD_TEST_LOG") == "" {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(os.Stderr, nil))
}

// Source waits until a source is open, and returns it.
func Source(t testing.TB, g *guard.Guard, name string) guard.Control {
	t.Helper()
	Eventually(t, "the source "+name+" is open", func() bool { return g.Source(name) != nil })
	return g.Source(name)
}

// Running is a consumer that a test stops.
type Running struct {
	cancel context.CancelFunc
	done   chan error
}

// Run runs consume until the test stops it, or until the end of the test.
func Run(t testing.TB, consume func(context.Context) error) *Running {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	r := &Running{cancel: cancel, done: make(chan error, 1)}
	go func() { r.done <- consume(ctx) }()
	t.Cleanup(func() { _ = r.Stop(t) })
	return r
}

// Stop ends the consumer and returns its error.
func (r *Running) Stop(t testing.TB) error {
	t.Helper()
	r.cancel()
	return r.Wait(t)
}

// Wait waits for the consumer to end by itself, for 50 s at most, and returns its error.
func (r *Running) Wait(t testing.TB) error {
	t.Helper()
	select {
	case err := <-r.done:
		r.done <- err
		return err
	case <-time.After(50 * time.Second):
		t.Fatal("the consumption does not return")
		return nil
	}
}
