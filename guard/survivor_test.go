// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
)

// A dead letter whose write timed out is not confirmed: its message is settled by a later
// write, or not at all.
func TestTimedOutLetterIsNotAcked(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		port := &testPort{}
		var writes atomic.Int64
		var well atomic.Bool
		letters := dlq.WriterFunc(func(ctx context.Context, _ *dlq.Record) error {
			if writes.Add(1); !well.Load() {
				<-ctx.Done()
				return context.Cause(ctx)
			}
			return nil
		})
		s, err := Open(g, SourceConfig{Name: "s", DeadLetters: letters}, Limits{}, port, func(context.Context, int) error { return Permanent(errDown) })
		if err != nil {
			t.Fatal(err)
		}
		in := make(chan int)
		go func() { _ = s.Run(t.Context(), in) }()
		in <- 1
		elapse(5 * time.Minute)
		if a := s.Account(); writes.Load() < 5 || a.Settling != 1 || a.DeadLettered > 0 || len(port.acked) > 0 {
			t.Errorf("after %d writes that timed out: %+v", writes.Load(), a)
		}
		well.Store(true)
		elapse(time.Minute)
		if a := s.Account(); a.DeadLettered != 1 || len(port.acked) != 1 {
			t.Errorf("%+v", a)
		}
		closeAll(t, g)
	})
}

// refusing is a limiter that refuses while it is told to.
type refusing struct{ refuse atomic.Bool }

func (l *refusing) Admit(time.Duration) time.Duration {
	if l.refuse.Load() {
		return 100 * time.Millisecond
	}
	return 0
}

