// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// strictRig is a source with StrictOrder whose handler fails for what bad says; the error
// says nothing. It returns the source, its intake, how many it handled, and how to end it.
func strictRig(t *testing.T, order Order, bad func(m int) bool) (s *Source[int], in chan int, handled *atomic.Int64, end func()) {
	t.Helper()
	g, err := New(Config{Policy: Policy{StrictOrder: true, Order: order}})
	if err != nil {
		t.Fatal(err)
	}
	handled = new(atomic.Int64)
	write := dlq.WriterFunc(func(context.Context, *dlq.Record) error { return nil })
	s, err = Open(g, SourceConfig{Name: "orders", DeadLetters: write}, Limits{}, &testPort{keys: 1}, func(_ context.Context, m int) error {
		if bad(m) {
			return errors.New("the order was not charged")
		}
		handled.Add(1)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	in = make(chan int)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Run(ctx, in) }() // the context's error
	return s, in, handled, func() {
		cancel()
		<-done
		if _, err := g.Close(context.Background()); err != nil {
			t.Error(err)
		}
	}
}

// With StrictOrder nothing behind a poison message may be tried, so there is no proof. Each
// is guessed all the same, the first within 12 minutes and the one behind it within 14 more,
// whose attempts are probes of a breaker that has been open for long. The healthy ones go on.
func TestStrictOrderMovesOn(t *testing.T) {
	for _, order := range []Order{OrderSource, OrderKey} {
		bubble(t, order.String(), func(t *testing.T) {
			s, in, handled, end := strictRig(t, order, func(m int) bool { return m < 2 })
			defer end()
			for m := range 5 {
				in <- m
			}
			time.Sleep(12 * time.Minute)
			if n := s.Account().DeadLettered; n != 1 {
				t.Errorf("%d dead letters after 12 minutes, want the first message: %+v", n, s.State().Holds)
			}
			time.Sleep(14 * time.Minute)
			if a := s.Account(); a.DeadLettered != 2 || handled.Load() != 3 || a.Unsettled() != 0 {
				t.Errorf("after 26 minutes: %+v, %d handled", a, handled.Load())
			}
		})
		bubble(t, order.String()+", traffic", func(t *testing.T) {
			s, in, handled, end := strictRig(t, order, func(m int) bool { return m == 0 })
			defer end()
			stop := time.After(15 * time.Minute) // the window is full after two of them
			for m := 0; ; m++ {
				select {
				case in <- m:
					time.Sleep(100 * time.Millisecond)
					continue
				case <-stop:
				}
				break
			}
			if a := s.Account(); a.DeadLettered != 1 || handled.Load() < 1024 {
				t.Errorf("%+v, %d handled", a, handled.Load())
			}
		})
	}
}

// An outage of ten minutes whose errors say nothing costs no healthy message, and drains.
func TestStrictOrderInAnOutage(t *testing.T) {
	for n, order := range map[int]Order{2: OrderSource, 3: OrderKey, 200: OrderSource, 201: OrderKey} {
		bubble(t, fmt.Sprint(n, " ", order), func(t *testing.T) {
			var down atomic.Bool
			down.Store(true)
			s, in, handled, end := strictRig(t, order, func(int) bool { return down.Load() })
			defer end()
			for m := range n {
				in <- m
			}
			time.Sleep(10 * time.Minute)
			down.Store(false)
			time.Sleep(time.Minute)
			if a := s.Account(); a.DeadLettered != 0 || handled.Load() != int64(n) || a.Unsettled() != 0 {
				t.Errorf("%+v, %d handled", a, handled.Load())
			}
		})
	}
}
