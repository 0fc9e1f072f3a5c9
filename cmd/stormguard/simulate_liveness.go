// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/liveness"
)

const livenessLong = `Run one guarded source through a table of poison, flaky dependencies and outages,
and judge whether it goes on: how soon, and at what cost.

What runs is the guard that ships, with its defaults. Only time is virtual, and the
broker and the dependency are in memory.

  handled     of the healthy messages; in the rows flaky-N-1000 of what a loop with
              the same retries, order and window handles without a guard
  letters     healthy messages that were dead-lettered
  passed      adjacent: from the arrival of the poison (idle: of the healthy message)
              until the message behind it was handled; else from the end of the
              outage until something was handled
  drained     until all poison was dead-lettered, or all that was held was settled:
              from the first success after an outage, in the rows head-N from its end
  calls       in the outage, of those of a loop that tries each message 5 times
              without a delay. The limit is 1 %, but no less than what one message's
              attempts, one look and the probes need that see the recovery in time
  overtaken   outages in which a message was handled before one in front of it

What is drawn repeats by its seed, the guard's delays too. What happens at the same
virtual instant comes in any order, so some rows differ a little between two runs.
The exit status is 1 when a row misses its limit.`

func newSimulateLiveness() *cobra.Command {
	cfg := liveness.Config{}
	seed := 1
	var ranges ranges
	cmd := &cobra.Command{
		Use:   "liveness",
		Short: "Run a guarded source through poison and outages, on virtual time",
		Long:  livenessLong,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := ranges.check(); err != nil {
				return usageError{err}
			}
			if cmd.Flags().Changed("seed") && cmd.Flags().Changed("seeds") {
				return usageError{errors.New("--seeds: draws seeds, and --seed names one; give one of them")}
			}
			cfg.Seed = uint64(seed)
			err := liveness.Run(cmd.Context(), cfg, cmd.OutOrStdout(), cmd.ErrOrStderr())
			if errors.Is(err, liveness.ErrUsage) {
				return usageError{err}
			}
			return err
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&cfg.Only, "only", "", "only rows whose name matches this regular expression")
	flags.BoolVar(&cfg.All, "all", false, "more runs of each row, each order, thousands of hours: takes hours")
	flags.BoolVar(&cfg.JSON, "json", false, `print {"rows":[...]}`)
	ranges.number(flags, &seed, "seed", 0, 1<<31-1, "of everything that is drawn")
	ranges.number(flags, &cfg.Seeds, "seeds", 0, 1000, "draw so many seeds, and run each row with each; 0 means --seed")
	return cmd
}
