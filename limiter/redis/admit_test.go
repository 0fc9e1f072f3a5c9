// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package redis

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/limiter"
)

var _ guard.Limiter = (*Handle)(nil)

// scripted answers as it is told to, when it is told to.
type scripted struct {
	goredis.Scripter

	asked  chan []any
	answer chan any // []any or error
}

func (s *scripted) EvalSha(ctx context.Context, _ string, _ []string, args ...any) *goredis.Cmd {
	cmd := goredis.NewCmd(ctx)
	s.asked <- args
	select {
	case a := <-s.answer:
		if err, ok := a.(error); ok {
			cmd.SetErr(err)
		} else {
			cmd.SetVal(a)
		}
	case <-ctx.Done():
		cmd.SetErr(ctx.Err())
	}
	return cmd
}

func newScripted() *scripted {
	return &scripted{asked: make(chan []any, 100), answer: make(chan any)}
}

func took(n int64, wait time.Duration) []any { return []any{n, wait.Microseconds(), int64(0)} }

// Admit takes ahead, asks again when half is used, waits for nobody, and drops what
// is a second old.
func TestAdmitTakesAhead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newScripted()
		s := at(t, c, Config{Limit: limiter.Limit{Rate: 100, Burst: 100}, Batch: 10, Timeout: time.Second})
		h := s.Key("k")
		if wait := h.Admit(0); wait != poll {
			t.Errorf("nothing ahead: %v", wait)
		}
		if args := <-c.asked; args[2] != 1 || args[3] != 10 || args[4] != 0 {
			t.Errorf("asked for %v", args)
		}
		for range 5 { // it hangs
			if wait := h.Admit(0); wait != poll {
				t.Errorf("on its way: %v", wait)
			}
		}
		c.answer <- took(10, 0)
		synctest.Wait()
		for i := range 5 {
			if h.Admit(0) != 0 {
				t.Fatal("not ahead")
			}
			if len(c.asked) > 0 {
				t.Fatalf("asked again after %d", i+1)
			}
		}
		if h.Admit(0) != 0 {
			t.Fatal("not ahead")
		}
		if args := <-c.asked; args[3] != 6 && args[3] != 5 {
			t.Errorf("asked for %v", args)
		}
		// Denied, with a time: nothing is asked before.
		c.answer <- took(0, 500*ms)
		synctest.Wait()
		for range 4 {
			if h.Admit(0) != 0 {
				t.Fatal("not ahead")
			}
		}
		if wait := h.Admit(0); wait < 500*ms || wait > 600*ms || len(c.asked) > 0 {
			t.Errorf("told to wait %v, asked %d", wait, len(c.asked))
		}
		time.Sleep(600 * ms)
		h.Admit(0)
		<-c.asked
		c.answer <- took(10, 0)
		synctest.Wait()
		time.Sleep(fresh)
		if h.Admit(0) != 0 {
			t.Error("a second is not too old")
		}
		time.Sleep(ms)
		if h.Admit(0) == 0 {
			t.Error("more than a second is too old")
		}
		<-c.asked
		c.answer <- errors.New("gone")
	})
}

// While nothing is decided, FailOpen admits and FailClosed does not, and one asks
// for all.
func TestAdmitInSilence(t *testing.T) {
	for _, silence := range []Silence{FailClosed, FailOpen} {
		synctest.Test(t, func(t *testing.T) {
			c := newScripted()
			s := at(t, c, Config{Limit: limiter.Limit{Rate: 100, Burst: 100}, Silence: silence, Timeout: time.Second})
			handles := []*Handle{s.Key("a"), s.Key("b"), s.Key("c")}
			handles[0].Admit(0)
			<-c.asked
			c.answer <- errors.New("connection refused")
			synctest.Wait()
			var asked int64
			for range 500 {
				for _, h := range handles {
					if (h.Admit(0) == 0) != (silence == FailOpen) {
						t.Fatalf("%v: not as configured", silence)
					}
				}
				synctest.Wait()
				for len(c.asked) > 0 {
					<-c.asked
					asked++
					c.answer <- errors.New("connection refused")
				}
				time.Sleep(10 * ms)
			}
			if asked < 20 || asked > 60 {
				t.Errorf("%v: %d questions in 5 s", silence, asked)
			}
			// And back.
			time.Sleep(pause)
			handles[0].Admit(0)
			<-c.asked
			c.answer <- took(3, 0)
			synctest.Wait()
			if s.Err() != nil || handles[0].Admit(0) != 0 {
				t.Errorf("%v: not back: %v", silence, s.Err())
			}
			go func() {
				for range c.asked {
					c.answer <- took(0, time.Second)
				}
			}()
			s.Close()
			synctest.Wait()
			close(c.asked)
		})
	}
}

