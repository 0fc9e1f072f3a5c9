// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package guard

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/statefile"
)

// stateHost is a host, on which processes with one directory follow each other.
type stateHost struct {
	t      *testing.T
	dir    string
	boot   string
	booted time.Time
	policy Policy

	mu  sync.Mutex
	log bytes.Buffer
}

func newStateHost(t *testing.T, p Policy) *stateHost {
	return &stateHost{t: t, dir: filepath.Join(t.TempDir(), "state"), boot: "first", booted: time.Now().Add(-time.Hour), policy: p}
}

func (h *stateHost) Write(b []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.log.Write(b)
}

// said takes what was logged since the last call.
func (h *stateHost) said() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	defer h.log.Reset()
	return h.log.String()
}

func (h *stateHost) now() statefile.Now {
	return statefile.Now{Boot: h.boot, Up: time.Since(h.booted), Wall: time.Now()}
}

// stateProcess is one of its processes, with one source.
type stateProcess struct {
	h       *stateHost
	g       *Guard
	s       *Source[int]
	port    *testPort
	letters *testWriter
	in      chan int
	ran     chan struct{}

	mu    sync.Mutex
	calls []int
}

func (h *stateHost) start(handler func(int) error) *stateProcess {
	h.t.Helper()
	p := &stateProcess{h: h, port: &testPort{}, letters: &testWriter{}, in: make(chan int, 1000), ran: make(chan struct{})}
	var err error
	log := slog.New(slog.NewTextHandler(h, nil))
	if p.g, err = New(Config{Policy: h.policy, StateDir: h.dir}, WithLogger(log), func(g *Guard) { g.host = h.now }); err != nil {
		h.t.Fatal(err)
	}
	p.s, err = Open(p.g, SourceConfig{Name: "orders/0", Destination: "orders", Partition: "0", DeadLetters: p.letters}, Limits{EndsWithInput: true}, p.port,
		func(_ context.Context, m int) error {
			p.mu.Lock()
			p.calls = append(p.calls, m)
			p.mu.Unlock()
			return handler(m)
		})
	if err != nil {
		h.t.Fatal(err)
	}
	go func() { defer close(p.ran); _ = p.s.Run(h.t.Context(), p.in) }()
	return p
}

func (p *stateProcess) send(ms ...int) {
	for _, m := range ms {
		p.in <- m
	}
}

func (p *stateProcess) called() []int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.calls)
}

// kill ends the process such that the next finds the file as it is now.
func (p *stateProcess) kill() {
	p.h.t.Helper()
	path := filepath.Join(p.h.dir, "stormguard.state")
	b, err := os.ReadFile(path)
	if err != nil {
		p.h.t.Fatal(err)
	}
	p.close()
	if err := os.WriteFile(path, b, 0o600); err != nil {
		p.h.t.Fatal(err)
	}
}

func (p *stateProcess) close() {
	p.h.t.Helper()
	if _, err := p.g.Close(p.h.t.Context()); err != nil {
		p.h.t.Error(err)
	}
	<-p.ran
	if err := p.s.Account().Check(); err != nil {
		p.h.t.Error(err)
	}
}

var (
	errNoAnswer = &netRefused{}
	errHopeless = errors.New("no such order")
)

// netRefused is an error of a dependency that is down.
type netRefused struct{}

func (*netRefused) Error() string { return "connection refused" }

func down(int) error   { return Unavailable(errNoAnswer) }
func fine(int) error   { return nil }
func poison(int) error { return Permanent(errHopeless) }

// A process that is killed again and again spends its budget once.
func TestBudgetOverKills(t *testing.T) {
	for name, p := range map[string]Policy{
		"default":   {Budget: dlq.BudgetConfig{PermanentBalance: 5, FreeEvery: time.Hour}},
		"low rates": {Storm: dlq.StormConfig{ErrorRate: 0.01}, Budget: dlq.BudgetConfig{Earn: 0.02, PermanentEarn: 0.02, PermanentBalance: 5, FreeEvery: time.Hour}},
	} {
		budgetOverKills(t, name, p)
	}
}

