// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/failsafe-go/failsafe-go"
	"github.com/failsafe-go/failsafe-go/circuitbreaker"
	"github.com/failsafe-go/failsafe-go/retrypolicy"
	"github.com/failsafe-go/failsafe-go/timeout"
	"github.com/sony/gobreaker"

	"github.com/stormguard-mq/stormguard/guard"
)

// hotpath is what a message costs while all is well. Every side handles the
// same prepared message, of Watermill's type, with the same handler, and is set
// to the same retries, timeout and, as near as it goes, breaker. Where a rival
// offers dearer and cheaper ways to the same end, it gets the cheaper one.
var hotpath = Group{
	Name:  "hotpath",
	About: "the closed path against Watermill's middlewares and router, and failsafe-go",
	Cases: []Case{
		{Name: "chain_guard", Open: openChainGuard},
		{Name: "chain_watermill", Open: openChain(watermillChain, 1)},
		{Name: "chain_failsafe", Open: openChain(failsafeChain, 1)},
		{Name: "loop_guard", Open: openLoopGuard},
		{Name: "loop_bare", Open: openLoopBare},
		{Name: "func8_guard", Open: openFunc8Guard},
		{Name: "func8_watermill", Open: openChain(watermillChain, 8)},
		{Name: "func8_failsafe", Open: openChain(failsafeChain, 8)},
		{Name: "router_guard", Open: openRouterGuard},
		{Name: "router_watermill", Open: openRouterWatermill(false)},
		{Name: "router_watermill_throttle", Open: openRouterWatermill(true)},
	},
	Ratios: []Ratio{
		{Name: "chain", Ours: "chain_guard", Theirs: "chain_watermill"},
		{Name: "failsafe", Ours: "chain_guard", Theirs: "chain_failsafe"},
		{Name: "loop", Ours: "loop_guard", Theirs: "loop_bare"},
		{Name: "func8_watermill", Ours: "func8_guard", Theirs: "func8_watermill"},
		{Name: "func8_failsafe", Ours: "func8_guard", Theirs: "func8_failsafe"},
		{Name: "router", Ours: "router_guard", Theirs: "router_watermill"},
		{Name: "router_throttled", Ours: "router_guard", Theirs: "router_watermill_throttle"},
	},
}

// What guard.Policy and breaker.Config have as defaults.
const (
	attempts    = 5
	retryBase   = 50 * time.Millisecond
	retryMax    = 10 * time.Second
	callTimeout = 30 * time.Second
)

func prepared() *message.Message { return message.NewMessage("1", make([]byte, 256)) }

// handle is the handler of all sides.
//
//go:noinline
func handle(context.Context, *message.Message) error { return nil }

// A call is a chain around handle, ready to be called for a message.
type call func(ctx context.Context, m *message.Message) error

func watermillMiddlewares() []message.HandlerMiddleware {
	return []message.HandlerMiddleware{ // outermost first
		middleware.Retry{
			MaxRetries: attempts - 1, InitialInterval: retryBase, MaxInterval: retryMax, Multiplier: 2, RandomizationFactor: 0.5,
		}.Middleware,
		middleware.NewCircuitBreaker(gobreaker.Settings{Name: "bench", Interval: time.Minute}).Middleware,
		middleware.Recoverer,
		middleware.Timeout(callTimeout),
	}
}

func watermillChain() call {
	h := message.HandlerFunc(func(m *message.Message) ([]*message.Message, error) {
		return nil, handle(m.Context(), m)
	})
	all := watermillMiddlewares()
	for i := range all {
		h = all[len(all)-1-i](h)
	}
	return func(ctx context.Context, m *message.Message) error {
		m.SetContext(ctx) // Timeout leaves an ended one in the message
		_, err := h(m)
		return err
	}
}

func failsafeChain() call {
	policies := failsafe.With(
		retrypolicy.NewBuilder[any]().WithMaxAttempts(attempts).WithBackoff(retryBase, retryMax).Build(),
		circuitbreaker.NewBuilder[any]().WithFailureThreshold(5).WithDelay(time.Second).Build(), // five in a row: cheaper than its windows
		timeout.New[any](callTimeout),
	)
	return func(ctx context.Context, m *message.Message) error {
		return policies.RunWithExecution(func(e failsafe.Execution[any]) error { return handle(e.Context(), m) })
	}
}

