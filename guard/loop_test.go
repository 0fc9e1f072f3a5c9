// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// slowFlush is a port whose Flush takes a while.
type slowFlush struct {
	testPort
	takes time.Duration
}

func (p *slowFlush) Flush() error {
	time.Sleep(p.takes)
	return p.testPort.Flush()
}

// The loop reads on beside one handler that takes long, also if a worker made room
// just when the loop had found none.
func TestIntakeBesideASlowHandler(t *testing.T) {
	for _, c := range []struct {
		name   string
		limits Limits
		fed    bool
	}{{name: "channel"}, {name: "batches", limits: Limits{AckWait: time.Minute}}, {name: "feed", fed: true}} {
		for burst := 1; burst <= 100; burst += 1 + burst/12*10 { // a batch may be left in hand, or not
			bubble(t, c.name+"/"+strconv.Itoa(burst), func(t *testing.T) {
				g, err := New(Config{Policy: Policy{Order: OrderNone, Workers: 2, Window: 8}})
				if err != nil {
					t.Fatal(err)
				}
				var handled atomic.Int64
				port := &slowFlush{takes: 3 * time.Millisecond}
				s, err := Open(g, SourceConfig{Name: "s"}, c.limits, port, func(_ context.Context, m int) error {
					if m == 0 {
						time.Sleep(20 * time.Second)
					} else {
						time.Sleep(time.Millisecond)
					}
					handled.Add(1)
					return nil
				})
				if err != nil {
					t.Fatal(err)
				}
				in, ended := make(chan int, 128), make(chan error, 1)
				put, end, run := func(m int) { in <- m }, func() { close(in) }, func() error { return s.Run(t.Context(), in) }
				if c.fed {
					feed := s.Feed()
					put = func(m int) {
						if _, err := feed.Put(t.Context(), m); err != nil {
							t.Error(err)
						}
					}
					end, run = feed.Close, func() error { return s.RunFeed(t.Context()) }
				}
				var reader sync.WaitGroup
				reader.Go(func() {
					for m := range 3 {
						put(m)
					}
					time.Sleep(1500 * time.Microsecond)
					for m := range burst {
						put(3 + m)
					}
				})
				go func() { ended <- run() }()
				time.Sleep(time.Second)
				if n := handled.Load(); int(n) != 2+burst {
					t.Errorf("%d of %d handled beside the slow one: %+v", n, 2+burst, s.Account())
				}
				reader.Wait()
				end()
				if err := <-ended; err != nil || int(handled.Load()) != 3+burst {
					t.Error(err, handled.Load())
				}
				if _, err := g.Close(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// Half of the window is told as soon as it is free, though no worker is.
func TestRoomIsToldWhileWorkersAreBusy(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := offered(t, Policy{Order: OrderNone, Workers: 2, Window: 8}, func(context.Context, int) error {
			time.Sleep(time.Second)
			return nil
		})
		for m := range 8 {
			if err := r.s.Offer(m); err != nil {
				t.Fatal(m, err)
			}
		}
		r.told(8, 0)
		time.Sleep(1500 * time.Millisecond)
		r.told(8, 0)
		time.Sleep(time.Second)
		r.told(8, 0, 4)
		time.Sleep(10 * time.Second)
		r.close()
	})
}

// However a message comes in, the sweeper is awake for its call, though it had parked:
// the first, which is there when Run begins, and one that comes later.
func TestSweeperIsAwakeForACall(t *testing.T) {
	for _, c := range []struct {
		name   string
		policy Policy
		limits Limits
		fed    bool
	}{
		{name: "channel"},
		{name: "batches", limits: Limits{AckWait: time.Minute}},
		{name: "feed", fed: true},
		{name: "workers", policy: Policy{Order: OrderNone, Workers: 2}},
	} {
		for _, later := range []bool{false, true} {
			bubble(t, c.name+" later="+strconv.FormatBool(later), func(t *testing.T) {
				c.policy.Timeout = time.Second
				g, err := New(Config{Policy: c.policy})
				if err != nil {
					t.Fatal(err)
				}
				s, err := Open(g, SourceConfig{Name: "s"}, c.limits, &testPort{}, waitsForItsEnd)
				if err != nil {
					t.Fatal(err)
				}
				in, ended := make(chan int, 1), make(chan error, 1)
				put, run := func(m int) { in <- m }, func() error { return s.Run(t.Context(), in) }
				if c.fed {
					feed := s.Feed()
					put = func(m int) {
						if _, err := feed.Put(t.Context(), m); err != nil {
							t.Error(err)
						}
					}
					run = func() error { return s.RunFeed(t.Context()) }
				}
				begin := func() { go func() { ended <- run() }() }
				if later {
					put(done)
					begin()
				}
				time.Sleep(time.Second)
				if !g.sweeper.parked.Load() {
					t.Fatal("the sweeper has not parked")
				}
				put(waits)
				if !later {
					begin()
				}
				timesOut(t, s)
				closeSoon(t, g)
				if err := <-ended; err != nil && !errors.Is(err, ErrClosed) {
					t.Error(err)
				}
			})
		}
	}
}

// The same where a nudge and a message wake the loop at once.
func TestSweeperIsAwakeAfterANudge(t *testing.T) {
	for range 20 { // the loop sees either first
		bubble(t, "", func(t *testing.T) {
			g, err := New(Config{Policy: Policy{Timeout: time.Second}})
			if err != nil {
				t.Fatal(err)
			}
			in, ended := make(chan int, 1), make(chan error, 1)
			in <- done
			port := &hookedPort{first: map[string]func(){"demand": func() {
				time.Sleep(time.Second)
				if !g.sweeper.parked.Load() {
					t.Error("the sweeper has not parked")
				}
				in <- waits
			}}}
			s, err := Open(g, SourceConfig{Name: "s"}, Limits{}, port, waitsForItsEnd)
			if err != nil {
				t.Fatal(err)
			}
			s.Pause(0)
			s.Resume()
			go func() { ended <- s.Run(t.Context(), in) }()
			time.Sleep(time.Second)
			timesOut(t, s)
			closeSoon(t, g)
			if err := <-ended; err != nil && !errors.Is(err, ErrClosed) {
				t.Error(err)
			}
		})
	}
}

// A source that holds messages is not idle: the sweeper does not sleep through it.
func TestSweeperIsAwakeWhileAMessageIsHeld(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, Policy{}, Limits{}, ok)
		r.s.Pause(0)
		time.Sleep(time.Second)
		if !r.g.sweeper.parked.Load() {
			t.Error("the sweeper has not parked")
		}
		r.send(0, 1)
		time.Sleep(time.Second)
		if r.g.sweeper.parked.Load() {
			t.Error("the sweeper is parked beside a message that is held")
		}
		r.close()
	})
}

// The messages of waitsForItsEnd, a handler that is done at once or ends with its
// context.
const done, waits = 0, 1

func waitsForItsEnd(ctx context.Context, m int) error {
	if m == done {
		return nil
	}
	<-ctx.Done()
	return ctx.Err()
}

// timesOut checks that the call that has just begun ends after its timeout of 1s.
func timesOut(t *testing.T, s *Source[int]) {
	t.Helper()
	synctest.Wait()
	if a := s.Account(); a.Processing != 1 {
		t.Errorf("no call: %+v", a)
	}
	time.Sleep(time.Second - 1)
	if n := s.State().Tally.Timeouts; n != 0 {
		t.Errorf("%d timeouts before a second is over", n)
	}
	time.Sleep(3 * tick)
	if n := s.State().Tally.Timeouts; n != 1 {
		t.Errorf("%d timeouts, want 1: %+v", n, s.Account())
	}
}

// closeSoon ends a Guard whose handlers may wait for that.
func closeSoon(t *testing.T, g *Guard) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := g.Close(ctx); err != nil {
		t.Error(err)
	}
}

