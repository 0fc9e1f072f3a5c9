// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package simulate runs the limiter and the gossip session of a whole fleet through a
// table of faults in simulated time. It runs the code that ships, and judges the fleet's
// admissions from outside.
package simulate

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/stormguard-mq/stormguard/internal/gossip"
)

// Strategy says how the fleet divides the limit.
type Strategy string

// The strategies.
const (
	Strict Strategy = "strict" // token escrow with loans
	Static Strategy = "static" // a fixed part for each node, for comparison
)

// Config says what to run.
type Config struct {
	Strategy Strategy
	Seed     uint64 // for all random draws
	Seeds    int    // number of seeds drawn from Seed; each row runs with each. 0 runs Seed itself
	Only     string // a regular expression for the names of rows; empty selects all
	All      bool   // runs the expensive rows, too
	JSON     bool   // prints JSON, not a table
}

// Result is the result of one run of a scenario.
type Result struct {
	Name  string `json:"name"`
	Gate  Gate   `json:"gate"`
	Nodes int    `json:"nodes"`

	// Policy says how the limit is divided, and what happens to the share of a silent
	// node.
	Policy string `json:"policy"`

	Error       float64 `json:"error_percent"`
	MaxError    float64 `json:"error_limit_percent"`
	Over        float64 `json:"over_budget_tokens"`
	StatedExtra float64 `json:"stated_extra_tokens"`
	ExtraWhy    string  `json:"stated_extra_why,omitempty"`
	SyncP99     float64 `json:"sync_p99_ms"`     // 0: not measured
	Converged   float64 `json:"converged_ms"`    // slowest pair, from its first packet after the fault; 0: not measured
	Rejoined    float64 `json:"rejoined_ms"`     // from the end of the fault; 0: not measured, -1: never
	Formula     float64 `json:"formula_percent"` // the highest cost of the fault; 0: no formula
	FormulaWhy  string  `json:"formula_why,omitempty"`
	BytesPerSec float64 `json:"bytes_per_node_second"`             // in the rest, if the scenario has one
	Packets     float64 `json:"packets_per_node_second,omitempty"` // in the rest; 0: not measured
	Fewest      int     `json:"fewest_in_10s,omitempty"`
	Most        int     `json:"most_in_10s,omitempty"`
	Share       float64 `json:"largest_share"`                      // of one node, as a multiple of its fair part
	Agreed      int     `json:"configurations_completed,omitempty"` // known to all running nodes
	Members     int     `json:"members,omitempty"`                  // with a share in the newest configuration; 0: the nodes differ, or none has one
	Memory      float64 `json:"bytes_per_node,omitempty"`           // of the heap, including the simulation's own; 0: not measured
	Asked       int     `json:"asked"`
	Admitted    int     `json:"admitted"`

	Silence float64 `json:"silence_ms,omitempty"` // the longest of a pair; measured only if StatedExtra depends on it

	Seed   uint64   `json:"-"`
	Trace  string   `json:"trace_hash"`
	Took   float64  `json:"seconds"`
	Used   float64  `json:"limit_used"` // the largest used part of any limit; above 1 the run failed
	Passed bool     `json:"passed"`
	Why    []string `json:"why,omitempty"` // reasons why the run did not pass
}

// ErrUsage means that a Config is wrong: an unknown strategy, a bad regular expression, or
// no scenario selected.
var ErrUsage = errors.New("simulate")

// ErrFailed means that a row or a run is out of its limits.
var ErrFailed = errors.New("out of its limits")

// Run runs the scenarios that cfg selects, and prints their rows. The error is [ErrFailed]
// if a row fails with any seed; its text names the row and the seed. If ctx ends, Run
// returns soon, with the error of ctx and without a table.
func Run(ctx context.Context, cfg Config, stdout, stderr io.Writer) error {
	chosen, err := cfg.choose()
	if err != nil {
		return err
	}
	seeds := cfg.seeds()
	rows, err := runAll(ctx, chosen, cfg.Strategy, seeds, stderr)
	if err != nil {
		return err
	}
	virtual := 0.0
	for _, sc := range chosen {
		virtual += sc.length.Seconds() * float64(len(seeds))
	}
	if cfg.JSON {
		err = json.NewEncoder(stdout).Encode(struct {
			Seed      uint64   `json:"seed"` // seeds were drawn from it
			Seeds     []uint64 `json:"seeds"`
			Virtual   float64  `json:"virtual_seconds"`
			Scenarios []Row    `json:"scenarios"`
		}{cfg.Seed, seeds, virtual, rows})
	} else {
		err = table(stdout, cfg, seeds, virtual, rows)
	}
	var failed []string
	for _, r := range rows {
		if !r.Passed {
			failed = append(failed, fmt.Sprintf("%s (--seed %d)", r.Name, r.Worst))
		}
	}
	if len(failed) > 0 {
		err = errors.Join(err, fmt.Errorf("%w: %d of %d rows: %s", ErrFailed, len(failed), len(rows), strings.Join(failed, ", ")))
	}
	return err
}

