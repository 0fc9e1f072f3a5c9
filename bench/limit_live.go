// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"sync"

	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/stormguard-mq/stormguard/fleet"
)

// liveLimit is the fleet whose first member decides here. The cases share it.
var liveLimit liveFleet

// A liveFleet is a member in this process, whose metrics are read, and two in
// processes of their own: the limit is one of three, and what is spent of it is
// told to the others as long as it lasts.
type liveFleet struct {
	mu     sync.Mutex // around all: cases open and close one after the other
	users  int
	p      *fleet.Process
	others []*member
	meters *metric.MeterProvider
	reader *metric.ManualReader
	found  metricdata.ResourceMetrics
}

func (f *liveFleet) enter(ctx context.Context) (err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.users++; f.users > 1 {
		return nil
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.endLocked())
			f.users = 0
		}
	}()
	f.reader = metric.NewManualReader()
	f.meters = metric.NewMeterProvider(metric.WithReader(f.reader))
	spec := memberSpec{Name: memberNames[0], Network: "udp", Limit: open}
	if f.p, err = fleet.Start(spec.config(), fleet.WithMeterProvider(f.meters)); err != nil {
		return err
	}
	spec.Seeds = []string{f.p.Addr().String()}
	for _, name := range memberNames[1:] {
		spec.Name, spec.Kind = name, "idle"
		m, err := startMember(ctx, spec)
		if err != nil {
			return err
		}
		f.others = append(f.others, m)
	}
	for _, m := range f.others {
		if err := m.ready(); err != nil {
			return err
		}
	}
	return meet(func() bool { return met(f.p) && f.p.Key("first").Allow() })
}

func (f *liveFleet) leave() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.users--; f.users > 0 {
		return nil
	}
	return f.endLocked()
}

func (f *liveFleet) endLocked() error {
	err := closeAll(f.others)
	f.others = nil
	if f.p != nil {
		f.p.Close()
		f.p = nil
	}
	return errors.Join(err, f.meters.Shutdown(context.Background()))
}

// runner is a case in which the fleet's metrics are read once in each turn, on the
// clock: more often than any collector would.
func (f *liveFleet) runner(decide func(n int) error) Runner {
	return Runner{
		Do: func(ctx context.Context, n int) error {
			return errors.Join(decide(n), f.reader.Collect(ctx, &f.found))
		},
		Close: f.leave,
	}
}

// handle asks one key's handle from so many goroutines.
func (f *liveFleet) handle(callers int) func(context.Context) (Runner, error) {
	return func(ctx context.Context) (Runner, error) {
		if err := f.enter(ctx); err != nil {
			return Runner{}, err
		}
		x := f.p.Key("handle")
		return f.runner(func(n int) error { return decide(n, callers, true, x.Allow) }), nil
	}
}

// keyed looks a key up for each decision.
func (f *liveFleet) keyed(ctx context.Context) (Runner, error) {
	if err := f.enter(ctx); err != nil {
		return Runner{}, err
	}
	keys, set := limitNames(), f.p
	return f.runner(func(n int) error {
		for i := range n {
			if !set.Key(keys[i%limitKeys]).Allow() {
				return errLimit
			}
		}
		return nil
	}), nil
}
