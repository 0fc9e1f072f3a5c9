// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/breaker"
)

type scopeSeen struct {
	scope   string
	tripped bool
	acked   uint64
}

// scopeRig is two topics of two partitions, each a source that is fed for 20s: the bad
// one 50 messages a second, the others one in 10 s, so that its failures are a run.
func scopeRig(t *testing.T, cfg Config, bad string) map[string]scopeSeen {
	t.Helper()
	seen := make(map[string]scopeSeen)
	synctest.Test(t, func(t *testing.T) {
		g, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var ins []chan int
		before := make(map[string]uint64)
		for _, c := range []SourceConfig{
			{Name: "a/0", Destination: "a", Partition: "0"},
			{Name: "a/1", Destination: "a", Partition: "1"},
			{Name: "b/0", Destination: "b", Partition: "0"},
			{Name: "b/1", Destination: "b", Partition: "1"},
		} {
			c.DeadLetters = &testWriter{}
			s, err := Open(g, c, Limits{}, &testPort{}, func(context.Context, int) error {
				if c.Name == bad {
					return errDown
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			before[c.Name] = s.State().Breaker.Generation
			in := make(chan int)
			ins = append(ins, in)
			go func() { _ = s.Run(ctx, in) }()
		}
		for k := range 1000 {
			for i, in := range ins {
				if k%500 > 0 && i > 0 {
					continue
				}
				select {
				case in <- i:
				default: // its window is full
				}
			}
			time.Sleep(20 * time.Millisecond)
		}
		for _, s := range g.Sources() {
			st := s.State()
			seen[s.Name()] = scopeSeen{st.Breaker.Name, st.Breaker.Generation > before[s.Name()], st.Account.Acked}
		}
		cancel()
		if _, err := g.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	return seen
}

// One breaker counts over what Scope says, and holds no more and no less.
func TestScope(t *testing.T) {
	for _, tt := range []struct {
		scope Scope
		names string // of the breakers of a/0, a/1, b/0, b/1
		hit   string // sources that a/0's failures hold
	}{
		{ScopePartition, "g/a/0 g/a/1 g/b/0 g/b/1", "a/0"},
		{ScopeTopic, "g/a g/a g/b g/b", "a/0 a/1"},
		{ScopeGroup, "g g g g", "a/0 a/1 b/0 b/1"},
	} {
		t.Run(tt.scope.String(), func(t *testing.T) {
			seen := scopeRig(t, Config{Group: "g", Scope: tt.scope}, "a/0")
			var names, hit []string
			for _, source := range []string{"a/0", "a/1", "b/0", "b/1"} {
				names = append(names, seen[source].scope)
				if seen[source].tripped {
					hit = append(hit, source)
				}
			}
			if got := strings.Join(names, " "); got != tt.names {
				t.Errorf("breakers %s, want %s", got, tt.names)
			}
			if got := strings.Join(hit, " "); got != tt.hit {
				t.Errorf("held: %s, want %s", got, tt.hit)
			}
			if n := seen["a/0"].acked; n > 0 {
				t.Errorf("a/0 acked %d messages, all of which fail", n)
			}
		})
	}
}

// Sources that share a breaker have deliveries of their own: a message of each of two
// sources, failing over and over, is an outage and not one poison.
func TestSharedScopeTellsDeliveriesApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, err := New(Config{Scope: ScopeGroup})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ins := make(map[string]chan int)
		for _, name := range []string{"a", "b"} {
			s, err := Open(g, SourceConfig{Name: name}, Limits{}, &testPort{}, func(context.Context, int) error { return errDown })
			if err != nil {
				t.Fatal(err)
			}
			in := make(chan int)
			ins[name] = in
			go func() { _ = s.Run(ctx, in) }()
		}
		ins["a"] <- 1
		ins["b"] <- 1
		time.Sleep(5 * time.Second)
		if st := g.Source("a").State(); st.Breaker.State == breaker.Closed {
			t.Errorf("two deliveries failed on and on, and the breaker is %v, run %d", st.Breaker.State, st.Breaker.Run)
		}
		cancel()
		_, _ = g.Close(context.WithoutCancel(t.Context()))
	})
}

// Neither do functions that share a breaker mix up theirs.
func TestSharedScopeTellsCallsApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, err := New(Config{Scope: ScopeGroup})
		if err != nil {
			t.Fatal(err)
		}
		funcs := make(map[string]*Func[int])
		for _, name := range []string{"a", "b", "c"} {
			if funcs[name], err = Protect(g, SourceConfig{Name: name}, func(context.Context, int) error {
				if name == "c" {
					return nil
				}
				return errDown
			}); err != nil {
				t.Fatal(err)
			}
		}
		var calls sync.WaitGroup
		for _, name := range []string{"a", "b"} {
			calls.Go(func() { _ = funcs[name].Do(t.Context(), 1) })
		}
		synctest.Wait()
		_ = funcs["c"].Do(t.Context(), 1) // ends the run of first attempts
		calls.Wait()
		if st := funcs["a"].State(); st.Breaker.State == breaker.Closed {
			t.Errorf("two calls failed on and on, and the breaker is %v, run %d", st.Breaker.State, st.Breaker.Run)
		}
		_, _ = g.Close(t.Context())
	})
}

