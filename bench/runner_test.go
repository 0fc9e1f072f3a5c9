// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestMedian(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		values []float64
		want   float64
	}{
		{[]float64{7}, 7},
		{[]float64{9, 1, 5}, 5},
		{[]float64{1, 100, 2, 3}, 2.5},
		{[]float64{2, 2, 2, 1000}, 2}, // one bad round does not move it
	} {
		before := slices.Clone(tt.values)
		if got := median(tt.values); got != tt.want {
			t.Errorf("median(%v) = %v, want %v", tt.values, got, tt.want)
		}
		if !slices.Equal(tt.values, before) {
			t.Errorf("median changed %v to %v", before, tt.values)
		}
	}
}

func TestTurns(t *testing.T) {
	t.Parallel()
	want := [][]int{{0, 1, 2}, {1, 2, 0}, {2, 0, 1}, {0, 1, 2}}
	for round, order := range want {
		if got := turns(round, 3); !slices.Equal(got, order) {
			t.Errorf("round %d: %v, want %v", round, got, order)
		}
	}
}

// The median of per-round ratios is not the ratio of medians: a machine that
// is slow in some rounds slows both cases, and only the former does not care.
func TestRatiosAreTakenWithinARound(t *testing.T) {
	t.Parallel()
	g := Group{
		Name:  "made-up",
		Cases: []Case{{Name: "ours"}, {Name: "theirs"}},
		Ratios: []Ratio{
			{Name: "chain", Kind: Time, Ours: "ours", Theirs: "theirs"},
			{Name: "throughput", Kind: Throughput, Ours: "ours", Theirs: "theirs"},
			{Name: "cpu", Kind: CPU, Ours: "ours", Theirs: "theirs"},
		},
	}
	rep := g.report([][]sample{
		{{ns: 10, allocs: 1, cpu: 4}, {ns: 20, allocs: 3, cpu: 6}, {ns: 900, allocs: 2, cpu: 5}},
		{{ns: 20, allocs: 0, cpu: 8}, {ns: 80, allocs: 0, cpu: 2}, {ns: 1000, allocs: 0, cpu: 10}},
	})

	if got, want := rep.Results[0], (Result{"ours", 20, 2, 5}); got != want {
		t.Errorf("ours: %+v, want %+v", got, want)
	}
	if got, want := rep.Results[1], (Result{"theirs", 80, 0, 8}); got != want {
		t.Errorf("theirs: %+v, want %+v", got, want)
	}
	for i, want := range []struct{ median, least, most float64 }{
		{0.5, 0.25, 0.9},
		{2, 1 / 0.9, 4},
		{0.5, 0.5, 3},
	} {
		got := rep.Ratios[i]
		if !near(got.Median, want.median) || !near(got.Min, want.least) || !near(got.Max, want.most) {
			t.Errorf("%s: %v [%v..%v], want %v [%v..%v]",
				got.Name, got.Median, got.Min, got.Max, want.median, want.least, want.most)
		}
	}
}

// made returns a group of cases with three operations a round that write down
// their turns, and where they write.
func made(names ...string) (Group, *[]string) {
	var log []string
	g := Group{Name: "made-up"}
	for _, name := range names {
		g.Cases = append(g.Cases, Case{Name: name, N: 3, Open: func(context.Context) (Runner, error) {
			log = append(log, "open "+name)
			return Runner{
				Do: func(_ context.Context, n int) error {
					if n != 3 {
						return errors.New("not the number asked for")
					}
					log = append(log, name)
					return nil
				},
				Close: func() error { log = append(log, "close "+name); return nil },
			}, nil
		}})
	}
	return g, &log
}

func TestCasesTakeTurns(t *testing.T) {
	t.Parallel()
	g, log := made("a", "b")
	if _, err := g.Run(t.Context(), Settings{Rounds: 3}); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"open a", "open b",
		"a", "b", // trial and warm-up
		"a", "b",
		"b", "a",
		"a", "b",
		"close b", "close a",
	}
	if !slices.Equal(*log, want) {
		t.Errorf("order\n%q, want\n%q", *log, want)
	}
}

func TestRounds(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ group, asked, want int }{{0, 0, 9}, {11, 0, 11}, {11, 2, 2}} {
		g, log := made("a")
		g.Rounds = tt.group
		if _, err := g.Run(t.Context(), Settings{Rounds: tt.asked}); err != nil {
			t.Fatal(err)
		}
		if got := len(*log) - 3; got != tt.want { // less open, trial, close
			t.Errorf("group %d, asked %d: %d rounds, want %d", tt.group, tt.asked, got, tt.want)
		}
	}
}