// seeds returns the seeds that each row runs with.
func (c Config) seeds() []uint64 {
	if c.Seeds == 0 {
		return []uint64{c.Seed}
	}
	return Draw(c.Seed, c.Seeds)
}

// Draw draws n different seeds from one seed. It always draws the same.
func Draw(seed uint64, n int) []uint64 {
	rng := rand.New(rand.NewPCG(seed, 0x5eed))
	seeds := make([]uint64, 0, n)
	for len(seeds) < n {
		if s := uint64(rng.Int32()); !slices.Contains(seeds, s) {
			seeds = append(seeds, s)
		}
	}
	return seeds
}

func (c Config) choose() (chosen []scenario, err error) {
	switch c.Strategy {
	case Strict, Static:
	default:
		return nil, fmt.Errorf("%w: strategy %q is neither %s nor %s", ErrUsage, c.Strategy, Strict, Static)
	}
	only, err := regexp.Compile(c.Only)
	if err != nil {
		return nil, fmt.Errorf("%w: --only: %w", ErrUsage, err)
	}
	for _, sc := range scenarios() {
		if (c.All || !sc.expensive || c.Only != "") && only.MatchString(sc.name) {
			chosen = append(chosen, sc)
		}
	}
	if len(chosen) == 0 {
		return nil, fmt.Errorf("%w: no scenario's name matches %q", ErrUsage, c.Only)
	}
	return chosen, nil
}

// runAll runs each scenario with each seed, on all processors. The longest scenarios run
// first. Scenarios whose memory is measured run last, one at a time. The error is the context's.
func runAll(ctx context.Context, chosen []scenario, strategy Strategy, seeds []uint64, stderr io.Writer) ([]Row, error) {
	type job struct{ row, seed int }
	results := make([][]Result, len(chosen))
	left := make([]int, len(chosen))
	var together, alone []job // alone: runs whose memory is measured; other runs would add theirs
	for i := range chosen {
		results[i], left[i] = make([]Result, len(seeds)), len(seeds)
		for k := range seeds {
			if chosen[i].maxMemory > 0 {
				alone = append(alone, job{i, k})
			} else {
				together = append(together, job{i, k})
			}
		}
	}
	slices.SortStableFunc(together, func(a, b job) int {
		return cmp.Compare(chosen[b.row].work(), chosen[a.row].work())
	})
	rows := make([]Row, len(chosen))
	var mu sync.Mutex // guards stderr, results, left and rows
	do := func(j job) {
		r := run(ctx, &chosen[j.row], strategy, seeds[j.seed])
		if ctx.Err() != nil {
			return // the run was cut short
		}
		mu.Lock()
		defer mu.Unlock()
		results[j.row][j.seed] = r
		if left[j.row]--; left[j.row] == 0 {
			row := rowOf(results[j.row])
			rows[j.row] = row
			fmt.Fprintf(stderr, "%-28s %6.1f s  %s\n", row.Name, row.Took, row.verdict())
		}
	}
	next := make(chan job)
	var runners sync.WaitGroup
	for range min(len(together), runtime.GOMAXPROCS(0)) {
		runners.Go(func() {
			for j := range next {
				do(j)
			}
		})
	}
	for _, j := range together {
		select {
		case next <- j:
			continue
		case <-ctx.Done():
		}
		break
	}
	close(next)
	runners.Wait()
	for _, j := range alone {
		if ctx.Err() == nil {
			do(j)
		}
	}
	return rows, ctx.Err()
}

// work estimates how long a run takes, without a unit: packets, if all nodes were busy.
func (sc *scenario) work() float64 { return float64(sc.nodes*sc.nodes) * sc.length.Seconds() }