func budgetOverKills(t *testing.T, name string, policy Policy) {
	t.Helper()
	bubble(t, name, func(t *testing.T) {
		h := newStateHost(t, policy)
		letters := 0
		for life := range 10 {
			p := h.start(poison)
			p.s.Resume()
			p.s.Pause(time.Millisecond) // the first write
			time.Sleep(saveEvery / 2)
			for m := range 3 {
				p.send(10*life + m)
			}
			time.Sleep(saveSoon + 10*time.Millisecond)
			letters += len(p.letters.bodies())
			p.kill()
		}
		if letters != 5 {
			t.Errorf("%d dead letters of a balance of 5", letters)
		}
		time.Sleep(time.Hour)
		p := h.start(poison) // one credit is free by now
		p.send(1, 2, 3)
		time.Sleep(time.Second)
		if n := len(p.letters.bodies()); n != 1 {
			t.Errorf("%d dead letters an hour later, want the free one", n)
		}
		p.s.GrantCredits(1)
		time.Sleep(time.Second)
		p.s.GrantCredits(7)
		time.Sleep(time.Second)
		p.kill()
		p = h.start(poison)
		p.send(1, 2, 3, 4, 5, 6, 7, 8, 9)
		time.Sleep(time.Second)
		if n := len(p.letters.bodies()); n != 6 {
			t.Errorf("%d dead letters of the 6 that were granted and not spent", n)
		}
		p.close()
	})
}

// An open breaker is open in the next process for what remains of its period; one that is
// old, or of another boot, lets a probe through, and goes on at its level.
func TestBreakerOverKills(t *testing.T) {
	for _, c := range []struct {
		name string
		away time.Duration
		boot string
		cfg  breaker.Config
	}{
		{"at once", 0, "first", breaker.Config{}},
		{"after a second", time.Second, "first", breaker.Config{}},
		{"after a minute", time.Minute, "first", breaker.Config{}},
		{"after a minute of a longer period", time.Minute, "first", breaker.Config{Base: 10 * time.Minute, Cap: 10 * time.Minute}},
		{"after a reboot", time.Second, "second", breaker.Config{}},
	} {
		bubble(t, c.name, func(t *testing.T) {
			h := newStateHost(t, Policy{Breaker: c.cfg})
			p := h.start(down)
			p.send(1, 2, 3)
			time.Sleep(time.Minute)
			for p.s.State().Breaker.State != breaker.Open || p.s.State().Breaker.Until-p.g.now() < 10*time.Second {
				time.Sleep(10 * time.Millisecond)
			}
			time.Sleep(saveEvery)
			left := p.s.State().Breaker.Until - p.g.now() - c.away
			level := p.s.State().Breaker.BackoffLevel
			p.kill()
			time.Sleep(c.away)
			h.boot = c.boot

			p = h.start(down)
			p.send(1, 2, 3)
			time.Sleep(time.Second)
			st := p.s.State().Breaker
			switch probed := len(p.called()) > 0; {
			case st.State != breaker.Open || st.BackoffLevel < level:
				t.Errorf("it begins as %+v; want open, level %d", st, level)
			case left > time.Second && c.away < stateFresh && c.boot == "first":
				if probed {
					t.Errorf("called %v within the open period", p.called())
				}
				time.Sleep(left)
				if n := len(p.called()); n == 0 {
					t.Error("no probe after the open period")
				}
			case !probed:
				t.Error("not probed at once")
			}
			if n := len(p.called()); n > 2 {
				t.Errorf("%d calls of a dependency that is down", n)
			}
			p.close()
		})
	}
}

// A restart after the dependency came back: the source drains as it would have.
func TestRecoveryOverKills(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		h := newStateHost(t, Policy{})
		p := h.start(down)
		p.send(1, 2, 3)
		time.Sleep(2 * time.Minute)
		p.kill()
		p = h.start(fine)
		p.send(1, 2, 3, 4, 5)
		time.Sleep(30 * time.Second)
		if got := p.called(); !slices.Equal(got, []int{1, 2, 3, 4, 5}) {
			t.Errorf("handled %v within a period of 30s", got)
		}
		p.close()
	})
}

// Attempts count over processes: poison of a source that is killed between them is
// dead-lettered, with its history.
func TestAttemptsOverKills(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		h := newStateHost(t, Policy{Retry: Retry{Base: time.Second, Max: time.Second}})
		start := time.Now()
		attempts, lives := 0, 0
		for time.Since(start) < time.Hour {
			lives++
			p := h.start(func(m int) error {
				if m == 1 {
					return errHopeless
				}
				return nil
			})
			p.send(0, 1, 2, 3)
			time.Sleep(1500 * time.Millisecond)
			for _, m := range p.called() {
				if m == 1 {
					attempts++
				}
			}
			done := len(p.letters.bodies()) > 0
			if done {
				// What was tried after the last write of a life is forgotten.
				if r := p.letters.recs[0]; r.Attempts < 5 || r.Attempts > attempts || r.FirstFailed.Sub(start) > 2*time.Second || len(r.History) == 0 {
					t.Errorf("the letter tells of %d attempts since %v, of %d since the first process", r.Attempts, r.FirstFailed.Sub(start), attempts)
				}
			}
			p.kill()
			if done {
				break
			}
		}
		if lives < 2 || time.Since(start) > time.Minute {
			t.Errorf("dead-lettered in life %d, after %v", lives, time.Since(start))
		}
	})
}

