// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/internal/fleetstate"
	"github.com/stormguard-mq/stormguard/internal/gossip/simnet"
)

// An exploration begins with faults, at random instants and in any order. Then all faults
// end, and all load is at one node at a time, which needs loans of the others. After settle
// the run is judged, until each node was hot twice.
const (
	quiet    = 1500 * time.Millisecond // before the first fault: all nodes meet, and mint
	troubled = 14 * time.Second        // span of the faults: long enough for nodes to be lost to each other
	settle   = 8 * time.Second         // 5.1 s to meet again, 1.011 s to mint, and over a second more
	unheard  = 200 * time.Millisecond  // from the loss of the register until a process notices it
	turn     = 500 * time.Millisecond  // how long each node is hot

	admits = 2  // percent of the rate that the fleet may be off
	part   = 10 // percent of its share that one node may miss
)

// ExploreConfig says what to explore.
type ExploreConfig struct {
	Seed uint64
	Runs int  // number of runs, each with a seed drawn from Seed; 0 is one run, of Seed itself
	JSON bool // prints JSON, not text

	// Register makes an empty register for the run of a seed, and a function that closes
	// it. Several goroutines call Register. nil uses a register in memory.
	Register func(ctx context.Context, seed uint64) (r register.Register, closes func(), err error)

	// Patience is how long a run begins anew, on a new register, if a register that has
	// answered does not answer any more. 0 is not at all.
	Patience time.Duration
}

// An Exploration is the result of one run.
type Exploration struct {
	Seed   uint64   `json:"seed"`
	Nodes  int      `json:"nodes"`
	Faults []string `json:"faults"`

	Over   float64 `json:"over_budget_tokens"`
	Stated float64 `json:"stated_extra_tokens"` // for machines that stood still, and for evictions
	Error  float64 `json:"error_percent"`       // in the judged span, after all faults
	Least  float64 `json:"least_share"`         // of one node in the judged span, as a multiple of its fair part

	Unknown int `json:"unknown_writes"` // writes to the register whose writer was not told the outcome

	Trace string   `json:"trace_hash"`
	Why   []string `json:"why,omitempty"` // reasons why the run failed
}

// A mishap schedules one fault from t to until, and returns its description.
type mishap func(e *explored, t, until time.Duration) string

// mishaps are all possible faults.
var mishaps = []mishap{
	func(e *explored, t, until time.Duration) string {
		node := e.node()
		e.w.net.At(t, func() { e.w.net.Crash(node) })
		e.w.net.At(until, func() { e.w.net.Restart(node) })
		return fmt.Sprintf("%d crashes", node)
	},
	func(e *explored, t, until time.Duration) string {
		side := e.rng.Perm(e.w.sc.nodes)[:1+e.rng.IntN(e.w.sc.nodes-1)]
		e.w.net.At(t, func() { e.w.net.Split(side) })
		e.w.net.At(until, func() { e.w.net.Heal() })
		return fmt.Sprintf("split of %v", side)
	},
	func(e *explored, t, until time.Duration) string {
		from, to := e.node(), e.node()
		e.w.net.At(t, func() { e.w.net.Cut(from, to) })
		e.w.net.At(until, func() { e.w.net.Mend(from, to) })
		return fmt.Sprintf("cut from %d to %d", from, to)
	},
	func(e *explored, t, until time.Duration) string {
		node := e.node()
		e.w.net.At(t, func() { e.w.net.Suspend(node, until-t) })
		return fmt.Sprintf("%d is stopped", node)
	},
	func(e *explored, t, until time.Duration) string {
		node := e.node()
		e.stated += float64(e.w.sc.burstTokens) // its loans, spent after the lenders wrote them off
		e.w.net.At(t, func() { e.w.net.Pause(node, until-t) })
		return fmt.Sprintf("%d's machine stands still", node)
	},
	func(e *explored, t, _ time.Duration) string {
		node, by := e.node(), time.Duration(2*e.rng.IntN(2)-1)*time.Hour
		e.w.net.At(t, func() { e.w.net.StepWall(node, by) })
		return fmt.Sprintf("%d's clock steps by %v", node, by)
	},
	func(e *explored, t, _ time.Duration) string {
		ppm := e.rng.IntN(981) - 490 // the same for all: else their errors cancel out
		for node := range e.w.sc.nodes {
			e.w.net.At(t, func() { e.w.net.Drift(node, ppm) })
		}
		return fmt.Sprintf("all clocks are off by %d ppm", ppm)
	},
	func(e *explored, t, until time.Duration) string {
		link := e.link
		link.Loss, link.Dup = 0.5*e.rng.Float64(), 0.2*e.rng.Float64()
		e.w.net.At(t, func() { e.w.net.SetLinks(link) })
		e.w.net.At(until, func() { e.w.net.SetLinks(e.link) })
		return fmt.Sprintf("%.0f %% loss", 100*link.Loss)
	},
	func(e *explored, t, until time.Duration) string {
		lost := e.rng.Perm(e.w.sc.nodes)[:1+e.rng.IntN(e.w.sc.nodes)]
		e.w.unplug(t, until, lost...)
		e.reweigh(min(t+time.Duration(e.rng.Int64N(int64(unheard))), quiet+troubled), lost[0]) // the write is lost, or arrives late
		return fmt.Sprintf("%v lose the register", lost)
	},
	func(e *explored, t, _ time.Duration) string { // two operators at once
		for range 2 {
			e.reweigh(t, e.node())
		}
		return "two change weights"
	},
	func(e *explored, t, _ time.Duration) string {
		by, node := e.node(), e.node()
		// An evicted node that runs mints its share until it hears of the eviction, at the
		// latest after the end of all faults. It weighs at most three, the others at least
		// one. An operator who had lost the register may evict up to 1.2 s after that end.
		share := 3 / float64(e.w.sc.nodes+2)
		e.stated += share * (float64(e.w.sc.burstTokens) + e.w.sc.rate*(quiet+troubled+2*time.Second-t).Seconds())
		e.w.ask(t, by, func(c *citizen, now time.Duration) {
			number, _ := c.config.Number()
			_, _ = c.config.Evict(now, number, e.w.names[node], "explore")
		})
		return fmt.Sprintf("%d evicts %d", by, node)
	},
}

