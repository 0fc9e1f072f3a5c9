// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
)

// A few poison messages on an otherwise idle source must not hold it for ever.
func TestPoisonDoesNotWedgeAnIdleSource(t *testing.T) {
	for _, order := range []Order{OrderSource, OrderKey, OrderNone} {
		bubble(t, order.String(), func(t *testing.T) {
			r := newRig(t, Policy{Order: order}, Limits{}, func(_ *rig, _ context.Context, m int) error {
				if m == 20 || m == 71 || m == 122 {
					return errors.New("poison")
				}
				return nil
			})
			r.port.keys = 7
			r.send(0, 150)
			time.Sleep(20 * time.Minute)
			r.send(150, 151) // what comes next settles it, if nothing did
			time.Sleep(20 * time.Minute)
			if a := r.check(); a.Acked != 148 || a.DeadLettered != 3 {
				t.Errorf("%+v\n%+v", a, r.s.State().Holds)
			}
			r.close()
		})
	}
}

// Ready is closed at the end, also of a source that was never offered anything.
func TestReadyClosesWithoutOffer(t *testing.T) {
	g, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	s, err := Open[int](g, SourceConfig{Name: "s"}, Limits{}, &testPort{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	s.End(t.Context(), ReasonShutdown)
	if _, open := <-s.Ready(); open {
		t.Error("an item")
	}
	if _, err := g.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// The end of Run's context ends the workers, though messages are left and
// handlers heed it.
func TestContextEndsWorkers(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, Policy{Order: OrderKey, Workers: 4}, Limits{EndsWithInput: true}, func(_ *rig, ctx context.Context, _ int) error {
			select {
			case <-time.After(5 * time.Millisecond):
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
		r.send(0, 200)
		time.Sleep(20 * time.Millisecond)
		r.cancel()
		synctest.Wait()
		calls := len(r.calls)
		time.Sleep(time.Second)
		if n := len(r.calls); n != calls {
			t.Errorf("%d further calls", n-calls)
		}
		select {
		case err := <-r.ended:
			if !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			r.ended <- err
		default:
			t.Error("Run has not returned")
		}
		r.close()
	})
}

// Acks that were coalesced do not wait behind a slow handler until the broker
// delivers their messages again.
func TestFlushBehindASlowHandler(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, Policy{}, Limits{AckWait: time.Second}, func(_ *rig, _ context.Context, m int) error {
			if m == 1 {
				time.Sleep(5 * time.Second)
			}
			return nil
		})
		r.send(0, 2)
		time.Sleep(2 * time.Second)
		r.port.mu.Lock()
		if len(r.port.acked) != 1 || r.port.flushes == 0 {
			t.Errorf("%d acked, %d flushes", len(r.port.acked), r.port.flushes)
		}
		r.port.mu.Unlock()
		time.Sleep(4 * time.Second)
		r.close()
	})
}

// coalescing is a port that counts the acks it has not sent.
type coalescing struct {
	testPort
	due, most int
}

func (p *coalescing) Ack(m int) error {
	err := p.testPort.Ack(m)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.due++
	p.most = max(p.most, p.due)
	return err
}

func (p *coalescing) Flush() error {
	p.mu.Lock()
	p.due = 0
	p.mu.Unlock()
	return p.testPort.Flush()
}

type always struct{}

func (always) Admit(time.Duration) time.Duration { return 0 }

// A busy source flushes after 64 acks, whichever way its messages go.
func TestFlushAfterSixtyFourAcks(t *testing.T) {
	const n, workers = 300, 4
	for _, c := range []struct {
		name    string
		policy  Policy
		limiter Limiter
		passive bool
		most    int
	}{
		{"closed", Policy{}, nil, false, flushEvery},
		{"limiter", Policy{}, always{}, false, flushEvery},
		{"one in retry", Policy{Order: OrderNone, Retry: Retry{Base: time.Second}}, nil, false, flushEvery},
		// While a worker is about to flush the others go on, and one of them flushes.
		{"workers", Policy{Order: OrderNone, Workers: workers}, nil, false, 2*flushEvery + workers},
		{"passive", Policy{Order: OrderNone, Workers: workers}, nil, true, flushEvery},
	} {
		bubble(t, c.name, func(t *testing.T) {
			g, err := New(Config{Policy: c.policy})
			if err != nil {
				t.Fatal(err)
			}
			failed := false
			handle := func(_ context.Context, m int) error {
				if c.name == "one in retry" && m == 0 && !failed {
					failed = true
					return errDown
				}
				return nil
			}
			if c.passive {
				handle = nil
			}
			port := &coalescing{}
			s, err := Open(g, SourceConfig{Name: "s", Destination: "t", Limiter: c.limiter}, Limits{}, port, handle)
			if err != nil {
				t.Fatal(err)
			}
			in := make(chan int, n) // there is always another message: the loop never blocks
			var all sync.WaitGroup
			for m := range n {
				in <- m
				if c.passive {
					if err := s.Offer(m); err != nil {
						t.Fatal(err)
					}
				}
			}
			all.Go(func() {
				if !c.passive {
					_ = s.Run(t.Context(), in)
					return
				}
				for it := range s.Ready() {
					s.Done(it.Token, nil)
				}
			})
			time.Sleep(10 * time.Second)
			synctest.Wait()
			port.mu.Lock()
			if len(port.acked) != n || port.most > c.most || port.due > 0 {
				t.Errorf("%d acked, at most %d coalesced, %d never sent", len(port.acked), port.most, port.due)
			}
			port.mu.Unlock()
			if _, err := g.Close(t.Context()); err != nil {
				t.Error(err)
			}
			all.Wait()
		})
	}
}

