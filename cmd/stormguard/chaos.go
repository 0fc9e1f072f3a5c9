// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/stormguard-mq/stormguard/chaos"
	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/chaosrun"
)

const figuresLong = `

The dependency is this process, so what another process knew is not needed to judge it:

  published             messages that the broker confirmed
  kills, restarts       of the schedule
  fired                 every planned fault happened
  lost                  healthy messages with neither an effect nor a dead letter, and
                        poison without a dead letter
  duplicate_deliveries  handlers that returned nil for a message a second time
  duplicate_effects     effects of a message that happened a second time
  out_of_order          effects after that of a later message of their key. RabbitMQ and
                        JetStream hand over again what a killed process had, behind newer
                        messages: there only messages that were sent after a process
                        began count, in what that process made of them. With several
                        consumers they give a key to all of them: then nothing counts
  healthy_dead_letters  dead letters that are no poison
  drained               nothing was left at the broker in the end
  drain_seconds         from the last fault until then
  p99_ms                from sending to the effect, faults included
  error_percent         handlers of healthy messages that returned an error

  poison_effects        effects of poison
  unknown               effects and dead letters of messages that nobody sent
  missed                gates of the schedule that were missed

The status is 0 if everything was fired and drained, no gate was missed, and lost,
duplicate_effects, out_of_order, healthy_dead_letters, poison_effects and unknown are 0;
else 1. --mutant makes a consumer that is wrong, to see it found.`

const crashLong = `Kill a guarded consumer again and again, and prove that nothing is lost.

The run publishes messages, one in 97 of them poison, and starts a consumer as a process
of its own: a guard with its defaults, and once.Do around the effect. The schedule is
drawn from --seed. SIGKILL comes at any instant, one in four times in the middle of an
outage of the dependency, one in sixteen while the process is frozen; then the next
process starts. The kills are spread over --messages, and publishing goes on until the last
kill. Several consumers share the marks of their effects.` + figuresLong

const rollingLong = `Restart guarded consumers one after the other, as a deploy does, and prove that nothing is
lost.

The run publishes messages, one in 97 of them poison, and starts the consumers as
processes of their own: guards with their defaults, and once.Do around the effect, with
marks that all of them share. In each round each consumer is stopped in order and started
again, one in three times in the middle of an outage of the dependency. Kafka's topic has a
partition for each consumer, so each restart is two rebalances. Publishing goes on until
the last restart.` + figuresLong

const networkLong = `Break the network between guarded consumers and their broker, and prove that nothing is
lost.

Each consumer runs in a network namespace of its own, which needs Linux with ip, nft and
nsenter, and root or unprivileged user namespaces. There are four faults, by turns: 5 to 35 %
of the packets are lost each way; each read comes 100 ms late; no traffic comes through,
and no connection breaks; all connections break. The first three last one to two seconds,
and then until they have hit something, for a minute more at most. In the middle of one in
four a consumer is killed. The dependency and the marks of effects are reached without
faults.` + figuresLong

const brokerLong = `Kill and freeze the broker under guarded consumers, and prove that nothing is lost.

The run starts a broker of its own, by scripts/brokers of the source tree. By turns the
broker is killed with SIGKILL and started again up to three seconds later, and frozen for
up to fifteen. In the middle of one in four a consumer is killed. Messages that the broker
did not confirm are published again.` + figuresLong

const diskLong = `Fill the disk under guarded consumers, and prove that nothing is lost.

The consumers keep their spill and their state on a file system of 64 MiB. A single consumer
keeps the marks of its effects there, too. The run mounts the file system, which needs Linux
and root. The run fills it for one to four seconds at a time. By turns an outage of the
dependency begins in the middle, a consumer is killed in the middle, both, and neither. In an
outage messages must go to the full disk. After a kill the next process begins on it.

A spill goes on taking messages while its file has free pages, also on a full disk. If the
run itself is killed, the mount stays in the directory for temporary files, in
stormguard-chaos-*/disk: unmount it.` + figuresLong

