// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// What waits for a person is a warning: once, again after an hour, and a line when it
// goes on.
func TestLinesOfWhatNeedsAPerson(t *testing.T) {
	if RaceEnabled {
		t.Skip("hours of virtual time: run without -race")
	}
	again := func(t *testing.T, r *logRig, text string) loggedLine {
		t.Helper()
		first := r.log.one(t, text, slog.LevelWarn)
		elapse(65 * time.Minute)
		if n := len(r.log.of(text)); n != 2 {
			t.Errorf("%d lines of %q in more than an hour", n, text)
		}
		return first
	}
	over := func(t *testing.T, r *logRig, was string) {
		t.Helper()
		if l := r.log.one(t, "what waited goes on", slog.LevelInfo); l.args["was"] != was || l.args["for"].(time.Duration) < time.Hour {
			t.Errorf("%+v", l)
		}
	}
	bubble(t, "writer", func(t *testing.T) {
		const text = "a message waits for a dead-letter writer, and there is none"
		r := newLogRig(t)
		_, in := r.open("orders/0", "orders", "0", nil)
		r.fail(Permanent(errDown))
		in <- 1
		elapse(30 * time.Second)
		if l := again(t, r, text); !strings.Contains(fmt.Sprint(l.args["help"]), "WithDeadLetters") || l.args["messages"] != int64(1) {
			t.Errorf("%+v", l)
		}
		r.close()
	})
	bubble(t, "credit", func(t *testing.T) {
		const text = "a message waits for a dead-letter credit"
		r := newLogRig(t)
		s, in := r.open("orders/0", "orders", "0", r.letters)
		r.fail(Permanent(errDown))
		for i := range 600 { // more than the budget of permanent failures
			in <- i
		}
		elapse(20 * time.Second)
		if n := len(r.log.of(text)); n != 0 {
			t.Errorf("%d lines too early", n)
		}
		elapse(time.Minute)
		if l := again(t, r, text); !strings.Contains(fmt.Sprint(l.args["help"]), "GrantCredits") {
			t.Errorf("%+v", l)
		}
		s.DeadLetterWaiting(1000)
		for i := 0; s.Account().Unsettled() > 0 && i < 1000; i++ {
			s.DeadLetterWaiting(1000)
			elapse(time.Second)
		}
		elapse(time.Minute)
		over(t, r, text)
		r.close()
	})
	bubble(t, "head", func(t *testing.T) {
		const text = "a message blocks its order: its dependency fails"
		r := newLogRig(t)
		_, in := r.open("orders/0", "orders", "0", r.letters)
		r.fail(Unavailable(errDown))
		for i := range 10 {
			in <- i
		}
		elapse(4 * time.Minute)
		if n := len(r.log.of(text)); n != 0 {
			t.Errorf("%d lines too early", n)
		}
		elapse(2 * time.Minute)
		if l := again(t, r, text); l.args["error"] != errDown.Error() || l.args["class"] != "dependency" || l.args["messages"] != int64(1) {
			t.Errorf("%+v", l)
		}
		r.fail(nil)
		elapse(2 * time.Minute)
		over(t, r, text)
		r.close()
	})
}

