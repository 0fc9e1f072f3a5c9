// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"

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

A scenario is strict, and then the exit status is 1 when it is out of its limits,
or printed, where no design can keep both accuracy and the bound. With --strategy
static each node has a fixed part of the limit, which fails the table.`

func newSimulate() *cobra.Command {
	cfg := simulate.Config{Seed: 1}
	strategy, seed := string(simulate.Strict), int(cfg.Seed)
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
	flags.StringSliceVar(&cfg.Only, "scenario", nil, "only those whose name has one of these in it")
	flags.BoolVar(&cfg.All, "all", false, "the scenarios that take minutes too")
	flags.BoolVar(&cfg.JSON, "json", false, `print {"scenarios":[...]}`)
	ranges.number(flags, &seed, "seed", 0, 1<<31-1, "of everything that is drawn")
	cmd.AddCommand(newSimulateLiveness())
	return cmd
}