const seedLong = `Put guarded consumers through three stages, and hold them to gates.

For --loss the network loses 5 % of the packets from the broker to the consumers; for --down
the first of the consumers is dead; for --burn as many processes compute as there are
processors. Messages come at --rate, whatever becomes of them. Before each stage there are
five quiet seconds.

  p99_ms         of the messages that are sent in the loss, and in the burn: below 350
  longest_ms     of the messages that are sent while a consumer is down: below 20000, and
                 below half of --down. By then the other consumers have taken over
  error_percent  of the handlers' calls for healthy messages in each stage: below 0.02.
                 At this load no such call may fail

The gates are for the default load: two messages a second for each consumer. Linux sends a
lost packet again after 200 ms at least, and Kafka's client asks for the next messages only
after an answer: with more messages, more of them wait for one lost packet. The report says
when that timer decides the p99. Each consumer runs in a network namespace of its own, which
needs Linux with ip, nft and nsenter, and root or unprivileged user namespaces.` + figuresLong

// errJudged means that a check of the run found a bug. errMissed means that the run missed only
// a gate.
var (
	errJudged = errors.New("an oracle found something; --history FILE keeps what happened")
	errMissed = errors.New("a gate was missed, and nothing else")
)

func newChaos() *cobra.Command {
	cmd := &cobra.Command{
		Use: "chaos", Short: "Break guarded consumers on real brokers, and judge what becomes of the messages",
		Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	run := &cobra.Command{
		Use: "run", Short: "Run a schedule of faults", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	run.AddCommand(newChaosCrash(), newChaosRolling(), newChaosNetwork(), newChaosBroker(), newChaosDisk(), newChaosSeed())
	cmd.AddCommand(run, &cobra.Command{
		Use: "burn", Hidden: true, Args: cobra.NoArgs,
		Run: func(*cobra.Command, []string) { chaosrun.Burn(os.Stdin) },
	}, &cobra.Command{
		Use: "worker JOB", Hidden: true, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return chaosrun.Work(cmd.Context(), args[0], os.Stdin, cmd.ErrOrStderr())
		},
	})
	return cmd
}

func newChaosCrash() *cobra.Command {
	kills, consumers := 200, 1
	r := newChaosRun(nil)
	r.schedule = func(seed uint64) chaos.Schedule {
		return chaos.Crash(seed, consumers, kills, min(max(faultWithin, 2*r.cfg.Messages/kills), mostApart))
	}
	cmd := &cobra.Command{
		Use:   "crash",
		Short: "Kill a consumer a few hundred times, during outages and poison",
		Long:  crashLong,
		Example: `  stormguard chaos run crash
  stormguard chaos run crash --broker kafka --kills 50 --seed 7 --json
  stormguard chaos run crash --broker rabbitmq --spill
  stormguard chaos run crash --consumers 3
  stormguard chaos run crash --mutant no-once --kills 40`,
		Args: cobra.NoArgs, RunE: r.run,
	}
	r.ranges.number(cmd.Flags(), &kills, "kills", 1, 10000, "how often a consumer is killed")
	r.ranges.number(cmd.Flags(), &consumers, "consumers", 1, 64, "how many run side by side")
	r.flags(cmd)
	return cmd
}

func newChaosRolling() *cobra.Command {
	consumers, rounds := 3, 3
	r := newChaosRun(func(seed uint64) chaos.Schedule { return chaos.Rolling(seed, consumers, rounds, faultWithin) })
	cmd := &cobra.Command{
		Use:   "rolling",
		Short: "Restart consumers one after the other, as a deploy does",
		Long:  rollingLong,
		Example: `  stormguard chaos run rolling
  stormguard chaos run rolling --broker kafka --consumers 5 --rounds 10 --json
  stormguard chaos run rolling --broker rabbitmq --spill`,
		Args: cobra.NoArgs, RunE: r.run,
	}
	r.ranges.number(cmd.Flags(), &consumers, "consumers", 1, 64, "how many run side by side")
	r.ranges.number(cmd.Flags(), &rounds, "rounds", 1, 1000, "how often each of them is restarted")
	r.flags(cmd)
	return cmd
}

func newChaosNetwork() *cobra.Command {
	consumers, faults := 3, 40
	r := newChaosRun(func(seed uint64) chaos.Schedule { return chaos.Network(seed, consumers, faults, faultWithin) })
	cmd := &cobra.Command{
		Use:   "network",
		Short: "Lose, delay, hold and break what is between consumers and broker",
		Long:  networkLong,
		Example: `  stormguard chaos run network
  stormguard chaos run network --broker kafka --faults 100 --json`,
		Args: cobra.NoArgs, RunE: r.run,
	}
	r.ranges.number(cmd.Flags(), &consumers, "consumers", 1, 64, "how many run side by side")
	r.ranges.number(cmd.Flags(), &faults, "faults", 1, 10000, "how many faults of the network there are")
	r.flags(cmd)
	return cmd
}

func newChaosBroker() *cobra.Command {
	consumers, faults := 3, 10
	r := newChaosRun(func(seed uint64) chaos.Schedule { return chaos.Broker(seed, consumers, faults, faultWithin) })
	cmd := &cobra.Command{
		Use:   "broker",
		Short: "Kill and freeze the broker under guarded consumers",
		Long:  brokerLong,
		Example: `  stormguard chaos run broker
  stormguard chaos run broker --broker kafka --faults 40 --json`,
		Args: cobra.NoArgs, RunE: r.run,
	}
	r.ranges.number(cmd.Flags(), &consumers, "consumers", 1, 64, "how many run side by side")
	r.ranges.number(cmd.Flags(), &faults, "faults", 1, 10000, "how many faults of the broker there are")
	r.flags(cmd)
	return cmd
}

func newChaosDisk() *cobra.Command {
	consumers, faults := 1, 20
	r := newChaosRun(func(seed uint64) chaos.Schedule { return chaos.Disk(seed, consumers, faults, faultWithin) })
	r.cfg.Spill = true
	cmd := &cobra.Command{
		Use:   "disk",
		Short: "Fill the disk under guarded consumers",
		Long:  diskLong,
		Example: `  stormguard chaos run disk
  stormguard chaos run disk --broker rabbitmq --faults 40 --json`,
		Args: cobra.NoArgs, RunE: r.run,
	}
	r.ranges.number(cmd.Flags(), &consumers, "consumers", 1, 64, "how many run side by side")
	r.ranges.number(cmd.Flags(), &faults, "faults", 1, 10000, "how often the disk is full")
	r.flags(cmd)
	return cmd
}

func newChaosSeed() *cobra.Command {
	consumers := 20
	loss, down, burn := time.Minute, 45*time.Second, time.Minute
	r := newChaosRun(nil)
	r.cfg.Rate = 40
	r.schedule = func(seed uint64) chaos.Schedule {
		return chaos.Stages(seed, consumers, 5*r.cfg.Rate, loss, down, burn)
	}
	cmd := &cobra.Command{
		Use:   "seed",
		Short: "Three stages with gates: lost packets, a consumer that is down, busy processors",
		Long:  seedLong,
		Example: `  stormguard chaos run seed
  stormguard chaos run seed --broker kafka --json
  stormguard chaos run seed --loss 30s --down 5s --burn 10s
  stormguard chaos run seed --mutant slow`,
		Args: cobra.NoArgs, RunE: r.run,
	}
	f := cmd.Flags()
	r.ranges.number(f, &consumers, "consumers", 2, 64, "how many run side by side")
	r.ranges.duration(f, &loss, "loss", time.Second, 10*time.Minute, "how long packets are lost")
	r.ranges.duration(f, &down, "down", time.Second, 10*time.Minute, "how long a consumer is down")
	r.ranges.duration(f, &burn, "burn", time.Second, 10*time.Minute, "how long the processors burn")
	r.flags(cmd)
	return cmd
}

// faultWithin is the highest number of effects between two faults. With many --messages the kills
// of crash are further apart, at most mostApart, so that the last comes near the last message.
const (
	faultWithin = 60
	mostApart   = 100_000 // the limit of chaos.Fault.After
)

// chaosRun is a command that runs a schedule, and judges its history.
type chaosRun struct {
	schedule func(seed uint64) chaos.Schedule
	cfg      chaosrun.Config
	ranges   ranges
	seed     uint64
	asJSON   bool
	history  string
}

func newChaosRun(schedule func(seed uint64) chaos.Schedule) *chaosRun {
	return &chaosRun{schedule: schedule, cfg: chaosrun.Config{Broker: "nats", Messages: 1000, Drain: 2 * time.Minute}}
}

func (r *chaosRun) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	choice(&r.ranges, f, &r.cfg.Broker, "broker", chaosrun.Brokers(), "what to run on")
	if cmd.Name() != "broker" {
		f.StringVar(&r.cfg.URL, "url", "", "`address` of a broker of yours (default an embedded NATS, or a broker that scripts/brokers finds or starts)")
	}
	r.ranges.number(f, &r.cfg.Messages, "messages", 1, 10_000_000, "published at least")
	if r.cfg.Rate > 0 {
		r.ranges.number(f, &r.cfg.Rate, "rate", 1, 10000, "messages a second, whatever becomes of them")
	} else {
		r.ranges.number(f, &r.cfg.Rate, "rate", 0, 10000, "messages a second, whatever becomes of them; 0: as fast as the consumers")
	}
	f.Uint64Var(&r.seed, "seed", 0, "of the schedule (default drawn anew, and printed)")
	r.ranges.duration(f, &r.cfg.Drain, "drain", time.Second, time.Hour, "how long everything may take after the last fault")
	f.BoolVar(&r.cfg.Spill, "spill", r.cfg.Spill, "a consumer holds what comes in an outage on its disk, with a window of 20, and keeps its state there")
	choice(&r.ranges, f, &r.cfg.Mutant, "mutant", append(chaosrun.Mutants(), ""), "a consumer that is wrong on purpose")
	f.StringVar(&r.history, "history", "", "`file` to write the history to, as JSON that chaos.Judge reads")
	f.BoolVar(&r.asJSON, "json", false, "print one JSON object")
}

