// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// healthRig is a source whose dependency fails calls and checks while down is true.
func healthRig(t *testing.T, down *atomic.Bool, p Policy, poison ...int) (*rig, *atomic.Int64) {
	t.Helper()
	since := new(atomic.Int64) // the first success after down ended, in virtual time
	g, err := New(Config{Policy: p}, WithHealthCheck(func(context.Context) error {
		if down.Load() {
			return errDown
		}
		return nil
	}, time.Second))
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, g: g, port: &testPort{keys: 8}, letters: &testWriter{}, in: make(chan int), ended: make(chan error, 1)}
	r.s, err = Open(g, SourceConfig{Name: "s", DeadLetters: r.letters}, Limits{}, r.port, func(_ context.Context, m int) error {
		time.Sleep(2 * time.Millisecond)
		if down.Load() || slices.Contains(poison, m) {
			return errBad
		}
		since.CompareAndSwap(0, time.Now().UnixNano())
		r.mu.Lock()
		r.handled = append(r.handled, m)
		r.mu.Unlock()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	r.cancel = cancel
	go func() { r.ended <- r.s.Run(ctx, r.in) }()
	return r, since
}

// With a health check of a second a recovery is noticed within 1.5 s, however long the
// outage was, and an outage with errors of unknown class costs neither a message nor
// its order.
func TestHealthCheckNoticesRecovery(t *testing.T) {
	for _, length := range []time.Duration{20 * time.Second, 20 * time.Minute} {
		bubble(t, length.String(), func(t *testing.T) {
			var down atomic.Bool
			r, since := healthRig(t, &down, Policy{})
			r.send(0, 100)
			down.Store(true)
			r.send(100, 300)
			time.Sleep(length)
			since.Store(0)
			down.Store(false)
			back := time.Now().UnixNano()
			time.Sleep(time.Minute)
			a := r.check()
			if a.Acked != 300 || a.DeadLettered != 0 || r.s.State().Tally.Overtaken != 0 || !slices.IsSorted(r.done()) {
				t.Errorf("%+v, %d overtaken", a, r.s.State().Tally.Overtaken)
			}
			if idle := time.Duration(since.Load() - back); idle > 1500*time.Millisecond {
				t.Errorf("idle for %v after the dependency was back", idle)
			}
			r.close()
		})
	}
}

// While the dependency is well, what goes on failing is poison, also on an idle source:
// neither a guess nor another message is needed.
func TestHealthCheckCondemnsPoison(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var down atomic.Bool
		r, _ := healthRig(t, &down, Policy{StrictOrder: true}, 3, 4, 5)
		r.send(0, 6)
		time.Sleep(20 * time.Second)
		if a := r.check(); a.Acked != 3 || a.DeadLettered != 3 {
			t.Errorf("%+v", a)
		}
		if got := r.letters.bodies(); !slices.Equal(got, []string{"3", "4", "5"}) {
			t.Errorf("dead letters %v", got)
		}
		r.close()
	})
}

// A check that panics, exits or does not return is one that fails, and hangs nothing.
func TestHealthChecksThatMisbehave(t *testing.T) {
	for name, check := range map[string]func(context.Context) error{
		"panic":  func(context.Context) error { panic("odd") },
		"exit":   func(context.Context) error { runtime.Goexit(); return nil },
		"hangs":  func(ctx context.Context) error { <-ctx.Done(); return nil },
		"error":  func(context.Context) error { return errors.New("odd") },
		"sleeps": func(context.Context) error { time.Sleep(90 * time.Second); return nil },
	} {
		bubble(t, name, func(t *testing.T) {
			g, err := New(Config{}, WithHealthCheck(check, time.Second))
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(5500 * time.Millisecond)
			if !g.health.failing.Load() || g.health.passed.Load() > 0 {
				t.Errorf("failing %t, passed %d", g.health.failing.Load(), g.health.passed.Load())
			}
			if _, err := g.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestHealthCheckIsRefused(t *testing.T) {
	_, err := New(Config{}, WithHealthCheck(nil, 0))
	if err == nil || !strings.Contains(err.Error(), "check must not be nil") || !strings.Contains(err.Error(), "period: 0s is not within 10ms and 1h0m0s") {
		t.Errorf("%v", err)
	}
}
