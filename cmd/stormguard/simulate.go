// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"math/rand/v2"

	"github.com/spf13/cobra"

	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/simulate"
)

const simulateLong = `Run a fleet of consumers that share one limit through a table of faults, in
simulated time, and judge from outside what the fleet admitted.

What runs is the limiter and the gossip session that ship; only the network and
the clocks are simulated. A run is repeated exactly by its seed: the trace hash
is over every packet and every instant.

  error            the worst window of 10s inside the fault, after 1s of warm-up:
                   what was admitted against what one ideal bucket admits of the
                   same messages
  over             the most tokens that were ever above burst + rate·T, over all
                   intervals
  sync p99         from a change to its merge at a peer, all changes and peers; what
                   never arrived counts with its age
  equal again      after the fault, from the first packet of a pair until it has
                   what it had missed
  rejoined         from the end of the fault until then

Unless a scenario says another, the limit is 10,000 a second with a burst of 500,
messages come in as a Poisson process at 1.2 times the limit, and packets take
0.5 ms and another 0.5 ms on average, exponentially distributed.

Each row runs with five seeds that are drawn anew. Each figure is the worst of any
seed. The worst seed is the one nearest to a limit, or furthest beyond it, and the
trace is its: --seed S --only ROW runs it again. A limit is that of the error, of
what is over, of the sync delay and so on, whichever is nearest.

  of 99 % of seeds the sync p99 within which 99 % of the seeds are

A strict row has limits. A printed one, where no design can keep both accuracy and
the bound, states what it costs, and must stay within that and come to 30 % of it.
The exit status is 1 when any row fails with any seed. With --strategy static each
node has a fixed part of the limit, which fails the table.`

func newSimulate() *cobra.Command {
	cfg := simulate.Config{Seeds: 5}
	strategy, seed := string(simulate.Strict), 0
	var ranges ranges
	cmd := &cobra.Command{
		Use:   "simulate",
		Short: "Run a simulated fleet through a table of faults",
		Long:  simulateLong,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := ranges.check(); err != nil {
				return usageError{err}
			}
			switch {
			case !cmd.Flags().Changed("seed"):
				seed = int(rand.Int32())
			case !cmd.Flags().Changed("seeds"):
				cfg.Seeds = 0
			}
			cfg.Strategy, cfg.Seed = simulate.Strategy(strategy), uint64(seed)
			err := simulate.Run(cmd.Context(), cfg, cmd.OutOrStdout(), cmd.ErrOrStderr())
			if errors.Is(err, simulate.ErrUsage) {
				return usageError{err}
			}
			return err
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&strategy, "strategy", strategy, "strict, or static for comparison")
	flags.StringVar(&cfg.Only, "only", "", "only rows whose name matches this regular expression, those that take minutes too")
	flags.BoolVar(&cfg.All, "all", false, "the rows that take minutes too")
	flags.BoolVar(&cfg.JSON, "json", false, `print {"seeds":[...],"scenarios":[...]}`)
	ranges.number(flags, &seed, "seed", 0, 1<<31-1, "run with this one; with --seeds, draw them from it")
	flags.Lookup("seed").DefValue = "drawn"
	ranges.number(flags, &cfg.Seeds, "seeds", 1, 100_000, "draw so many, and run each row with each")
	cmd.AddCommand(newSimulateLiveness(), newSimulateExplore())
	return cmd
}