func TestAFailureClosesWhatIsOpen(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	for _, tt := range []struct {
		name string
		c    Case
		want []string
	}{
		{"open", Case{Name: "z", Open: func(context.Context) (Runner, error) { return Runner{}, broken }}, []string{"open a", "close a"}},
		{"do", Case{Name: "z", N: 1, Open: func(context.Context) (Runner, error) {
			return Runner{Do: func(context.Context, int) error { return broken }}, nil
		}}, []string{"open a", "a", "close a"}},
	} {
		g, log := made("a")
		g.Cases = append(g.Cases, tt.c)
		_, err := g.Run(t.Context(), Settings{Rounds: 1})
		if !errors.Is(err, broken) || !strings.Contains(err.Error(), "z: ") {
			t.Errorf("%s: error %v, want the case's and its name", tt.name, err)
		}
		if !slices.Equal(*log, tt.want) {
			t.Errorf("%s: %q, want %q", tt.name, *log, tt.want)
		}
	}
}

func TestCloseErrorIsReported(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	g := Group{Cases: []Case{{Name: "a", N: 1, Open: func(context.Context) (Runner, error) {
		return Runner{
			Do:    func(context.Context, int) error { return nil },
			Close: func() error { return broken },
		}, nil
	}}}}
	if _, err := g.Run(t.Context(), Settings{Rounds: 1}); !errors.Is(err, broken) {
		t.Errorf("error %v, want the one from Close", err)
	}
}

func TestRunEndsWithItsContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	turns := 0
	g := Group{Cases: []Case{{Name: "a", N: 1, Open: func(context.Context) (Runner, error) {
		return Runner{Do: func(context.Context, int) error {
			if turns++; turns == 3 {
				cancel()
			}
			return nil
		}}, nil
	}}}}
	if _, err := g.Run(ctx, Settings{Rounds: 1000}); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want context.Canceled", err)
	}
	if turns != 3 {
		t.Errorf("%d turns, want 3", turns)
	}
}

func TestTrialFindsANumberForTheTime(t *testing.T) {
	t.Parallel()
	const perOp = 200 * time.Microsecond
	c := Case{Name: "sleeper"}
	n, err := c.operations(t.Context(), Runner{Do: func(_ context.Context, n int) error {
		time.Sleep(time.Duration(n) * perOp)
		return nil
	}}, 20*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	// A busy machine sleeps longer than asked, never shorter.
	if n < 1 || n > 100 {
		t.Errorf("%d operations of at least %v for 20ms, want at most 100", n, perOp)
	}
}

func TestMeasureCountsAllocations(t *testing.T) {
	// Not parallel: the count is the process's.
	var keep []*[64]byte
	s, err := measure(t.Context(), Runner{Do: func(_ context.Context, n int) error {
		for range n {
			keep = append(keep[:0], new([64]byte))
		}
		return nil
	}}, 1000)
	if err != nil {
		t.Fatal(err)
	}
	if s.allocs < 1 || s.allocs > 1.2 {
		t.Errorf("%v allocations per operation, want about 1", s.allocs)
	}
	_ = keep
}

func TestMistakesInTheTableAreFoundAllAtOnce(t *testing.T) {
	t.Parallel()
	g := Group{
		Cases:  []Case{{Name: "a"}, {Name: "a"}},
		Ratios: []Ratio{{Name: "r", Ours: "a", Theirs: "b"}, {Name: "r", Ours: "c", Theirs: "a"}},
	}
	_, err := g.Run(t.Context(), Settings{})
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{`two cases named "a"`, `"b", which is no case`, `"c", which is no case`, `two ratios named "r"`} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q does not mention %q", err, want)
		}
	}
}

func TestGroupsAreValid(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, g := range groups {
		if seen[g.Name] || g.Name == "" || g.About == "" {
			t.Errorf("group %q: named twice, or without name or About", g.Name)
		}
		seen[g.Name] = true
		if err := g.validate(); err != nil {
			t.Errorf("group %s: %v", g.Name, err)
		}
	}
}

func near(a, b float64) bool { return math.Abs(a-b) < 1e-9 }

// A round whose yardstick is off is taken again, but not for ever.
func TestOnlySteadyRoundsCount(t *testing.T) {
	t.Parallel()
	g, log := made("a", "b")
	g.Ratios = []Ratio{{Name: "same", Ours: "a", Theirs: "b"}}
	g.Steady, g.Within = "same", 0.05
	for _, tt := range []struct {
		a, b float64
		want bool
	}{{100, 100, true}, {104, 100, true}, {100, 104, true}, {106, 100, false}, {100, 106, false}} {
		if _, ok := g.steady([]sample{{ns: tt.a}, {ns: tt.b}}); ok != tt.want {
			t.Errorf("%v and %v: steady is %v", tt.a, tt.b, ok)
		}
	}

	g.Within = math.Inf(1)
	rep, err := g.Run(t.Context(), Settings{Rounds: 2})
	if err != nil || rep.Rounds == nil || rep.Rounds.Counted != 2 || rep.Rounds.Taken != 2 || rep.Rounds.Asked != 2 {
		t.Errorf("rounds %+v, error %v", rep.Rounds, err)
	}

	// None counts: as many as asked for are taken, and no more once patience is at its end.
	*log, g.Within = nil, -1
	_, err = g.Run(t.Context(), Settings{Rounds: 2, Patience: 1})
	if err == nil || !strings.Contains(err.Error(), "in 2 rounds") || len(*log) != 2+2+2*2+2 {
		t.Errorf("error %v after %q, want one about 2 rounds", err, *log)
	}
	*log = nil
	_, err = g.Run(t.Context(), Settings{Rounds: 2, Patience: time.Second})
	if err == nil || len(*log) <= 2+2+2*2+2 {
		t.Errorf("error %v after %d entries: rounds that do not count were not taken again", err, len(*log))
	}
}

