// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"math"
	"testing"
	"testing/synctest"
	"time"
)

// neverTwice says "never" twice, and admits after that.
type neverTwice struct{ asked int }

func (l *neverTwice) Admit(time.Duration) time.Duration {
	if l.asked++; l.asked <= 2 {
		return math.MaxInt64
	}
	return 0
}

// A limiter that says "never" is asked again in an hour, in front of the handler and
// of the dead letters, and nothing is due before now.
func TestLimiterThatSaysNever(t *testing.T) {
	hourly := func(t *testing.T, s *sim, asked *int) {
		t.Helper()
		for n := 1; n <= 2; n++ {
			st := s.next(s.now)
			s.post()
			if at := s.now + time.Hour; st.kind != stepWait || st.at != at || *asked != n {
				t.Fatalf("at %v, asked %d times: %+v", s.now, *asked, st)
			}
			s.now += time.Hour
		}
	}
	t.Run("admissions", func(t *testing.T) {
		s, l := newSim(t, Policy{}), &neverTwice{}
		s.limiter = l
		s.put(s.now, 1, 0, 1)
		hourly(t, s, &l.asked)
		if st := s.next(s.now); st.kind != stepHandle || l.asked != 3 {
			t.Errorf("asked %d times: %+v", l.asked, st)
		}
	})
	t.Run("dead letters", func(t *testing.T) {
		s, l := newSim(t, Policy{}), &neverTwice{}
		s.letterPace = l
		s.put(s.now, 1, 0, 1)
		s.finish(s.next(s.now).it, Permanent(errors.New("no such order")))
		s.now += time.Hour - 1
		if st := s.next(s.now); st.at != s.now+1 || l.asked != 1 {
			t.Fatalf("asked %d times: %+v", l.asked, st)
		}
		s.now++
		s.next(s.now)
		s.now += time.Hour
		s.next(s.now)
		if s.post(); len(s.letters) != 1 || l.asked != 3 || s.tally.Paced != 1 {
			t.Errorf("asked %d times, %d letters, %+v", l.asked, len(s.letters), s.tally)
		}
	})
}

// A handler that asks for a year gets an hour.
func TestBackoffOfAYear(t *testing.T) {
	for _, ahead := range []time.Duration{365 * 24 * time.Hour, math.MaxInt64 - time.Minute} {
		s := newSim(t, Policy{})
		s.put(s.now, 1, 0, 1)
		s.finish(s.next(s.now).it, Backoff(errDown, s.origin.Add(ahead)))
		if s.asked != s.now+time.Hour {
			t.Errorf("asked for %v, held for %v", ahead, s.asked-s.now)
		}
	}
}

// A source with such a limiter goes on by itself, and a caller is told an hour.
func TestSourceWhoseLimiterSaysNever(t *testing.T) {
	if RaceEnabled {
		t.Skip("hours of virtual time: run without -race")
	}
	synctest.Test(t, func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		s, err := Open(g, SourceConfig{Name: "s", Limiter: &neverTwice{}}, Limits{}, &testPort{}, func(context.Context, int) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		in, ended := make(chan int), make(chan error)
		go func() { ended <- s.Run(t.Context(), in) }()
		in <- 1
		time.Sleep(2*time.Hour + time.Second)
		if a := s.Account(); a.Acked != 1 {
			t.Errorf("%+v, %+v", a, s.State().Holds)
		}
		f, err := Protect(g, SourceConfig{Name: "f", Limiter: &neverTwice{}}, func(context.Context, int) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		var held *HeldError
		if err := f.Do(t.Context(), 1); !errors.As(err, &held) || held.Until != time.Hour {
			t.Errorf("%v: %+v", err, held)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if err := <-ended; !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	})
}
