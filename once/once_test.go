// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package once_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/once"
	"github.com/stormguard-mq/stormguard/once/bolt"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func store(t testing.TB) *bolt.Store {
	t.Helper()
	s, err := bolt.Open(filepath.Join(t.TempDir(), "once.db"), bolt.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func runner(t testing.TB, s once.Store) *once.Runner {
	t.Helper()
	r, err := once.New(s, once.Config{})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	_, err := once.New(nil, once.Config{InDoubt: 7})
	if err == nil || !strings.Contains(err.Error(), "a store is needed") || !strings.Contains(err.Error(), "Config.InDoubt: 7 is not") {
		t.Errorf("%v: want both problems", err)
	}
}

// refusing is a store that takes no marks while it says why: of keys that begin with only.
type refusing struct {
	once.Store
	why  error
	only string
}

type refusedClaim struct {
	once.Claim
	s   *refusing
	key string
}

func (s *refusing) Claim(ctx context.Context, key string, ask once.Ask) (once.Claim, once.Found, error) {
	c, found, err := s.Store.Claim(ctx, key, ask)
	if c != nil {
		c = refusedClaim{c, s, key}
	}
	return c, found, err
}

func (c refusedClaim) Finish(ctx context.Context, value []byte, also ...once.Entry) error {
	if c.s.why != nil && strings.HasPrefix(c.key, c.s.only) {
		return c.s.why
	}
	return c.Claim.Finish(ctx, value, also...)
}

// While the mark of an effect that has happened cannot be written, no effect begins, and
// that one is not repeated.
func TestUnmarked(t *testing.T) {
	t.Parallel()
	why := errors.New("no space")
	s := &refusing{Store: store(t), why: why}
	r := runner(t, s)
	calls := make(map[string]int)
	do := func(key string) error {
		_, err := r.Result(t.Context(), key, func(context.Context) ([]byte, error) {
			calls[key]++
			return []byte("of " + key), nil
		})
		return err
	}
	if err := do("a"); !errors.Is(err, once.ErrUnmarked) || !errors.Is(err, why) {
		t.Fatalf("%v, want ErrUnmarked", err)
	}
	for _, key := range []string{"b", "a"} {
		if err := do(key); !errors.Is(err, why) || !strings.Contains(err.Error(), `the mark of "a"`) {
			t.Fatalf("%s: %v", key, err)
		}
	}
	s.why = nil
	for _, key := range []string{"b", "a"} {
		if err := do(key); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := r.Result(t.Context(), "a", nil); string(got) != "of a" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	if calls["a"] != 1 || calls["b"] != 1 {
		t.Errorf("ran %v, want each once", calls)
	}

	// The key is another process's by now: the runner goes on without it.
	s.why = fmt.Errorf("taken over: %w", once.ErrLost)
	if err := do("c"); !errors.Is(err, once.ErrUnmarked) || !errors.Is(err, once.ErrLost) {
		t.Fatal(err)
	}
	s.why = why
	if err := do("d"); !errors.Is(err, once.ErrUnmarked) {
		t.Fatal(err)
	}
	s.why = once.ErrLost // meanwhile
	if err := do("e"); !errors.Is(err, once.ErrLost) || calls["e"] != 1 {
		t.Fatalf("%v, %v: want the next effect to run", err, calls)
	}
	s.why = nil
	if err := do("f"); err != nil {
		t.Error(err)
	}
}

// A mark that the store refuses, while it takes others, stops the effects of its own key only.
func TestOneMarkRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "once.db")
	synctest.Test(t, func(t *testing.T) {
		file, err := bolt.Open(path, bolt.Config{})
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		why := errors.New("too large")
		s := &refusing{Store: file, why: why, only: "ka"}
		r := runner(t, s)
		calls := make(map[string]int)
		do := func(key string) error {
			return r.Do(t.Context(), key, func(context.Context) error { calls[key]++; return nil })
		}
		runs := func(keys ...string) {
			t.Helper()
			for _, key := range keys {
				if err := do(key); err != nil || calls[key] != 1 {
					t.Fatalf("%s: ran %d times, %v", key, calls[key], err)
				}
			}
		}
		if err := do("a"); !errors.Is(err, once.ErrUnmarked) {
			t.Fatalf("%v, want ErrUnmarked", err)
		}
		runs("b", "c")
		for _, err := range []error{do("a"), r.Settle(t.Context(), "a", true)} {
			if !errors.Is(err, why) || !strings.Contains(err.Error(), `the mark of "a"`) || calls["a"] != 1 {
				t.Fatalf("its own key: ran %d times, %v", calls["a"], err)
			}
		}
		if err := r.Settle(t.Context(), "settled", true); err != nil {
			t.Fatal(err)
		}

		s.only = "" // and then the store takes nothing at all
		if err := do("d"); !errors.Is(err, once.ErrUnmarked) {
			t.Fatalf("%v, want ErrUnmarked", err)
		}
		if err := do("e"); !errors.Is(err, why) || calls["e"] != 0 {
			t.Fatalf("the store takes nothing: e ran %d times, %v", calls["e"], err)
		}
		s.why = nil
		runs("e", "d")

		time.Sleep(time.Minute)
		runs("f") // which tries a's mark again
		if _, done, err := file.Get(t.Context(), "ka"); !done || err != nil {
			t.Errorf("the mark of a: %v, %v", done, err)
		}
		runs("a")

		s.why, s.only = why, "kx" // a store that takes none of the effects' marks, and others
		begun := 0
		for i := range 100 {
			if key := fmt.Sprint("x", i); do(key) != nil && calls[key] > 0 {
				begun++
			}
		}
		if begun > 20 || do("g") == nil {
			t.Errorf("%d effects without a mark", begun)
		}
	})
}

// A step whose mark the store refuses stops the steps of its own entity only.
func TestOneStepRefused(t *testing.T) {
	t.Parallel()
	why := errors.New("too large")
	s := &refusing{Store: store(t), why: why, only: "em\x0017"}
	m, err := once.NewMachine("m", "a", map[string][]string{"a": {"b"}, "b": {"c"}})
	if err != nil {
		t.Fatal(err)
	}
	e, _, err := once.NewEntities(t.Context(), runner(t, s), m)
	if err != nil {
		t.Fatal(err)
	}
	step := func(entity, to string) error {
		return e.Step(t.Context(), entity, to, func(context.Context) error { return nil })
	}
	if err := step("17", "b"); !errors.Is(err, once.ErrUnmarked) {
		t.Fatalf("%v, want ErrUnmarked", err)
	}
	for _, to := range []string{"b", "c"} {
		if err := step("18", to); err != nil {
			t.Errorf("another entity's step to %s: %v", to, err)
		}
		if err := step("17", to); !errors.Is(err, why) || !strings.Contains(err.Error(), `the mark of "m/17/b"`) {
			t.Errorf("its own step to %s: %v", to, err)
		}
	}
	if err := e.Settle(t.Context(), "17", "b", true); !errors.Is(err, why) {
		t.Errorf("Settle: %v", err)
	}
}

// The guard takes a wait that ended for the dependency's fault, so it dead-letters no
// message for it.
func TestUnderwayIsTheDependencys(t *testing.T) {
	t.Parallel()
	err := fmt.Errorf("handler: %w", &once.UnderwayError{Key: "a", Err: context.Canceled})
	if c := guard.Classify(err); c != guard.ClassDependency {
		t.Errorf("class %v", c)
	}
}

func TestMachineRefuses(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, first string
		steps       map[string][]string
		says        []string
	}{
		{"", "a\x00", nil, []string{`name ""`, `first state "a\x00"`}},
		{"m", "a", map[string][]string{"a": {"b"}, "b": {"c", ""}, "c": {"b"}}, []string{`state ""`, "a cycle: b → c → b"}},
		{"m", "a", map[string][]string{"a": {"a"}, "x": {"y"}}, []string{"a cycle: a → a", `state "x": it must be reachable`}},
	} {
		_, err := once.NewMachine(tt.name, tt.first, tt.steps)
		for _, says := range tt.says {
			if err == nil || !strings.Contains(err.Error(), says) {
				t.Errorf("%v: want %q", err, says)
			}
		}
	}
	if _, err := once.NewMachine("m", "only", nil); err != nil {
		t.Error(err)
	}
}

