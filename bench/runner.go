// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/internal/brokers"
)

// A Group is what is measured together.
type Group struct {
	Name   string
	About  string // one line for the help
	Cases  []Case
	Ratios []Ratio
	Rounds int // unset means 9
	// Passes is how often a round goes through the cases, unset means once. Above
	// that it goes forth and back, two and two passes, in an order that is drawn
	// anew for each two: what changes while the round lasts hits all alike
	// (two equal cases are ABBA), and so does what a turn leaves to the next.
	Passes int
	// Steady names a ratio of two equal cases. A round in which it is not within
	// Within of 1 does not count: the machine did something else meanwhile. Such
	// a round is taken again until Settings.Patience is at its end.
	Steady string
	Within float64
}

// patience is Settings.Patience where that is unset.
const patience = 8 * time.Minute

// A Case is one thing to measure.
type Case struct {
	Name string
	// Open prepares the case, once, before any round of the group.
	Open func(context.Context) (Runner, error)
	// Optional is a case that is left out, with its ratios, where the machine cannot
	// run the broker that it needs.
	Optional bool
	// N is how many operations a round does. Unset, a trial run finds the
	// number that takes about Settings.Time. It is for one turn: a round of
	// several passes has as many turns.
	N int
}

// A Runner is a case that is ready. All runners of a group are open at the same
// time: one that leaves goroutines busy between its turns spoils the others'.
type Runner struct {
	// Before and After surround each Do, and are not measured; they may be nil.
	// After follows also a Do that failed.
	Before func(ctx context.Context, n int) error
	After  func(ctx context.Context) error
	// Do performs n operations, and is all that the clock and the allocation
	// count see. Allocations are the process's: a case pays for its goroutines.
	Do func(ctx context.Context, n int) error
	// Each, if set, is how long an operation of the last Do took, for a case that
	// runs in a process of its own and has its own clock.
	Each func() time.Duration
	// Close undoes Open; it may be nil.
	Close func() error
}

// Kind says what a ratio compares.
type Kind int

const (
	// Time is our time per operation over theirs: lower is better.
	Time Kind = iota
	// Throughput is our operations per second over theirs: higher is better.
	Throughput
	// CPU is the process's processor time per operation in ours over that in
	// theirs: lower is better. It counts all threads, and what the kernel does for
	// them; nothing of a broker that is another process.
	CPU
	// Millis is no ratio: our time per operation in milliseconds. It stands among
	// the ratios because it has a limit, as they do.
	Millis
	// PerSecond is no ratio either: our operations per second. It has no Theirs.
	PerSecond
)

// alone says whether a kind has no Theirs.
func (k Kind) alone() bool { return k == Millis || k == PerSecond }

// A Ratio compares two cases of a group, round by round.
type Ratio struct {
	Name         string
	Kind         Kind
	Ours, Theirs string // names of cases; Millis and PerSecond have no Theirs
}

// Settings is what the command line decides.
type Settings struct {
	Rounds int           // 0 means the group's
	Time   time.Duration // per case and turn, about
	// Patience is after how long no round is taken in place of one that did not
	// count; 0 means 8 minutes. As many rounds as asked for are taken in any case.
	Patience time.Duration
	Log      io.Writer // progress; nil means none
}

// A sample is one case in one round.
type sample struct {
	ns, allocs, cpu float64 // per operation; cpu in ns
}

// middle is the sample of several turns with the same number of operations: the mean
// of their middle half, by time. A turn in which the disk stood still is no side's cost.
func middle(turns []sample) (m sample) {
	kept := slices.SortedFunc(slices.Values(turns), func(a, b sample) int { return cmp.Compare(a.ns, b.ns) })
	cut := len(kept) / 4
	kept = kept[cut : len(kept)-cut]
	n := float64(len(kept))
	for _, s := range kept {
		m.ns += s.ns / n
		m.allocs += s.allocs / n
		m.cpu += s.cpu / n
	}
	return m
}

func (g Group) title() (name, about string) { return g.Name, g.About }

func (g Group) measure(ctx context.Context, set Settings) (printer, error) { return g.Run(ctx, set) }