// explored is one run.
type explored struct {
	w      *world
	rng    *rand.Rand
	link   simnet.Link // without a fault
	stated float64     // tokens above the bound that the faults may cost
	faults []string
}

func (e *explored) node() int { return e.rng.IntN(e.w.sc.nodes) }

// reweigh has an operator at the node by change the weight of a random node.
func (e *explored) reweigh(t time.Duration, by int) {
	change := fleetstate.Change{Weights: map[string]int{e.w.names[e.node()]: 1 + e.rng.IntN(3)}}
	e.w.ask(t, by, func(c *citizen, now time.Duration) {
		number, _ := c.config.Number()
		_, _ = c.config.Set(now, number, change, "explore") // may fail: another operator was faster, or no configuration is known yet
	})
}

// errAway means that a register has answered, and then did not.
var errAway = errors.New("the register does not answer any more")

// explore is one run, on an empty register. The error is the context's or the register's. A
// register that broke a promise is no error, also if it does not answer any more.
func explore(ctx context.Context, seed uint64, r register.Register) (x Exploration, err error) {
	rng := rand.New(rand.NewPCG(seed, 0xe))
	sc := base("explore", 2+rng.IntN(5), nil)
	sc.rate = 2000
	sc.changes = true
	sc.burstTokens = 100 * (1 + rng.IntN(3))
	sc.from = quiet + troubled + settle
	looked := 2 * turn * time.Duration(sc.nodes)
	sc.to = sc.from + looked
	sc.length = sc.to
	sc.load = first(quiet+troubled, []load{
		balanced(demand), balanced(3), rotating(rotation), rotating(200 * time.Millisecond), only(rng.IntN(sc.nodes)), skewed,
	}[rng.IntN(6)], rotating(turn))
	w := newWorld(&sc, Strict, seed)
	w.store.register, w.store.notices = r, unheard
	w.store.rng, w.store.late = rand.New(rand.NewPCG(seed, 0xf)), quiet+troubled
	e := &explored{w: w, rng: rng, link: sc.link()}
	for range 1 + rng.IntN(10) {
		begin := quiet + time.Duration(rng.Int64N(int64(troubled)))
		end := min(begin+time.Duration(rng.ExpFloat64()*float64(1500*time.Millisecond)), quiet+troubled)
		if rng.IntN(4) == 0 {
			end = quiet + troubled
		}
		what := mishaps[rng.IntN(len(mishaps))](e, begin, end)
		e.faults = append(e.faults, fmt.Sprintf("%v to %v: %s", begin.Round(time.Millisecond), end.Round(time.Millisecond), what))
	}
	w.net.At(quiet+troubled, func() { w.net.Heal() })
	var before []int
	w.net.At(sc.from, func() { before = append(before, w.ledgers[0].byNode...) })
	w.run(ctx)
	switch err := cmp.Or(ctx.Err(), w.store.err); {
	case err == nil:
	case ctx.Err() == nil && len(w.store.wrong) > 0:
		return Exploration{Seed: seed, Nodes: sc.nodes, Faults: e.faults, Least: 1, Why: append(w.store.wrong, err.Error())}, nil
	case ctx.Err() == nil && w.store.answered:
		return x, fmt.Errorf("%w: %w", errAway, err)
	default:
		return x, err
	}

	l := w.ledgers[0]
	x = Exploration{
		Seed: seed, Nodes: sc.nodes, Faults: e.faults, Over: l.over, Stated: e.stated,
		Error: l.worst(sc.from, sc.to), Trace: fmt.Sprintf("%016x", w.net.Hash()), Unknown: w.store.unknown,
	}
	fair := sc.rate * looked.Seconds() / float64(sc.nodes)
	x.Least = fair
	for i, n := range l.byNode {
		x.Least = min(x.Least, float64(n-before[i]))
	}
	x.Least /= fair
	x.Why = w.store.wrong
	if x.Over > x.Stated+1e-3 {
		x.Why = append(x.Why, fmt.Sprintf("%.3f tokens over the bound, %.0f are stated", x.Over, x.Stated))
	}
	if x.Error < -admits || x.Error > admits {
		x.Why = append(x.Why, fmt.Sprintf("error %+.2f %% when all was mended for %v, the limit is %d %%", x.Error, settle, admits))
	}
	if _, members := w.agreed(); members != sc.nodes {
		x.Why = append(x.Why, fmt.Sprintf("%d of %d have a share of one configuration when all was mended for %v", members, sc.nodes, settle))
	}
	if x.Least < 1-part/100. {
		x.Why = append(x.Why, fmt.Sprintf("a node admits %.2f of its share when all was mended for %v", x.Least, settle))
	}
	return x, nil
}

