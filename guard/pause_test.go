// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// A pause ends by itself, whether a message waits for that, comes meanwhile, or comes
// to another epoch; a later Pause sets another end.
func TestPauseEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, err := guard.New(guard.Config{})
		if err != nil {
			t.Fatal(err)
		}
		var handled atomic.Int64
		in := make(chan int, 100)
		var src *guard.Source[int]
		done := make(chan struct{})
		begin := func() {
			src, err = guard.Open(g, guard.SourceConfig{Name: "orders"}, guard.Limits{EndsWithInput: true}, hopeless{},
				func(context.Context, int) error { handled.Add(1); return nil })
			if err != nil {
				t.Fatal(err)
			}
			go func(s *guard.Source[int]) { _ = s.Run(context.Background(), in); done <- struct{}{} }(src)
			synctest.Wait()
		}
		end := func() {
			src.End(context.Background(), guard.ReasonRebalance)
			<-done
		}
		handles := func(when string, n int64) {
			t.Helper()
			synctest.Wait()
			if got := handled.Load(); got != n {
				t.Errorf("%s: %d handled, want %d; %+v", when, got, n, src.State().Holds)
			}
		}
		begin()
		defer func() {
			end()
			if _, err := g.Close(context.Background()); err != nil {
				t.Error(err)
			}
		}()
		time.Sleep(time.Minute) // the sweeper is parked

		src.Pause(30 * time.Minute)
		in <- 1
		time.Sleep(30*time.Minute - time.Second)
		if h := src.State().Holds; len(h) == 0 || h[0].Reason != guard.ReasonOperator || h[0].Until != time.Second {
			t.Errorf("holds %+v, want the operator's for one second more", h)
		}
		handles("a second before the end", 0)
		time.Sleep(time.Second + 250*time.Millisecond)
		handles("after the end", 1)
		if guard.RaceEnabled { // the rest is hours of virtual time
			return
		}

		src.Pause(time.Minute)
		src.Pause(time.Hour)
		in <- 2
		time.Sleep(59 * time.Minute)
		handles("after the first end, before the second", 1)
		src.Pause(time.Minute)
		time.Sleep(time.Minute + 250*time.Millisecond)
		handles("after a third that is sooner", 2)

		src.Pause(time.Minute) // nothing waits, and the sweeper would park
		time.Sleep(2 * time.Minute)
		in <- 3
		handles("a message that came after it", 3)

		src.Pause(time.Hour)
		end()
		in <- 4
		time.Sleep(30 * time.Minute)
		begin()
		handles("the next epoch, before the end", 3)
		time.Sleep(30*time.Minute + 250*time.Millisecond)
		handles("the next epoch, after the end", 4)

		src.Pause(3 * time.Hour)
		end()
		time.Sleep(150 * time.Minute)
		begin()
		in <- 5
		time.Sleep(time.Minute)
		handles("a pause of more than what a Guard remembers besides", 4)
		end()
		in <- 6 // 5 is gone with its epoch: this port returns it to nobody
		time.Sleep(time.Hour)
		begin()
		time.Sleep(250 * time.Millisecond)
		handles("an epoch that begins after the end", 5)
	})
}

// A function's pause ends by itself too, and a refused call is told when.
func TestPauseOfAFunction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, err := guard.New(guard.Config{})
		if err != nil {
			t.Fatal(err)
		}
		f, err := guard.Protect(g, guard.SourceConfig{Name: "pay"}, func(context.Context, int) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		f.Pause(time.Minute)
		time.Sleep(time.Second)
		var held *guard.HeldError
		if err := f.Do(t.Context(), 1); !errors.As(err, &held) || held.Reason != guard.ReasonOperator || held.Until != 59*time.Second {
			t.Errorf("paused: %v %+v", err, held)
		}
		time.Sleep(59 * time.Second)
		if err := f.Do(t.Context(), 1); err != nil {
			t.Error("after the end:", err)
		}
		if _, err := g.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
}

// Release ends a force: the next message is the probe that closes the breaker.
func TestRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, err := guard.New(guard.Config{})
		if err != nil {
			t.Fatal(err)
		}
		var handled atomic.Int64
		in := make(chan int, 100)
		src, err := guard.Open(g, guard.SourceConfig{Name: "orders"}, guard.Limits{EndsWithInput: true}, hopeless{},
			func(context.Context, int) error { handled.Add(1); return nil })
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() { defer close(done); _ = src.Run(context.Background(), in) }()
		if err := src.ForceOpen(0); err != nil {
			t.Fatal(err)
		}
		in <- 1
		time.Sleep(time.Hour)
		if n := handled.Load(); n != 0 {
			t.Errorf("%d handled by force", n)
		}
		if err := src.Release(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		if n, st := handled.Load(), src.State(); n != 1 || st.Breaker.Forced {
			t.Errorf("%d handled after Release: %+v", n, st.Breaker)
		}
		src.End(context.Background(), guard.ReasonShutdown)
		<-done
		if _, err := g.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
}