// Run opens all cases, has them take turns and closes them.
func (g Group) Run(ctx context.Context, set Settings) (_ Report, err error) {
	if err := g.validate(); err != nil {
		return Report{}, err
	}
	if _, err := cpuTime(); err != nil && g.asksForCPU() {
		return Report{}, err
	}
	rounds := cmp.Or(set.Rounds, g.Rounds, 9)

	var runners []Runner
	var kept []Case
	for _, c := range g.Cases {
		runner, err2 := c.Open(ctx)
		if c.Optional && errors.Is(err2, brokers.ErrLeftOut) {
			logf(set.Log, "%s: %v\n", c.Name, err2)
			g.Ratios = slices.DeleteFunc(slices.Clone(g.Ratios), func(r Ratio) bool { return r.Ours == c.Name || r.Theirs == c.Name })
			continue
		}
		if err2 != nil {
			return Report{}, fmt.Errorf("%s: open: %w", c.Name, err2)
		}
		runners, kept = append(runners, runner), append(kept, c)
		if runner.Close != nil {
			defer func() {
				if cerr := runner.Close(); cerr != nil {
					err = errors.Join(err, fmt.Errorf("%s: close: %w", c.Name, cerr))
				}
			}()
		}
	}

	g.Cases = kept

	ns := make([]int, len(g.Cases))
	for i, c := range g.Cases {
		if ns[i], err = c.operations(ctx, runners[i], set.Time); err != nil {
			return Report{}, fmt.Errorf("%s: trial: %w", c.Name, err)
		}
	}

	samples := make([][]sample, len(g.Cases))
	var yardstick []float64 // of every round that was taken
	taken, counted, start := 0, 0, time.Now()
	for ; counted < rounds && (taken < rounds || time.Since(start) < cmp.Or(set.Patience, patience)); taken++ {
		logf(set.Log, "round %d of %d\n", counted+1, rounds)
		round, err := g.round(ctx, taken, runners, ns)
		if err != nil {
			return Report{}, err
		}
		off, steady := g.steady(round)
		yardstick = append(yardstick, off)
		if !steady {
			logf(set.Log, "does not count: %s is %.3f\n", g.Steady, off)
			continue
		}
		counted++
		for i, s := range round {
			samples[i] = append(samples[i], s)
		}
	}
	if counted == 0 {
		return Report{}, fmt.Errorf("%s was never within %g of 1 in %d rounds, but %.3f to %.3f: the machine is too busy to measure on",
			g.Steady, g.Within, taken, slices.Min(yardstick), slices.Max(yardstick))
	}
	rep := g.report(samples)
	if g.Steady != "" {
		rep.Rounds = &Rounds{
			Asked: rounds, Counted: counted, Taken: taken,
			Yardstick: g.Steady, Within: g.Within, Median: median(yardstick), Min: slices.Min(yardstick), Max: slices.Max(yardstick),
		}
	}
	return rep, nil
}

// round gives each case its turns.
func (g Group) round(ctx context.Context, number int, runners []Runner, ns []int) ([]sample, error) {
	all := make([][]sample, len(g.Cases))
	draw := rand.New(rand.NewPCG(uint64(number), 0))
	order := turns(number, len(g.Cases))
	for pass := range max(g.Passes, 1) {
		if g.Passes > 1 && pass%2 == 0 {
			order = draw.Perm(len(g.Cases))
		}
		for _, i := range order {
			s, err := measure(ctx, runners[i], ns[i])
			if err != nil {
				return nil, fmt.Errorf("%s: round %d: %w", g.Cases[i].Name, number+1, err)
			}
			all[i] = append(all[i], s)
		}
		slices.Reverse(order)
	}
	round := make([]sample, len(g.Cases))
	for i, mine := range all {
		round[i] = middle(mine)
	}
	return round, nil
}

func logf(w io.Writer, format string, args ...any) {
	if w != nil {
		fmt.Fprintf(w, format, args...)
	}
}

func (g Group) asksForCPU() bool {
	return slices.ContainsFunc(g.Ratios, func(r Ratio) bool { return r.Kind == CPU })
}

// steady tells whether a round counts, and what its yardstick was.
func (g Group) steady(round []sample) (off float64, ok bool) {
	for _, r := range g.Ratios {
		if r.Name == g.Steady {
			off = r.Kind.of(round[g.index(r.Ours)], round[g.index(r.Theirs)])
			return off, math.Abs(off-1) <= g.Within
		}
	}
	return 0, true
}

func (g Group) index(name string) int {
	return slices.IndexFunc(g.Cases, func(c Case) bool { return c.Name == name })
}

// turns is the order of n cases in a round. It starts one case later each round,
// so that none always follows the same one's garbage or goes first on a cool
// processor.
func turns(round, n int) []int {
	order := make([]int, n)
	for k := range order {
		order[k] = (round + k) % n
	}
	return order
}