func (r *chaosRun) run(cmd *cobra.Command, _ []string) error {
	if err := r.ranges.check(); err != nil {
		return usageError{err}
	}
	if !cmd.Flags().Changed("seed") {
		r.seed = rand.Uint64()
	}
	if err := r.tryHistory(); err != nil {
		return err
	}
	r.cfg.Schedule = r.schedule(r.seed)
	h, err := chaosrun.Run(cmd.Context(), r.cfg, cmd.ErrOrStderr())
	if err != nil {
		return err
	}
	return r.judge(cmd.OutOrStdout(), h)
}

// judge prints the report on the messages, and writes the history to its file.
func (r *chaosRun) judge(out io.Writer, h chaos.History) (err error) {
	report := chaos.Judge(h)
	if r.asJSON {
		err = json.NewEncoder(out).Encode(struct {
			Broker string `json:"broker"`
			chaos.Report
		}{r.cfg.Broker, report})
	} else {
		_, err = fmt.Fprint(out, report.Text())
	}
	if r.history != "" {
		err = errors.Join(err, writeHistory(r.history, h))
	}
	if report.OK() {
		return err
	}
	if report.Missed = nil; report.OK() {
		return errors.Join(errMissed, err)
	}
	return errors.Join(errJudged, err)
}

// tryHistory checks, before a long run, that its history can be written.
func (r *chaosRun) tryHistory() error {
	if r.history == "" {
		return nil
	}
	f, err := os.OpenFile(r.history, os.O_CREATE|os.O_WRONLY, 0o600)
	if err == nil {
		err = f.Close()
	}
	if err != nil {
		return usageError{fmt.Errorf("--history: %w", err)}
	}
	return nil
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
