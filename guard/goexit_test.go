// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/propagation"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
)

// A Goexit of a retry and then one on the closed path are two messages: each is settled
// once, the first as an operator's dead letter.
func TestGoexitAfterGoexit(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		var calls [10]atomic.Int64
		r := newRig(t, Policy{Retry: Retry{Base: time.Minute, Max: time.Minute}}, Limits{}, func(_ *rig, _ context.Context, m int) error {
			switch n := calls[m].Add(1); {
			case m == 0 && n == 2, m == 5 && n == 1:
				runtime.Goexit()
			case m == 0: // a third call may follow at once
				return errDown
			}
			return nil
		})
		r.send(0, 1)
		for calls[0].Load() < 2 { // the retry is the machine's
			elapse(time.Second)
		}
		if n := r.s.DeadLetterWaiting(1); n != 1 {
			t.Fatalf("%d dead-lettered", n)
		}
		elapse(time.Second)
		r.send(1, 10)
		elapse(10 * time.Minute)
		if a := r.check(); a.Received != 10 || a.Acked != 9 || a.DeadLettered != 1 {
			t.Errorf("%+v", a)
		}
		slices.Sort(r.port.acked)
		if want := []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}; !slices.Equal(r.port.acked, want) {
			t.Errorf("acked %v", r.port.acked)
		}
		r.close()
	})
}

// elapse lets time pass and all come to rest, so that what others wrote may be read.
func elapse(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// exitingError is an error whose text cannot be had: who asks for it is gone.
type exitingError struct{}

func (exitingError) Error() string { runtime.Goexit(); return "" }

// An error whose method calls Goexit is a failure like any other: its message is neither
// forgotten nor taken for acked, in every shape.
func TestErrorThatExits(t *testing.T) {
	for name, p := range map[string]Policy{
		"closed path": {}, "machine": {}, "workers": {Order: OrderNone, Workers: 2},
	} {
		bubble(t, name, func(t *testing.T) {
			var well atomic.Bool
			r := newRig(t, p, Limits{}, func(*rig, context.Context, int) error {
				if !well.Load() {
					return exitingError{}
				}
				return nil
			})
			if name == "machine" {
				r.s.Pause(0)
			}
			r.send(0, 1)
			r.s.Resume()
			elapse(10 * time.Millisecond)
			if a := r.check(); a.RetryWait != 1 || len(r.port.acked) > 0 {
				t.Errorf("%+v, acked %v", a, r.port.acked)
			}
			well.Store(true)
			elapse(time.Minute)
			if a := r.check(); a.Acked != 1 || len(r.port.acked) != 1 || r.s.State().Tally.Panics == 0 {
				t.Errorf("%+v, acked %v", a, r.port.acked)
			}
			r.close()
		})
	}
	bubble(t, "passive", func(t *testing.T) {
		g, s := openPassive(t, Policy{}, &testPort{})
		if err := s.Offer(1); err != nil {
			t.Fatal(err)
		}
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			s.Done((<-s.Ready()).Token, exitingError{})
			t.Error("Done has returned")
		}()
		<-gone
		it := <-s.Ready()
		if it.Attempt != 2 {
			t.Errorf("attempt %d", it.Attempt)
		}
		s.Done(it.Token, nil)
		synctest.Wait()
		if a := s.Account(); a.Acked != 1 || a.Check() != nil {
			t.Errorf("%+v", a)
		}
		closeAll(t, g)
	})
	bubble(t, "function", func(t *testing.T) {
		g, fn := newFunc(t, Policy{}, func(context.Context, int) error { return exitingError{} })
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			_ = fn.Do(t.Context(), 1)
			t.Error("Do has returned")
		}()
		<-gone
		if a := fn.Account(); a.Processing != 0 || a.Returned != 1 || a.Check() != nil {
			t.Errorf("%+v", a)
		}
		closeAll(t, g)
	})
}

// openPassive opens a passive source on a Guard of its own.
func openPassive(t *testing.T, p Policy, port Port[int]) (*Guard, *Source[int]) {
	t.Helper()
	g, err := New(Config{Policy: p})
	if err != nil {
		t.Fatal(err)
	}
	s, err := Open[int](g, SourceConfig{Name: "s", DeadLetters: &testWriter{}}, Limits{}, port, nil)
	if err != nil {
		t.Fatal(err)
	}
	return g, s
}