// Who waits at a handle is served in the order of their calls, one question at a
// time, and who gives up holds up nobody.
func TestWaitersInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newScripted()
		h := at(t, c, Config{Limit: limiter.Limit{Rate: 100, Burst: 100}, Timeout: time.Second}).Key("k")
		const waiters, quitter = 20, 7
		served := make(chan int, waiters)
		hurry, giveUp := context.WithCancel(t.Context())
		for i := range waiters {
			ctx := t.Context()
			if i == quitter {
				ctx = hurry
			}
			go func() {
				if err := h.Wait(ctx); (err != nil) != (i == quitter) {
					t.Errorf("waiter %d: %v", i, err)
				}
				served <- i
			}()
			synctest.Wait() // it is in line
		}
		giveUp()
		if i := <-served; i != quitter {
			t.Fatalf("waiter %d was served before anything was admitted", i)
		}
		for i := range waiters {
			if i == quitter {
				continue
			}
			for _, answer := range []any{took(0, 10*ms), took(1, 0)} {
				<-c.asked
				synctest.Wait()
				if len(c.asked) > 0 {
					t.Fatal("two ask at a time")
				}
				c.answer <- answer
			}
			if got := <-served; got != i {
				t.Fatalf("waiter %d was served, it is the turn of %d", got, i)
			}
		}
	})
}

// distant answers after 2 ms: that there will be a token in 1 ms, and from then on all that
// is asked for.
type distant struct {
	goredis.Scripter

	asked atomic.Int64
}

func (d *distant) EvalSha(ctx context.Context, _ string, _ []string, args ...any) *goredis.Cmd {
	cmd := goredis.NewCmd(ctx)
	first := d.asked.Add(1) == 1
	most, _ := args[3].(int)
	select {
	case <-time.After(2 * ms):
	case <-ctx.Done():
		cmd.SetErr(ctx.Err())
		return cmd
	}
	if first {
		cmd.SetVal(took(0, ms))
	} else {
		cmd.SetVal(took(int64(most), 0))
	}
	return cmd
}

// Callers with a deadline who come faster than one in a round trip are all served below
// the limit, also after a denial.
func TestLineFasterThanRoundTrips(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := at(t, new(distant), Config{Limit: limiter.Limit{Rate: 1e6, Burst: 1e6}}).Key("k")
		var denied atomic.Int64
		var all sync.WaitGroup
		for i := range 5000 {
			all.Go(func() {
				if limiter.Enter(t.Context(), h, 100*ms) != nil && i >= 1000 {
					denied.Add(1)
				}
			})
			time.Sleep(ms)
		}
		all.Wait()
		if n := denied.Load(); n > 0 {
			t.Errorf("%d of 4000 denied", n)
		}
	})
}

// An answer is everybody's in line, also of a question whose caller has given up. What is
// left over goes back.
func TestLineSharesAnAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newScripted()
		h := at(t, c, Config{Limit: limiter.Limit{Rate: 100, Burst: 100}, Timeout: time.Second}).Key("k")
		hurry, giveUp := context.WithCancel(t.Context())
		defer giveUp()
		wait := func(ctx context.Context) <-chan error {
			served := make(chan error, 1)
			go func() { served <- h.Wait(ctx) }()
			synctest.Wait() // it is in line
			return served
		}
		first := wait(hurry)
		<-c.asked
		second, third := wait(t.Context()), wait(hurry)
		c.answer <- took(0, 10*ms)
		if args := <-c.asked; args[2] != 1 || args[3] != 3 || args[4] != 0 {
			t.Errorf("asked for %v", args)
		}
		giveUp()
		is(t, <-first, context.Canceled)
		is(t, <-third, context.Canceled)
		c.answer <- took(3, 0)
		is(t, <-second, nil)
		if args := <-c.asked; args[2] != 0 || args[3] != 0 || args[4] != 2 {
			t.Errorf("asked for %v", args)
		}
		c.answer <- took(0, 0)
	})
}

