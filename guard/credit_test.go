// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/credit"
)

// What was condemned while the writer was down, and never handed to it, costs the
// next epoch nothing, though an operator's grant paid for it. What was handed to it
// may have been written, and is paid for.
func TestCreditsOutliveAWriterThatIsDown(t *testing.T) {
	for order, why := range map[Order]Reason{OrderSource: ReasonShutdown, OrderNone: ReasonShutdown, OrderKey: ReasonRebalance} {
		bubble(t, order.String(), func(t *testing.T) {
			g, err := New(Config{Policy: Policy{Order: order, Budget: dlq.BudgetConfig{PermanentBalance: 2, FreeEvery: time.Hour}}})
			if err != nil {
				t.Fatal(err)
			}
			tried := map[string]bool{}
			w := &testWriter{says: func(r *dlq.Record) error {
				tried[string(r.Body)] = true
				return errDown
			}}
			open := func() *Source[int] {
				s, err := Open(g, SourceConfig{Name: "orders", DeadLetters: w}, Limits{}, &testPort{}, func(context.Context, int) error {
					return Permanent(errors.New("no such order"))
				})
				if err != nil {
					t.Fatal(err)
				}
				return s
			}
			s := open()
			in, ended := make(chan int), make(chan struct{})
			go func() { defer close(ended); _ = s.Run(t.Context(), in) }()
			const granted, sent = 100, 60
			s.GrantCredits(granted)
			for m := range sent {
				in <- m
			}
			time.Sleep(time.Second)
			if a := s.Account(); a.Settling != sent {
				t.Fatalf("%+v", a)
			}
			over, cancel := context.WithCancel(t.Context())
			cancel()
			if rep := s.End(over, why); len(rep.Left)+rep.Returned != sent {
				t.Errorf("%d left, %d returned", len(rep.Left), rep.Returned)
			}
			<-ended
			synctest.Wait()
			s = open()
			w.mu.Lock()
			if n := len(tried); n == 0 || n > sent/2 {
				t.Errorf("%d were tried", n)
			}
			if got, want := s.c.budget.Balance(credit.Permanent), float64(2+granted-len(tried)); got != want {
				t.Errorf("credits left: %v, want %v", got, want)
			}
			w.mu.Unlock()
			if _, err := g.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}