// openChain calls a chain from so many goroutines, each with a message of its
// own: Watermill's middlewares write to it.
func openChain(chain func() call, goroutines int) func(context.Context) (Runner, error) {
	return func(context.Context) (Runner, error) {
		return Runner{Do: callers(chain(), goroutines)}, nil
	}
}

// callers shares n calls among goroutines.
func callers(f call, goroutines int) func(context.Context, int) error {
	work := func(ctx context.Context, n int) error {
		m := prepared()
		for range n {
			if err := f(ctx, m); err != nil {
				return err
			}
		}
		return nil
	}
	if goroutines == 1 {
		return work
	}
	return func(ctx context.Context, n int) error {
		var wg sync.WaitGroup
		errs := make(chan error, goroutines)
		for i := range goroutines {
			wg.Go(func() { errs <- work(ctx, share(n, goroutines, i)) })
		}
		wg.Wait()
		for range goroutines {
			if err := <-errs; err != nil {
				return err
			}
		}
		return nil
	}
}

// share is the i-th part of n, split into as even parts as there can be.
func share(n, parts, i int) int { return n*(i+1)/parts - n*i/parts }

// openChainGuard has no chain to call: a source is a loop that takes messages.
// So a turn opens a source, puts the prepared message into its feed n times, in
// batches of 64, and ends when the source has acked them all. That is more than
// the rivals' calls do: ours also hands over, accounts for and acks each message.
// What overlaps, on the second processor, is copying 64 pointers under a lock.
func openChainGuard(context.Context) (Runner, error) {
	return guarded(func(ctx context.Context, s *guard.Source[*message.Message], n int) error {
		feed := s.Feed()
		batch := make([]*message.Message, 64)
		m := prepared()
		for i := range batch {
			batch[i] = m
		}
		go func() {
			defer feed.Close()
			for left := n; left > 0; left -= 64 {
				if _, err := feed.Put(ctx, batch[:min(64, left)]...); err != nil {
					return // the account will tell
				}
			}
		}()
		return s.RunFeed(ctx)
	})
}

const loopBuffer = 4096

// produce sends the prepared message n times through a channel.
func produce(n int) <-chan *message.Message {
	in := make(chan *message.Message, loopBuffer)
	m := prepared()
	go func() {
		defer close(in)
		for range n {
			in <- m
		}
	}()
	return in
}

func openLoopGuard(context.Context) (Runner, error) {
	return guarded(func(ctx context.Context, s *guard.Source[*message.Message], n int) error {
		return s.Run(ctx, produce(n))
	})
}

// openLoopBare is the loop without a guard: it receives, handles and acks.
func openLoopBare(context.Context) (Runner, error) {
	var port guard.Port[*message.Message] = noPort[*message.Message]{}
	return Runner{Do: func(ctx context.Context, n int) error {
		for m := range produce(n) {
			if err := handle(ctx, m); err != nil {
				return err
			}
			if err := port.Ack(m); err != nil {
				return err
			}
		}
		return nil
	}}, nil
}

// guarded makes a Runner that feeds a fresh source in each turn. Opening and
// ending it is measured too.
func guarded(feed func(context.Context, *guard.Source[*message.Message], int) error) (Runner, error) {
	g, err := newMetered()
	if err != nil {
		return Runner{}, err
	}
	do := func(ctx context.Context, n int) error {
		s, err := guard.Open(g.Guard, guard.SourceConfig{Name: "bench", System: "bench"}, guard.Limits{}, noPort[*message.Message]{}, handle)
		if err != nil {
			return err
		}
		if err := feed(ctx, s, n); err != nil {
			return err
		}
		if err := g.scrape(ctx); err != nil {
			return err
		}
		if a := s.End(ctx, guard.ReasonShutdown).Account; a.Acked != uint64(n) {
			return fmt.Errorf("%d messages, but %+v", n, a)
		}
		return nil
	}
	return Runner{Do: do, Close: g.close}, nil
}

func openFunc8Guard(context.Context) (Runner, error) {
	g, err := newMetered()
	if err != nil {
		return Runner{}, err
	}
	f, err := guard.Protect(g.Guard, guard.SourceConfig{Name: "bench", System: "bench"}, handle)
	if err != nil {
		return Runner{}, err
	}
	do := callers(f.Do, 8)
	return Runner{
		Do: func(ctx context.Context, n int) error {
			if err := do(ctx, n); err != nil {
				return err
			}
			return g.scrape(ctx)
		},
		Close: g.close,
	}, nil
}
