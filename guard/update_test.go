// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
)

func TestUpdate(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, Policy{}, Limits{}, ok)
		if err := r.s.Update(Policy{Timeout: time.Second, Window: 7}); err != nil {
			t.Error(err)
		}
		if st := r.s.State(); st.Settings.Timeout != time.Second || st.Window != 7 {
			t.Errorf("%+v", st.Settings)
		}
		for _, p := range []Policy{{NoTimeout: true}, {Timeout: time.Minute}} {
			if err := r.s.Update(p); err != nil {
				t.Error(err)
			}
			again := r.s.State().Settings
			again.Window = 9
			if err := r.s.Update(again); err != nil {
				t.Error(err)
			}
			if is := r.s.State().Settings; is.Timeout != p.Timeout || is.NoTimeout != p.NoTimeout || is.Window != 9 {
				t.Errorf("%+v", is)
			}
		}
		err := r.s.Update(Policy{Order: OrderKey, Window: -1})
		if err == nil || !strings.Contains(err.Error(), "Policy.Order") || !strings.Contains(err.Error(), "Policy.Window: -1") {
			t.Error(err)
		}
		r.close()
	})
}

// A changed field is in force after an Update without an error; otherwise the error names it.
func TestUpdateLeavesNoFieldOut(t *testing.T) {
	changed := Policy{
		Order: OrderKey, StrictOrder: true, Workers: 2, Window: 7, WindowBytes: 1 << 20, Spill: true, Timeout: time.Second, NoTimeout: true,
		Retry: Retry{Attempts: 9}, Ramp: Ramp{Off: true}, Breaker: breaker.Config{Base: time.Second}, NoBreaker: true,
		Storm: dlq.StormConfig{Attempts: 7}, Budget: dlq.BudgetConfig{Off: true},
	}
	for i, field := range reflect.VisibleFields(reflect.TypeFor[Policy]()) {
		bubble(t, field.Name, func(t *testing.T) {
			value := reflect.ValueOf(changed).Field(i)
			if value.IsZero() {
				t.Fatal("the test changes no such field")
			}
			r := newRig(t, Policy{}, Limits{}, ok)
			before := reflect.ValueOf(r.s.State().Settings).Field(i).Interface()
			p := Policy{}
			reflect.ValueOf(&p).Elem().Field(i).Set(value)
			err := r.s.Update(p)
			after := reflect.ValueOf(r.s.State().Settings).Field(i).Interface()
			switch named := err != nil && strings.Contains(err.Error(), "Policy."+field.Name); {
			case err == nil && after == before:
				t.Errorf("%v is not in force, and Update gave no error", value)
			case err != nil && (!named || after != before):
				t.Errorf("%v, was %v: %v", after, before, err)
			}
			r.close()
		})
	}
}

// Settings from before an Update may be given back.
func TestUpdateBack(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		r := newRig(t, Policy{}, Limits{}, ok)
		before := r.s.State().Settings
		more := before
		more.Timeout = 2 * time.Minute
		for _, p := range []Policy{more, before, more, {}} {
			if err := r.s.Update(p); err != nil {
				t.Error(err)
			}
		}
		if is := r.s.State().Settings; is != before {
			t.Errorf("%+v, was %+v", is, before)
		}
		if err := r.s.Update(Policy{NoTimeout: true}); err != nil {
			t.Fatal(err)
		}
		none := r.s.State().Settings
		for _, p := range []Policy{more, none, before, none} {
			if err := r.s.Update(p); err != nil {
				t.Error(err)
			}
		}
		r.close()
	})
}