// drawMachine is a random machine: steps lead from a lower number to a higher one, and
// every state can be reached.
func drawMachine(t *rapid.T) (m *once.Machine, steps map[string][]string, states []string) {
	n := rapid.IntRange(2, 7).Draw(t, "states")
	for i := range n {
		states = append(states, fmt.Sprint("s", i))
	}
	steps = make(map[string][]string)
	for to := 1; to < n; to++ {
		for _, from := range rapid.SliceOfNDistinct(rapid.IntRange(0, to-1), 1, to, rapid.ID[int]).Draw(t, "from") {
			steps[states[from]] = append(steps[states[from]], states[to])
		}
	}
	m, err := once.NewMachine("m", states[0], steps)
	if err != nil {
		t.Fatal(err)
	}
	return m, steps, states
}

// Steps in any order, with failures and in several entities, against a model that knows of
// each entity where it is and where it was.
func TestEntitiesAgainstModel(t *testing.T) {
	s := store(t)
	run := 0
	rapid.Check(t, func(t *rapid.T) {
		run++ // the store is one for all, since a file for each is slow
		m, steps, states := drawMachine(t)
		r, err := once.New(s, once.Config{})
		if err != nil {
			t.Fatal(err)
		}
		ctx := context.Background()
		e, _, err := once.NewEntities(ctx, r, m)
		if err != nil {
			t.Fatal(err)
		}
		type model struct {
			at  string
			was []string
		}
		entities := make(map[string]*model)
		for range rapid.IntRange(1, 12).Draw(t, "steps") {
			name := fmt.Sprint(run, "/", rapid.IntRange(0, 1).Draw(t, "entity"))
			to := rapid.SampledFrom(states).Draw(t, "to")
			fails := rapid.Bool().Draw(t, "fails")
			x := entities[name]
			if x == nil {
				x = &model{at: states[0], was: states[:1]}
				entities[name] = x
			}
			ran := false
			failure := errors.New("failure")
			err := e.Step(ctx, name, to, func(context.Context) error {
				if ran = true; fails {
					return failure
				}
				return nil
			})
			var impossible *once.StepError
			switch {
			case slices.Contains(x.was, to):
				if ran || err != nil {
					t.Fatalf("%s, at %s, to %s again: ran %t, %v", name, x.at, to, ran, err)
				}
			case !slices.Contains(steps[x.at], to):
				if ran || !errors.As(err, &impossible) || impossible.From != x.at || impossible.To != to || impossible.Entity != name {
					t.Fatalf("%s, impossible from %s to %s: ran %t, %v", name, x.at, to, ran, err)
				}
			case fails:
				if !ran || err != failure {
					t.Fatalf("%s, at %s, to %s in vain: ran %t, %v", name, x.at, to, ran, err)
				}
			default:
				if !ran || err != nil {
					t.Fatalf("%s, at %s, to %s: ran %t, %v", name, x.at, to, ran, err)
				}
				x.at, x.was = to, append(slices.Clone(x.was), to)
			}
			if at, err := e.State(ctx, name); at != x.at || err != nil {
				t.Fatalf("%s is at %s, %v; want %s", name, at, err, x.at)
			}
		}
	})
}

