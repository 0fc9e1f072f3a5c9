// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// countedContext counts how often somebody asks for its end, and calls enough once that
// is too often.
type countedContext struct {
	context.Context

	asked  atomic.Int64
	enough func()
}

func (c *countedContext) Done() <-chan struct{} {
	if c.asked.Add(1) == 1000 {
		c.enough()
	}
	return c.Context.Done()
}

// While End waits for a worker or a writer, the loop waits too, although its context has
// ended: it does not turn.
func TestEndThenCancelWhileBusy(t *testing.T) {
	for name, p := range map[string]Policy{"writer": {}, "worker": {Order: OrderNone, Workers: 2}} {
		bubble(t, name, func(t *testing.T) {
			release := make(chan struct{})
			var once sync.Once
			free := func() { once.Do(func() { close(release) }) }
			g, err := New(Config{Policy: p})
			if err != nil {
				t.Fatal(err)
			}
			letters := dlq.WriterFunc(func(context.Context, *dlq.Record) error {
				<-release
				return nil
			})
			s, err := Open(g, SourceConfig{Name: "s", DeadLetters: letters}, Limits{}, &testPort{}, func(context.Context, int) error {
				if name == "writer" {
					return Permanent(errDown)
				}
				<-release
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			inner, cancel := context.WithCancel(t.Context())
			defer cancel()
			ctx := &countedContext{Context: inner, enough: free}
			in, ended := make(chan int, 1), make(chan error, 1)
			in <- 0
			go func() { ended <- s.Run(ctx, in) }()
			elapse(time.Second)
			reports := make(chan Report, 1)
			go func() { reports <- s.End(t.Context(), ReasonShutdown) }()
			synctest.Wait()
			cancel()
			elapse(10 * time.Second)
			if n := ctx.asked.Load(); n > 100 {
				t.Errorf("the loop has turned %d times or more", n)
			}
			free()
			if rep := <-reports; !rep.Clean() || rep.Account.Acked+rep.Account.DeadLettered != 1 {
				t.Errorf("%+v", rep)
			}
			if err := <-ended; !errors.Is(err, ErrClosed) {
				t.Error(err)
			}
			closeAll(t, g)
		})
	}
}
