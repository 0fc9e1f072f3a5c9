// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package oncetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stormguard-mq/stormguard/once"
)

// A Place opens handles of one [once.Store], and ends their processes.
type Place struct {
	// Open returns a handle like that of another process. For a store of a single process
	// it returns the same handle until Crash. The handle is closed with the test.
	Open func(t *testing.T) once.Store
	// Crash ends the process of a handle. Its claims stay as they are.
	Crash func(t *testing.T, s once.Store)
}

// RunStore runs all tests of a [once.Store], including those of [Run]. place returns an
// empty store.
func RunStore(t *testing.T, place func(t *testing.T) Place) {
	Run(t, func(t *testing.T) Opener {
		p := place(t)
		return func(t *testing.T) Effects { return runner(t, p.Open(t), once.Config{}) }
	})
	for _, test := range []struct {
		name string
		run  func(context.Context, *testing.T, Place)
	}{
		{"Results", results},
		{"DoubtRunsAgain", doubtRunsAgain},
		{"DoubtRefused", doubtRefused},
		{"DoubtLookedUp", doubtLookedUp},
		{"DoubtOfTheEffect", doubtOfTheEffect},
		{"SettledThoughDone", settledThoughDone},
		{"Steps", steps},
		{"StepsTogether", stepsTogether},
		{"StepInDoubt", stepInDoubt},
		{"StepAgainInDoubt", stepAgainInDoubt},
		{"StepAfterAgainInDoubt", stepAfterAgainInDoubt},
		{"Differences", differences},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			test.run(ctx, t, place(t))
		})
	}
}

