// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// With one seed all that is drawn comes again: retries, probes, and the pauses of a
// dead-letter writer that fails.
func TestWithSeed(t *testing.T) {
	run := func(t *testing.T, seed uint64) (at []time.Duration) {
		synctest.Test(t, func(t *testing.T) {
			var mu sync.Mutex
			note := func(since time.Duration) {
				mu.Lock()
				defer mu.Unlock()
				at = append(at, since)
			}
			begun := time.Now()
			g, err := New(Config{}, WithSeed(seed), WithLogger(slog.New(slog.DiscardHandler)))
			if err != nil {
				t.Fatal(err)
			}
			down := func(context.Context, int) error {
				note(time.Since(begun))
				if time.Since(begun) > time.Minute {
					return nil
				}
				return errDown
			}
			port := &testPort{}
			s, err := Open(g, SourceConfig{Name: "s", System: "test", Destination: "s"}, Limits{}, port, down)
			if err != nil {
				t.Fatal(err)
			}
			in := make(chan int, 3)
			in <- 1
			in <- 2
			in <- 3
			close(in)
			if err := s.Run(t.Context(), in); err != nil {
				t.Error(err)
			}
			if _, err := g.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
		return at
	}
	first := run(t, 7)
	if len(first) < 10 {
		t.Fatalf("%d calls", len(first))
	}
	if again := run(t, 7); !slices.Equal(first, again) {
		t.Errorf("%v, and with the same seed %v", first, again)
	}
	if other := run(t, 8); slices.Equal(first, other) {
		t.Errorf("%v with another seed, too", other)
	}
}