func TestScopeWords(t *testing.T) {
	for scope, word := range map[Scope]string{ScopePartition: "partition", ScopeTopic: "topic", ScopeGroup: "group"} {
		text, err := scope.MarshalText()
		if err != nil || string(text) != word {
			t.Errorf("%d is written %q, %v", scope, text, err)
		}
		var back Scope
		if err := back.UnmarshalText([]byte(word)); err != nil || back != scope {
			t.Errorf("%q is read as %v, %v", word, back, err)
		}
	}
	var s Scope
	if err := s.UnmarshalText([]byte("queue")); err == nil || !strings.Contains(err.Error(), `"queue"`) {
		t.Errorf("queue: %v", err)
	}
	if _, err := Scope(9).MarshalText(); err == nil {
		t.Error("9 is written")
	}
	if err := (Config{Scope: 9}).Validate(); err == nil || !strings.Contains(err.Error(), "Config.Scope: 9") {
		t.Errorf("9 is valid: %v", err)
	}
	if _, err := New(Config{Scope: 9}); err == nil || errors.Is(err, ErrClosed) {
		t.Errorf("New takes 9: %v", err)
	}
}

// A source whose scope has no probe left is woken as soon as one is, not when the
// lease of the other's would have ended.
func TestProbeOfAnotherSourceIsAwaited(t *testing.T) {
	for name, outcome := range map[string]error{"success": nil, "ignored": Ignore(errDown), "backoff": Backoff(errDown, time.Time{})} {
		bubble(t, name, func(t *testing.T) {
			g, err := New(Config{Scope: ScopeGroup})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var sources []*Source[int]
			for _, name := range []string{"slow", "quick"} {
				calls := 0
				s, err := Open(g, SourceConfig{Name: name}, Limits{}, &testPort{}, func(context.Context, int) error {
					if calls++; name == "slow" && calls == 1 {
						time.Sleep(5 * time.Second)
						return outcome
					}
					return nil
				})
				if err != nil {
					t.Fatal(err)
				}
				sources = append(sources, s)
				go func() { _ = s.Run(ctx, nil) }()
			}
			if err := sources[0].ForceOpen(time.Second); err != nil {
				t.Fatal(err)
			}
			for i, s := range sources {
				if err := s.Offer(i); err != nil {
					t.Fatal(err)
				}
				time.Sleep(1100 * time.Millisecond) // the first has the probe
			}
			time.Sleep(4 * time.Second)
			if a := sources[1].Account(); a.Acked != 1 {
				t.Errorf("%+v", a)
			}
			cancel()
			if _, err := g.Close(context.WithoutCancel(t.Context())); err != nil {
				t.Error(err)
			}
		})
	}
}

// A limiter that refuses the probes of several sources is asked once by each, not
// each time another has given its slot back; and again when a message comes later.
func TestLimiterRefusesProbes(t *testing.T) {
	for _, scope := range []Scope{ScopePartition, ScopeGroup} {
		bubble(t, "", func(t *testing.T) {
			g, err := New(Config{Scope: scope})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			lim := &strict{wait: time.Hour}
			var sources []*Source[int]
			for i, name := range []string{"a", "b", "c"} {
				s, err := Open(g, SourceConfig{Name: name, Limiter: lim}, Limits{}, &testPort{}, func(context.Context, int) error { return nil })
				if err != nil {
					t.Fatal(err)
				}
				sources = append(sources, s)
				if err := s.Offer(i); err != nil {
					t.Fatal(err)
				}
				if err := s.ForceOpen(time.Second); err != nil {
					t.Fatal(err)
				}
			}
			for _, s := range sources {
				go func() { _ = s.Run(ctx, nil) }()
			}
			time.Sleep(time.Minute)
			if n := lim.asked.Load(); n > 30 {
				t.Errorf("asked %d times in a minute", n)
			}
			lim.open.Store(true)
			for _, s := range sources {
				if err := s.Offer(9); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Minute)
				if a := s.Account(); a.Acked != 2 {
					t.Errorf("%s does not ask again: %+v", s.Name(), a)
				}
				for _, h := range s.State().Holds {
					if h.Reason == ReasonLimiter {
						t.Errorf("%s: %+v", s.Name(), h)
					}
				}
			}
			cancel()
			if _, err := g.Close(context.WithoutCancel(t.Context())); err != nil {
				t.Error(err)
			}
		})
	}
}

// strict is a limiter that refuses until it is open, or has been asked far too often.
type strict struct {
	wait  time.Duration
	asked atomic.Int64
	open  atomic.Bool
}

func (l *strict) Admit(time.Duration) time.Duration {
	if l.asked.Add(1) > 10_000 || l.open.Load() {
		return 0
	}
	return l.wait
}
