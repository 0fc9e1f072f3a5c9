// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard_test

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// Watchers are told beside the options' functions and beside each other, until they stop;
// one that panics costs the others nothing.
func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var option, first, second atomic.Int64
		g, err := guard.New(guard.Config{}, guard.WithLogger(slog.New(slog.DiscardHandler)), guard.OnDeadLetter(func(guard.DeadLetter) { option.Add(1) }))
		if err != nil {
			t.Fatal(err)
		}
		g.Watch(guard.Watcher{DeadLetter: func(guard.DeadLetter) { panic("a watcher's own mistake") }})
		stop := g.Watch(guard.Watcher{DeadLetter: func(guard.DeadLetter) { first.Add(1) }})
		g.Watch(guard.Watcher{
			StateChange: func(c guard.StateChange) {
				if c.Active {
					second.Add(100)
				}
			},
			DeadLetter: func(d guard.DeadLetter) {
				if d.Source == "orders" && d.Record.Error.Message == "no such order" {
					second.Add(1)
				}
			},
		})
		in := make(chan int, 10)
		write := dlq.WriterFunc(func(context.Context, *dlq.Record) error { return nil })
		src, err := guard.Open(g, guard.SourceConfig{Name: "orders", DeadLetters: write}, guard.Limits{EndsWithInput: true}, hopeless{},
			func(context.Context, int) error { return guard.Permanent(errors.New("no such order")) })
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() { defer close(done); _ = src.Run(context.Background(), in) }()
		told := func(o, f, s int64) {
			t.Helper()
			time.Sleep(time.Second)
			if option.Load() != o || first.Load() != f || second.Load() != s {
				t.Errorf("told %d, %d, %d; want %d, %d, %d", option.Load(), first.Load(), second.Load(), o, f, s)
			}
		}
		in <- 1
		told(1, 1, 1)
		stop()
		in <- 2
		told(2, 1, 2)
		if err := src.ForceOpen(time.Hour); err != nil {
			t.Fatal(err)
		}
		told(2, 1, 102)
		src.End(context.Background(), guard.ReasonShutdown)
		<-done
		if _, err := g.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
}
