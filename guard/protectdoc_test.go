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
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

// A refused call is received and returned, and shows as diverted.
func TestProtectCountsWhatItRefuses(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, f := newFunc(t, Policy{}, func(context.Context, int) error { return nil })
		_ = f.Do(t.Context(), 1)
		f.Pause(0)
		if err := f.Do(t.Context(), 2); !errors.Is(err, errHeld) {
			t.Error(err)
		}
		st := f.State()
		if a := st.Account; a.Check() != nil || a.Received != 2 || a.Acked != 1 || a.Returned != 1 || st.Tally.Diverted != 1 {
			t.Errorf("%+v, %+v", a, st.Tally)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// A probe that the limiter refuses is no call.
func TestProtectCountsProbesThatAreMade(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		l := &strict{wait: time.Second}
		f, err := Protect(g, SourceConfig{Name: "f", Limiter: l}, func(context.Context, int) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		if err := f.ForceOpen(time.Second); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		for range 2 {
			_ = f.Do(t.Context(), 1)
			l.open.Store(true)
		}
		if st := f.State(); st.Tally.Probes != 1 || st.Account.Acked != 1 || st.Breaker.ProbesPassed != 1 {
			t.Errorf("%+v, %+v", st.Tally, st.Breaker)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// A function's breaker is its scope's, as a source's is.
func TestProtectTakesNoOtherBreaker(t *testing.T) {
	g, err := New(Config{Policy: Policy{Breaker: breaker.Config{Base: time.Second}}})
	if err != nil {
		t.Fatal(err)
	}
	nothing := func(context.Context, int) error { return nil }
	protect := func(b breaker.Config) (*Func[int], error) {
		return Protect(g, SourceConfig{Name: "f", Policy: &Policy{Breaker: b}}, nothing)
	}
	if _, err := protect(breaker.Config{Base: time.Minute}); err == nil || !strings.Contains(err.Error(), "Policy.Breaker: differs from the Guard's") {
		t.Error(err)
	}
	if f, err := protect(breaker.Config{}); err != nil || f.policy.Breaker.Base != time.Second {
		t.Errorf("unset is the Guard's: %v", err)
	}
	if _, err := g.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// together admits as many as wait, once all are there.
type together struct{ sync.WaitGroup }

func (l *together) Admit(time.Duration) time.Duration {
	l.Done()
	l.Wait()
	return 0
}

// Callers ask a function's limiter at the same time: none waits for another's answer.
func TestProtectAsksItsLimiterConcurrently(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		l := new(together)
		f, err := Protect(g, SourceConfig{Name: "f", Limiter: l}, func(context.Context, int) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		const callers = 4
		l.Add(callers)
		var all sync.WaitGroup
		for m := range callers {
			all.Go(func() {
				if err := f.Do(t.Context(), m); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// A pause of a function is logged as that of a source is: when it begins, and when an operator
// or its time ends it.
func TestPauseOfAFunctionIsLogged(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		heard := new(logged)
		g, err := New(Config{}, WithLogger(slog.New(heard)))
		if err != nil {
			t.Fatal(err)
		}
		f := Must(Protect(g, SourceConfig{Name: "f"}, func(context.Context, int) error { return nil }))
		f.Pause(0)
		f.Resume()
		f.Resume() // it is over
		time.Sleep(time.Hour)
		f.Pause(time.Minute)
		time.Sleep(time.Minute - time.Second)
		if err := f.Do(t.Context(), 1); !errors.Is(err, errHeld) {
			t.Errorf("paused: %v", err)
		}
		time.Sleep(2 * time.Second)
		var got []string
		heard.mu.Lock()
		for _, l := range heard.lines {
			got = append(got, fmt.Sprint(l.text, " ", l.args["source"], " ", l.args["reason"], " ", l.args["for"]))
		}
		heard.mu.Unlock()
		want := []string{
			"source paused f operator <nil>", "source resumed f operator <nil>",
			"source paused f operator 1m0s", "source resumed f time <nil>",
		}
		if !slices.Equal(got, want) {
			t.Errorf("logged %q, want %q", got, want)
		}
		if err := f.Do(t.Context(), 1); err != nil {
			t.Errorf("after the pause: %v", err)
		}
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}