// measure gives one case one turn.
func measure(ctx context.Context, r Runner, n int) (_ sample, err error) {
	if err := ctx.Err(); err != nil {
		return sample{}, err
	}
	if r.Before != nil {
		if err := r.Before(ctx, n); err != nil {
			return sample{}, err
		}
	}
	if r.After != nil {
		defer func() { err = errors.Join(err, r.After(ctx)) }()
	}
	runtime.GC() // a case does not pay for the garbage of the one before
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	spent, _ := cpuTime()
	start := time.Now()
	err = r.Do(ctx, n)
	took := time.Since(start)
	now, _ := cpuTime() // Run has checked that it is known, if anyone asks
	runtime.ReadMemStats(&after)
	if err != nil {
		return sample{}, err
	}
	each := float64(took.Nanoseconds()) / float64(n)
	if r.Each != nil {
		each = float64(r.Each())
	}
	return sample{
		ns:     each,
		allocs: float64(after.Mallocs-before.Mallocs) / float64(n),
		cpu:    float64((now - spent).Nanoseconds()) / float64(n),
	}, nil
}

// operations finds how many operations take about d, and warms the case up.
func (c Case) operations(ctx context.Context, r Runner, d time.Duration) (int, error) {
	if c.N > 0 {
		_, err := measure(ctx, r, c.N)
		return c.N, err
	}
	for n := 1; ; {
		s, err := measure(ctx, r, n)
		if err != nil {
			return 0, err
		}
		took := s.ns * float64(n)
		if took >= float64(d)/2 || n >= 1e9 {
			return max(1, int(float64(d)/max(s.ns, 1))), nil
		}
		// Small runs tell little, so grow at most a hundredfold.
		n = max(n+1, min(100*n, int(float64(d)/max(s.ns, 1))))
	}
}

// validate finds mistakes in the table, all at once.
func (g Group) validate() error {
	var problems []error
	seen := map[string]bool{}
	for _, c := range g.Cases {
		if seen[c.Name] {
			problems = append(problems, fmt.Errorf("two cases named %q", c.Name))
		}
		seen[c.Name] = true
	}
	ratios := map[string]bool{}
	for _, r := range g.Ratios {
		if ratios[r.Name] {
			problems = append(problems, fmt.Errorf("two ratios named %q", r.Name))
		}
		ratios[r.Name] = true
		names := []string{r.Ours, r.Theirs}
		if r.Kind.alone() {
			names = names[:1]
		}
		for _, name := range names {
			if !seen[name] {
				problems = append(problems, fmt.Errorf("ratio %q compares %q, which is no case", r.Name, name))
			}
		}
	}
	if g.Steady != "" && !ratios[g.Steady] {
		problems = append(problems, fmt.Errorf("steady %q is no ratio", g.Steady))
	}
	return errors.Join(problems...)
}

// report boils the samples down; samples[i] are case i's, one per round.
func (g Group) report(samples [][]sample) Report {
	rep := Report{Group: g.Name}
	for i, mine := range samples {
		rep.Results = append(rep.Results, Result{
			Name:        g.Cases[i].Name,
			NsPerOp:     median(each(mine, func(s sample) float64 { return s.ns })),
			AllocsPerOp: median(each(mine, func(s sample) float64 { return s.allocs })),
			CPUNsPerOp:  median(each(mine, func(s sample) float64 { return s.cpu })),
		})
	}
	for _, r := range g.Ratios {
		ours := samples[g.index(r.Ours)]
		theirs := ours
		if !r.Kind.alone() {
			theirs = samples[g.index(r.Theirs)]
		}
		perRound := make([]float64, len(ours))
		for k := range ours {
			perRound[k] = r.Kind.of(ours[k], theirs[k])
		}
		rep.Ratios = append(rep.Ratios, RatioResult{
			Ratio: r, Median: median(perRound), Min: slices.Min(perRound), Max: slices.Max(perRound),
		})
	}
	return rep
}

// of compares two samples.
func (k Kind) of(ours, theirs sample) float64 {
	switch k {
	case Throughput:
		return theirs.ns / ours.ns
	case CPU:
		return ours.cpu / theirs.cpu
	case Millis:
		return ours.ns / 1e6
	case PerSecond:
		return 1e9 / ours.ns
	default:
		return ours.ns / theirs.ns
	}
}

// median returns the middle value, or the mean of the two middle ones.
// It does not change values, which must not be empty.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	mid := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[mid]
	}
	return (sorted[mid-1] + sorted[mid]) / 2
}

func each(samples []sample, f func(sample) float64) []float64 {
	values := make([]float64, len(samples))
	for i, s := range samples {
		values[i] = f(s)
	}
	return values
}