// A limiter that refuses a probe says nothing about the dependency: the breaker stays
// half-open, and the backoff where it is.
func TestRefusedProbeIsNoFailure(t *testing.T) {
	check := func(t *testing.T, limit *refusing, state func() breaker.Snapshot, ask func()) {
		t.Helper()
		level := state().BackoffLevel
		limit.refuse.Store(true)
		for range 600 {
			ask()
			elapse(100 * time.Millisecond)
		}
		if st := state(); st.State != breaker.HalfOpen || st.BackoffLevel > level || st.ProbesOut > 0 {
			t.Errorf("after a minute of refusals: %v, level %d, it was %d; %d probes out", st.State, st.BackoffLevel, level, st.ProbesOut)
		}
		limit.refuse.Store(false)
		for range 100 {
			ask()
			elapse(100 * time.Millisecond)
		}
		if st := state(); st.State != breaker.Closed {
			t.Errorf("then: %v", st.State)
		}
	}
	bubble(t, "source", func(t *testing.T) {
		limit := &refusing{}
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		s, err := Open(g, SourceConfig{Name: "s", DeadLetters: &testWriter{}, Limiter: limit}, Limits{}, &testPort{}, func(context.Context, int) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		in := make(chan int, 100)
		go func() { _ = s.Run(t.Context(), in) }()
		if err := s.ForceOpen(time.Second); err != nil {
			t.Fatal(err)
		}
		for m := range 50 {
			in <- m
		}
		check(t, limit, func() breaker.Snapshot { return s.State().Breaker }, func() {})
		closeAll(t, g)
	})
	bubble(t, "function", func(t *testing.T) {
		limit := &refusing{}
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		fn, err := Protect(g, SourceConfig{Name: "f", Limiter: limit}, func(context.Context, int) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		if err := fn.ForceOpen(time.Second); err != nil {
			t.Fatal(err)
		}
		check(t, limit, func() breaker.Snapshot { return fn.State().Breaker }, func() { _ = fn.Do(t.Context(), 1) })
		closeAll(t, g)
	})
}

// heavyPort is a port of messages of 100 bytes each, the first of which has more.
type heavyPort struct {
	testPort
	first int
}

func (p *heavyPort) Size(m int) int {
	if m == 0 && p.first > 0 {
		return p.first
	}
	return 100
}

// WindowBytes bounds what a source takes in, in every shape; a message that is larger than
// all of it comes in alone.
func TestWindowBytesIsABound(t *testing.T) {
	for name, c := range map[string]struct{ first, want int }{"hundreds": {0, 10}, "one giant": {5000, 1}} {
		bubble(t, "passive "+name, func(t *testing.T) {
			g, s := openPassive(t, Policy{WindowBytes: 1000}, &heavyPort{first: c.first})
			taken := 0
			for m := range 50 {
				err := s.Offer(m)
				if err == nil {
					taken++
				} else if !errors.Is(err, ErrFull) {
					t.Error(err)
				}
			}
			if taken != c.want {
				t.Errorf("%d messages taken, want %d", taken, c.want)
			}
			closeAll(t, g)
		})
		for _, limits := range []Limits{{}, {AckWait: time.Minute}} {
			bubble(t, "run "+name, func(t *testing.T) {
				g, err := New(Config{Policy: Policy{WindowBytes: 1000}})
				if err != nil {
					t.Fatal(err)
				}
				s, err := Open(g, SourceConfig{Name: "s", DeadLetters: &testWriter{}}, limits, &heavyPort{first: c.first},
					func(context.Context, int) error { return nil })
				if err != nil {
					t.Fatal(err)
				}
				s.Pause(0)
				in := make(chan int)
				go func() { _ = s.Run(t.Context(), in) }()
				taken := 0
				for m, over := 0, time.After(time.Minute); m < 50; m++ {
					select {
					case in <- m:
						taken++
					case <-over:
						m = 50
					}
				}
				most := c.want
				if limits.AckWait > 0 {
					most += flushEvery // a batch, which is read before it is weighed
				}
				if a := s.Account(); a.Held < c.want || taken > most || limits.AckWait == 0 && taken != c.want {
					t.Errorf("%d messages taken, want %d: %+v", taken, c.want, a)
				}
				closeAll(t, g)
			})
		}
	}
}

// extendPort notes what was extended when.
type extendPort struct {
	testPort
	last map[int]time.Time
}

func (p *extendPort) Extend(ms []int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range ms {
		p.last[m] = time.Now()
	}
}

// ago is how long ago a message was extended.
func (p *extendPort) ago(m int) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return time.Since(p.last[m])
}

// A message whose dead letter is being written, or waits for the writer, is extended like
// any other.
func TestLetterInTheMakingIsExtended(t *testing.T) {
	for _, order := range []Order{OrderSource, OrderKey, OrderNone} {
		bubble(t, order.String(), func(t *testing.T) {
			g, err := New(Config{Policy: Policy{Order: order}})
			if err != nil {
				t.Fatal(err)
			}
			port := &extendPort{last: map[int]time.Time{}}
			release := make(chan struct{})
			letters := dlq.WriterFunc(func(ctx context.Context, _ *dlq.Record) error {
				select {
				case <-release:
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			})
			const wait = 3 * time.Second
			s, err := Open(g, SourceConfig{Name: "s", DeadLetters: letters}, Limits{AckWait: wait}, port, func(context.Context, int) error { return Permanent(errDown) })
			if err != nil {
				t.Fatal(err)
			}
			in := make(chan int)
			go func() { _ = s.Run(t.Context(), in) }()
			for m := range 5 {
				in <- m
			}
			elapse(2 * time.Minute)
			if a := s.Account(); a.Settling != 5 {
				t.Errorf("%+v", a)
			}
			for m := range 5 {
				if ago := port.ago(m); ago > wait/2 {
					t.Errorf("message %d was extended %s ago", m, ago)
				}
			}
			close(release)
			elapse(time.Minute)
			closeAll(t, g)
		})
	}
}

// A letter that is confirmed waits for the loop, which may be with a slow handler: it is
// extended until it is acked.
func TestConfirmedLetterIsExtended(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		port := &extendPort{last: map[int]time.Time{}}
		letters := dlq.WriterFunc(func(context.Context, *dlq.Record) error { time.Sleep(time.Second); return nil })
		const wait = 3 * time.Second
		s, err := Open(g, SourceConfig{Name: "s", DeadLetters: letters}, Limits{AckWait: wait}, port, func(_ context.Context, m int) error {
			if m == 0 {
				return Permanent(errDown)
			}
			time.Sleep(20 * time.Second)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		in := make(chan int)
		go func() { _ = s.Run(t.Context(), in) }()
		in <- 0
		in <- 1
		elapse(15 * time.Second)
		if a := s.Account(); a.Settling != 1 || a.Processing != 1 {
			t.Errorf("%+v", a)
		}
		if ago := port.ago(0); ago > wait/2 {
			t.Errorf("it was extended %s ago", ago)
		}
		elapse(time.Minute)
		closeAll(t, g)
	})
}

// The failed probe of a message that is known to be poison, since others have succeeded
// meanwhile, does not reopen the breaker: it says nothing about the dependency. Also where
// it is the first probe, since the others come a moment later.
func TestPoisonProbeDoesNotReopen(t *testing.T) {
	for _, c := range []struct {
		order Order
		first bool
	}{{OrderKey, true}, {OrderNone, true}, {OrderKey, false}, {OrderNone, false}} {
		order, first := c.order, c.first
		bubble(t, fmt.Sprintf("%s, first %t", order, first), func(t *testing.T) {
			var logged bytes.Buffer
			const poison = 80 // of lane 0
			// It never runs out of attempts, so that it is there when the breaker is half-open.
			p := Policy{Order: order, Retry: Retry{Attempts: 1000, Base: 100 * time.Millisecond, Max: 100 * time.Millisecond}}
			r := newRig(t, p, Limits{}, func(_ *rig, _ context.Context, m int) error {
				if m == poison {
					return errDown
				}
				return nil
			})
			r.g.log = slog.New(slog.NewTextHandler(&logged, &slog.HandlerOptions{Level: slog.LevelDebug})) // before anything is logged
			r.send(0, poison+1)
			for m := poison + 1; m < poison+200; m++ { // it fails while others succeed
				if m%8 != 0 {
					r.send(m, m+1)
				}
				elapse(10 * time.Millisecond)
			}
			if st := r.s.State(); st.Breaker.State != breaker.Closed || st.Account.RetryWait != 1 {
				t.Fatalf("%+v", st)
			}
			held := func() bool {
				return slices.ContainsFunc(r.s.State().Holds, func(h Hold) bool { return h.Reason == ReasonBreaker })
			}
			before, probes := logged.Len(), r.s.State().Tally.Probes
			if err := r.s.ForceOpen(time.Second); err != nil {
				t.Fatal(err)
			}
			if first {
				for i := 0; r.s.State().Tally.Probes == probes && i < 2000; i++ {
					elapse(time.Millisecond)
				}
			}
			go func() {
				for m := 1000; m < 1200; m++ {
					if m%8 != 0 {
						r.send(m, m+1)
					}
				}
			}()
			for i := 0; held() && i < 6000; i++ {
				elapse(10 * time.Millisecond)
			}
			elapse(time.Second) // the sweeper logs
			text := logged.String()[before:]
			if strings.Count(text, "to=open") != 1 || strings.Count(text, "to=closed") != 1 {
				t.Errorf("the breaker reopened: %s", text)
			}
			if n := r.s.State().Tally.Probes - probes; n == 0 {
				t.Error("no probe was made")
			}
			elapse(time.Minute)
			r.s.DeadLetterWaiting(1)
			r.check()
			r.close()
		})
	}
}