// run makes the register of a run, and explores with it.
func (cfg *ExploreConfig) run(ctx context.Context, seed uint64) (Exploration, error) {
	if cfg.Register == nil {
		return explore(ctx, seed, new(register.Memory))
	}
	r, closes, err := cfg.Register(ctx, seed)
	if err != nil {
		return Exploration{}, err
	}
	defer closes()
	return explore(ctx, seed, r)
}

// Explore runs the seeds of cfg, and prints each failed run and one summary line. The error
// is [ErrFailed] if a run failed, or the error of a register that did not answer. If ctx
// ends, Explore returns soon, with the error of ctx.
func Explore(ctx context.Context, cfg ExploreConfig, stdout io.Writer) error {
	seeds := []uint64{cfg.Seed}
	if cfg.Runs > 0 {
		seeds = Draw(cfg.Seed, cfg.Runs)
	}
	var mu sync.Mutex
	var failed []Exploration
	worst, least, over, faults, unknown, anew := 0., 1., 0., 0, 0, 0
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	next := make(chan uint64)
	var runners sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		runners.Go(func() {
			for seed := range next {
				x, err := cfg.run(ctx, seed)
				for began := time.Now(); errors.Is(err, errAway) && time.Since(began) < cfg.Patience && ctx.Err() == nil; {
					select {
					case <-ctx.Done():
					case <-time.After(time.Second):
					}
					mu.Lock()
					anew++
					mu.Unlock()
					if again, errAgain := cfg.run(ctx, seed); errAgain == nil || errors.Is(errAgain, errAway) || ctx.Err() != nil {
						x, err = again, errAgain
					}
				}
				if err != nil {
					stop(fmt.Errorf("seed %d: %w", seed, err)) // the first error counts
					continue
				}
				mu.Lock()
				worst, least, over = min(worst, x.Error), min(least, x.Least), max(over, x.Over-x.Stated)
				faults, unknown = faults+len(x.Faults), unknown+x.Unknown
				if len(x.Why) > 0 {
					failed = append(failed, x)
				}
				mu.Unlock()
			}
		})
	}
	for _, seed := range seeds {
		if ctx.Err() != nil {
			break
		}
		next <- seed
	}
	close(next)
	runners.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	var err error
	if cfg.JSON {
		err = json.NewEncoder(stdout).Encode(struct {
			Seed    uint64        `json:"seed"`
			Runs    int           `json:"runs"`
			Faults  int           `json:"faults"`
			Unknown int           `json:"unknown_writes"`
			Over    float64       `json:"over_stated_tokens"`
			Error   float64       `json:"error_percent"`
			Least   float64       `json:"least_share"`
			Anew    int           `json:"begun_anew"`
			Failed  []Exploration `json:"failed"`
		}{cfg.Seed, len(seeds), faults, unknown, over, worst, least, anew, failed})
	} else {
		for _, x := range failed {
			fmt.Fprintf(stdout, "seed %d, %d nodes, trace %s: %s\n  %s\n", x.Seed, x.Nodes, x.Trace, strings.Join(x.Why, "; "), strings.Join(x.Faults, "\n  "))
		}
		_, err = fmt.Fprintf(stdout, "%d runs of --seed %d, %d faults, %d writes of unknown outcome: %d failed; %.3f tokens over what is stated; %v after the last fault error %+.2f %%, least share %.2f\n",
			len(seeds), cfg.Seed, faults, unknown, len(failed), over, settle, worst, least)
		if anew > 0 {
			fmt.Fprintf(stdout, "%d times a run began anew: its register did not answer any more\n", anew)
		}
	}
	if len(failed) > 0 {
		err = errors.Join(err, fmt.Errorf("%w: %d of %d runs", ErrFailed, len(failed), len(seeds)))
	}
	return err
}
