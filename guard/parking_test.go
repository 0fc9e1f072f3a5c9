// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
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

// parkPort parks what it is told to, and says how often it was.
type parkPort struct {
	testPort
	full   bool // parks no more
	err    error
	parked int
}

func (p *parkPort) Parks(int) bool { return !p.full }

func (p *parkPort) Park(context.Context, int, *dlq.Record) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil {
		p.parked++
	}
	return p.err
}

func (p *parkPort) Parked() (int, uint64) { return 0, 0 }

// Poison whose attempts are used up is parked, unless the port may not park it again or
// cannot. While the breaker is not closed nothing is parked for its attempts; a poison head
// and a guess are, which may be healthy.
func TestWhichLettersAreParked(t *testing.T) {
	const open, full = true, true
	for _, c := range []struct {
		reason       dlq.Reason
		open, full   bool
		err          error
		written      int // dead letters
		parked       int
		putOff, lost bool
	}{
		{reason: dlq.ReasonAttempts, parked: 1},
		{reason: dlq.ReasonPoisonHead, parked: 1},
		{reason: dlq.ReasonGuess, parked: 1},
		{reason: dlq.ReasonPermanent, written: 1},
		{reason: dlq.ReasonOperator, written: 1},
		{reason: dlq.ReasonLastDelivery, written: 1},
		{reason: dlq.ReasonAttempts, open: open, putOff: true},
		{reason: dlq.ReasonPoisonHead, open: open, parked: 1},
		{reason: dlq.ReasonGuess, open: open, parked: 1},
		{reason: dlq.ReasonAttempts, full: full, written: 1},
		{reason: dlq.ReasonAttempts, full: full, open: open, written: 1},
		{reason: dlq.ReasonAttempts, err: &dlq.TooLargeError{}, written: 1},
		{reason: dlq.ReasonAttempts, err: dlq.ErrPutOff, putOff: true},
		{reason: dlq.ReasonAttempts, err: errDown, lost: true},
	} {
		for _, again := range []bool{false, true} { // of the source, and of that of its parked messages
			bubble(t, string(c.reason), func(t *testing.T) {
				g, err := New(Config{})
				if err != nil {
					t.Fatal(err)
				}
				port, letters := &parkPort{full: c.full, err: c.err}, &testWriter{}
				handle := func(context.Context, int) error { return nil }
				parent, err := Open(g, SourceConfig{Name: "s", DeadLetters: letters}, Limits{}, Port[int](port), handle)
				if err != nil {
					t.Fatal(err)
				}
				s := parent
				if again {
					if s, err = OpenParked(parent, "s/retry", Port[int](port), handle); err != nil {
						t.Fatal(err)
					}
				}
				if c.open {
					if err := parent.ForceOpen(0); err != nil {
						t.Fatal(err)
					}
				}
				l := letter[int]{s, &item[int]{entry: entry[int]{m: 7}}}
				_, _, err = s.writer.write(t.Context(), l, &dlq.Record{Reason: c.reason, Permanent: c.reason == dlq.ReasonPermanent})
				if errors.Is(err, dlq.ErrPutOff) != c.putOff || errors.Is(err, errDown) != c.lost || err != nil && !c.putOff && !c.lost {
					t.Errorf("%+v: %v", c, err)
				}
				if len(letters.recs) != c.written || port.parked != c.parked {
					t.Errorf("%+v: %d dead, %d parked", c, len(letters.recs), port.parked)
				}
				closeAll(t, g)
			})
		}
	}
}

// A port that parks needs dead letters.
func TestParkerNeedsDeadLetters(t *testing.T) {
	g, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Open(g, SourceConfig{Name: "s"}, Limits{}, Port[int](&parkPort{}), func(context.Context, int) error { return nil }); err == nil || !strings.Contains(err.Error(), "SourceConfig.DeadLetters") {
		t.Error(err)
	}
	closeAll(t, g)
}