// Who inherits the question of one that gave up waits for as long as a denial says, unless it
// wants less.
func TestLineInheritsADenial(t *testing.T) {
	for n, waits := range map[int]bool{1: false, 5: true, 7: true} {
		synctest.Test(t, func(t *testing.T) {
			c := newScripted()
			h := at(t, c, Config{Limit: limiter.Limit{Rate: 100, Burst: 100}, Timeout: time.Second}).Key("k")
			hurry, giveUp := context.WithCancel(t.Context())
			defer giveUp()
			first, second := make(chan error, 1), make(chan error, 1)
			go func() { first <- h.WaitN(hurry, 5) }()
			<-c.asked
			go func() { second <- h.WaitN(t.Context(), n) }()
			synctest.Wait() // it is in line
			giveUp()
			is(t, <-first, context.Canceled)
			synctest.Wait() // the question is its own
			start := time.Now()
			c.answer <- took(0, 500*ms)
			<-c.asked
			if after := time.Since(start); (after >= 500*ms) != waits {
				t.Errorf("%d are asked for after %v", n, after)
			}
			c.answer <- took(int64(n), 0)
			is(t, <-second, nil)
		})
	}
}

// Against the real one: what a guard's source gets in a while.
func TestAdmitPaces(t *testing.T) {
	t.Parallel()
	const rate, burst, batch = 2000, 64, 16
	cfg := patient(limiter.Limit{Rate: rate, Burst: burst})
	cfg.Batch = batch
	s, c := open(t, cfg)
	h := s.Key("k")
	var admitted atomic.Int64
	before := serverTime(t, c)
	for end := time.Now().Add(time.Second); time.Now().Before(end) || admitted.Load() < burst; {
		if wait := h.Admit(0); wait > 0 {
			time.Sleep(wait)
			continue
		}
		admitted.Add(1)
	}
	took := serverTime(t, c).Sub(before).Seconds()
	if got, bound := float64(admitted.Load()), burst+rate*took; got > bound || got < burst {
		t.Errorf("%v in %.3f s, want up to %v", got, took, bound)
	}
}

// A fetch that failed long ago opens nothing: Redis has answered others since.
func TestAdmitAfterAnOldFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newScripted()
		s := at(t, c, Config{Limit: limiter.Limit{Rate: 100, Burst: 100}, Batch: 10, Timeout: time.Second, Silence: FailOpen})
		a, b := s.Key("a"), s.Key("b")
		a.Admit(0)
		<-c.asked
		time.Sleep(2 * time.Second) // past the timeout
		synctest.Wait()
		time.Sleep(time.Hour)
		answered := make(chan bool)
		go func() { answered <- b.Allow() }()
		<-c.asked
		c.answer <- took(1, 0)
		if !<-answered {
			t.Fatal("denied")
		}
		if wait := a.Admit(0); wait == 0 {
			t.Error("admitted by a failure of an hour ago")
		}
		<-c.asked
		c.answer <- took(10, 0)
		synctest.Wait()
		if a.Admit(0) != 0 {
			t.Error("not ahead")
		}
	})
}

// What Admit wants ahead leaves its turn to those who Wait.
func TestAdmitYieldsToWaiters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newScripted()
		s := at(t, c, Config{Limit: limiter.Limit{Rate: 10, Burst: 100}, Batch: 10, Timeout: time.Second})
		h := s.Key("k")
		served := make(chan error, 1)
		go func() { served <- h.WaitN(t.Context(), 20) }()
		args := <-c.asked
		for range 100 {
			h.Admit(0)
		}
		c.answer <- took(0, 500*ms)
		synctest.Wait()
		for range 100 {
			h.Admit(0)
		}
		if len(c.asked) > 0 {
			t.Errorf("asked for %v beside a waiter's %v", <-c.asked, args)
		}
		<-c.asked
		c.answer <- took(20, 0)
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
}

// A closed store says so to those who would not have waited, and asks nothing.
func TestEnterClosed(t *testing.T) {
	t.Parallel()
	s := at(t, newScripted(), Config{Limit: limiter.Limit{Rate: 1, Burst: 1}})
	h := s.Key("k")
	s.Close()
	for _, most := range []time.Duration{0, time.Second} {
		is(t, limiter.Enter(t.Context(), h, most), limiter.ErrClosed)
	}
}

// A closed store serves nobody in line, whatever the last answer has to spare.
func TestLineOfAClosedStore(t *testing.T) {
	t.Parallel()
	s := at(t, newScripted(), Config{Limit: limiter.Limit{Rate: 1, Burst: 1}})
	h := s.Key("k")
	h.spare = 2
	s.Close()
	q, own := h.question(1)
	if q == nil || !own {
		t.Fatal("served")
	}
	<-q.done
	is(t, q.err, limiter.ErrClosed)
}
