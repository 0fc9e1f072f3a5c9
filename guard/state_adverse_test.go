// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package guard

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

// guard is a process without sources.
func (h *stateHost) guard(cfg Config, opts ...Option) *Guard {
	h.t.Helper()
	cfg.StateDir = h.dir
	g, err := New(cfg, append(opts, WithLogger(slog.New(slog.NewTextHandler(h, nil))), func(g *Guard) { g.host = h.now })...)
	if err != nil {
		h.t.Fatal(err)
	}
	return g
}

// kill ends a process such that the next finds the file as it is now.
func (h *stateHost) kill(g *Guard) {
	h.t.Helper()
	path := filepath.Join(h.dir, "stormguard.state")
	b, err := os.ReadFile(path)
	if err != nil {
		h.t.Fatal(err)
	}
	if _, err := g.Close(h.t.Context()); err != nil {
		h.t.Error(err)
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		h.t.Fatal(err)
	}
}

// partition opens a source and runs it until its Guard is closed.
func partition(t *testing.T, g *Guard, topic string, n int, handler func(int) error) (*Source[int], chan<- int) {
	t.Helper()
	in := make(chan int, 100)
	s, err := Open(g, SourceConfig{Name: fmt.Sprint(topic, "/", n), Destination: topic, Partition: fmt.Sprint(n), DeadLetters: &testWriter{}},
		Limits{EndsWithInput: true}, &testPort{}, func(_ context.Context, m int) error { return handler(m) })
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = s.Run(t.Context(), in) }()
	return s, in
}

// Two sources of one breaker are in a storm at a kill. It ends for both, whoever closes
// the breaker, and before the other has looked at it.
func TestRestoredStormEnds(t *testing.T) {
	for name, c := range map[string]struct {
		cfg   breaker.Config
		close func(a *Source[int], in chan<- int)
	}{
		"by a probe":     {breaker.Config{Successes: 1}, func(_ *Source[int], in chan<- int) { in <- 1 }},
		"by an operator": {breaker.Config{}, func(a *Source[int], _ chan<- int) { _ = a.ForceClosed() }},
	} {
		bubble(t, name, func(t *testing.T) {
			h := newStateHost(t, Policy{})
			cfg := Config{Scope: ScopeTopic, Policy: Policy{Breaker: c.cfg}}
			g := h.guard(cfg)
			a, inA := partition(t, g, "orders", 0, down)
			b, inB := partition(t, g, "orders", 1, down)
			for m := range 5 {
				inA <- m
				inB <- m
			}
			for start := time.Now(); !a.State().Storm.Active || !b.State().Storm.Active; time.Sleep(time.Second) {
				if time.Since(start) > 30*time.Minute {
					t.Fatal("no storm in 30 min")
				}
			}
			time.Sleep(2 * saveEvery)
			h.kill(g)
			time.Sleep(time.Minute)
			g = h.guard(cfg)
			time.Sleep(5 * time.Second) // the sweeper rests
			a, inA = partition(t, g, "orders", 0, fine)
			b, inB = partition(t, g, "orders", 1, fine)
			if !a.State().Storm.Active || !b.State().Storm.Active {
				t.Error("the storm does not go on")
			}
			c.close(a, inA)
			for m := range 180 {
				inA <- m
				inB <- m
				time.Sleep(time.Second)
			}
			for _, s := range []*Source[int]{a, b} {
				if st := s.State(); st.Storm.Active || st.Breaker.State != breaker.Closed {
					t.Errorf("%s after 3 min of successes: %s, breaker %s", s.Name(), st.Storm, st.Breaker.State)
				}
			}
			h.kill(g)
		})
	}
}

// Partitions that were open long ago, and are idle, do not hold their topic after a restart.
func TestIdlePartitionsHoldNothingAfterARestart(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		h := newStateHost(t, Policy{})
		var calls atomic.Int64
		start := func() (g *Guard, in [4]chan<- int) {
			g = h.guard(Config{})
			for i := range in {
				_, in[i] = partition(t, g, "orders", i, func(m int) error {
					if i < 2 {
						return down(m)
					}
					calls.Add(1)
					return nil
				})
			}
			return g, in
		}
		g, in := start()
		for m := range 3 {
			in[0] <- m
			in[1] <- m
		}
		time.Sleep(30 * time.Second)
		for life := range 5 { // partitions 0 and 1 are idle from now on
			h.kill(g)
			time.Sleep(time.Minute)
			g, in = start()
			calls.Store(0)
			for m := range 10 {
				in[2] <- m
				in[3] <- m
			}
			time.Sleep(time.Second)
			if n := calls.Load(); n != 20 {
				t.Fatalf("life %d: %d of 20 messages of the healthy partitions are handled in 1s", life, n)
			}
		}
		h.kill(g)
	})
}

