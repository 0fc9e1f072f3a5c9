// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// A source says why its own letters are put off, and not why another's are.
func TestPutOffIsItsSources(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{}, WithLogger(slog.New(slog.DiscardHandler)))
		if err != nil {
			t.Fatal(err)
		}
		w := &testWriter{says: func(r *dlq.Record) error { return fmt.Errorf("%w: no room for %s", dlq.ErrPutOff, r.Body) }}
		var all []*Source[int]
		for m := range 2 {
			s, err := Open(g, SourceConfig{Name: strconv.Itoa(m), DeadLetters: w}, Limits{}, &testPort{}, func(context.Context, int) error { return Permanent(errBad) })
			if err != nil {
				t.Fatal(err)
			}
			in := make(chan int, 1)
			in <- m
			go func() { _ = s.Run(t.Context(), in) }()
			all = append(all, s)
		}
		time.Sleep(time.Minute)
		for m, s := range all {
			if h := s.State().Holds; len(h) != 1 || h[0].Reason != ReasonDLQ || !strings.Contains(h[0].Detail, fmt.Sprint("no room for ", m)) {
				t.Errorf("%d: %+v", m, h)
			}
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}