// run runs one scenario and judges it.
func run(ctx context.Context, sc *scenario, strategy Strategy, seed uint64) Result {
	start := time.Now()
	before := 0.0
	if sc.maxMemory > 0 {
		before = heap()
	}
	w := newWorld(sc, strategy, seed)
	w.weigh(before)
	w.run(ctx)
	r := w.result()
	r.Seed, r.Took = seed, time.Since(start).Seconds()
	return r
}

// weigh measures the memory of the fleet: the live heap less before, soon after the start
// and at the end. Each node is asked once for each idle key, so that it knows the key.
func (w *world) weigh(before float64) {
	if w.sc.maxMemory <= 0 {
		return
	}
	const at = warmUp / 2
	w.net.At(at, func() {
		for id, m := range w.members {
			own, _ := w.net.Clock(id)
			for _, key := range w.keys[len(w.ledgers):] {
				m.node.Take(own, key, 1)
			}
		}
	})
	for _, t := range []time.Duration{at + 20*time.Millisecond, w.sc.length - 1} {
		w.net.At(t, func() { w.memory = max(w.memory, (heap()-before)/float64(w.sc.nodes)) })
	}
}

// heap returns the bytes of the live heap.
func heap() float64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}

// result measures and judges the finished run.
func (w *world) result() Result {
	sc := w.sc
	r := Result{
		Name: sc.name, Gate: sc.gate, Nodes: sc.nodes,
		MaxError: sc.maxError, StatedExtra: sc.extra, ExtraWhy: sc.extraWhy, Formula: sc.formula, FormulaWhy: sc.formulaWhy,
		Trace: fmt.Sprintf("%016x", w.net.Hash()), SyncP99: milliseconds(w.tap.p99(w.net.Now())),
		BytesPerSec: float64(w.net.Stats().Bytes) / float64(sc.nodes) / sc.length.Seconds(),
	}
	if sc.rest.maxPackets > 0 {
		r.Packets, r.BytesPerSec = w.sent()
	}
	byNode := make([]int, sc.nodes)
	for _, l := range w.ledgers {
		if e := l.worst(sc.from, sc.to); math.Abs(e) >= math.Abs(r.Error) {
			r.Error = e
		}
		r.Over = max(r.Over, l.over)
		r.Asked += total(l.asked)
		r.Admitted += total(l.admitted)
		for i, n := range l.byNode {
			byNode[i] += n
		}
	}
	if sc.windows != [2]int{} {
		r.Fewest, r.Most = w.ledgers[0].windows(sc.from, sc.to)
	}
	for _, n := range byNode {
		r.Share = max(r.Share, float64(n)*float64(sc.nodes)/float64(max(1, r.Admitted)))
	}
	r.Agreed, r.Members = w.agreed()
	r.Policy = sc.policy(w.strategy)
	r.Converged, r.Rejoined = milliseconds(w.converged), milliseconds(w.rejoined)
	if w.rejoined == gossip.Never {
		r.Rejoined = -1
	}
	r.Memory = w.memory
	if w.ears != nil {
		silence := w.ears.longest(w.net.Now())
		r.Silence, r.StatedExtra = milliseconds(silence), sc.takenOver(silence)
	}
	r.judge(sc, w.strategy)
	return r
}