func closeAll(t *testing.T, g *Guard) {
	t.Helper()
	if _, err := g.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// faultyLimiter panics or exits when it is asked.
type faultyLimiter struct{ fail func() }

func (l *faultyLimiter) Admit(time.Duration) time.Duration {
	if l.fail != nil {
		l.fail()
	}
	return 0
}

// A limiter that panics or exits takes its caller along; the call is over all the same,
// and so is the probe that it was to be.
func TestLimiterThatDoesNotReturn(t *testing.T) {
	for name, fail := range map[string]func(){"panic": func() { panic("no limit") }, "goexit": runtime.Goexit} {
		bubble(t, name, func(t *testing.T) {
			g, err := New(Config{})
			if err != nil {
				t.Fatal(err)
			}
			limit, down := &faultyLimiter{}, true
			fn, err := Protect(g, SourceConfig{Name: "f", Limiter: limit}, func(context.Context, int) error {
				if down {
					return errDown
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			call := func() {
				gone := make(chan struct{})
				go func() {
					defer close(gone)
					defer func() { _ = recover() }()
					_ = fn.Do(t.Context(), 1)
				}()
				<-gone
			}
			for fn.State().Breaker.State.String() == "closed" {
				call()
			}
			elapse(time.Minute) // half-open at the next call
			limit.fail = fail
			for range 50 {
				call()
			}
			if a := fn.Account(); a.Processing != 0 || a.Check() != nil {
				t.Errorf("%+v", a)
			}
			limit.fail, down = nil, false
			elapse(time.Second)
			var held *HeldError
			if err := fn.Do(t.Context(), 1); errors.As(err, &held) {
				t.Errorf("the probes are gone: %+v", held)
			}
			closeAll(t, g)
		})
	}
}

// A port that cannot describe a message costs neither the process nor the message, where
// its deliveries are counted and where its trace is read.
func TestMetaThatDoesNotReturnOnTheWay(t *testing.T) {
	for name, fail := range map[string]func(){"panic": func() { panic("no headers") }, "goexit": runtime.Goexit} {
		for _, traced := range []bool{false, true} {
			bubble(t, name, func(t *testing.T) { testLostMeta(t, fail, traced) })
		}
	}
}

func testLostMeta(t *testing.T, fail func(), traced bool) {
	var logged bytes.Buffer
	opts := []Option{WithLogger(slog.New(slog.NewTextHandler(&logged, nil)))}
	if traced {
		opts = append(opts, WithTracerProvider(sdktrace.NewTracerProvider()), WithPropagator(propagation.TraceContext{}))
	}
	g, err := New(Config{}, opts...)
	if err != nil {
		t.Fatal(err)
	}
	port, calls := &faultyPort{fail: fail}, 0
	port.broken.Store(true)
	s, err := Open(g, SourceConfig{Name: "s", DeadLetters: &testWriter{}}, Limits{MaxDeliver: 3}, port, func(context.Context, int) error {
		if calls++; calls == 1 || calls == 2 {
			return errDown
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	in, ended := make(chan int), make(chan error, 1)
	go func() { ended <- s.Run(t.Context(), in) }()
	in <- 0
	elapse(time.Minute)
	if a := s.Account(); a.Acked != 1 || calls != 3 || a.Check() != nil {
		t.Errorf("%+v after %d calls", a, calls)
	}
	closeAll(t, g)
	if err := <-ended; err != nil && !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
	if n := strings.Count(logged.String(), "Port.Meta"); n != 1 {
		t.Errorf("logged %d times: %s", n, &logged)
	}
}

// exitingProcessor calls Goexit when the span of a dead letter begins, the first time.
type exitingProcessor struct{ exited atomic.Bool }

func (p *exitingProcessor) OnStart(_ context.Context, span sdktrace.ReadWriteSpan) {
	if strings.HasPrefix(span.Name(), "dead_letter ") && p.exited.CompareAndSwap(false, true) {
		runtime.Goexit()
	}
}

func (*exitingProcessor) OnEnd(sdktrace.ReadOnlySpan)      {}
func (*exitingProcessor) Shutdown(context.Context) error   { return nil }
func (*exitingProcessor) ForceFlush(context.Context) error { return nil }

// A write of a dead letter that a Goexit ends is a failure: the letter is written later, and
// its message is not acked before.
func TestGoexitInAWriteOfADeadLetter(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		p, log := new(exitingProcessor), new(logged)
		g := Must(New(Config{}, WithLogger(slog.New(log)), WithTracerProvider(sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(p)))))
		port, letters := new(testPort), new(testWriter)
		s := Must(Open(g, SourceConfig{Name: "s", DeadLetters: letters}, Limits{}, port, func(context.Context, int) error { return Permanent(errBad) }))
		in := make(chan int, 1)
		in <- 7
		go func() { _ = s.Run(t.Context(), in) }() // until Close
		elapse(time.Minute)
		if a, n := s.Account(), len(letters.bodies()); !p.exited.Load() || a.DeadLettered != 1 || n != 1 {
			t.Errorf("%d letters are written, exited %v, %+v", n, p.exited.Load(), a)
		}
		if all := log.of(lineWriter); len(all) != 1 || !strings.Contains(fmt.Sprint(all[0].args["error"]), "called runtime.Goexit") {
			t.Errorf("%+v", all)
		}
		closeAll(t, g)
	})
}
