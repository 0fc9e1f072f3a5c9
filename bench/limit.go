// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/time/rate"

	"github.com/stormguard-mq/stormguard/limiter"
)

// limit is what one decision costs. All sides have a limit so high that nothing
// is denied: 10⁹ a second with a burst of 10⁹ (deny: one in a thousand seconds,
// so that nothing is admitted). Ours is a fleet's, gossip live and metrics read,
// but for alone and deny.
var limit = Group{
	Name:  "limiter",
	About: "a decision of the limiter against golang.org/x/time/rate",
	Cases: []Case{
		{Name: "seq_limiter", Open: liveLimit.handle(1)},
		{Name: "seq_xrate", Open: openXRate(1, open)},
		{Name: "par_limiter", Open: liveLimit.handle(limitCallers)},
		{Name: "par_xrate", Open: openXRate(limitCallers, open)},
		{Name: "keyed_limiter", Open: liveLimit.keyed},
		{Name: "keyed_xrate", Open: openKeyedXRate},
		{Name: "alone_limiter", Open: openLimiter(1, open)},
		{Name: "deny_limiter", Open: openLimiter(1, shut)},
		{Name: "deny_xrate", Open: openXRate(1, shut)},
		{Name: "seq_redis", Open: openRedis, Optional: true},
		{Name: "seq_grpc", Open: openRemote},
	},
	Ratios: []Ratio{
		{Name: "xrate_seq", Ours: "seq_limiter", Theirs: "seq_xrate"},
		{Name: "xrate_par", Ours: "par_limiter", Theirs: "par_xrate"},
		{Name: "xrate_keyed", Ours: "keyed_limiter", Theirs: "keyed_xrate"},
		{Name: "xrate_alone", Ours: "alone_limiter", Theirs: "seq_xrate"},
		{Name: "xrate_deny", Ours: "deny_limiter", Theirs: "deny_xrate"},
		{Name: "redis_times", Ours: "seq_redis", Theirs: "seq_limiter"},
		{Name: "grpc_times", Ours: "seq_grpc", Theirs: "seq_limiter"},
	},
}

const (
	limitCallers = 2
	limitKeys    = 1024
)

var (
	open = limiter.Limit{Rate: 1e9, Burst: 1e9}
	shut = limiter.Limit{Rate: .001, Burst: 1}
)

var errLimit = errors.New("a decision was not the one that is measured")

// decide asks n times from so many goroutines, and wants one answer.
func decide(n, callers int, want bool, allow func() bool) error {
	if callers == 1 {
		for range n {
			if allow() != want {
				return errLimit
			}
		}
		return nil
	}
	var all sync.WaitGroup
	errs := make(chan error, callers)
	for i := range callers {
		all.Go(func() {
			for range share(n, callers, i) {
				if allow() != want {
					errs <- errLimit
					return
				}
			}
		})
	}
	all.Wait()
	close(errs)
	return <-errs
}

func openLimiter(callers int, l limiter.Limit) func(context.Context) (Runner, error) {
	return func(context.Context) (Runner, error) {
		x, err := limiter.Local(l)
		if err != nil {
			return Runner{}, err
		}
		x.Allow() // what is shut has one token
		return Runner{Do: func(_ context.Context, n int) error {
			return decide(n, callers, l == open, x.Allow)
		}}, nil
	}
}

func openXRate(callers int, l limiter.Limit) func(context.Context) (Runner, error) {
	return func(context.Context) (Runner, error) {
		x := rate.NewLimiter(rate.Limit(l.Rate), l.Burst)
		x.Allow()
		return Runner{Do: func(_ context.Context, n int) error {
			return decide(n, callers, l == open, x.Allow)
		}}, nil
	}
}

func limitNames() []string {
	keys := make([]string, limitKeys)
	for i := range keys {
		keys[i] = fmt.Sprintf("tenant-%04d", i)
	}
	return keys
}

// They look the key up for each decision, as ours does in its Set: in the sync.Map
// that people write for it.
func openKeyedXRate(context.Context) (Runner, error) {
	var all sync.Map
	keys := limitNames()
	return Runner{Do: func(_ context.Context, n int) error {
		for i := range n {
			key := keys[i%limitKeys]
			x, ok := all.Load(key)
			if !ok {
				x, _ = all.LoadOrStore(key, rate.NewLimiter(rate.Limit(open.Rate), open.Burst))
			}
			if l, _ := x.(*rate.Limiter); !l.Allow() {
				return errLimit
			}
		}
		return nil
	}}, nil
}