// judge sets Passed, Why and Used. It allows a thousandth of a token for rounding.
func (r *Result) judge(sc *scenario, strategy Strategy) {
	wrong := func(format string, args ...any) { r.Why = append(r.Why, fmt.Sprintf(format, args...)) }
	within := func(value, limit float64, format string, args ...any) {
		if value > limit {
			wrong(format, args...)
		}
		if limit > 0 {
			r.Used = max(r.Used, value/limit)
		}
	}
	r.Used, r.Why = 0, nil
	e, f := math.Abs(r.Error), math.Abs(sc.formula)
	switch {
	case f == 0:
		within(e, sc.maxError, "error %+.2f %%, the limit is %.2f %%", r.Error, sc.maxError)
	case strategy == Strict || sc.gate == Gated:
		within(e, f+sc.maxError, "error %+.2f %%, said to be up to %+.2f %%", r.Error, sc.formula)
		within(0.3*f, e, "error %+.2f %%, said to be up to %+.2f %%"+unapproached, r.Error, sc.formula)
	}
	within(max(0, r.Over-1e-3), r.StatedExtra, "%.3f tokens over the bound, %.0f are stated", r.Over, r.StatedExtra)
	if sc.windows != [2]int{} && (r.Fewest < sc.windows[0] || r.Most > sc.windows[1]) {
		wrong("%d to %d admissions in 10 s, the limits are %d and %d", r.Fewest, r.Most, sc.windows[0], sc.windows[1])
	}
	if sc.fairness > 0 {
		within(r.Share, sc.fairness, "a node admitted %.1f times its part, the limit is %.1f", r.Share, sc.fairness)
	}
	if sc.maxBytes > 0 {
		within(r.BytesPerSec, sc.maxBytes, "%.0f bytes a second and node, the limit is %.0f", r.BytesPerSec, sc.maxBytes)
	}
	if sc.maxMemory > 0 {
		within(r.Memory, sc.maxMemory, "%.0f bytes of memory a node, the limit is %.0f", r.Memory, sc.maxMemory)
	}
	if r.Asked == 0 || r.Admitted == 0 {
		wrong("nothing happened: %d asked, %d admitted", r.Asked, r.Admitted)
	}
	if strategy == Strict {
		r.judgeShared(sc, wrong, within)
	}
	r.Passed = len(r.Why) == 0
}

// judgeShared judges the figures that need a fleet with gossip.
func (r *Result) judgeShared(sc *scenario, wrong func(string, ...any), within func(value, limit float64, format string, args ...any)) {
	if sc.approach {
		within(0.3*r.StatedExtra, r.Over, "%.3f tokens over the bound, and %.0f are stated"+unapproached, r.Over, r.StatedExtra)
	}
	if r.Agreed < sc.agreed {
		wrong("%d configurations were completed, of %d", r.Agreed, sc.agreed)
	}
	if sc.members > 0 && r.Members != sc.members {
		wrong("%d members have a share at the end, want %d; 0 is that they differ", r.Members, sc.members)
	}
	if sc.maxSync > 0 {
		if r.SyncP99 <= 0 {
			wrong("no sync delay was measured")
		}
		within(r.SyncP99, milliseconds(sc.maxSync), "sync p99 %.1f ms, the limit is %.1f ms", r.SyncP99, milliseconds(sc.maxSync))
	}
	if sc.rest.maxPackets > 0 {
		if r.Packets <= 0 {
			wrong("nothing was sent at rest")
		}
		within(r.Packets, sc.rest.maxPackets, "%.1f packets a second and node at rest, the limit is %.0f", r.Packets, sc.rest.maxPackets)
		within(r.BytesPerSec, sc.rest.maxBytes, "%.0f bytes a second and node at rest, the limit is %.0f", r.BytesPerSec, sc.rest.maxBytes)
	}
	if sc.maxSilence > 0 {
		within(r.Silence, milliseconds(sc.maxSilence), "two did not hear each other for %.0f ms, said to be up to %.0f ms", r.Silence, milliseconds(sc.maxSilence))
	}
	if sc.converge > 0 {
		if r.Rejoined < 0 {
			wrong("not whole again at the end")
		}
		if r.Converged <= 0 {
			wrong("nothing was missed in the fault")
		}
		within(r.Rejoined, milliseconds(rejoin), "whole again %.0f ms after the fault, the limit is %v", r.Rejoined, rejoin)
		within(r.Converged, milliseconds(sc.converge), "equal again %.0f ms after packets flowed, the limit is %v", r.Converged, sc.converge)
	}
}

func (r *Result) verdict() string {
	if r.Passed {
		return "ok"
	}
	return "FAILED: " + strings.Join(r.Why, "; ")
}

// A Row is one scenario with all its seeds. Each figure is the worst of any seed;
// Asked, Admitted and Took are sums.
type Row struct {
	Result

	Seeds  []uint64 `json:"seeds"`
	Worst  uint64   `json:"worst_seed"` // the seed nearest to a limit, or furthest beyond; Trace is of its run
	Failed []uint64 `json:"failed_seeds,omitempty"`

	SyncP99OfSeeds float64 `json:"sync_p99_of_seeds_ms"` // 99 % of the seeds have at most this SyncP99
}

// unapproached ends the message for a stated figure that the run did not approach.
const unapproached = ": what is never approached is wrong too"

