// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"testing"
	"time"
)

// A probe is with the program when its epoch ends, and nobody says what became of it, as
// when a channel breaks. The next epoch probes at once, and not when the probe's lease of
// a minute is over.
func TestProbeLeftBehind(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		g, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		open := func() *Source[int] {
			s, err := Open(g, SourceConfig{Name: "s", DeadLetters: &testWriter{}}, Limits{}, &testPort{}, nil)
			if err != nil {
				t.Fatal(err)
			}
			for m := range 20 {
				if err := s.Offer(m); err != nil {
					t.Fatal(err)
				}
			}
			return s
		}
		s := open()
		if err := s.ForceOpen(time.Second); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Second)
		probe := <-s.Ready()
		if n := s.State().Breaker.ProbesOut; n != 1 {
			t.Fatalf("%d probes are out", n)
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		s.End(ended, ReasonRebalance)

		again := open()
		began := time.Now()
		again.Done((<-again.Ready()).Token, nil)
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("the next epoch's first message came after %s", took)
		}
		s.Done(probe.Token, errBad) // too late, and nobody's
		if _, err := g.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}