// Where the dependency is flaky a message has as many attempts after a restart, too.
func TestFlakinessOverKills(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		h := newStateHost(t, Policy{Order: OrderNone, NoBreaker: true, Retry: Retry{Base: 400 * time.Millisecond, Max: 400 * time.Millisecond}})
		var calls atomic.Int64  // of message 0
		again := map[int]bool{} // the handler's
		m := 1
		life := func(until func() bool, unlucky ...int) {
			t.Helper()
			p := h.start(func(m int) error {
				fails := m%2 == 1 && !again[m]
				if again[m] = true; m == 0 {
					fails = calls.Add(1) <= 14
				}
				if fails {
					return errHopeless
				}
				return nil
			})
			p.send(unlucky...)
			for ; !until(); m++ {
				p.send(m)
				time.Sleep(10 * time.Millisecond)
			}
			if n := len(p.letters.bodies()); n > 0 {
				t.Errorf("%d letters after %d calls of the unlucky message", n, calls.Load())
			}
			p.kill()
		}
		life(func() bool { return calls.Load() >= 8 || calls.Load() == 0 && m > 10_000 }, 0)
		life(func() bool { return calls.Load() >= 15 || m > 10_000 }, 0)
		if calls.Load() != 15 {
			t.Errorf("%d calls of the unlucky message", calls.Load())
		}
	})
}

// Guesses go on at the pace of the outage: a crash loop does not make one in each life.
func TestGuessesOverKills(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		h := newStateHost(t, Policy{})
		letters, lives := 0, 20
		for life := range lives {
			p := h.start(func(int) error { return errHopeless })
			p.send(life)
			time.Sleep(time.Minute)
			letters += len(p.letters.bodies())
			p.kill()
		}
		if letters < 1 || letters > 6 {
			t.Errorf("%d guesses in %d lives of a minute; their distance doubles from 10s", letters, lives)
		}
	})
}

// Time that a handler asked for is not called in by a restart.
func TestBackoffOverKills(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		h := newStateHost(t, Policy{})
		start := time.Now()
		p := h.start(func(int) error { return Backoff(errHopeless, start.Add(10*time.Minute)) })
		p.send(1)
		time.Sleep(2 * saveEvery)
		p.kill()
		p = h.start(fine)
		p.send(1)
		time.Sleep(time.Until(start.Add(10*time.Minute - time.Second)))
		if n := len(p.called()); n != 0 {
			t.Errorf("%d calls in the time that was asked for", n)
		}
		if st := p.s.State(); !strings.Contains(st.Holds[0].Detail, errHopeless.Error()) {
			t.Errorf("held by %+v", st.Holds)
		}
		time.Sleep(3 * time.Second)
		if n := len(p.called()); n != 1 {
			t.Errorf("%d calls after it", n)
		}
		p.close()
	})
}