// With the Timeout goes the age from which on a call is slow, unless Policy.Breaker has one.
func TestUpdateOfTheTimeout(t *testing.T) {
	for _, c := range []struct {
		slow    time.Duration // set
		timeout time.Duration // 0 for none
		call    time.Duration
		opens   bool
	}{
		{0, 2 * time.Minute, 45 * time.Second, false},
		{30 * time.Second, 2 * time.Minute, 45 * time.Second, true},
		{0, 0, 15 * time.Second, false},
	} {
		bubble(t, fmt.Sprint(c.slow, c.timeout), func(t *testing.T) {
			p := Policy{Order: OrderNone, Workers: 8, Breaker: breaker.Config{Window: 30 * time.Minute, Slow: c.slow}}
			r := newRig(t, p, Limits{}, func(_ *rig, ctx context.Context, _ int) error {
				select {
				case <-time.After(c.call):
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			})
			settings := r.s.State().Settings
			settings.Timeout, settings.NoTimeout = c.timeout, c.timeout == 0
			if err := r.s.Update(settings); err != nil {
				t.Fatal(err)
			}
			before := r.s.State().Breaker.Generation
			r.send(0, 100)
			elapse(5 * time.Minute)
			if opened := r.s.State().Breaker.Generation != before; opened != c.opens {
				t.Errorf("opened: %v, %+v", opened, r.s.State().Breaker)
			}
			r.close()
		})
	}
}

// A feed that has become smaller keeps what it has and takes no more; one that has
// become larger takes more at once.
func TestUpdateOfTheFeed(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{Policy: Policy{Window: 16}})
		if err != nil {
			t.Fatal(err)
		}
		port := &testPort{}
		s, err := Open(g, SourceConfig{Name: "s"}, Limits{}, port, func(context.Context, int) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		feed := s.Feed()
		put := func(ctx context.Context, ms ...int) {
			t.Helper()
			if n, err := feed.Put(ctx, ms...); n != len(ms) || err != nil {
				t.Error(n, err)
			}
		}
		put(t.Context(), 0, 1, 2, 3)
		if err := s.Update(Policy{Window: 8}); err != nil {
			t.Error(err)
		}
		over, cancel := context.WithCancel(t.Context())
		cancel()
		if n, err := feed.Put(over, 4); n != 0 || !errors.Is(err, context.Canceled) || feed.Len() != 4 {
			t.Error(n, err, feed.Len())
		}
		late, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		var reader sync.WaitGroup
		reader.Go(func() { put(late, 4, 5) })
		synctest.Wait()
		if err := s.Update(Policy{Window: 24}); err != nil {
			t.Error(err)
		}
		reader.Wait()
		if _, err := g.Close(t.Context()); err != nil || !slices.Equal(port.returned, []int{0, 1, 2, 3, 4, 5}) {
			t.Error(port.returned, err)
		}
	})
}