func runner(t *testing.T, s once.Store, cfg once.Config, opts ...once.Option) *once.Runner {
	t.Helper()
	r, err := once.New(s, cfg, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// results checks that a duplicate gets the result of the first delivery.
func results(ctx context.Context, t *testing.T, p Place) {
	r, other := runner(t, p.Open(t), once.Config{}), runner(t, p.Open(t), once.Config{})
	all := bytes.Repeat([]byte{0, 1, 255}, 100)
	for key, result := range map[string][]byte{"none": nil, "short": []byte("booking 17"), "all": all, "full": make([]byte, once.MaxResult)} {
		for i := range 3 {
			got, err := []*once.Runner{r, other}[i%2].Result(ctx, key, func(context.Context) ([]byte, error) {
				if i > 0 {
					t.Errorf("%s: ran again", key)
				}
				return result, nil
			})
			if err != nil || !bytes.Equal(got, result) {
				t.Fatalf("%s, call %d: %.20q, %v; want %.20q", key, i, got, err, result)
			}
		}
	}
	var c counter
	for range 2 {
		_, err := r.Result(ctx, "large", func(ctx context.Context) ([]byte, error) {
			return make([]byte, once.MaxResult+1), c.effect(ctx)
		})
		if !errors.Is(err, once.ErrResult) {
			t.Errorf("a result that is too large: %v", err)
		}
	}
	want(t, &c, 1)
}

// crashed begins an effect for each key, and then ends the process.
func crashed(ctx context.Context, t *testing.T, p Place, cfg once.Config, opts []once.Option, keys ...string) {
	t.Helper()
	s := p.Open(t)
	r := runner(t, s, cfg, opts...)
	var all []*blocked
	for _, key := range keys {
		all = append(all, block(ctx, t, r, key))
	}
	p.Crash(t, s)
	for _, b := range all {
		t.Cleanup(func() {
			b.proceed <- errEffect
			b.join()
		})
	}
}

func doubtRunsAgain(ctx context.Context, t *testing.T, p Place) {
	crashed(ctx, t, p, once.Config{}, nil, "a")
	var c counter
	r := runner(t, p.Open(t), once.Config{})
	do(ctx, t, r, "a", c.effect)
	do(ctx, t, r, "a", c.effect)
	want(t, &c, 1)
}

func doubtRefused(ctx context.Context, t *testing.T, p Place) {
	cfg := once.Config{InDoubt: once.Refuse}
	crashed(ctx, t, p, cfg, nil, "happened", "did not")
	r := runner(t, p.Open(t), cfg)
	var c counter
	for range 2 {
		for _, key := range []string{"happened", "did not"} {
			if err := r.Do(ctx, key, c.effect); !errors.Is(err, once.ErrInDoubt) || !strings.Contains(err.Error(), key) {
				t.Fatalf("%v, want ErrInDoubt with the key", err)
			}
		}
	}
	do(ctx, t, r, "another", c.effect)
	want(t, &c, 1)
	listed, err := r.Doubtful(ctx)
	if slices.Sort(listed); err != nil || !slices.Equal(listed, []string{"did not", "happened"}) {
		t.Errorf("in doubt: %q, %v", listed, err)
	}
	for key, happened := range map[string]bool{"happened": true, "did not": false, "before its delivery": true} {
		if err := r.Settle(ctx, key, happened); err != nil {
			t.Fatal(err)
		}
	}
	// Settle does not undo a finished effect.
	if err := r.Settle(ctx, "another", false); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		for _, key := range []string{"happened", "did not", "before its delivery", "another"} {
			do(ctx, t, r, key, c.effect)
		}
	}
	want(t, &c, 2)
	if listed, err := r.Doubtful(ctx); len(listed) > 0 || err != nil {
		t.Errorf("in doubt: %q, %v", listed, err)
	}
}

// settledThoughDone checks that a marked effect is not run again and keeps its result,
// whatever Settle says, even if Settle itself ends in the middle.
func settledThoughDone(ctx context.Context, t *testing.T, p Place) {
	s := p.Open(t)
	r := runner(t, s, once.Config{})
	runs := 0
	result := func() {
		t.Helper()
		got, err := r.Result(ctx, "a", func(context.Context) ([]byte, error) { runs++; return []byte("booking 17"), nil })
		if err != nil || string(got) != "booking 17" || runs != 1 {
			t.Fatalf("%q, %v, ran %d times", got, err, runs)
		}
	}
	result()
	for _, happened := range []bool{true, false} {
		if err := r.Settle(ctx, "a", happened); err != nil {
			t.Fatal(err)
		}
		result()
	}
	for _, refuse := range []once.Config{{}, {InDoubt: once.Refuse}} {
		claim, found, err := s.Claim(ctx, "ka", once.Ask{Over: true, Record: true}) // as Settle does
		if err != nil || !found.Done {
			t.Fatalf("%+v, %v", found, err)
		}
		p.Crash(t, s)
		t.Cleanup(func() { _ = claim.Leave(context.Background()) }) // the claim of the dead process
		s = p.Open(t)
		r = runner(t, s, refuse)
		result()
		result()
	}
}

func doubtLookedUp(ctx context.Context, t *testing.T, p Place) {
	away := true
	asked := make(map[string]int)
	lookup := []once.Option{once.WithLookup(func(_ context.Context, key string) (bool, error) {
		if asked[key]++; away {
			return false, errEffect
		}
		return key == "happened", nil
	})}
	crashed(ctx, t, p, once.Config{}, lookup, "happened", "did not")
	r := runner(t, p.Open(t), once.Config{}, lookup...)
	var c counter
	for key := range map[string]bool{"happened": true, "did not": true} {
		if err := r.Do(ctx, key, c.effect); !errors.Is(err, once.ErrInDoubt) || !errors.Is(err, errEffect) {
			t.Fatalf("%v, want ErrInDoubt and the lookup's error", err)
		}
	}
	away = false
	do(ctx, t, r, "happened", c.effect)
	want(t, &c, 0)
	do(ctx, t, r, "did not", c.effect)
	want(t, &c, 1)
	do(ctx, t, r, "did not", c.effect)
	do(ctx, t, r, "no crash", c.effect)
	want(t, &c, 2)
	if fmt.Sprint(asked) != "map[did not:2 happened:2]" {
		t.Errorf("asked %v", asked)
	}
}

// doubtOfTheEffect checks an effect that itself returns ErrInDoubt.
func doubtOfTheEffect(ctx context.Context, t *testing.T, p Place) {
	unknown := func(context.Context) error { return fmt.Errorf("%w: no answer from the bank", once.ErrInDoubt) }
	r := runner(t, p.Open(t), once.Config{InDoubt: once.Refuse})
	var c counter
	if err := r.Do(ctx, "a", unknown); !errors.Is(err, once.ErrInDoubt) {
		t.Fatal(err)
	}
	if err := r.Do(ctx, "a", c.effect); !errors.Is(err, once.ErrInDoubt) {
		t.Fatal(err)
	}
	want(t, &c, 0)
	again := runner(t, p.Open(t), once.Config{})
	if err := again.Do(ctx, "b", unknown); !errors.Is(err, once.ErrInDoubt) {
		t.Fatal(err)
	}
	do(ctx, t, again, "b", c.effect)
	want(t, &c, 1)
}

// Order is the machine of the tests.
func Order(t testing.TB) *once.Machine {
	t.Helper()
	m, err := once.NewMachine("order", "created", map[string][]string{
		"created":   {"allocated", "cancelled"},
		"allocated": {"packed", "cancelled"},
		"packed":    {"shipped"},
	})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func entities(ctx context.Context, t *testing.T, r *once.Runner, differences int) (*once.Entities, []once.Difference) {
	t.Helper()
	e, found, err := once.NewEntities(ctx, r, Order(t))
	if err != nil {
		t.Fatal(err)
	}
	if len(found) != differences {
		t.Fatalf("%d differences, want %d: %v", len(found), differences, found)
	}
	return e, found
}

func steps(ctx context.Context, t *testing.T, p Place) {
	e, _ := entities(ctx, t, runner(t, p.Open(t), once.Config{}), 0)
	other, _ := entities(ctx, t, runner(t, p.Open(t), once.Config{InDoubt: once.Refuse}), 0)
	var c counter
	step := func(to string, err error) {
		t.Helper()
		for _, e := range []*once.Entities{e, other, e} {
			if got := e.Step(ctx, "17", to, c.effect); !errors.Is(got, err) {
				t.Fatalf("to %s: %v, want %v", to, got, err)
			}
		}
	}
	state := func(want string) {
		t.Helper()
		if got, err := other.State(ctx, "17"); got != want || err != nil {
			t.Fatalf("state %q, %v; want %q", got, err, want)
		}
	}
	state("created")
	step("created", nil)
	step("packed", once.ErrImpossible)
	want(t, &c, 0)
	step("allocated", nil)
	want(t, &c, 1)
	state("allocated")
	if err := e.Step(ctx, "17", "packed", func(context.Context) error { return errEffect }); !errors.Is(err, errEffect) {
		t.Fatal(err)
	}
	state("allocated")
	step("packed", nil)
	step("allocated", nil)
	step("created", nil)
	want(t, &c, 2)
	step("cancelled", once.ErrImpossible)
	var impossible *once.StepError
	if err := e.Step(ctx, "17", "cancelled", c.effect); !errors.As(err, &impossible) || *impossible != (once.StepError{Machine: "order", Entity: "17", From: "packed", To: "cancelled"}) {
		t.Errorf("%+v", impossible)
	}
	step("shipped", nil)
	step("packed", nil)
	want(t, &c, 3)
	state("shipped")
	if err := e.Step(ctx, "18", "cancelled", c.effect); err != nil {
		t.Fatal(err)
	}
	want(t, &c, 4)
	for _, bad := range []string{"", "a\x00b", strings.Repeat("x", 600)} {
		if err := e.Step(ctx, bad, "allocated", c.effect); !errors.Is(err, once.ErrKey) {
			t.Errorf("entity %.10q: %v", bad, err)
		}
	}
	entities(ctx, t, runner(t, p.Open(t), once.Config{}), 0)
}

// stepsTogether takes two steps at the same time, of which only one is possible: one
// happens.
func stepsTogether(ctx context.Context, t *testing.T, p Place) {
	const rounds = 5
	a, _ := entities(ctx, t, runner(t, p.Open(t), once.Config{}), 0)
	b, _ := entities(ctx, t, runner(t, p.Open(t), once.Config{}), 0)
	for i := range rounds {
		var c counter
		name := fmt.Sprint(i)
		if err := a.Step(ctx, name, "allocated", c.effect); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		errs := make([]error, 2)
		for k, to := range []string{"packed", "cancelled"} {
			wg.Go(func() { errs[k] = []*once.Entities{a, b}[k].Step(ctx, name, to, c.effect) })
		}
		wg.Wait()
		if (errs[0] == nil) == (errs[1] == nil) || !errors.Is(errors.Join(errs...), once.ErrImpossible) {
			t.Fatalf("%v: want one to be impossible", errs)
		}
		want(t, &c, 2)
		if c.most.Load() > 1 {
			t.Error("two steps of one entity at the same time")
		}
	}
}

// stepAgainInDoubt checks a repeated step whose process ended before it saw that the path
// has the step. The step is in doubt in the store only: the entity does not go back to it.
func stepAgainInDoubt(ctx context.Context, t *testing.T, p Place) {
	for i, cfg := range []once.Config{{}, {InDoubt: once.Refuse}} {
		for _, settle := range []bool{false, true} {
			name := fmt.Sprint(i, settle)
			var c counter
			s := p.Open(t)
			e, _ := entities(ctx, t, runner(t, s, cfg), 0)
			for _, to := range []string{"allocated", "packed"} {
				if err := e.Step(ctx, name, to, c.effect); err != nil {
					t.Fatal(err)
				}
			}
			claim, _, err := s.Claim(ctx, "eorder\x00"+name, once.Ask{Over: true, Record: true, Note: "allocated"}) // as Step does
			if err != nil {
				t.Fatal(err)
			}
			p.Crash(t, s)
			t.Cleanup(func() { _ = claim.Leave(context.Background()) }) // the claim of the dead process

			e, _ = entities(ctx, t, runner(t, p.Open(t), cfg), 0)
			if settle {
				if err := e.Settle(ctx, name, "allocated", true); err != nil {
					t.Errorf("settled: %v", err)
				}
			}
			if err := e.Step(ctx, name, "cancelled", c.effect); !errors.Is(err, once.ErrImpossible) {
				t.Errorf("%+v, settled %v: cancelled after packed: %v", cfg, settle, err)
			}
			for _, to := range []string{"allocated", "packed", "shipped"} {
				if err := e.Step(ctx, name, to, c.effect); err != nil {
					t.Errorf("%+v, settled %v, to %s: %v", cfg, settle, to, err)
				}
			}
			if at, err := e.State(ctx, name); at != "shipped" || err != nil {
				t.Errorf("%+v, settled %v: state %q, %v", cfg, settle, at, err)
			}
			want(t, &c, 3)
		}
	}
}

// stepAfterAgainInDoubt checks the step after a repeated one: it is in doubt under its own
// name.
func stepAfterAgainInDoubt(ctx context.Context, t *testing.T, p Place) {
	cfg := once.Config{InDoubt: once.Refuse}
	var c counter
	s := p.Open(t)
	e, _ := entities(ctx, t, runner(t, s, cfg), 0)
	for _, to := range []string{"allocated", "packed"} {
		if err := e.Step(ctx, "a", to, c.effect); err != nil {
			t.Fatal(err)
		}
	}
	claim, _, err := s.Claim(ctx, "eorder\x00a", once.Ask{Over: true, Record: true, Note: "allocated"})
	if err != nil {
		t.Fatal(err)
	}
	p.Crash(t, s)
	t.Cleanup(func() { _ = claim.Leave(context.Background()) })

	s = p.Open(t)
	e, _ = entities(ctx, t, runner(t, s, cfg), 0)
	b := block(ctx, t, stepper{e, "a"}, "shipped")
	p.Crash(t, s)
	defer func() {
		b.proceed <- errEffect
		b.join()
	}()
	e, _ = entities(ctx, t, runner(t, p.Open(t), cfg), 1)
	for _, to := range []string{"shipped", "cancelled"} {
		if err := e.Step(ctx, "a", to, c.effect); to == "shipped" && !errors.Is(err, once.ErrInDoubt) || err == nil {
			t.Errorf("to %s: %v, want ErrInDoubt about shipped", to, err)
		}
	}
	want(t, &c, 2)
	if err := e.Settle(ctx, "a", "shipped", true); err != nil {
		t.Error(err)
	}
}

// stepInDoubt checks a step in doubt when a different step comes next.
func stepInDoubt(ctx context.Context, t *testing.T, p Place) {
	cfg := once.Config{InDoubt: once.Refuse}
	var c counter
	s := p.Open(t)
	e, _ := entities(ctx, t, runner(t, s, cfg), 0)
	for _, name := range []string{"a", "b", "c"} {
		if err := e.Step(ctx, name, "allocated", c.effect); err != nil {
			t.Fatal(err)
		}
	}
	all := make([]*blocked, 0, 3)
	for _, name := range []string{"a", "b", "c"} {
		all = append(all, block(ctx, t, stepper{e, name}, "packed"))
	}
	p.Crash(t, s)
	defer func() {
		for _, b := range all {
			b.proceed <- errEffect
			b.join()
		}
	}()

	r := runner(t, p.Open(t), cfg)
	e, found := entities(ctx, t, r, 3)
	for i, d := range found {
		if d != (once.Difference{Entity: []string{"a", "b", "c"}[i], State: "allocated", Step: "packed", Detail: once.StepInDoubt}) {
			t.Errorf("difference %+v", d)
		}
	}
	for _, to := range []string{"packed", "cancelled", "packed"} {
		if err := e.Step(ctx, "a", to, c.effect); !errors.Is(err, once.ErrInDoubt) || !strings.Contains(err.Error(), "order/a/packed") {
			t.Fatalf("to %s: %v, want ErrInDoubt about packed", to, err)
		}
	}
	if err := e.Step(ctx, "a", "allocated", c.effect); err != nil {
		t.Fatalf("a step that came again: %v", err)
	}
	want(t, &c, 3)
	if err := e.Settle(ctx, "a", "cancelled", true); !errors.Is(err, once.ErrKey) {
		t.Errorf("a step that is not in doubt is settled: %v", err)
	}
	for name, happened := range map[string]bool{"a": true, "b": false} {
		if err := e.Settle(ctx, name, "packed", happened); err != nil {
			t.Fatal(err)
		}
	}
	if err := e.Step(ctx, "a", "cancelled", c.effect); !errors.Is(err, once.ErrImpossible) {
		t.Error(err)
	}
	if err := e.Step(ctx, "b", "cancelled", c.effect); err != nil {
		t.Error(err)
	}
	want(t, &c, 4)

	// A lookup answers for the step in doubt. Then the new step is checked.
	lookup := once.WithLookup(func(_ context.Context, key string) (bool, error) { return key == "order/c/packed", nil })
	e, _ = entities(ctx, t, runner(t, p.Open(t), once.Config{}, lookup), 1)
	if err := e.Step(ctx, "c", "shipped", c.effect); err != nil {
		t.Error(err)
	}
	want(t, &c, 5)
	if state, err := e.State(ctx, "c"); state != "shipped" || err != nil {
		t.Error(state, err)
	}
	entities(ctx, t, r, 0)
}

// stepper runs steps of an entity as effects.
type stepper struct {
	e      *once.Entities
	entity string
}

func (s stepper) Do(ctx context.Context, to string, effect func(context.Context) error) error {
	return s.e.Step(ctx, s.entity, to, effect)
}

// differences checks states without marks, and marks without states.
func differences(ctx context.Context, t *testing.T, p Place) {
	s := p.Open(t)
	r := runner(t, s, once.Config{})
	e, _ := entities(ctx, t, r, 0)
	var c counter
	for _, name := range []string{"a", "b"} {
		for _, to := range []string{"allocated", "packed"} {
			if err := e.Step(ctx, name, to, c.effect); err != nil {
				t.Fatal(err)
			}
		}
	}
	// "a" loses its newest state, as between the two writes of a store without
	// transactions. "b" gets a state without a mark. "c" comes from another program.
	put := func(entity string, states ...string) {
		t.Helper()
		claim, _, err := s.Claim(ctx, "eorder\x00"+entity, once.Ask{Over: true})
		if err != nil {
			t.Fatal(err)
		}
		if err := claim.Finish(ctx, []byte(strings.Join(states, "\x00"))); err != nil {
			t.Fatal(err)
		}
	}
	put("a", "allocated")
	put("b", "allocated", "packed", "shipped")
	put("c", "returned")
	e, found := entities(ctx, t, r, 4)
	for i, d := range []once.Difference{
		{Entity: "b", State: "shipped", Step: "shipped", Detail: once.StateOnly},
		{Entity: "c", State: "returned", Step: "returned", Detail: once.NoStep},
		{Entity: "c", State: "returned", Step: "returned", Detail: once.StateOnly},
		{Entity: "a", State: "allocated", Step: "packed", Detail: once.MarkOnly},
	} {
		if found[i] != d {
			t.Errorf("difference %d: %s; want %s", i, found[i], d)
		}
	}
	// The next delivery of the step repairs "a", without its effect.
	if err := e.Step(ctx, "a", "packed", c.effect); err != nil {
		t.Fatal(err)
	}
	if err := e.Step(ctx, "b", "shipped", c.effect); err != nil {
		t.Fatal(err)
	}
	want(t, &c, 4)
	if state, err := e.State(ctx, "a"); state != "packed" || err != nil {
		t.Error(state, err)
	}
	entities(ctx, t, r, 3)
}