// An operator's pause and force outlive the process, and are told of.
func TestOperatorsWordOverKills(t *testing.T) {
	bubble(t, "pause", func(t *testing.T) {
		h := newStateHost(t, Policy{})
		p := h.start(fine)
		p.s.Pause(time.Minute)
		time.Sleep(saveSoon + 10*time.Millisecond)
		p.kill()
		h.said()
		time.Sleep(20 * time.Second)
		p = h.start(fine)
		p.send(1)
		if said := h.said(); !strings.Contains(said, "paused since before the restart") || !strings.Contains(said, "for=40s") {
			t.Errorf("the log says %s", said)
		}
		time.Sleep(39 * time.Second)
		if n := len(p.called()); n != 0 {
			t.Errorf("%d calls in a pause", n)
		}
		time.Sleep(2 * time.Second)
		if n := len(p.called()); n != 1 {
			t.Errorf("%d calls after the pause", n)
		}
		p.s.Pause(0)
		p.s.Resume()
		time.Sleep(saveSoon + 10*time.Millisecond)
		p.kill()
		p = h.start(fine)
		p.send(1)
		time.Sleep(time.Second)
		if n := len(p.called()); n != 1 {
			t.Errorf("%d calls after it was resumed", n)
		}
		p.close()
	})
	bubble(t, "force", func(t *testing.T) {
		h := newStateHost(t, Policy{})
		p := h.start(fine)
		if err := p.s.ForceOpen(10 * time.Minute); err != nil {
			t.Fatal(err)
		}
		time.Sleep(saveSoon + 10*time.Millisecond)
		p.kill()
		time.Sleep(5 * time.Minute)
		p = h.start(fine)
		p.send(1)
		time.Sleep(4*time.Minute + 55*time.Second)
		if n := len(p.called()); n != 0 {
			t.Errorf("%d calls under a force", n)
		}
		time.Sleep(10 * time.Second)
		if n := len(p.called()); n != 1 {
			t.Errorf("%d calls after the force", n)
		}
		p.close()
	})
	bubble(t, "function", func(t *testing.T) {
		h := newStateHost(t, Policy{})
		p := h.start(fine)
		f, err := Protect(p.g, SourceConfig{Name: "pay"}, func(context.Context, int) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		f.Pause(0)
		time.Sleep(saveSoon + 10*time.Millisecond)
		p.kill()
		p = h.start(fine)
		if f, err = Protect(p.g, SourceConfig{Name: "pay"}, func(context.Context, int) error { return nil }); err != nil {
			t.Fatal(err)
		}
		var held *HeldError
		if err := f.Do(t.Context(), 1); !errors.As(err, &held) {
			t.Errorf("a call in a pause: %v", err)
		}
		f.Resume()
		if err := f.Do(t.Context(), 1); err != nil {
			t.Error(err)
		}
		p.close()
	})
}

// A storm goes on in the next process, and ends with what its probes say.
func TestStormOverKills(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		h := newStateHost(t, Policy{})
		p := h.start(down)
		p.send(1, 2, 3, 4, 5)
		for start := time.Now(); !p.s.State().Storm.Active; time.Sleep(time.Second) {
			if time.Since(start) > 10*time.Minute {
				t.Fatal("no storm in 10 min")
			}
		}
		began := p.s.State().Storm.Since - p.g.now()
		time.Sleep(saveEvery)
		p.kill()
		p = h.start(fine)
		p.send(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
		synctest.Wait()
		if st := p.s.State().Storm; !st.Active || (st.Since-p.g.now()-began).Abs() > 2*time.Second {
			t.Errorf("the storm began %v ago, before the restart %v: %+v", p.g.now()-st.Since, -began, st)
		}
		time.Sleep(3 * time.Minute)
		if st := p.s.State(); st.Storm.Active || st.Breaker.State != breaker.Closed {
			t.Errorf("3 min after the recovery: %+v", st)
		}
		p.close()
	})
}

