// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package simulate runs the limiter and the gossip session of a whole fleet, the
// code that ships, through a table of faults in simulated time, and judges from
// outside what the fleet admitted.
package simulate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/stormguard-mq/stormguard/crdt/gossip"
)

// Strategy is what divides the limit.
type Strategy string

// The strategies.
const (
	Strict Strategy = "strict" // token escrow with loans
	Static Strategy = "static" // a fixed part for each node, for comparison
)

// Config says what to run.
type Config struct {
	Strategy Strategy
	Seed     uint64
	Only     []string // parts of scenarios' names; unset is all but the expensive ones
	All      bool     // the expensive ones too
	JSON     bool
}

// Result is what one scenario came to.
type Result struct {
	Name  string `json:"name"`
	Gate  Gate   `json:"gate"`
	Nodes int    `json:"nodes"`

	// Policy is what the limit goes by: how it is divided, and what becomes of the
	// share of who is not heard.
	Policy string `json:"policy"`

	Error       float64 `json:"error_percent"`
	MaxError    float64 `json:"error_limit_percent"`
	Over        float64 `json:"over_budget_tokens"`
	StatedExtra float64 `json:"stated_extra_tokens"`
	ExtraWhy    string  `json:"stated_extra_why,omitempty"`
	SyncP99     float64 `json:"sync_p99_ms"`     // 0: not measured
	Converged   float64 `json:"converged_ms"`    // from a pair's first packet after the fault; 0: not measured
	Rejoined    float64 `json:"rejoined_ms"`     // from the end of the fault; 0: not measured, -1: never
	Formula     float64 `json:"formula_percent"` // what the fault is said to cost; 0: not stated
	FormulaWhy  string  `json:"formula_why,omitempty"`
	BytesPerSec float64 `json:"bytes_per_node_second"`             // where a rest is measured, in that
	Packets     float64 `json:"packets_per_node_second,omitempty"` // in a rest; 0: not measured
	Fewest      int     `json:"fewest_in_10s,omitempty"`
	Most        int     `json:"most_in_10s,omitempty"`
	Share       float64 `json:"largest_share"`                // of one node, times its fair part
	Agreed      int     `json:"charters_completed,omitempty"` // known to all that live
	Members     int     `json:"members,omitempty"`            // with a share, by the newest charter; 0: they differ, or there is none
	Memory      float64 `json:"bytes_per_node,omitempty"`     // of the heap, with what the simulation itself takes; 0: not measured
	Asked       int     `json:"asked"`
	Admitted    int     `json:"admitted"`

	Seed   uint64   `json:"seed"`
	Trace  string   `json:"trace_hash"`
	Took   float64  `json:"seconds"`
	Passed bool     `json:"passed"`
	Why    []string `json:"why,omitempty"` // it did not
}

// ErrUsage means that a Config asks for what there is not.
var ErrUsage = errors.New("simulate")

// ErrFailed means that a gated scenario is out of its limits.
var ErrFailed = errors.New("a scenario is out of its limits")

// Run runs what cfg says and prints it. The error is [ErrFailed] if a gated
// scenario failed; its text names them. It ends soon after ctx, with its error and
// without a table.
func Run(ctx context.Context, cfg Config, stdout, stderr io.Writer) error {
	chosen, err := cfg.choose()
	if err != nil {
		return err
	}
	results := make([]Result, len(chosen))
	next := make(chan int)
	var runners sync.WaitGroup
	var mu sync.Mutex // of stderr
	do := func(i int) {
		results[i] = run(ctx, &chosen[i], cfg.Strategy, cfg.Seed)
		if ctx.Err() != nil {
			return // it did not come to its end
		}
		mu.Lock()
		defer mu.Unlock()
		fmt.Fprintf(stderr, "%-28s %6.1f s  %s\n", results[i].Name, results[i].Took, results[i].verdict())
	}
	for range min(len(chosen), runtime.GOMAXPROCS(0)) {
		runners.Go(func() {
			for i := range next {
				do(i)
			}
		})
	}
	for i := range chosen {
		if chosen[i].maxMemory > 0 {
			continue
		}
		select {
		case next <- i:
			continue
		case <-ctx.Done():
		}
		break
	}
	close(next)
	runners.Wait()
	for i := range chosen { // alone, or others' memory would be counted
		if chosen[i].maxMemory > 0 && ctx.Err() == nil {
			do(i)
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if cfg.JSON {
		err = json.NewEncoder(stdout).Encode(struct {
			Scenarios []Result `json:"scenarios"`
		}{results})
	} else {
		err = table(stdout, results)
	}
	var failed []string
	for _, r := range results {
		if r.Gate == Gated && !r.Passed {
			failed = append(failed, r.Name)
		}
	}
	if len(failed) > 0 {
		err = errors.Join(err, fmt.Errorf("%w: %s", ErrFailed, strings.Join(failed, ", ")))
	}
	return err
}

func (c Config) choose() (chosen []scenario, err error) {
	switch c.Strategy {
	case Strict, Static:
	default:
		return nil, fmt.Errorf("%w: strategy %q is neither %s nor %s", ErrUsage, c.Strategy, Strict, Static)
	}
	for _, sc := range scenarios() {
		wanted := len(c.Only) == 0 && (c.All || !sc.expensive)
		for _, part := range c.Only {
			wanted = wanted || strings.Contains(sc.name, part)
		}
		if wanted {
			chosen = append(chosen, sc)
		}
	}
	if len(chosen) == 0 {
		return nil, fmt.Errorf("%w: no scenario's name has any of %q", ErrUsage, c.Only)
	}
	return chosen, nil
}

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

// weigh has all keys that lie idle asked for once at every node, so that they are
// known, and looks at what is alive then and at the end, less what was before.
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

// heap is what is alive.
func heap() float64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}

// result is what has happened in w, judged.
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
	r.judge(sc, w.strategy)
	return r
}

