// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	"github.com/stormguard-mq/stormguard/guard/guardtest"
)

// Router cases go from publish to ack, through an in-memory broker each. One
// goroutine publishes one message at a time, and at most routerWindow of them
// are on their way: without a bound Watermill's broker, which starts two
// goroutines for each message, only piles them up.
//
// The brokers differ. Ours keeps order, accounts for each delivery and would
// deliver it again; Watermill's router starts one more goroutine for each
// message, so it keeps no order and uses both processors where ours uses one
// for the handler.
const (
	routerWindow = 256
	topic        = "bench"
)

// A flow bounds the messages between a publisher and handlers at the price of
// one atomic addition a message, and one wake-up for half a window.
type flow struct {
	handled atomic.Int64
	want    atomic.Int64
	wake    chan struct{}
}

func newFlow() *flow { return &flow{wake: make(chan struct{}, 1)} }

// handle notes that one more message was handled.
func (f *flow) handle() {
	if f.handled.Add(1) == f.want.Load() {
		select {
		case f.wake <- struct{}{}:
		default:
		}
	}
}

// await waits until n messages were handled since the last reset.
func (f *flow) await(ctx context.Context, n int) error {
	f.want.Store(int64(n))
	for f.handled.Load() < int64(n) {
		select {
		case <-f.wake:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// run publishes n messages within the window and waits until all are handled.
func (f *flow) run(ctx context.Context, n int, publish func() error) error {
	f.handled.Store(0)
	for i := range n {
		if int64(i)-f.handled.Load() >= routerWindow {
			if err := f.await(ctx, i-routerWindow/2); err != nil {
				return err
			}
		}
		if err := publish(); err != nil {
			return err
		}
	}
	return f.await(ctx, n)
}

func openRouterGuard(ctx context.Context) (Runner, error) {
	g, err := newMetered()
	if err != nil {
		return Runner{}, err
	}
	b, f := guardtest.NewBroker(), newFlow()
	b.ForgetAcked(topic)
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		ended <- b.Run(ctx, g.Guard, topic, guardtest.Guarded{Consumer: guardtest.ConsumerConfig{Buffer: routerWindow}},
			func(context.Context, *guardtest.Message) error { f.handle(); return nil })
	}()
	m := guardtest.Message{Key: "1", Body: make([]byte, 256)}
	published := uint64(0)
	return Runner{
		Do: func(ctx context.Context, n int) error {
			err := f.run(ctx, n, func() error { b.Publish(topic, m); return nil })
			if err != nil {
				return err
			}
			published += uint64(n)
			for b.Stats(topic).Acked < published { // the last flush
				if ctx.Err() != nil {
					return ctx.Err()
				}
				runtime.Gosched()
			}
			return g.scrape(ctx)
		},
		Close: func() error {
			cancel()
			return errors.Join(<-ended, g.close())
		},
	}, nil
}

// openRouterWatermill leaves Throttle out unless it is asked for. It hands one
// message on at each tick, so at a rate below the router's there is nothing but
// the ticker to measure; a million ticks a second is more than the router needs.
func openRouterWatermill(throttle bool) func(context.Context) (Runner, error) {
	return func(ctx context.Context) (Runner, error) {
		router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 10 * time.Second}, watermill.NopLogger{})
		if err != nil {
			return Runner{}, err
		}
		b, f := gochannel.NewGoChannel(gochannel.Config{OutputChannelBuffer: routerWindow}, watermill.NopLogger{}), newFlow()
		router.AddMiddleware(watermillMiddlewares()...)
		if throttle {
			router.AddMiddleware(middleware.NewThrottle(1e6, time.Second).Middleware)
		}
		router.AddConsumerHandler("bench", topic, b, func(*message.Message) error { f.handle(); return nil })
		ended := make(chan error, 1)
		go func() { ended <- router.Run(ctx) }()
		select {
		case <-router.Running():
		case err := <-ended:
			return Runner{}, err
		}
		m := prepared()
		return Runner{
			Do: func(ctx context.Context, n int) error {
				return f.run(ctx, n, func() error { return b.Publish(topic, m) })
			},
			Close: func() error { return errors.Join(router.Close(), <-ended, b.Close()) },
		}, nil
	}
}
