// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/simulate"
	"github.com/stormguard-mq/stormguard/fleet/register"
)

const exploreLong = `Run many simulated fleets, each through faults that are drawn: crashes, splits,
one-way cuts, stopped processes and machines, clocks that step by an hour or run by
up to 490 ppm, lost and repeated packets, one on top of the other for 14 s.

Then everything is mended, and all load is at one node, and soon at another. 8 s
later that is looked at, until each was hot twice. A run fails if

  over             the fleet ever admitted more than burst + rate·T, and one burst
                   for each machine that stood still
  error            it does not admit the rate again, within 2 %
  least share      one node does not admit 90 % of the rate in its turns
  register         one number had two documents, or the newest number fell

A run that fails is printed with its faults, and its seed runs it again.

With --register the fleets keep their configuration in a real store. Each run makes a
new register there and does not delete it: use a store for tests. A run begins anew,
for two minutes, if a register that has answered does not answer any more.`

func newSimulateExplore() *cobra.Command {
	cfg := simulate.ExploreConfig{Runs: 100, Patience: 2 * time.Minute}
	seed := 0
	var (
		ranges ranges
		store  registerFlags
	)
	cmd := &cobra.Command{
		Use:   "explore",
		Short: "Run simulated fleets through faults that are drawn",
		Long:  exploreLong,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := errors.Join(ranges.check(), store.validate()); err != nil {
				return usageError{err}
			}
			switch {
			case !cmd.Flags().Changed("seed"):
				seed = int(rand.Int32())
			case !cmd.Flags().Changed("runs"):
				cfg.Runs = 0
			}
			cfg.Seed = uint64(seed)
			if batch := rand.Uint32(); store.url != "" {
				var runs atomic.Int64
				cfg.Register = func(ctx context.Context, seed uint64) (register.Register, func(), error) {
					name, of := fmt.Sprintf("explore-%08x-%d-%d", batch, seed, runs.Add(1)), store
					if of.kind() == "file" {
						of.url += "-" + name
					}
					return of.open(ctx, name, cmd.ErrOrStderr())
				}
			}
			return simulate.Explore(cmd.Context(), cfg, cmd.OutOrStdout())
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&cfg.JSON, "json", false, `print {"runs":N,"failed":[...]}`)
	ranges.number(flags, &seed, "seed", 0, 1<<31-1, "run this one; with --runs, draw them from it")
	flags.Lookup("seed").DefValue = "drawn"
	ranges.number(flags, &cfg.Runs, "runs", 1, 1_000_000, "draw so many")
	store.bind(&ranges, flags)
	flags.Lookup("register").Usage = "`URL` of a store for the fleets' configuration: " + registerForms + ". Without it they keep it in memory"
	return cmd
}