// While the breaker of their source is not closed, parked messages wait: but not where
// nothing else could show that the dependency is back.
func TestParkedMessagesWaitForTheBreaker(t *testing.T) {
	for name, c := range map[string]struct {
		force, own bool // its breaker is forced open; it has a message of its own
		letter     bool // it has a dead letter that is put off
		waits      bool
	}{
		"closed":                {},
		"open by force":         {force: true, waits: true},
		"nothing to probe with": {},
		"a message is held":     {own: true, waits: true},
		"a letter is put off":   {letter: true},
	} {
		bubble(t, name, func(t *testing.T) {
			r := newRig(t, Policy{Breaker: breaker.Config{Base: time.Minute, Cap: time.Minute}}, Limits{}, func(*rig, context.Context, int) error {
				if c.letter {
					return Permanent(errors.New("no such order"))
				}
				return errors.New("down")
			})
			r.letters.err = dlq.ErrPutOff
			var handled []int
			again, err := OpenParked(r.s, "s/retry", Port[int](&testPort{}), func(_ context.Context, m int) error {
				handled = append(handled, m)
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			in, done := make(chan int), make(chan error)
			go func() { done <- again.Run(t.Context(), in) }()
			if c.letter {
				r.send(0, 1)
				time.Sleep(time.Second)
				if a := r.check(); a.Settling != 1 {
					t.Fatalf("%+v", a)
				}
			}
			switch {
			case c.force:
				err = r.s.ForceOpen(0)
			case name != "closed": // by its failures
				r.s.c.gate.Trip(r.g.now(), causeOutage)
			}
			if err != nil {
				t.Fatal(err)
			}
			if c.own {
				r.send(0, 1)
				synctest.Wait() // it is held before the other comes
			}
			in <- 5
			time.Sleep(10 * time.Second)
			synctest.Wait()
			if waits := len(handled) == 0; waits != c.waits || waits != (again.Account().Held == 1) {
				t.Errorf("handled %v, %+v", handled, again.Account())
			}
			if a := again.State().Tally; a.Failures > 0 || a.Retries > 0 && !c.waits {
				t.Errorf("%+v", a)
			}
			if c.waits || t.Failed() {
				if err := r.s.ForceClosed(); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Second)
				synctest.Wait()
				if len(handled) != 1 {
					t.Error("it still waits")
				}
			}
			close(in)
			if err := <-done; err != nil {
				t.Error(err)
			}
			again.End(t.Context(), ReasonShutdown)
			r.letters.mu.Lock()
			r.letters.err = nil
			r.letters.mu.Unlock()
			r.s.End(t.Context(), ReasonShutdown)
			close(r.in)
			if err := <-r.ended; err != nil && !errors.Is(err, ErrClosed) {
				t.Error(err)
			}
			closeAll(t, r.g)
		})
	}
}

// earlierPort says what its messages had before they were parked.
type earlierPort struct {
	testPort
	attempts int
	first    time.Time
}

func (p *earlierPort) Meta(m int) Meta {
	meta := p.testPort.Meta(m)
	meta.Attempts, meta.FirstFailed = p.attempts, p.first
	return meta
}

// A dead letter has the attempts and the first failure from before the message was parked.
func TestLetterOfAParkedMessage(t *testing.T) {
	for name, c := range map[string]struct {
		before time.Duration // of the first failure here
		want   time.Duration
	}{"earlier": {time.Hour, time.Hour}, "a clock that is behind": {-time.Hour, 0}} {
		bubble(t, name, func(t *testing.T) {
			g, err := New(Config{})
			if err != nil {
				t.Fatal(err)
			}
			now, letters := time.Now(), &testWriter{}
			s, err := Open(g, SourceConfig{Name: "s", DeadLetters: letters}, Limits{}, Port[int](&earlierPort{attempts: 4, first: now.Add(-c.before)}), func(context.Context, int) error {
				return Permanent(errDown)
			})
			if err != nil {
				t.Fatal(err)
			}
			in := make(chan int, 1)
			in <- 1
			close(in)
			if err := s.Run(t.Context(), in); err != nil {
				t.Error(err)
			}
			if r := letters.recs[0]; r.Attempts != 5 || !r.FirstFailed.Equal(now.Add(-c.want)) || !r.LastFailed.Equal(now) {
				t.Errorf("%d attempts, first failed %s, last %s; now %s", r.Attempts, r.FirstFailed, r.LastFailed, now)
			}
			closeAll(t, g)
		})
	}
}

// A source that cannot park keeps no other from writing to the same dead letters.
func TestParkersWriteBesideEachOther(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		letters := &testWriter{}
		for _, name := range []string{"a", "b"} {
			s, err := Open(g, SourceConfig{Name: name, DeadLetters: letters}, Limits{}, Port[int](&parkPort{}), func(context.Context, int) error { return nil })
			if err != nil {
				t.Fatal(err)
			}
			if s.writer.users != 1 {
				t.Errorf("%s shares its writer's goroutine", name)
			}
		}
		if n := len(g.dispatchers); n != 2 {
			t.Errorf("%d boxes", n)
		}
		closeAll(t, g)
	})
}

// A message whose error blames it uses its attempts up in the probes of an open breaker. Where
// nothing but the message behind it could probe next, it is parked all the same.
func TestTheLastProbeIsParked(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g := Must(New(Config{Policy: Policy{Order: OrderKey}}))
		port, letters := &parkPort{}, &testWriter{}
		s := Must(Open(g, SourceConfig{Name: "s", DeadLetters: letters}, Limits{}, Port[int](port), func(_ context.Context, m int) error {
			if m == 0 {
				return &strconv.NumError{Func: "ParseInt", Num: "x", Err: strconv.ErrSyntax}
			}
			return nil
		}))
		s.c.gate.Trip(g.now(), causeOutage)
		in, done := make(chan int, 2), make(chan error, 1)
		in <- 0 // of one key, since the port has no keys
		in <- 1
		go func() { done <- s.Run(t.Context(), in) }()
		elapse(10 * time.Minute)
		port.mu.Lock()
		parked := port.parked
		port.mu.Unlock()
		if a := s.Account(); parked != 1 || a.Acked != 2 || a.Unsettled() != 0 || s.State().Tally.Parked != 1 {
			t.Errorf("%d parked, %+v, %+v", parked, a, s.State().Holds)
		}
		close(in)
		s.End(t.Context(), ReasonShutdown)
		if err := <-done; err != nil && !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
		closeAll(t, g)
	})
}