// Compare finds exactly what was taken from one of two equal tracks, except marks of older
// steps, which may be forgotten.
func TestCompareFindsWhatIsMissing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m, steps, states := drawMachine(t)
		var path []string
		for at := states[0]; len(steps[at]) > 0 && rapid.IntRange(0, 9).Draw(t, "goes on") > 0; {
			at = rapid.SampledFrom(steps[at]).Draw(t, "to")
			path = append(path, at)
		}
		tracks := func(kept int) (paths, marks map[string][]string) {
			return map[string][]string{"x": path[:kept]}, map[string][]string{"x": path}
		}
		paths, marks := tracks(len(path))
		if d := m.Compare(paths, marks); len(d) > 0 {
			t.Fatalf("equal tracks differ: %v", d)
		}
		if len(path) == 0 {
			return
		}
		kept := rapid.IntRange(0, len(path)-1).Draw(t, "kept")
		paths, marks = tracks(kept)
		if d := m.Compare(paths, marks); len(d) != len(path)-kept || d[0].Detail != once.MarkOnly {
			t.Fatalf("states %v, marks %v: %v", paths, marks, d)
		}
		lost := rapid.IntRange(0, len(path)-1).Draw(t, "lost")
		paths, marks = tracks(len(path))
		marks["x"] = slices.Delete(slices.Clone(path), lost, lost+1)
		d := m.Compare(paths, marks)
		if want := lost == len(path)-1; want != (len(d) == 1 && d[0].Detail == once.StateOnly && d[0].Step == path[lost]) || !want && len(d) > 0 {
			t.Fatalf("path %v without the mark of step %d: %v", path, lost, d)
		}
	})
}