// What changes while a round lasts must hit all alike, and so must what a turn
// leaves to the next.
func TestPassesGoForthAndBack(t *testing.T) {
	t.Parallel()
	const passes, rounds = 4, 30
	names := []string{"a", "b", "c"}
	g, log := made(names...)
	g.Passes = passes
	if _, err := g.Run(t.Context(), Settings{Rounds: rounds}); err != nil {
		t.Fatal(err)
	}
	took := (*log)[2*len(names) : len(*log)-len(names)]
	if len(took) != rounds*passes*len(names) {
		t.Fatalf("%d turns", len(took))
	}
	first := make(map[string]int)
	for pair := range slices.Chunk(took, 2*len(names)) {
		back := slices.Clone(pair[len(names):])
		slices.Reverse(back)
		if !slices.Equal(pair[:len(names)], back) || !slices.Equal(slices.Sorted(slices.Values(back)), names) {
			t.Fatalf("%q is not all cases forth and back", pair)
		}
		first[pair[0]]++
	}
	for _, name := range names {
		if n := first[name]; n < rounds*passes/2/6 {
			t.Errorf("%s went first in %d of %d", name, n, rounds*passes/2)
		}
	}
}

func TestMiddle(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		turns []sample
		want  sample
	}{
		{[]sample{{1, 2, 3}}, sample{1, 2, 3}},
		{[]sample{{3, 4, 9}, {1, 2, 3}}, sample{2, 3, 6}},
		{[]sample{{90, 900, 900}, {3, 4, 9}, {1, 2, 3}, {-90, 0, 0}}, sample{2, 3, 6}},
		{[]sample{{3, 4, 9}, {90, 900, 900}, {2, 3, 6}, {1, 2, 3}, {-90, 0, 0}}, sample{2, 3, 6}},
	} {
		if got := middle(c.turns); got != c.want {
			t.Errorf("%v: %+v, want %+v", c.turns, got, c.want)
		}
	}
}

func TestMeasureCountsProcessorTime(t *testing.T) {
	// Not parallel: the count is the process's.
	if _, err := cpuTime(); err != nil {
		t.Skip(err)
	}
	s, err := measure(t.Context(), Runner{Do: func(context.Context, int) error {
		work(50 * time.Millisecond)
		time.Sleep(200 * time.Millisecond)
		return nil
	}}, 1)
	if err != nil {
		t.Fatal(err)
	}
	// A busy machine gives less than the time that passes, never more but for what else the process does.
	if s.cpu <= 0 || s.cpu > 0.8*s.ns {
		t.Errorf("%v processor time in %v, of which a fifth was busy", time.Duration(s.cpu), time.Duration(s.ns))
	}
}

func TestBeforeAndAfterSurroundEachTurn(t *testing.T) {
	t.Parallel()
	var log []string
	note := func(s string) { log = append(log, s) }
	failed := errors.New("failed")
	g := Group{Name: "made-up", Cases: []Case{{Name: "a", N: 2, Open: func(context.Context) (Runner, error) {
		turn := 0
		return Runner{
			Before: func(_ context.Context, n int) error { note("before"); return nil },
			Do: func(context.Context, int) error {
				note("do")
				if turn++; turn == 2 {
					return failed
				}
				return nil
			},
			After: func(context.Context) error { note("after"); return nil },
		}, nil
	}}}}
	if _, err := g.Run(t.Context(), Settings{Rounds: 3}); !errors.Is(err, failed) {
		t.Errorf("error %v, want %v", err, failed)
	}
	if want := []string{"before", "do", "after", "before", "do", "after"}; !slices.Equal(log, want) {
		t.Errorf("%q, want %q", log, want)
	}
}

func TestMillisHasNoRival(t *testing.T) {
	t.Parallel()
	g := Group{Name: "made-up", Cases: []Case{{Name: "gc"}}, Ratios: []Ratio{{Name: "gc_ms", Kind: Millis, Ours: "gc"}}}
	if err := g.validate(); err != nil {
		t.Fatal(err)
	}
	rep := g.report([][]sample{{{ns: 600_000}, {ns: 500_000}, {ns: 900_000}}})
	if got := rep.Ratios[0]; !near(got.Median, 0.6) || !near(got.Min, 0.5) || !near(got.Max, 0.9) {
		t.Errorf("%+v", got)
	}
}

// A case with a clock of its own is believed.
func TestEachReplacesTheClock(t *testing.T) {
	t.Parallel()
	s, err := measure(t.Context(), Runner{
		Do:   func(context.Context, int) error { return nil },
		Each: func() time.Duration { return time.Hour },
	}, 7)
	if err != nil || s.ns != float64(time.Hour) {
		t.Errorf("%v ns per operation, %v; want an hour", s.ns, err)
	}
}
