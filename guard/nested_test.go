// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/guard/guardtest"
)

// A function that is called by a handler, or by a function, of its own scope goes through with
// the probe of its caller: there is no other, and the breaker would never close.
func TestFunctionInItsCallersScope(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, err := guard.New(guard.Config{Group: "g", Scope: guard.ScopeGroup})
		if err != nil {
			t.Fatal(err)
		}
		protect := func(name string, f func(context.Context, int) error) *guard.Func[int] {
			t.Helper()
			p, err := guard.Protect(g, guard.SourceConfig{Name: name}, f)
			if err != nil {
				t.Fatal(err)
			}
			return p
		}
		inner := protect("inner", func(context.Context, int) error { return nil })
		outer := protect("outer", func(ctx context.Context, n int) error { return inner.Do(ctx, n) })
		b := guardtest.NewBroker()
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		var kept context.Context
		go func() {
			ended <- b.Run(ctx, g, "s", guardtest.Guarded{}, func(ctx context.Context, _ *guardtest.Message) error {
				kept = ctx //nolint:fatcontext // it is used once the handler has returned
				return outer.Do(ctx, 1)
			})
		}()
		synctest.Wait()
		src := g.Source("s")
		if err := src.ForceOpen(time.Second); err != nil {
			t.Fatal(err)
		}
		for n := range uint64(20) {
			b.Publish("s", guardtest.Message{Body: guardtest.Body(n, 0)})
		}
		time.Sleep(time.Minute)
		if a, s := b.Stats("s").Acked, src.State().Breaker.State; a != 20 || s != breaker.Closed {
			t.Errorf("%d are acked, the breaker is %s: %+v", a, s, src.State().Holds)
		}
		// Nobody else's call goes through, and not that of a handler that has returned.
		if err := src.ForceOpen(time.Minute); err != nil {
			t.Fatal(err)
		}
		for _, ctx := range []context.Context{t.Context(), context.WithoutCancel(kept)} {
			if err := inner.Do(ctx, 1); !errors.As(err, new(*guard.HeldError)) {
				t.Errorf("%v", err)
			}
		}
		// Nor do those of a call that was let through while the breaker was closed: it is no probe.
		if err := src.ForceClosed(); err != nil {
			t.Fatal(err)
		}
		late := protect("late", func(ctx context.Context, n int) error {
			if err := src.ForceOpen(time.Minute); err != nil {
				t.Error(err)
			}
			return inner.Call(ctx, n)
		})
		if err := late.Call(t.Context(), 1); !errors.As(err, new(*guard.HeldError)) {
			t.Errorf("%v", err)
		}
		stop()
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// A poison message whose handler calls a function goes to the dead letters, and those behind
// it are handled: while the function is held no message tells anything, and then the next one
// behind the head is asked, not the head again.
func TestPoisonThatFailsInAFunction(t *testing.T) {
	for name, call := range map[string]func(*guard.Func[uint64], context.Context, uint64) error{
		"Do": (*guard.Func[uint64]).Do, "Call": (*guard.Func[uint64]).Call,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g, err := guard.New(guard.Config{Group: "g"})
				if err != nil {
					t.Fatal(err)
				}
				f, err := guard.Protect(g, guard.SourceConfig{Name: "charge"}, func(_ context.Context, n uint64) error {
					if n == 1 {
						return errors.New("boom")
					}
					return nil
				})
				if err != nil {
					t.Fatal(err)
				}
				b := guardtest.NewBroker()
				for n := range uint64(20) {
					b.Publish("s", guardtest.Message{Body: guardtest.Body(n+1, 0)})
				}
				ctx, stop := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				go func() {
					ended <- b.Run(ctx, g, "s", guardtest.Guarded{}, func(ctx context.Context, m *guardtest.Message) error {
						return call(f, ctx, guardtest.Number(m.Body))
					})
				}()
				time.Sleep(10 * time.Minute)
				if a, d := b.Stats("s").Acked, b.DeadLetters("s").Len(); a != 20 || d != 1 {
					t.Errorf("%d are settled, %d dead letters: %+v", a, d, g.Source("s").State().Holds)
				}
				stop()
				if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
				if _, err := g.Close(t.Context()); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// An outage of what one queue's handler calls by a function holds no other queue, and is over
// as soon as it would be without the function.
func TestFunctionWidensNoOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, err := guard.New(guard.Config{Group: "g"})
		if err != nil {
			t.Fatal(err)
		}
		const outage = 10 * time.Minute
		began := time.Now()
		charge, err := guard.Protect(g, guard.SourceConfig{Name: "charge"}, func(context.Context, int) error {
			if time.Since(began) < outage {
				return guard.Unavailable(errors.New("connection refused"))
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		b := guardtest.NewBroker()
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 2)
		for name, handler := range map[string]func(context.Context, *guardtest.Message) error{
			"orders": func(ctx context.Context, _ *guardtest.Message) error { return charge.Do(ctx, 1) },
			"mails":  func(context.Context, *guardtest.Message) error { return nil },
		} {
			go func() { ended <- b.Run(ctx, g, name, guardtest.Guarded{}, handler) }()
		}
		for n := range uint64(600) {
			b.Publish("orders", guardtest.Message{Body: guardtest.Body(n, 0)})
			b.Publish("mails", guardtest.Message{Body: guardtest.Body(n, 0)})
			time.Sleep(time.Second)
		}
		if acked := b.Stats("mails").Acked; acked < 595 {
			t.Errorf("%d mails of 600 were handled: %+v", acked, g.Source("mails").State().Holds)
		}
		time.Sleep(32 * time.Second)
		if acked := b.Stats("orders").Acked; acked == 0 {
			t.Errorf("no order was handled in 32 s after the outage: %+v", g.Source("orders").State().Holds)
		}
		stop()
		t.Log(<-ended, <-ended)
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// Functions hold each other no more than queues: two that failed and are not called again do
// not keep a third shut.
func TestFunctionsHoldNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, err := guard.New(guard.Config{Group: "g"})
		if err != nil {
			t.Fatal(err)
		}
		protect := func(name string, err error) *guard.Func[int] {
			p, no := guard.Protect(g, guard.SourceConfig{Name: name}, func(context.Context, int) error { return err })
			if no != nil {
				t.Fatal(no)
			}
			return p
		}
		refused := guard.Unavailable(errors.New("connection refused"))
		a, b, c := protect("a", refused), protect("b", refused), protect("c", nil)
		for range 10 {
			if err := errors.Join(a.Do(t.Context(), 1), b.Do(t.Context(), 1)); err == nil {
				t.Fatal("no error")
			}
			time.Sleep(time.Second)
		}
		if a.State().Breaker.State == breaker.Closed || b.State().Breaker.State == breaker.Closed {
			t.Fatal("a breaker is closed")
		}
		if err := c.Do(t.Context(), 1); err != nil {
			t.Error(err)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}
