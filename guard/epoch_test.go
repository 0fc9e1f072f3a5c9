// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// An operator's pause waits for its source as long as it takes: only an operator
// ends it.
func TestPauseOutlivesALongAbsence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		open := func(name string) *Source[int] {
			s, err := Open(g, SourceConfig{Name: name}, Limits{}, &testPort{}, func(context.Context, int) error { return nil })
			if err != nil {
				t.Fatal(err)
			}
			return s
		}
		in := make(chan int)
		other := open("other") // keeps the sweeper at work
		go func() { _ = other.Run(t.Context(), in) }()
		s := open("orders")
		s.Pause(0)
		s.End(t.Context(), ReasonRebalance)
		for range 4 * 60 {
			in <- 1
			time.Sleep(time.Minute)
		}
		s = open("orders")
		if st := s.State(); len(st.Holds) == 0 || st.Holds[0].Reason != ReasonOperator {
			t.Errorf("not paused any more: %+v", st.Holds)
		}
		close(in)
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// Channels that come and go in an outage do not start the guesses anew: it costs
// what it would cost one that stays.
func TestGuessesOutliveAnEpoch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, err := New(Config{Policy: Policy{NoBreaker: true}})
		if err != nil {
			t.Fatal(err)
		}
		var letters testWriter
		var down atomic.Bool
		down.Store(true)
		for i := range 12 {
			s, err := Open(g, SourceConfig{Name: "orders", DeadLetters: &letters}, Limits{EndsWithInput: true}, &testPort{}, func(context.Context, int) error {
				if down.Load() {
					return errDown
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			in := make(chan int, 1)
			in <- i // the only one, so that nothing can be compared
			ran := make(chan struct{})
			go func() { defer close(ran); _ = s.Run(t.Context(), in) }()
			time.Sleep(time.Minute)
			s.End(t.Context(), ReasonRebalance)
			<-ran
		}
		if n := len(letters.bodies()); n > 7 {
			t.Errorf("%d healthy messages are dead letters after 12 minutes", n)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// Epochs that come and go leave nothing behind, also where each has a dispatcher
// of its own: a function cannot be compared.
func TestLetterboxesEndWithTheirEpoch(t *testing.T) {
	g, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	w := dlq.WriterFunc(func(context.Context, *dlq.Record) error { return nil })
	for range 50 {
		s, err := Open(g, SourceConfig{Name: "orders", DeadLetters: w}, Limits{}, &testPort{}, func(context.Context, int) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		s.End(t.Context(), ReasonRebalance)
	}
	g.mu.Lock()
	n := len(g.dispatchers)
	g.mu.Unlock()
	if n > 0 {
		t.Errorf("%d dispatchers are left", n)
	}
	if _, err := g.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