// A handler that does not return, or a program that takes nothing or settles nothing, is
// said after its timeout, and again after an hour.
func TestLineOfWhatStandsStill(t *testing.T) {
	const text = "a handler or the program's loop stands still"
	told := func(t *testing.T, log *logged, messages int64, over func()) {
		t.Helper()
		elapse(38 * time.Second)
		if n := len(log.of(text)); n != 0 {
			t.Errorf("%d lines too early", n)
		}
		elapse(15 * time.Second)
		l := log.one(t, text, slog.LevelWarn)
		if age := l.args["for"].(time.Duration); l.args["source"] != "s" || l.args["messages"] != messages || age < 40*time.Second || age > 53*time.Second ||
			!strings.Contains(fmt.Sprint(l.args["help"]), "Policy.Workers") {
			t.Errorf("%+v", l)
		}
		stands := time.Minute
		if !RaceEnabled { // hours of virtual time
			stands = 65 * time.Minute
		}
		elapse(stands)
		if n := len(log.of(text)); n != 1+int(stands/time.Hour) {
			t.Errorf("%d lines in %v", n, stands)
		}
		over()
		elapse(30 * time.Second)
		ends := slices.DeleteFunc(log.of("what waited goes on"), func(l loggedLine) bool { return l.args["was"] != text })
		if len(ends) != 1 || ends[0].args["for"].(time.Duration) < stands {
			t.Errorf("%+v", ends)
		}
	}
	passive := func(t *testing.T, workers int, f func(s *Source[int], log *logged)) {
		t.Helper()
		log := new(logged)
		p := Policy{Workers: workers}
		if workers > 1 {
			p.Order = OrderNone
		}
		g := Must(New(Config{Policy: p}, WithLogger(slog.New(log))))
		s := Must(Open(g, SourceConfig{Name: "s", DeadLetters: &testWriter{}}, Limits{}, &testPort{}, (func(context.Context, int) error)(nil)))
		defer closeAll(t, g)
		f(s, log)
	}
	offer := func(s *Source[int], n int) {
		for m := range n {
			if err := s.Offer(m); err != nil {
				panic(err)
			}
		}
	}
	bubble(t, "never settled", func(t *testing.T) {
		passive(t, 3, func(s *Source[int], log *logged) {
			offer(s, 5)
			var have []Item[int]
			for range 3 {
				have = append(have, <-s.Ready())
			}
			told(t, log, 3, func() {
				for _, it := range have {
					s.Done(it.Token, nil)
				}
				for range 2 {
					s.Done((<-s.Ready()).Token, nil)
				}
			})
		})
	})
	bubble(t, "failed by its adapter, and not taken again", func(t *testing.T) {
		passive(t, 1, func(s *Source[int], log *logged) {
			offer(s, 2)
			it := <-s.Ready()
			elapse(30 * time.Second)
			s.Done(it.Token, errors.New("not settled in time"))
			told(t, log, 1, func() {
				for range 2 {
					s.Done((<-s.Ready()).Token, nil)
				}
			})
		})
	})
	bubble(t, "a probe that nobody takes", func(t *testing.T) {
		passive(t, 1, func(s *Source[int], log *logged) {
			offer(s, 8)
			for range 5 {
				s.Done((<-s.Ready()).Token, syscall.ECONNREFUSED)
			}
			synctest.Wait()
			if s.c.closed() {
				t.Fatal("the breaker is closed")
			}
			told(t, log, 1, func() {
				for range 8 {
					s.Done((<-s.Ready()).Token, nil)
				}
			})
		})
	})
	bubble(t, "a program that waits for the breaker", func(t *testing.T) {
		passive(t, 1, func(s *Source[int], log *logged) {
			offer(s, 8)
			go func() {
				for it := range s.Ready() {
					elapse(20 * time.Second)
					s.Done(it.Token, syscall.ECONNREFUSED)
				}
			}()
			elapse(time.Hour)
			if n := len(log.of(text)); n != 0 || s.c.closed() {
				t.Errorf("%d lines, %+v", n, s.State().Holds)
			}
		})
	})
	for _, shape := range []string{"closed path", "workers"} {
		bubble(t, shape, func(t *testing.T) {
			log, release := new(logged), make(chan struct{})
			p := Policy{}
			if shape == "workers" {
				p = Policy{Order: OrderNone, Workers: 2}
			}
			g := Must(New(Config{Policy: p}, WithLogger(slog.New(log))))
			s := Must(Open(g, SourceConfig{Name: "s", DeadLetters: &testWriter{}}, Limits{}, &testPort{}, func(context.Context, int) error {
				<-release
				return nil
			}))
			in, ended := make(chan int, 1), make(chan error, 1)
			in <- 0
			go func() { ended <- s.Run(t.Context(), in) }()
			told(t, log, 1, func() { close(release) })
			closeAll(t, g)
			if err := <-ended; err != nil && !errors.Is(err, ErrClosed) {
				t.Error(err)
			}
		})
	}
}