// A lookup that panics, or ends its goroutine, leaves the doubt and not the claim: the next
// delivery asks again.
func TestLookupThatPanics(t *testing.T) {
	t.Parallel()
	for name, bad := range map[string]func(){"panic": func() { panic("no answer") }, "Goexit": runtime.Goexit} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ask := bad
			r, err := once.New(store(t), once.Config{}, once.WithLookup(func(context.Context, string) (bool, error) {
				ask()
				return false, nil
			}))
			if err != nil {
				t.Fatal(err)
			}
			if err := r.Do(t.Context(), "a", func(context.Context) error { return once.ErrInDoubt }); !errors.Is(err, once.ErrInDoubt) {
				t.Fatal(err)
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				defer func() { _ = recover() }()
				_ = r.Do(t.Context(), "a", func(context.Context) error { t.Error("it ran"); return nil })
			}()
			<-done
			ask = func() {}
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			ran := false
			if err := r.Do(ctx, "a", func(context.Context) error { ran = true; return nil }); err != nil || !ran {
				t.Errorf("%v, ran %t", err, ran)
			}
		})
	}
}

// losing is a store whose claims are lost when lose is called.
type losing struct {
	once.Store
	lose func()
}

type lostClaim struct {
	once.Claim
	ctx context.Context
}

func (c lostClaim) Context() context.Context { return c.ctx }

func (s *losing) Claim(ctx context.Context, key string, ask once.Ask) (once.Claim, once.Found, error) {
	c, found, err := s.Store.Claim(ctx, key, ask)
	if c == nil {
		return c, found, err
	}
	ctx, cancel := context.WithCancelCause(c.Context())
	s.lose = func() { cancel(once.ErrLost) }
	return lostClaim{c, ctx}, found, err
}

// A claim that is lost while the lookup is asked runs no effect, and the lookup hears of it.
func TestLostDuringTheLookup(t *testing.T) {
	t.Parallel()
	s := &losing{Store: store(t)}
	loses := true
	r, err := once.New(s, once.Config{}, once.WithLookup(func(ctx context.Context, _ string) (bool, error) {
		if loses {
			s.lose()
			<-ctx.Done()
		}
		return false, nil
	}))
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Do(t.Context(), "a", func(context.Context) error { return once.ErrInDoubt }); !errors.Is(err, once.ErrInDoubt) {
		t.Fatal(err)
	}
	if err := r.Do(t.Context(), "a", func(context.Context) error { t.Error("it ran"); return nil }); !errors.Is(err, once.ErrLost) {
		t.Errorf("%v, want ErrLost", err)
	}
	loses = false
	ran := false
	if err := r.Do(t.Context(), "a", func(context.Context) error { ran = true; return nil }); err != nil || !ran {
		t.Errorf("%v, ran %t", err, ran)
	}
}

// Settle writes what could not be written before: it would wait for its own claim.
func TestSettleAfterUnmarked(t *testing.T) {
	t.Parallel()
	why := errors.New("no space")
	s := &refusing{Store: store(t), why: why}
	r := runner(t, s)
	if err := r.Settle(t.Context(), "a", true); !errors.Is(err, once.ErrUnmarked) {
		t.Fatalf("%v, want ErrUnmarked", err)
	}
	s.why = nil
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := r.Settle(ctx, "a", true); err != nil {
		t.Error(err)
	}
	if err := r.Do(ctx, "a", func(context.Context) error { t.Error("it ran"); return nil }); err != nil {
		t.Error(err)
	}
}