// A state that is damaged or another group's is named, kept, and not taken up.
func TestStateThatIsNotTakenUp(t *testing.T) {
	for _, c := range []struct {
		name, says string
		spoil      func(t *testing.T, h *stateHost, path string)
	}{
		{"damaged", "damaged", func(t *testing.T, _ *stateHost, path string) {
			if err := os.Truncate(path, 100); err != nil {
				t.Fatal(err)
			}
		}},
		{"another group", "it is of group", func(t *testing.T, h *stateHost, _ string) {
			f, _, err := statefile.Open(h.dir, h.now)
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(f.Write([]byte(`{"clock":1,"state":{"group":"other","sources":{"orders/0":{"paused":true,"pause_ends":9223372036854775807}}}}`)), f.Close()); err != nil {
				t.Fatal(err)
			}
		}},
		{"no state", "invalid character", func(t *testing.T, h *stateHost, _ string) {
			f, _, err := statefile.Open(h.dir, h.now)
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(f.Write([]byte(`what`)), f.Close()); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		bubble(t, c.name, func(t *testing.T) {
			h := newStateHost(t, Policy{})
			p := h.start(fine)
			p.s.Pause(0)
			time.Sleep(saveSoon + 10*time.Millisecond)
			p.kill()
			c.spoil(t, h, filepath.Join(h.dir, "stormguard.state"))
			h.said()
			p = h.start(fine)
			if said := h.said(); !strings.Contains(said, "level=WARN") || !strings.Contains(said, c.says) {
				t.Errorf("the log says %s", said)
			}
			p.send(1)
			time.Sleep(time.Second)
			if n := len(p.called()); n != 1 {
				t.Errorf("%d calls", n)
			}
			p.close()
		})
	}
}

// A rule of the quarantine outlives the process, to the instant at which it ends, and one
// that was taken off does not come back: a message that kills its process is not handled by
// the next. A list that is shared is left to those that share it.
func TestQuarantineOverKills(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		h := newStateHost(t, Policy{})
		open := func(g *Guard) (in chan int, calls func() []int, letters *testWriter) {
			var mu sync.Mutex
			var called []int
			letters, in = &testWriter{}, make(chan int, 10)
			s, err := Open(g, SourceConfig{Name: "orders/0", Destination: "orders", DeadLetters: letters}, Limits{EndsWithInput: true}, Port[int](&tenantPort{}), func(_ context.Context, m int) error {
				mu.Lock()
				defer mu.Unlock()
				called = append(called, m)
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			go func() { _ = s.Run(t.Context(), in) }()
			return in, func() []int {
				mu.Lock()
				defer mu.Unlock()
				return slices.Clone(called)
			}, letters
		}
		binary := dlq.Rule{Kind: dlq.RuleKey, Value: "\xff\x00k"}
		g := h.guard(Config{})
		for _, e := range []dlq.QuarantineEntry{
			{Rule: tenantRule(1), By: "ann", Why: "ticket 7", Until: time.Now().Add(time.Hour)},
			{Rule: tenantRule(2)},
			{Rule: binary, Until: time.Now().Add(dlq.MaxQuarantineFor)},
		} {
			if err := g.Quarantine().Add(e); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(saveEvery + 10*time.Millisecond) // no source, no message
		if err := g.Quarantine().Remove(tenantRule(2), "ann"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(saveEvery + 10*time.Millisecond)
		want := g.Quarantine().Entries()
		h.kill(g)
		h.said()

		g = h.guard(Config{})
		if said := h.said(); !strings.Contains(said, "level=WARN msg=\"messages are in quarantine since before the restart\" rules=2") {
			t.Errorf("the log says %s", said)
		}
		got := g.Quarantine().Entries()
		if !slices.EqualFunc(got, want, func(a, b dlq.QuarantineEntry) bool {
			return a.Rule == b.Rule && a.By == b.By && a.Why == b.Why && a.At.Equal(b.At) && a.Until.Equal(b.Until)
		}) {
			t.Errorf("%v, want %v", got, want)
		}
		in, calls, letters := open(g)
		in <- 8 // tenant 1
		in <- 9 // tenant 2
		time.Sleep(time.Second)
		if called, dead := calls(), letters.bodies(); !slices.Equal(called, []int{9}) || len(dead) != 1 {
			t.Errorf("%v handled, %q dead-lettered, want 9 and 8", called, dead)
		}
		h.kill(g)
		time.Sleep(time.Hour)
		h.said()

		g = h.guard(Config{})
		if said, entries := h.said(), g.Quarantine().Entries(); len(entries) != 1 || entries[0].Rule != binary || !strings.Contains(said, "rules=1") || strings.Count(said, "level=WARN") != 1 {
			t.Errorf("%v when the time of one is over; the log says %s", entries, said)
		}
		h.kill(g)
		h.said()

		shared, err := New(Config{})
		if err != nil {
			t.Fatal(err)
		}
		g = h.guard(Config{}, WithQuarantine(shared.Quarantine()))
		if said, entries := h.said(), g.Quarantine().Entries(); len(entries) != 0 || !strings.Contains(said, "it shares a list now") {
			t.Errorf("%v in a list that others share; the log says %s", entries, said)
		}
		h.kill(g)
		if _, err := shared.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// A second process is refused, and so is one directory for two things; a Guard without one
// writes nothing.
func TestStateDirIsOneGuards(t *testing.T) {
	dir := t.TempDir()
	g, err := New(Config{StateDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := New(Config{StateDir: dir}); err == nil || !strings.Contains(err.Error(), "Config.StateDir") || !strings.Contains(err.Error(), "locked") {
		t.Errorf("a second one: %v", err)
	}
	if _, err := g.Close(t.Context()); err != nil {
		t.Error(err)
	}
	next, err := New(Config{StateDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "stormguard.state")
	was, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	g.saver.last = nil // it would write again
	if _, err := g.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if is, err := os.Stat(path); err != nil || !os.SameFile(was, is) {
		t.Errorf("a second Close wrote where the next process is: %v", err)
	}
	if _, err := next.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := New(Config{StateDir: dir, SpillDir: dir + "/"}); err == nil || !strings.Contains(err.Error(), "Config.SpillDir") {
		t.Errorf("one for both: %v", err)
	}
	if _, err := New(Config{StateDir: filepath.Join(dir, "not", "there")}); err == nil || !strings.Contains(err.Error(), "Config.StateDir") {
		t.Errorf("in a directory that is not there: %v", err)
	}
}

// A disk that refuses is said once, stops no message, and is tried again.
func TestStateOnADiskThatRefuses(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		h := newStateHost(t, Policy{})
		p := h.start(func(m int) error {
			if m < 0 {
				return poison(m)
			}
			return nil
		})
		block := filepath.Join(h.dir, "stormguard.state.next")
		if err := os.Mkdir(block, 0o700); err != nil {
			t.Fatal(err)
		}
		for m := range 20 {
			p.send(m, -m-1)
			time.Sleep(time.Second)
		}
		if n := strings.Count(h.said(), "cannot be written"); n != 1 || len(p.letters.bodies()) != 20 || len(p.called()) != 40 {
			t.Errorf("said %d times; %d dead letters, %d calls", n, len(p.letters.bodies()), len(p.called()))
		}
		if err := os.Remove(block); err != nil {
			t.Fatal(err)
		}
		p.send(-100)
		time.Sleep(time.Second)
		if said := h.said(); !strings.Contains(said, "written again") {
			t.Errorf("the log says %s", said)
		}
		if err := os.Mkdir(block, 0o700); err != nil {
			t.Fatal(err)
		}
		p.send(-101)
		time.Sleep(time.Second)
		if _, err := p.g.Close(t.Context()); err == nil || !strings.Contains(err.Error(), "Config.StateDir") {
			t.Errorf("Close says %v", err)
		}
		<-p.ran
	})
}

// A source at rest writes nothing, however busy it is.
func TestStateAtRestIsNotWritten(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		h := newStateHost(t, Policy{})
		p := h.start(fine)
		path := filepath.Join(h.dir, "stormguard.state")
		p.send(1)
		time.Sleep(saveEvery)
		was, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		for m := range 50 {
			p.send(m)
			time.Sleep(time.Second)
		}
		if is, err := os.Stat(path); err != nil || !os.SameFile(was, is) || is.Size() > 300 {
			t.Errorf("written anew, or large: %+v, %v", is, err)
		}
		p.close()
	})
}

// Whatever is in the file, the next process runs, and no credit is minted.
func FuzzState(f *testing.F) {
	f.Add([]byte(`{}`))
	f.Add([]byte(`{"clock":1000000000,"state":{"group":"default","scopes":[{"path":["default","orders","0"],"state":1,"cause":"rate","until":5000000000,"down":1,"level":3}],"sources":{"orders/0":{"budget":{"has":[0,0],"free":[0,0]},"budget_of":{},"guesses":2,"guessed_at":5,"asked":7000000000,"asked_for":"busy","storm":{"active":true,"since":1,"failed":9,"ok":1},"failed":{"x/1":{"tries":3,"attempts":3,"first_failed":1,"at":2,"failures":[{"n":1,"at":1,"type":"T","message":"m"}]}}}}}}`))
	f.Add([]byte(`{"clock":-9223372036854775808,"state":{"group":"default","scopes":[{"path":[],"state":9,"until":-9223372036854775808,"level":-1}],"sources":{"orders/0":{"at":9223372036854775807,"budget":{"has":[18446744073709551615,1],"free":[9223372036854775807,-9223372036854775808],"gift":18446744073709551615},"budget_of":{"balance":-1},"paused":true,"pause_ends":-9223372036854775808}}}}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		bubble(t, "", func(t *testing.T) {
			h := newStateHost(t, Policy{})
			f, _, err := statefile.Open(h.dir, h.now)
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(f.Write(body), f.Close()); err != nil {
				t.Fatal(err)
			}
			p := h.start(poison)
			p.s.Resume()
			if p.s.ForceClosed() != nil {
				t.Error("no breaker")
			}
			ms := make([]int, 0, 600)
			for m := range 600 {
				ms = append(ms, m)
			}
			p.send(ms...)
			time.Sleep(time.Minute)
			if n := len(p.letters.bodies()); n > 501 && !bytes.Contains(body, []byte("gift")) {
				t.Errorf("%d dead letters of a balance of 500", n)
			}
			p.close()
			p = h.start(fine)
			p.close()
		})
	})
}
