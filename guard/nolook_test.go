// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
)

// noLookRig is two sources of one scope whose handlers fail while down is set, and for
// what poison names; nothing behind a head may be tried.
func noLookRig(t *testing.T, p Policy, w dlq.Writer, down *atomic.Bool, poison int) (a, b *rig) {
	t.Helper()
	g, err := New(Config{Policy: p})
	if err != nil {
		t.Fatal(err)
	}
	open := func(name string) *rig {
		r := &rig{t: t, g: g, port: &testPort{keys: 8}, letters: &testWriter{}, in: make(chan int), ended: make(chan error, 1)}
		r.s, err = Open(g, SourceConfig{Name: name, Destination: "t", DeadLetters: w}, Limits{}, r.port, func(_ context.Context, m int) error {
			time.Sleep(time.Millisecond)
			if down.Load() || m == poison {
				return errBad
			}
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
		return r
	}
	return open("t/0"), open("t/1")
}

// Where the guard may not look behind a head, without a dead-letter writer or with
// StrictOrder, an outage opens the breaker all the same, and a recovery drains at the ramp.
func TestOutageWithoutALook(t *testing.T) {
	for name, c := range map[string]struct {
		policy Policy
		writer dlq.Writer
	}{
		"no writer":    {Policy{Window: 200}, nil},
		"strict order": {Policy{Window: 200, StrictOrder: true}, &testWriter{}},
	} {
		bubble(t, name, func(t *testing.T) {
			var down atomic.Bool
			r, other := noLookRig(t, c.policy, c.writer, &down, -1)
			down.Store(true)
			r.send(0, 200)
			time.Sleep(5 * time.Second)
			if st := r.s.State(); st.Breaker.State == breaker.Closed {
				t.Errorf("%v after 5s of an outage", st.Breaker.State)
			}
			time.Sleep(55 * time.Second)
			down.Store(false)
			up := time.Now()
			handled := func(n int) time.Duration {
				for len(r.done()) < n && time.Since(up) < time.Minute {
					time.Sleep(10 * time.Millisecond)
				}
				return time.Since(up)
			}
			if first := handled(1); first > 8*time.Second { // a second and a tenth of the outage, for the probe
				t.Errorf("nothing is handled for %s after the recovery", first)
			} else if all := handled(200); all-first < time.Second || all-first > 5*time.Second {
				t.Errorf("drained in %s, against the ramp", all-first)
			}
			a := r.check()
			if a.Acked != 200 || !slices.IsSorted(r.done()) {
				t.Errorf("%+v", a)
			}
			other.close()
			r.close()
		})
	}
}

// A poison head that cannot be dead-lettered stops its own source. While another source
// of the scope succeeds it is no outage.
func TestPoisonWithoutALook(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		var down atomic.Bool
		a, b := noLookRig(t, Policy{}, nil, &down, 0)
		a.send(0, 10)
		for m := range 3000 {
			b.send(1000+m, 1001+m)
			time.Sleep(10 * time.Millisecond)
			if st := b.s.State(); st.Breaker.State != breaker.Closed {
				t.Fatalf("%v after %d messages: %+v", st.Breaker.State, m, st.Holds)
			}
		}
		if got := b.check(); got.Acked != 3000 {
			t.Errorf("%+v", got)
		}
		if got := a.check(); got.Acked != 0 {
			t.Errorf("%+v", got)
		}
		b.close()
		a.close()
	})
}

// newParkRig is a source that parks, with order key, whose handler is given.
func newParkRig(t *testing.T, port *parkPort, w dlq.Writer, handler func(int) error, opts ...Option) *rig {
	t.Helper()
	g, err := New(Config{Policy: Policy{Order: OrderKey, Workers: 4, Window: 200}}, opts...)
	if err != nil {
		t.Fatal(err)
	}
	port.keys = 8
	r := &rig{t: t, g: g, in: make(chan int), ended: make(chan error, 1)}
	r.s, err = Open(g, SourceConfig{Name: "t/0", Destination: "t", DeadLetters: w}, Limits{}, Port[int](port), func(_ context.Context, m int) error {
		time.Sleep(time.Millisecond)
		return handler(m)
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	r.cancel = cancel
	go func() { r.ended <- r.s.Run(ctx, r.in) }()
	return r
}

// A source that parks has a breaker and a detector like any other: an outage opens it, also
// one of a part of the calls, or one whose errors say nothing, and a long one is a storm.
func TestOutageOfASourceThatParks(t *testing.T) {
	if RaceEnabled {
		t.Skip("minutes of an outage in which little else happens: run without -race")
	}
	for name, c := range map[string]struct {
		err   error
		every int // one call of so many fails
		cause breaker.Cause
	}{
		"errors of unknown class": {errBad, 1, breaker.CauseRun},
		"a third of the calls":    {Unavailable(errBad), 3, breaker.CauseRate},
	} {
		bubble(t, name, func(t *testing.T) {
			var opened, stormed, calls atomic.Int64
			port := new(parkPort)
			r := newParkRig(t, port, &testWriter{}, func(int) error {
				if int(calls.Add(1))%c.every == 0 {
					return c.err
				}
				return nil
			}, OnStateChange(func(s StateChange) {
				switch {
				case s.Reason == ReasonStorm && s.Active:
					stormed.Add(1)
				case s.Active && s.Detail == string(c.cause):
					opened.Add(1)
				}
			}))
			stop, stopped := make(chan struct{}), make(chan struct{})
			go func() { // ends with stop
				defer close(stopped)
				for m := 0; ; m++ {
					select {
					case r.in <- m:
						time.Sleep(5 * time.Millisecond)
					case <-stop:
						return
					}
				}
			}()
			time.Sleep(10 * time.Second)
			if opened.Load() == 0 {
				t.Errorf("the breaker did not open by %s: %+v", c.cause, r.s.State().Breaker)
			}
			time.Sleep(2 * time.Minute)
			if c.every == 1 && (stormed.Load() == 0 || calls.Load() > 1000) {
				t.Errorf("%d storms, %d calls in 130 s", stormed.Load(), calls.Load())
			}
			port.mu.Lock()
			parked := port.parked
			port.mu.Unlock()
			if parked > 0 && c.every == 1 {
				t.Errorf("%d were parked in an outage", parked)
			}
			close(stop)
			<-stopped
			r.close()
		})
	}
}

// What a guess takes for poison is parked, whatever its source's breaker: in an outage of a
// source with little traffic it is healthy.
func TestGuessesAreParkedInAnOutage(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		port, letters := new(parkPort), &testWriter{}
		r := newParkRig(t, port, letters, func(int) error { return errBad })
		for m := range 10 {
			r.send(m, m+1)
			time.Sleep(30 * time.Second)
		}
		port.mu.Lock()
		parked := port.parked
		port.mu.Unlock()
		if got := letters.bodies(); len(got) > 0 || parked == 0 {
			t.Errorf("letters %v, %d parked", got, parked)
		}
		if r.s.State().Breaker.State == breaker.Closed {
			t.Error("the breaker is closed")
		}
		r.close()
	})
}
