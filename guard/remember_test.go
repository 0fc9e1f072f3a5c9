// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

func TestIdentity(t *testing.T) {
	abc := func() string { return "abc" }
	at := func(m Meta) string { name, sure := identity(m); return fmt.Sprint(name, " ", sure) }
	for want, m := range map[string]Meta{
		"q/3/17 true":            {Origin: dlq.Origin{Source: "q", Partition: 3, Offset: 17, HasOffset: true}},
		"q/3/17@1000000000 true": {Origin: dlq.Origin{Source: "q", Partition: 3, Offset: 17, HasOffset: true}, Timestamp: time.Unix(1, 0)},
		"q/5 true":               {Origin: dlq.Origin{Source: "q", Sequence: 5}},
		"q/5@1000000000 true":    {Origin: dlq.Origin{Source: "q", Sequence: 5}, Timestamp: time.Unix(1, 0)},
		"q/m7 true":              {Origin: dlq.Origin{Source: "q", MessageID: "m7"}},
		"q#abc false":            {Origin: dlq.Origin{Source: "q", MessageID: "made-1"}, Content: abc},
		"q#abc true":             {Origin: dlq.Origin{Source: "q", MessageID: "made-2"}, Content: abc, Redelivered: true},
	} {
		if got := at(m); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	first, second := Meta{Body: []byte("b"), Deliveries: 1}, Meta{Body: []byte("b"), Deliveries: 2}
	if a, b := at(first), at(second); strings.TrimSuffix(a, " false") != strings.TrimSuffix(b, " true") {
		t.Errorf("%s and %s", a, b)
	}
}

// Poison that hangs until its timeout is dead-lettered although its source is taken away
// every minute or five: its attempts are counted over the epochs of one process.
func TestAttemptsOverEpochs(t *testing.T) {
	for _, epoch := range []time.Duration{time.Minute, 5 * time.Minute} {
		bubble(t, epoch.String(), func(t *testing.T) {
			g, err := New(Config{})
			if err != nil {
				t.Fatal(err)
			}
			letters := &testWriter{}
			left := []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9} // at the broker
			start := time.Now()
			for len(letters.bodies()) == 0 && time.Since(start) < 2*time.Hour {
				port := &testPort{}
				s, err := Open(g, SourceConfig{Name: "orders/0", DeadLetters: letters}, Limits{EndsWithInput: true}, port, func(ctx context.Context, m int) error {
					if m == 3 {
						<-ctx.Done()
						return ctx.Err()
					}
					return nil
				})
				if err != nil {
					t.Fatal(err)
				}
				in := make(chan int, len(left))
				for _, m := range left {
					in <- m
				}
				ran := make(chan struct{})
				go func() { defer close(ran); _ = s.Run(t.Context(), in) }()
				time.Sleep(epoch)
				s.End(t.Context(), ReasonRebalance)
				<-ran
				synctest.Wait()
				for len(left) > 0 && slices.Contains(port.acked, left[0]) { // the broker's low watermark
					left = left[1:]
				}
			}
			took := time.Since(start)
			if got := letters.bodies(); len(got) != 1 || got[0] != "3" || took > 20*time.Minute {
				t.Errorf("dead letters %v after %v", got, took)
			}
			if n := letters.recs[0].Attempts; n < 5 {
				t.Errorf("the letter tells of %d attempts", n)
			}
			if _, err := g.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// Where the dependency is flaky a message has as many attempts in the next epoch, too: what
// would be chance in one is in the other.
func TestFlakinessOverEpochs(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g := Must(New(Config{}))
		letters := &testWriter{}
		policy := Policy{Order: OrderNone, NoBreaker: true, Retry: Retry{Base: 10 * time.Millisecond, Max: 10 * time.Millisecond}}
		var unlucky atomic.Int64 // calls of message 0
		again := map[int]bool{}  // the handler's
		open := func() (s *Source[int], in chan int, ran chan struct{}) {
			s = Must(Open(g, SourceConfig{Name: "orders/0", DeadLetters: letters, Policy: &policy}, Limits{}, &testPort{}, func(_ context.Context, m int) error {
				fails := m%2 == 1 && !again[m]
				if again[m] = true; m == 0 {
					fails = unlucky.Add(1) <= 14
				}
				if fails {
					return errors.New("it may be this or that")
				}
				return nil
			}))
			in, ran = make(chan int), make(chan struct{})
			go func() { defer close(ran); _ = s.Run(t.Context(), in) }()
			return s, in, ran
		}
		s, in, ran := open()
		m := 1
		for ; m < 100; m++ { // it is known to be flaky
			in <- m
			time.Sleep(10 * time.Millisecond)
		}
		in <- 0
		for ; unlucky.Load() < 8; m++ {
			in <- m
			time.Sleep(10 * time.Millisecond)
		}
		s.End(t.Context(), ReasonRebalance)
		<-ran
		s, in, ran = open()
		in <- 0
		for end := m + 100; m < end; m++ {
			in <- m
			time.Sleep(10 * time.Millisecond)
		}
		time.Sleep(time.Second)
		if n := len(letters.bodies()); n > 0 || unlucky.Load() != 15 {
			t.Errorf("%d letters, and %d calls of the unlucky message", n, unlucky.Load())
		}
		s.End(t.Context(), ReasonShutdown)
		<-ran
		closeAll(t, g)
	})
}

// A message whose letter was not confirmed when its source ended keeps its attempts.
func TestAttemptsOfALetterThatWasNotWritten(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		letters := &testWriter{err: errDown}
		calls := 0
		open := func() (s *Source[int], ran chan struct{}) {
			s, err := Open(g, SourceConfig{Name: "orders/0", DeadLetters: letters}, Limits{}, &testPort{}, func(context.Context, int) error {
				calls++
				return &json.SyntaxError{}
			})
			if err != nil {
				t.Fatal(err)
			}
			in := make(chan int, 1)
			in <- 3
			ran = make(chan struct{})
			go func() { defer close(ran); _ = s.Run(t.Context(), in) }()
			return s, ran
		}
		s, ran := open()
		for s.Account().Settling == 0 {
			time.Sleep(10 * time.Millisecond)
		}
		s.mu.Lock()
		s.c.stoodStillAt = time.Millisecond // an outage ended then
		s.mu.Unlock()
		over, cancel := context.WithCancel(t.Context())
		cancel()
		s.End(over, ReasonRebalance)
		<-ran
		first := calls
		letters.mu.Lock()
		letters.err = nil
		letters.mu.Unlock()
		s, ran = open()
		if s.c.stoodStillAt != time.Millisecond {
			t.Error("an outage of the epoch before is forgotten")
		}
		time.Sleep(time.Minute)
		if got := letters.bodies(); len(got) != 1 || calls != first+1 || letters.recs[0].Attempts != first+1 {
			t.Errorf("letters %v, %d calls, then %d", got, first, calls-first)
		}
		s.End(t.Context(), ReasonShutdown)
		<-ran
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// What failed last is remembered, in the place of what failed long ago.
func TestOldSuspectsMakeRoom(t *testing.T) {
	s := newSim(t, Policy{})
	s.now = time.Hour
	s.suspects = make(map[string]suspect)
	for n := range maxSuspects {
		s.suspects[fmt.Sprint("old", n)] = suspect{tries: 1, at: s.now - time.Duration(n)}
	}
	s.put(s.now, 7, 0, 1)
	r := failureOf(errBad)
	r.name, r.known = "7", true
	s.done(s.now, s.next(s.now).it, r)
	if _, ok := s.failedMessages(maxSuspects)["7"]; !ok {
		t.Error("not in the file")
	}
	s.drain(s.now)
	_, oldest := s.suspects[fmt.Sprint("old", maxSuspects-1)]
	if _, ok := s.suspects["7"]; !ok || oldest || len(s.suspects) != maxSuspects {
		t.Errorf("remembered: %v, the oldest: %v, %d in all", ok, oldest, len(s.suspects))
	}
}

// A message that its adapter takes back keeps its attempts, and the handler that did not
// have it is no attempt.
func TestAttemptsOfAMessageTakenBack(t *testing.T) {
	s := newSim(t, Policy{Retry: Retry{Attempts: 2, Base: time.Millisecond, Max: time.Millisecond}})
	up := func() *item[int] {
		s.now += time.Second
		return s.next(s.now).it
	}
	fail := func(it *item[int]) {
		r := failureOf(&json.SyntaxError{})
		r.name, r.known = "7", true
		s.done(s.now, it, r)
		s.post()
	}
	takeBack := func(it *item[int]) {
		s.settled(s.done(s.now, it, failureOf(Ignore(ErrTakenBack))).it, ErrTakenBack)
		s.put(s.now, 7, 0, 1)
	}
	s.put(s.now, 7, 0, 1)
	takeBack(up())
	fail(up())
	takeBack(up())
	takeBack(up())
	fail(up())
	if len(s.letters) != 1 {
		t.Fatalf("%d letters: %+v", len(s.letters), s.account())
	}
	if it := s.letters[0]; it.tries != 2 || len(it.failures) != 2 || it.failures[0].at == it.failures[1].at {
		t.Errorf("%d tries, %+v", it.tries, it.failures)
	}
	if a := s.account(); a.Returned != 3 || a.Check() != nil || s.tally.FailedMessages != 1 {
		t.Errorf("%+v, %d have failed", a, s.tally.FailedMessages)
	}
}

// A witness that its adapter takes back has not failed, and leaves the source at once. The
// head waits its delay, and is no attempt closer to its end.
func TestWitnessTakenBack(t *testing.T) {
	s := newSim(t, Policy{Retry: Retry{Attempts: 2, Base: time.Millisecond, Max: time.Millisecond}})
	s.offers = true
	up := func(want int) *item[int] {
		t.Helper()
		s.now += time.Second
		it := s.next(s.now).it
		if it == nil || it.m != want {
			t.Fatalf("%+v is up, want %d", it, want)
		}
		return it
	}
	s.put(s.now, 7, 0, 1)
	s.put(s.now, 8, 0, 1)
	s.done(s.now, up(7), failureOf(errBad))
	for range 3 {
		s.done(s.now, up(7), failureOf(errBad))
		want := s.tally
		want.Returned++
		st := s.done(s.now, up(8), failureOf(Ignore(ErrTakenBack)))
		if st.kind != stepAck || st.it.m != 8 {
			t.Fatalf("%+v", st)
		}
		s.settled(st.it, ErrTakenBack)
		if a := s.account(); a.RetryWait != 1 || a.Unsettled() != 1 || a.Check() != nil || s.tally != want {
			t.Fatalf("%+v, %+v, want %+v", a, s.tally, want)
		}
		s.put(s.now, 8, 0, 1)
	}
	if s.post(); len(s.letters) > 0 {
		t.Error("a dead letter without proof")
	}
}
