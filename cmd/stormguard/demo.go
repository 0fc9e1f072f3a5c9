// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/demo"
)

const demoLong = `Watch one outage hit one JetStream consumer twice: unguarded, then guarded.

Each of the two runs publishes the same messages at the same rate and kills the
consumer's dependency, a TCP server on the loopback, at the same instant for the
same time. Server, stream and consumer settings, the handler and its one
goroutine, and the limit of 500 messages in flight are the same. What differs:

  unguarded  nats.go's Consume with its defaults, Nak on error, MaxDeliver 5; at
             the fifth failure the message goes to the DLQ stream and is acked
  guarded    nats.Consume(ctx, g, consumer, handle) of stormguard, with a DLQ
             stream, and the defaults but for the storm thresholds: age over 3s
             and a window of 10s instead of 60s each (--literal keeps 60s, and
             then an outage of less than a minute is no storm yet: the breaker
             alone contains it)

The server is embedded, keeps its data in a temporary directory and is gone at
the end. With --url the demo makes two streams of its own on your server, one
run after the other, and deletes them.

The figures come from a ledger of the demo's own, by message id, and from what
is found in the DLQ stream; never from the guard's counters:

  published                    messages that the server confirmed
  handled                      of these, handled successfully
  dead_letters                 messages in the DLQ stream at the end
  calls_during_outage          handler calls begun while the dependency was down
  contain_seconds              from the start of the outage to the last call
                               before the first pause of 50 ms or more. So that
                               a hiccup does not count, calls must from then on
                               be 50 ms apart on average. The whole outage if
                               there is no such pause
  idle_after_recovery_seconds  from the end of the outage to the first success
  drain_seconds                from the end of the outage until no more than
                               100 ms worth of messages was neither handled nor
                               dead-lettered
  lost                         published, but neither handled nor dead-lettered
  duplicates                   handled more than once, or dead-lettered as well
  out_of_order                 handled after a message that was published later

Progress goes to stderr: a moving picture on a terminal, else a line a second.
The result goes to stdout: a table, or with --json one object
{"unguarded":{...},"guarded":{...}}.`

func newDemo() *cobra.Command {
	cfg := demo.Defaults()
	var rs ranges
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Watch the same outage twice: unguarded and guarded",
		Long:  demoLong,
		Example: `  stormguard demo
  stormguard demo --outage 1m --rate 1000
  stormguard demo --json 2>/dev/null | jq .guarded
  stormguard demo --url nats://localhost:4222`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			err := rs.check()
			if cfg.Creds != "" && cfg.URL == "" {
				err = errors.Join(err, usageError{errors.New("--creds: needs --url, the embedded server asks for none")})
			}
			if err != nil {
				return err
			}
			return demo.Run(cmd.Context(), cfg, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.URL, "url", "", "NATS server with JetStream to use instead of the embedded one")
	f.StringVar(&cfg.Creds, "creds", "", "NATS credentials file for --url")
	rs.number(f, &cfg.Rate, "rate", 10, 20000, "messages published per second")
	rs.duration(f, &cfg.Outage, "outage", time.Second, 5*time.Minute, "how long the dependency is down")
	rs.duration(f, &cfg.WarmUp, "warmup", 500*time.Millisecond, time.Minute, "healthy time before the outage")
	rs.duration(f, &cfg.After, "after", 500*time.Millisecond, time.Minute, "how long publishing goes on after the outage")
	f.Uint64Var(&cfg.Seed, "seed", cfg.Seed, "seed of the messages' contents, the same for both runs")
	f.BoolVar(&cfg.Literal, "literal", false, "keep the guard's own storm thresholds")
	f.BoolVar(&cfg.JSON, "json", false, "print one JSON object instead of the table")
	f.BoolVar(&cfg.NoColor, "no-color", false, "no colours (NO_COLOR and TERM=dumb are respected too)")
	return cmd
}