// A clock that begins at 0 is as good as any: nothing takes 0 for "never".
func TestClockAtZero(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, Policy{Retry: Retry{Attempts: 1, Patience: 200 * time.Millisecond}}, Limits{}, func(*rig, context.Context, int) error {
			return errDown
		})
		r.send(0, 1) // no time has passed since New
		time.Sleep(time.Minute)
		if a := r.check(); a.DeadLettered != 1 {
			t.Errorf("%+v", a)
		}
		r.close()
	})
}

// Intake that a full window stopped goes on when little is left in it, also
// where the feed takes its part of a small window.
func TestIntakeResumesBesideStuckMessages(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{Policy: Policy{Order: OrderKey, Window: 10, Retry: Retry{Attempts: 12, Patience: time.Hour}}})
		if err != nil {
			t.Fatal(err)
		}
		port := &testPort{keys: 1000}
		s, err := Open(g, SourceConfig{Name: "s", DeadLetters: &testWriter{}}, Limits{}, port, func(_ context.Context, m int) error {
			if m < 3 {
				return errors.New("poison")
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan error)
		feed := s.Feed()
		go func() { ended <- s.RunFeed(t.Context()) }()
		s.Pause(0)
		for m := range 6 { // what the feed leaves of the window
			if _, err := feed.Put(t.Context(), m); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Second)
		s.Resume()
		time.Sleep(time.Minute)
		port.mu.Lock()
		if d := port.demands; len(d) < 2 || !slices.Contains(d, 0) || d[len(d)-1] == 0 {
			t.Errorf("demands %v, %+v", d, s.State().Account)
		}
		port.mu.Unlock()
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if err := <-ended; !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	})
}

// A writer may be a function, which cannot be compared.
func TestWriterMayBeAFunction(t *testing.T) {
	g, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	w := dlq.WriterFunc(func(context.Context, *dlq.Record) error { return nil })
	for _, name := range []string{"a", "b"} {
		if _, err := Open(g, SourceConfig{Name: name, DeadLetters: w}, Limits{}, &testPort{}, func(context.Context, int) error { return nil }); err != nil {
			t.Error(err)
		}
	}
	if _, err := g.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// An operator may dead-letter what nothing proves to be poison, as many messages
// as are named and only those that wait now.
func TestDeadLetterWaiting(t *testing.T) {
	for _, order := range []Order{OrderSource, OrderKey, OrderNone} {
		bubble(t, order.String(), func(t *testing.T) {
			r := newRig(t, Policy{Order: order}, Limits{}, func(*rig, context.Context, int) error { return errDown })
			if n := r.s.DeadLetterWaiting(5); n != 0 {
				t.Errorf("%d of an empty source", n)
			}
			r.send(0, 10)
			time.Sleep(5 * time.Minute)
			if a := r.check(); a.DeadLettered != 0 {
				t.Errorf("%+v", a)
			}
			if n := r.s.DeadLetterWaiting(1); n != 1 {
				t.Errorf("%d of 1", n)
			}
			synctest.Wait() // its letter is written
			r.s.DeadLetterWaiting(3)
			a := r.check()
			if a.DeadLettered < 2 || a.DeadLettered > 4 || r.letters.recs[0].Reason != dlq.ReasonOperator {
				t.Errorf("%+v", a)
			}
			if r.letters.bodies()[0] != "0" && order == OrderSource {
				t.Error(r.letters.bodies())
			}
			r.close()
		})
	}
}

// A trickle of healthy messages, fewer between two probes than it takes to close
// the breaker, gets past poison.
func TestTricklePastPoison(t *testing.T) {
	for _, order := range []Order{OrderSource, OrderKey, OrderNone} {
		bubble(t, order.String(), func(t *testing.T) {
			r := newRig(t, Policy{Order: order}, Limits{}, func(_ *rig, _ context.Context, m int) error {
				if m < 3 {
					return errors.New("poison")
				}
				return nil
			})
			r.port.keys = 1000
			r.send(0, 3)
			time.Sleep(5 * time.Minute) // long enough for the backoff's top
			for m := 3; m < 30; m++ {
				r.send(m, m+1)
				time.Sleep(40 * time.Second)
			}
			if a := r.check(); a.Acked != 27 || a.DeadLettered != 3 {
				t.Errorf("%+v\n%+v", a, r.s.State().Holds)
			}
			r.close()
		})
	}
}

// Retries of a few poison messages are no run of failures when the traffic
// pauses: others succeeded since each first failed.
func TestKnownPoisonDoesNotOpenTheBreaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		pol := Policy{Order: OrderKey, Workers: 8, Retry: Retry{Attempts: 3, Base: 5 * time.Millisecond, Max: 20 * time.Millisecond}}
		s, err := Open(g, SourceConfig{Name: "s", Policy: &pol, DeadLetters: &testWriter{}}, Limits{}, &testPort{keys: 1000}, func(_ context.Context, m int) error {
			if m%100 == 37 {
				return errors.New("cannot parse")
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		in := make(chan int)
		done := make(chan error, 1)
		go func() { done <- s.Run(context.Background(), in) }()
		for i := range 800 { // 8 poison of 8 keys, then a gap
			in <- i
			time.Sleep(100 * time.Microsecond) // or the last failure may be seen after all successes
		}
		opened := false
		for range 2000 {
			time.Sleep(time.Millisecond)
			opened = opened || s.State().Breaker.State != breaker.Closed
		}
		if opened {
			t.Errorf("the breaker opened at 1%% poison: %+v", s.State().Breaker)
		}
		for i := range 50 { // what comes next is their proof
			in <- 100 * i
			time.Sleep(100 * time.Millisecond)
		}
		close(in)
		if err := <-done; err != nil {
			t.Error(err)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}
