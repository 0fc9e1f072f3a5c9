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