// The file is written while sources end and open: what goes from one epoch to the next is
// shared with nobody.
func TestSaveBesideEpochs(t *testing.T) {
	h := &stateHost{t: t, dir: t.TempDir()}
	g := h.guard(Config{Policy: Policy{NoBreaker: true, Retry: Retry{Base: time.Hour, Max: time.Hour}}})
	saved := make(chan struct{})
	stop := make(chan struct{})
	go func() {
		defer close(saved)
		for {
			select {
			case <-stop:
				return
			default:
				g.saver.save()
			}
		}
	}()
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for range 100 {
				s, in := partition(t, g, "orders", i, func(m int) error {
					if m%2 == 0 {
						return nil
					}
					return errHopeless
				})
				for m := range 40 {
					in <- m
				}
				for s.Account().Received < 40 {
					time.Sleep(100 * time.Microsecond)
				}
				s.End(t.Context(), ReasonRebalance)
			}
		})
	}
	wg.Wait()
	s, in := partition(t, g, "orders", 0, func(int) error { return errHopeless })
	in <- 99 // it has never failed before, and is no dead letter yet
	for s.State().Tally.Failures == 0 {
		time.Sleep(100 * time.Microsecond)
	}
	s.End(t.Context(), ReasonRebalance)
	close(stop)
	<-saved
	if len(g.kept["orders/0"].suspects) == 0 {
		t.Error("no message is remembered")
	}
	if _, err := g.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// A source on hold has its file written for its age alone.
func TestHeldSourceIsSeldomWritten(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		h := newStateHost(t, Policy{})
		p := h.start(down)
		p.send(1, 2, 3)
		time.Sleep(time.Minute)
		p.s.Pause(0)
		time.Sleep(90 * time.Second) // the outcomes of probes leave the storm's window
		writes := 0
		var last os.FileInfo
		for range 100 {
			time.Sleep(time.Second)
			is, err := os.Stat(filepath.Join(h.dir, "stormguard.state"))
			if err != nil {
				t.Fatal(err)
			}
			if last == nil || !os.SameFile(last, is) || !last.ModTime().Equal(is.ModTime()) {
				writes++
			}
			last = is
		}
		if writes < 5 || writes > 12 {
			t.Errorf("%d writes in 100 s in which nothing changed, want one each 10 s", writes)
		}
		p.close()
	})
}

// What a person has to end is told of at WARN, and nothing else is.
func TestRestartIsLoud(t *testing.T) {
	const paused, forced = "a source is paused since before the restart", "a breaker begins as the process before left it"
	for _, c := range []struct {
		name  string
		leave func(*Source[int]) error
		away  time.Duration
		later time.Duration // the source is opened, after the start
		says  string
	}{
		{"paused", func(s *Source[int]) error { s.Pause(0); return nil }, time.Second, 0, paused},
		{"paused, opened late", func(s *Source[int]) error { s.Pause(0); return nil }, time.Second, 3 * time.Hour, paused},
		{"a pause that is over", func(s *Source[int]) error { s.Pause(time.Minute); return nil }, time.Hour, 0, ""},
		{"forced", func(s *Source[int]) error { return s.ForceOpen(0) }, time.Hour, 0, forced},
		{"a force that is over", func(s *Source[int]) error { return s.ForceOpen(time.Minute) }, time.Hour, 0, ""},
	} {
		bubble(t, c.name, func(t *testing.T) {
			h := newStateHost(t, Policy{})
			g := h.guard(Config{})
			s, _ := partition(t, g, "orders", 0, fine)
			if err := c.leave(s); err != nil {
				t.Fatal(err)
			}
			time.Sleep(saveEvery)
			h.kill(g)
			time.Sleep(c.away)
			h.said()
			g = h.guard(Config{})
			_, in := partition(t, g, "other", 0, fine)
			for range int(c.later / (10 * time.Second)) { // so that the sweeper looks
				in <- 1
				time.Sleep(10 * time.Second)
			}
			partition(t, g, "orders", 0, fine)
			var warned []string
			for line := range strings.Lines(h.said()) {
				if strings.Contains(line, "level=WARN") {
					warned = append(warned, line)
				}
			}
			if c.says == "" && len(warned) > 0 || c.says != "" && (len(warned) != 1 || !strings.Contains(warned[0], c.says) || !strings.Contains(warned[0], "help=")) {
				t.Errorf("at WARN: %q, want %q", warned, c.says)
			}
			h.kill(g)
		})
	}
}

// Breakers that nobody asks for any more are forgotten, but not an operator's force.
func TestForgottenScopes(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		h := newStateHost(t, Policy{})
		for life := range 10 {
			g := h.guard(Config{})
			s, in := partition(t, g, "orders", life, down)
			if life == 0 {
				if err := s.ForceOpen(0); err != nil {
					t.Fatal(err)
				}
			}
			for m := range 5 {
				in <- m
			}
			time.Sleep(time.Minute)
			h.kill(g)
			time.Sleep(3 * time.Hour)
		}
		g := h.guard(Config{})
		if len(g.restored) != 1 || len(g.kept) != 0 {
			t.Errorf("%d scopes and %d sources are remembered, want the forced one", len(g.restored), len(g.kept))
		}
		s, _ := partition(t, g, "orders", 0, fine)
		if st := s.State().Breaker; !st.Forced {
			t.Errorf("it begins as %+v", st)
		}
		h.kill(g)
	})
}
