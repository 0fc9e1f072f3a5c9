// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/stormguard-mq/stormguard/chaos"
	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/chaosrun"
)

const chaosLong = `Kill a guarded consumer again and again, and prove that nothing is lost.

The run publishes messages, one in 97 of them poison, and starts a consumer as a process
of its own: a guard with its defaults, and once.Do around the effect. The schedule is
drawn from --seed. SIGKILL comes at any instant, one in four times in the middle of an
outage of the dependency, one in sixteen while the process is frozen; then the next
process starts. Publishing goes on until the last fault.

The dependency is this process, so what a killed process knew is not needed to judge it:

  published             messages that the broker confirmed
  kills                 of the schedule
  fired                 every planned fault happened
  lost                  healthy messages without an effect, poison without a dead letter
  duplicate_deliveries  handlers that returned nil for a message a second time
  duplicate_effects     effects of a message that happened a second time
  out_of_order          effects after that of a later message of their key. RabbitMQ and
                        JetStream hand over again what a killed process had, behind newer
                        messages: there only messages that were sent after a process
                        began count, in what that process made of them
  healthy_dead_letters  dead letters that are no poison
  drained               nothing was left at the broker in the end
  drain_seconds         from the last fault until then
  p99_ms                from sending to the effect, faults included

The status is 0 if everything was fired and drained and no other figure but
duplicate_deliveries and the times is above 0, else 1. --mutant makes a consumer that is
wrong, to see it found.`

// errJudged is a run in which an oracle found something.
var errJudged = errors.New("an oracle found something; --history FILE keeps what happened")

func newChaos() *cobra.Command {
	cmd := &cobra.Command{
		Use: "chaos", Short: "Break guarded consumers on real brokers, and judge what becomes of the messages",
		Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	run := &cobra.Command{
		Use: "run", Short: "Run a schedule of faults", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	run.AddCommand(newChaosCrash())
	cmd.AddCommand(run, &cobra.Command{
		Use: "worker JOB", Hidden: true, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return chaosrun.Work(cmd.Context(), args[0], os.Stdin, cmd.ErrOrStderr())
		},
	})
	return cmd
}

func newChaosCrash() *cobra.Command {
	cfg := chaosrun.Config{Broker: "nats", Kills: 200, Messages: 1000, Drain: 2 * time.Minute}
	var rs ranges
	var asJSON bool
	var history string
	cmd := &cobra.Command{
		Use:   "crash",
		Short: "Kill a consumer a few hundred times, during outages and poison",
		Long:  chaosLong,
		Example: `  stormguard chaos run crash
  stormguard chaos run crash --broker kafka --kills 50 --seed 7 --json
  stormguard chaos run crash --broker rabbitmq --spill
  stormguard chaos run crash --mutant no-once --kills 40`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := rs.check(); err != nil {
				return usageError{err}
			}
			if !cmd.Flags().Changed("seed") {
				cfg.Seed = rand.Uint64()
			}
			h, err := chaosrun.Run(cmd.Context(), cfg, cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			if history != "" {
				if err := writeHistory(history, h); err != nil {
					return err
				}
			}
			report := chaos.Judge(h)
			if asJSON {
				err = json.NewEncoder(cmd.OutOrStdout()).Encode(struct {
					Broker string `json:"broker"`
					chaos.Report
				}{cfg.Broker, report})
			} else {
				_, err = fmt.Fprint(cmd.OutOrStdout(), report.Text())
			}
			if err == nil && !report.OK() {
				err = errJudged
			}
			return err
		},
	}
	f := cmd.Flags()
	choice(&rs, f, &cfg.Broker, "broker", chaosrun.Brokers(), "what to run on")
	f.StringVar(&cfg.URL, "url", "", "`address` of a broker of yours (default an embedded NATS, or a broker that scripts/brokers finds or starts)")
	rs.number(f, &cfg.Kills, "kills", 1, 10000, "how often the consumer is killed")
	rs.number(f, &cfg.Messages, "messages", 1, 10_000_000, "published at least")
	f.Uint64Var(&cfg.Seed, "seed", 0, "of the schedule (default drawn anew, and printed)")
	rs.duration(f, &cfg.Drain, "drain", time.Second, time.Hour, "how long everything may take after the last fault")
	f.BoolVar(&cfg.Spill, "spill", false, "the consumer holds what comes in an outage on its disk, with a window of 20, and keeps its state there")
	choice(&rs, f, &cfg.Mutant, "mutant", append(chaosrun.Mutants(), ""), "a consumer that is wrong on purpose")
	f.StringVar(&history, "history", "", "`file` to write the history to, as JSON that chaos.Judge reads")
	f.BoolVar(&asJSON, "json", false, "print one JSON object")
	return cmd
}

func writeHistory(name string, h chaos.History) error {
	text, err := json.Marshal(h)
	if err == nil {
		err = os.WriteFile(name, text, 0o600)
	}
	if err != nil {
		return fmt.Errorf("--history: %w", err)
	}
	return nil
}