// judge says what is out of its limits. A thousandth of a token is rounding.
func (r *Result) judge(sc *scenario, strategy Strategy) {
	wrong := func(format string, args ...any) { r.Why = append(r.Why, fmt.Sprintf(format, args...)) }
	if f := math.Abs(sc.formula); f > 0 {
		// A bound that is never approached is wrong too.
		judged := strategy == Strict || sc.gate == Gated
		if e := math.Abs(r.Error); judged && (e > f+sc.maxError || e < 0.3*f) {
			wrong("error %+.2f %%, said to be up to %+.2f %%", r.Error, sc.formula)
		}
	} else if math.Abs(r.Error) > sc.maxError {
		wrong("error %+.2f %%, the limit is %.2f %%", r.Error, sc.maxError)
	}
	if r.Over > sc.extra+1e-3 {
		wrong("%.3f tokens over the bound, %.0f are stated", r.Over, sc.extra)
	}
	if sc.approach && strategy == Strict && r.Over < 0.3*sc.extra {
		wrong("%.3f tokens over the bound, and %.0f are stated: what is never approached is wrong too", r.Over, sc.extra)
	}
	if strategy == Strict && r.Agreed < sc.agreed {
		wrong("%d charters were completed, of %d", r.Agreed, sc.agreed)
	}
	if strategy == Strict && sc.members > 0 && r.Members != sc.members {
		wrong("%d members have a share at the end, want %d; 0 is that they differ", r.Members, sc.members)
	}
	if r.Asked == 0 || r.Admitted == 0 {
		wrong("nothing happened: %d asked, %d admitted", r.Asked, r.Admitted)
	}
	if sc.maxSync > 0 && strategy == Strict && !(r.SyncP99 > 0 && r.SyncP99 <= milliseconds(sc.maxSync)) {
		wrong("sync p99 %.1f ms, the limit is %.1f ms, and 0 is nothing measured", r.SyncP99, milliseconds(sc.maxSync))
	}
	if sc.rest.maxPackets > 0 && strategy == Strict && !(r.Packets > 0 && r.Packets <= sc.rest.maxPackets && r.BytesPerSec <= sc.rest.maxBytes) {
		wrong("%.1f packets and %.0f bytes a second and node at rest, the limits are %.0f and %.0f, and 0 is nothing sent",
			r.Packets, r.BytesPerSec, sc.rest.maxPackets, sc.rest.maxBytes)
	}
	if sc.converge > 0 && strategy == Strict {
		switch {
		case r.Rejoined < 0 || r.Rejoined > milliseconds(rejoin):
			wrong("not whole again %v after the fault", rejoin)
		case r.Converged <= 0:
			wrong("nothing was missed in the fault")
		case r.Converged > milliseconds(sc.converge):
			wrong("equal again %.0f ms after packets flowed, the limit is %v", r.Converged, sc.converge)
		}
	}
	if sc.windows != [2]int{} && (r.Fewest < sc.windows[0] || r.Most > sc.windows[1]) {
		wrong("%d to %d admissions in 10 s, the limits are %d and %d", r.Fewest, r.Most, sc.windows[0], sc.windows[1])
	}
	if sc.fairness > 0 && r.Share > sc.fairness {
		wrong("a node admitted %.1f times its part, the limit is %.1f", r.Share, sc.fairness)
	}
	if sc.maxBytes > 0 && r.BytesPerSec > sc.maxBytes {
		wrong("%.0f bytes a second and node, the limit is %.0f", r.BytesPerSec, sc.maxBytes)
	}
	if sc.maxMemory > 0 && r.Memory > sc.maxMemory {
		wrong("%.0f bytes of memory a node, the limit is %.0f", r.Memory, sc.maxMemory)
	}
	r.Passed = len(r.Why) == 0
}

func (r *Result) verdict() string {
	switch {
	case r.Passed:
		return "ok"
	case r.Gate == Printed:
		return "printed: " + strings.Join(r.Why, "; ")
	default:
		return "FAILED: " + strings.Join(r.Why, "; ")
	}
}

func milliseconds(d time.Duration) float64 { return float64(d) / 1e6 }

func table(w io.Writer, results []Result) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "scenario\tnodes\tgate\tpolicy\terror %\tover\tstated\tsync p99 ms\tequal again ms\trejoined ms\tKB/s per node\tidle packets/s\ttrace\t\t")
	for _, r := range results {
		fmt.Fprintf(t, "%s\t%d\t%s\t%s\t%+.3f\t%.3f\t%.0f\t%.1f\t%.0f\t%.0f\t%.0f\t%.1f\t%s\t%s\t\n",
			r.Name, r.Nodes, r.Gate, r.Policy, r.Error, r.Over, r.StatedExtra, r.SyncP99, r.Converged, r.Rejoined, r.BytesPerSec/1000, r.Packets, r.Trace, r.verdict())
	}
	return t.Flush()
}