// forgive lets a run pass whose only fault is a stated figure that it did not approach, if
// another run of the scenario passed. The figure is a bound: a single draw may be far below.
func forgive(runs []Result) {
	if !slices.ContainsFunc(runs, func(r Result) bool { return r.Passed }) {
		return
	}
	for i := range runs {
		r := &runs[i]
		if !r.Passed && !slices.ContainsFunc(r.Why, func(why string) bool { return !strings.HasSuffix(why, unapproached) }) {
			r.Passed, r.Used, r.Why = true, 0, nil
		}
	}
}

// rowOf sums up the runs of one scenario.
func rowOf(runs []Result) Row {
	forgive(runs)
	worst := slices.MaxFunc(runs, func(a, b Result) int {
		if a.Passed != b.Passed {
			if a.Passed {
				return -1
			}
			return 1
		}
		return cmp.Compare(a.Used, b.Used)
	})
	row := Row{Result: worst, Worst: worst.Seed}
	row.Asked, row.Admitted, row.Took, row.Why = 0, 0, 0, nil
	var syncs []float64
	for _, r := range runs {
		row.Seeds = append(row.Seeds, r.Seed)
		if !r.Passed {
			row.Failed = append(row.Failed, r.Seed)
			for _, why := range r.Why {
				if len(runs) > 1 {
					why = fmt.Sprintf("seed %d: %s", r.Seed, why)
				}
				row.Why = append(row.Why, why)
			}
		}
		if math.Abs(r.Error) > math.Abs(row.Error) {
			row.Error = r.Error
		}
		if r.Rejoined < 0 || row.Rejoined < 0 {
			row.Rejoined = -1 // never
		} else {
			row.Rejoined = max(row.Rejoined, r.Rejoined)
		}
		row.Over, row.StatedExtra = max(row.Over, r.Over), max(row.StatedExtra, r.StatedExtra)
		row.SyncP99, row.Converged = max(row.SyncP99, r.SyncP99), max(row.Converged, r.Converged)
		row.Silence, row.Memory = max(row.Silence, r.Silence), max(row.Memory, r.Memory)
		row.BytesPerSec, row.Packets = max(row.BytesPerSec, r.BytesPerSec), max(row.Packets, r.Packets)
		row.Share = max(row.Share, r.Share)
		row.Fewest, row.Most = min(row.Fewest, r.Fewest), max(row.Most, r.Most)
		row.Agreed, row.Members = min(row.Agreed, r.Agreed), min(row.Members, r.Members)
		row.Asked += r.Asked
		row.Admitted += r.Admitted
		row.Took += r.Took
		syncs = append(syncs, r.SyncP99)
	}
	slices.Sort(syncs)
	row.SyncP99OfSeeds = syncs[(len(syncs)*99+99)/100-1]
	return row
}

func (r *Row) verdict() string {
	if r.Passed {
		return fmt.Sprintf("ok, %.0f %% of a limit with seed %d", 100*r.Used, r.Worst)
	}
	return fmt.Sprintf("FAILED with %d of %d seeds: %s", len(r.Failed), len(r.Seeds), strings.Join(r.Why, "; "))
}

func milliseconds(d time.Duration) float64 { return float64(d) / 1e6 }

func table(w io.Writer, cfg Config, seeds []uint64, virtual float64, rows []Row) error {
	if cfg.Seeds > 0 {
		fmt.Fprintf(w, "%d seeds, drawn from --seed %d: ", len(seeds), cfg.Seed)
	} else {
		fmt.Fprint(w, "seed ")
	}
	fmt.Fprintf(w, "%s; %.0f virtual seconds\n", strings.Trim(fmt.Sprint(seeds), "[]"), virtual)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "scenario\tnodes\tgate\tpolicy\terror %\tover\tstated\tsync p99 ms\tof 99 % of seeds\tequal again ms\trejoined ms\tKB/s per node\tidle packets/s\tworst seed\ttrace\t\t")
	for _, r := range rows {
		fmt.Fprintf(t, "%s\t%d\t%s\t%s\t%+.3f\t%.3f\t%.0f\t%.1f\t%.1f\t%.0f\t%.0f\t%.0f\t%.1f\t%d\t%s\t%s\t\n",
			r.Name, r.Nodes, r.Gate, r.Policy, r.Error, r.Over, r.StatedExtra, r.SyncP99, r.SyncP99OfSeeds,
			r.Converged, r.Rejoined, r.BytesPerSec/1000, r.Packets, r.Worst, r.Trace, r.verdict())
	}
	return t.Flush()
}