// Who was refused by Offer is told of room, though the loop never blocked while there
// was none.
func TestRoomIsToldAfterErrFull(t *testing.T) {
	bubble(t, "handler", func(t *testing.T) {
		r := offered(t, Policy{Window: 4}, func(context.Context, int) error {
			time.Sleep(time.Second)
			return nil
		})
		r.told(4)
		r.fill(4)
		time.Sleep(10 * time.Second)
		r.told(4, 4)
		r.fill(4)
		time.Sleep(10 * time.Second)
		r.told(4, 4, 4)
		r.close()
	})
	bubble(t, "passive", func(t *testing.T) {
		r := offered(t, Policy{Order: OrderNone, Workers: 1, Window: 4}, nil)
		var user sync.WaitGroup
		user.Go(func() {
			for item := range r.s.Ready() {
				time.Sleep(time.Second)
				r.s.Done(item.Token, nil)
			}
		})
		if err := r.s.Offer(0); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		r.told(3)
		r.fill(4) // whether it is refused before or after the pump has seen it
		time.Sleep(10 * time.Second)
		r.told(3, 0, 2)
		r.close()
		user.Wait()
	})
}

// offering is a source whose input is whoever calls Offer.
type offering struct {
	t     *testing.T
	g     *Guard
	s     *Source[int]
	port  *testPort
	ended chan error
}

func offered(t *testing.T, p Policy, handler func(context.Context, int) error) *offering {
	t.Helper()
	g, err := New(Config{Policy: p})
	if err != nil {
		t.Fatal(err)
	}
	r := &offering{t: t, g: g, port: &testPort{}, ended: make(chan error, 1)}
	if r.s, err = Open(g, SourceConfig{Name: "s"}, Limits{}, r.port, handler); err != nil {
		t.Fatal(err)
	}
	if handler == nil {
		r.ended <- nil
	} else {
		go func() { r.ended <- r.s.Run(t.Context(), nil) }()
	}
	synctest.Wait()
	return r
}

// fill offers as many messages as there is room for, and one that is refused.
func (r *offering) fill(room int) {
	r.t.Helper()
	for m := range room {
		if err := r.s.Offer(m); err != nil {
			r.t.Fatal(m, err)
		}
	}
	if err := r.s.Offer(room); !errors.Is(err, ErrFull) {
		r.t.Fatal(err)
	}
}

// told checks what the port was told.
func (r *offering) told(want ...int) {
	r.t.Helper()
	synctest.Wait()
	r.port.mu.Lock()
	defer r.port.mu.Unlock()
	if !slices.Equal(r.port.demands, want) {
		r.t.Errorf("told %v, want %v", r.port.demands, want)
	}
}

func (r *offering) close() {
	r.t.Helper()
	closeSoon(r.t, r.g)
	if err := <-r.ended; err != nil && !errors.Is(err, ErrClosed) {
		r.t.Error(err)
	}
}