// The window may change while a source runs: all of its parts change with it, up
// and down, so that its bound holds and every worker has something to do.
func TestUpdateOfTheWindow(t *testing.T) {
	for _, fed := range []bool{true, false} {
		bubble(t, "fed="+strconv.FormatBool(fed), func(t *testing.T) {
			const workers = 8
			g, err := New(Config{})
			if err != nil {
				t.Fatal(err)
			}
			policy := Policy{Order: OrderKey, Workers: workers, Window: 1024, Ramp: Ramp{Off: true}}
			var busy, most atomic.Int64
			s, err := Open(g, SourceConfig{Name: "s", Policy: &policy}, Limits{AckWait: time.Minute}, &testPort{keys: 1000}, func(context.Context, int) error {
				most.Store(max(most.Load(), busy.Add(1)))
				defer busy.Add(-1)
				time.Sleep(10 * time.Millisecond)
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			ended := make(chan error)
			in := make(chan int)
			var feed *Feed[int]
			if fed {
				feed = s.Feed()
				go func() { ended <- s.RunFeed(t.Context()) }()
			} else {
				go func() { ended <- s.Run(t.Context(), in) }()
			}
			stop, put := make(chan struct{}), 0
			var reader sync.WaitGroup
			reader.Go(func() {
				for ; ; put++ {
					if fed {
						select {
						case <-stop:
							feed.Close()
							return
						default:
						}
						if _, err := feed.Put(t.Context(), put); err != nil {
							t.Error(err)
							return
						}
						continue
					}
					select {
					case in <- put:
					case <-stop:
						close(in)
						return
					}
				}
			})
			for _, window := range []int{1024, 512, 64, 2048, 16, 1024} {
				s.Pause(0)
				time.Sleep(time.Second)
				before := s.Account()
				policy.Window = window
				if err := s.Update(policy); err != nil {
					t.Error(err)
				}
				time.Sleep(time.Second)
				full := s.Account()
				// One buffer of the feed, or the batch, may be empty while it holds.
				if n := full.Unsettled(); n < window*2/3 || n > max(window, before.Unsettled()) {
					t.Errorf("window %d: %d messages fill it", window, n)
				}
				s.Resume()
				time.Sleep(5 * time.Second)
				most.Store(0)
				for range 200 {
					time.Sleep(time.Millisecond)
					a := s.Account()
					if err := a.Check(); err != nil || a.Unsettled() > window {
						t.Errorf("window %d: %d unsettled, %v", window, a.Unsettled(), err)
						break
					}
				}
				if n := most.Load(); n != workers {
					t.Errorf("window %d: %d workers were busy", window, n)
				}
			}
			close(stop)
			if err := <-ended; err != nil {
				t.Error(err)
			}
			reader.Wait()
			if a := s.Account(); a.Acked != uint64(put) || a.Check() != nil {
				t.Errorf("%d put, %+v", put, a)
			}
			if _, err := g.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// A source that is held from its first message fills its window, however much comes at
// once.
func TestHeldFeedFillsTheWindow(t *testing.T) {
	for _, workers := range []int{1, 4} {
		bubble(t, strconv.Itoa(workers), func(t *testing.T) {
			g, err := New(Config{})
			if err != nil {
				t.Fatal(err)
			}
			policy := Policy{Order: OrderKey, Workers: workers, Window: 4096}
			s, err := Open(g, SourceConfig{Name: "s", Policy: &policy}, Limits{}, &testPort{keys: 100}, func(context.Context, int) error { return nil })
			if err != nil {
				t.Fatal(err)
			}
			s.Pause(0)
			feed, ended := s.Feed(), make(chan error)
			go func() { ended <- s.RunFeed(t.Context()) }()
			var reader sync.WaitGroup
			reader.Go(func() {
				for m := range 6000 {
					if _, err := feed.Put(t.Context(), m); err != nil {
						t.Error(err)
					}
				}
				feed.Close()
			})
			time.Sleep(time.Second)
			if n := s.Account().Unsettled(); n < policy.Window*3/4 || n > policy.Window {
				t.Errorf("%d messages fill a window of %d", n, policy.Window)
			}
			s.Resume()
			reader.Wait()
			if err := <-ended; err != nil {
				t.Error(err)
			}
			if a := s.Account(); a.Acked != 6000 {
				t.Errorf("%+v", a)
			}
			if _, err := g.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// Workers come before what is on the way from the reader, within the window.
func TestWorkersHaveTheirPartOfTheWindow(t *testing.T) {
	for _, c := range []struct {
		name                  string
		fed                   bool
		workers, window, busy int
	}{
		{"feed", true, 6, 8, 6}, {"feed", true, 8, 8, 6}, {"feed", true, 50, 64, 50},
		{"batches", false, 7, 8, 7}, {"batches", false, 8, 8, 7}, {"batches", false, 60, 64, 60},
	} {
		bubble(t, fmt.Sprintf("%s/%d of %d", c.name, c.workers, c.window), func(t *testing.T) {
			g, err := New(Config{Policy: Policy{Order: OrderNone, Workers: c.workers, Window: c.window}})
			if err != nil {
				t.Fatal(err)
			}
			s, err := Open(g, SourceConfig{Name: "s"}, Limits{AckWait: time.Minute}, &testPort{}, func(context.Context, int) error {
				time.Sleep(time.Second)
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			const n = 500
			ended := make(chan error, 1)
			if c.fed {
				f := s.Feed()
				go func() { ended <- s.RunFeed(t.Context()) }()
				go func() {
					for m := range n {
						if _, err := f.Put(t.Context(), m); err != nil {
							t.Error(err)
						}
					}
					f.Close()
				}()
			} else {
				in := make(chan int, n)
				for m := range n {
					in <- m
				}
				close(in)
				go func() { ended <- s.Run(t.Context(), in) }()
			}
			time.Sleep(500 * time.Millisecond)
			synctest.Wait()
			if a := s.Account(); a.Processing != c.busy || a.Unsettled() > c.window || a.Check() != nil {
				t.Errorf("%+v", a)
			}
			if err := <-ended; err != nil {
				t.Error(err)
			}
			if a := s.Account(); a.Acked != n {
				t.Errorf("%+v", a)
			}
			if _, err := g.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}