// What comes behind a parked message follows it, or waits for room: such a probe says nothing
// of the dependency. The parked message is handled then, though the breaker is not closed, and
// with it what waits.
func TestProbesThatSayNothingLetParkedGoOn(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g := Must(New(Config{Policy: Policy{Order: OrderKey}}))
		var handled atomic.Bool // the parked one
		s := Must(Open(g, SourceConfig{Name: "s", DeadLetters: &testWriter{}}, Limits{}, Port[int](&parkPort{}), func(context.Context, int) error {
			if !handled.Load() {
				return Backoff(errors.New("no room behind the parked one"), time.Now().Add(500*time.Millisecond))
			}
			return nil
		}))
		again := Must(OpenParked(s, "s/retry", Port[int](&testPort{}), func(context.Context, int) error {
			handled.Store(true)
			return nil
		}))
		s.c.gate.Trip(g.now(), causeOutage)
		in, parked, done := make(chan int, 1), make(chan int, 1), make(chan error, 2)
		in <- 1
		parked <- 0
		go func() { done <- s.Run(t.Context(), in) }()
		elapse(time.Second) // it has a message to probe with
		go func() { done <- again.Run(t.Context(), parked) }()
		elapse(20 * time.Second)
		if a, b := again.Account(), s.Account(); a.Acked != 1 || b.Acked != 1 {
			t.Errorf("parked %+v, behind it %+v", a, b)
		}
		again.End(t.Context(), ReasonShutdown)
		s.End(t.Context(), ReasonShutdown)
		for range 2 {
			if err := <-done; err != nil && !errors.Is(err, ErrClosed) {
				t.Error(err)
			}
		}
		closeAll(t, g)
	})
}

// Parked messages that have failed for long are handled within the longest delay after the
// dependency is back, although nothing else succeeds.
func TestIdleParkedMessagesAreHandledAfterAnOutage(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		const waiting = 31
		g := Must(New(Config{Policy: Policy{Order: OrderKey, Workers: 4}}))
		parent := Must(Open(g, SourceConfig{Name: "s", DeadLetters: &testWriter{}}, Limits{}, &testPort{keys: 40}, func(context.Context, int) error { return nil }))
		var back atomic.Bool
		again := Must(OpenParked(parent, "s/retry", Port[int](&testPort{keys: 40}), func(context.Context, int) error {
			if back.Load() {
				return nil
			}
			return Unavailable(errDown)
		}))
		fresh, parked := make(chan int), make(chan int)
		var loops sync.WaitGroup
		loops.Go(func() { _ = parent.Run(t.Context(), fresh) })
		loops.Go(func() { _ = again.Run(t.Context(), parked) })
		for m := range waiting {
			parked <- m
		}
		time.Sleep(10 * time.Minute)
		back.Store(true)
		time.Sleep(10*time.Second + time.Millisecond) // Retry.Max
		synctest.Wait()
		if a := again.Account(); a.Acked != waiting {
			t.Errorf("%+v", a)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
		loops.Wait()
	})
}

// Parked messages have no breaker. If nothing else comes, those that fail are called more and more
// rarely, and still die soon after a proof of life.
func TestIdleParkedMessagesAreCalledRarely(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		const failing = 31
		g := Must(New(Config{Policy: Policy{Order: OrderKey, Workers: 4}}))
		parent := Must(Open(g, SourceConfig{Name: "s", DeadLetters: &testWriter{}}, Limits{}, &testPort{keys: 40}, func(context.Context, int) error { return nil }))
		var calls atomic.Int64
		again := Must(OpenParked(parent, "s/retry", Port[int](&testPort{keys: 40}), func(context.Context, int) error {
			calls.Add(1)
			return errBad
		}))
		fresh, parked := make(chan int), make(chan int)
		var loops sync.WaitGroup
		loops.Go(func() { _ = parent.Run(t.Context(), fresh) })
		loops.Go(func() { _ = again.Run(t.Context(), parked) })
		for m := range failing {
			parked <- m
		}
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		before := calls.Load()
		time.Sleep(time.Minute)
		synctest.Wait()
		if got, most := calls.Load()-before, int64(2*failing*60/5); got > most { // a wait is 5 s on average
			t.Errorf("%d calls in a minute, at most %d are right", got, most)
		}
		if a := again.Account(); a.DeadLettered > 0 {
			t.Errorf("%+v", a)
		}
		for m := range 30 {
			fresh <- m
			time.Sleep(2 * time.Second)
		}
		synctest.Wait()
		if a := again.Account(); a.DeadLettered != failing {
			t.Errorf("a minute after a proof of life: %+v", a)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
		loops.Wait()
	})
}
