// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"
)

// One success in an outage is a proof of life for one message. It costs no more, although
// everything that is here has failed before it and fails again soon after it.
func TestOneSuccessInAnOutage(t *testing.T) {
	for _, n := range []int{9, 20, 40, 65, 100} {
		for _, at := range []int{1, 3, 5, 8} {
			s := newSim(t, Policy{})
			from, succeeded := s.now+time.Minute, false
			s.run(s.now+10*time.Minute, func(m int) (time.Duration, error) {
				if m == at && s.now > from && !succeeded {
					succeeded = true
					return time.Millisecond, nil
				}
				return time.Millisecond, errBad
			}, counter(n, time.Millisecond))
			if len(s.dead) > 2 {
				t.Errorf("%d messages, number %d succeeds once: dead letters %v", n, at, s.dead)
			}
		}
	}
}

// Poison whose calls take long, at a source without a timeout: the proof of life is not
// too old for it when its call ends.
func TestSlowPoison(t *testing.T) {
	for _, order := range []Order{OrderSource, OrderKey} {
		for _, took := range []time.Duration{4 * time.Second, 8 * time.Second, 16 * time.Second, time.Minute} {
			t.Run(fmt.Sprint(order, took), func(t *testing.T) {
				s := newSim(t, Policy{Order: order, NoTimeout: true})
				s.runKeyed(s.now+4*time.Hour, 7, func(m int) (time.Duration, error) {
					if m == 10 {
						return took, errBad
					}
					return time.Millisecond, nil
				}, counter(20000, 500*time.Millisecond))
				if len(s.dead) != 1 || len(s.handled) != 19999 {
					t.Errorf("dead %v, handled %d, overtaken %d", s.dead, len(s.handled), s.tally.Overtaken)
				}
			})
		}
	}
}

// A poison head that nothing can be looked at behind shares its topic's breaker with a
// source that gets a message now and then: that one need not wait for it.
func TestSparseNeighbour(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{Scope: ScopeTopic})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		open := func(name string, h func(context.Context, int) error) chan int {
			s, err := Open(g, SourceConfig{Name: name, Destination: "t"}, Limits{}, &testPort{}, h)
			if err != nil {
				t.Fatal(err)
			}
			in := make(chan int, 100)
			go func() { _ = s.Run(ctx, in) }()
			return in
		}
		var handled atomic.Int64
		poison := open("t/0", func(context.Context, int) error { time.Sleep(time.Millisecond); return errBad })
		healthy := open("t/1", func(context.Context, int) error { handled.Add(1); return nil })
		for m := range 10 {
			poison <- m
		}
		worst, total, sent := time.Duration(0), time.Duration(0), int64(0)
		for range 180 {
			begun := time.Now()
			healthy <- 1
			for sent++; handled.Load() < sent && time.Since(begun) < time.Hour; {
				time.Sleep(10 * time.Millisecond)
			}
			took := time.Since(begun)
			worst, total = max(worst, took), total+took
			time.Sleep(max(0, 20*time.Second-took))
		}
		if mean := total / time.Duration(sent); worst > 30*time.Second || mean > time.Second {
			t.Errorf("messages waited %s at worst, %s in the mean", worst, mean)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
		cancel()
	})
}
