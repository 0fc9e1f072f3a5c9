// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/demo"
)

const demoLong = `Watch one outage hit one consumer twice: unguarded, then guarded.

Each of the two runs publishes the same messages at the same rate. The handler
calls a dependency, a TCP server on the loopback. The outage closes that server
at the same instant for the same time, so that connections to it are refused.
Broker and settings, the handler and its one goroutine are the same. What differs
is the consumer:

  unguarded  as most programs are: a message that failed five times goes to the
             DLQ, and is acked when the DLQ has it
  guarded    wrapped by stormguard, with a DLQ, and the defaults but for the
             storm thresholds: age over 3s and a window of 10s instead of 60s
             each (--literal keeps 60s, and then an outage of less than a minute
             is no storm yet: the breaker alone contains it)

The brokers:

  nats       a stream, and a durable consumer with MaxDeliver 5 and 500 messages
             in flight. Unguarded: nats.go's Consume with its defaults, Nak on
             error. Guarded: nats.Consume(ctx, g, consumer, handle)
  kafka      a topic of one partition, and sarama's consumer group with its
             defaults. Unguarded: five tries in place, since a partition cannot
             repeat one message and go on with the next; an idempotent producer
             writes to the DLQ. Guarded: kafka.Wrap(g, handle) as the group's
             handler. What is in flight is sarama's buffer and, guarded, the
             window of 1024
  rabbitmq   a quorum queue with a delivery limit of 20, the default of RabbitMQ
             4, and a prefetch of 500. Unguarded: Nack with requeue until the
             broker has delivered five times. Guarded:
             amqp.Consume(ctx, g, dialer, queue, handle), WithPrefetch(500)

--errors says what the handler returns during the outage:

  refused  the error of the connection, as a handler that hands errors on does.
           The guard can see that the dependency is down
  unknown  an error that says nothing. The guard must find out by itself, which
           takes longer

On kafka and rabbitmq the unguarded consumer goes on while the DLQ confirms up to
100 messages; on nats it waits for each.

The NATS server is embedded, keeps its data in a temporary directory and is gone
at the end. Kafka and RabbitMQ are real ones. In a checkout of stormguard the
demo asks scripts/brokers for one, which installs it if it must, starts it, and
leaves it running; $STORMGUARD_KAFKA and $STORMGUARD_RABBITMQ name others. So
does --url, anywhere and for all three. On a broker of yours the demo makes
streams, topics, queues and groups of its own, one run after the other, and
deletes them.

A broker of yours may want TLS and a user: --tls, --ca, --cert, --key, --user and
--password-file, and for Kafka --sasl. They mean the same in "stormguard doctor".
RabbitMQ and NATS take user and password in --url too.

The figures come from a ledger of the demo's own, by message id, and from what
is found in the DLQ; never from the guard's counters:

  published                    messages that the broker confirmed
  handled                      of these, handled successfully
  dead_letters                 messages in the DLQ at the end
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

A run starts when the broker knows the consumer, and ends when nothing is left
to settle, or 45s after the last message. When the consumer has ended, a broker
that still has a message which the ledger calls settled is an error.

The guarded run is judged by bounds, made for the demo's own rate and outage: at
most 5 dead letters, calls at most 1 % of the unguarded ones, and contained within
1 s. None may be lost, duplicated or out of order. With --errors unknown only the
first three are judged, and contained means within 15 s. A shorter outage or a
lower rate may miss the 1 %. Bounds do not change the exit status.

Progress goes to stderr: a moving picture on a terminal, else a line a second.
The result goes to stdout: a table, or with --json one object
{"errors":"refused","unguarded":{...},"guarded":{...},"bounds":[...]}, where
"bounds" has a {"name","limit","value","kept"} for each bound that was judged.`

func newDemo() *cobra.Command {
	cfg := demo.Defaults()
	var rs ranges
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Watch the same outage twice: unguarded and guarded",
		Long:  demoLong,
		Example: `  stormguard demo
  stormguard demo --outage 1m --rate 1000
  stormguard demo --broker kafka --json 2>/dev/null | jq .guarded
  stormguard demo --url nats://localhost:4222
  stormguard demo --broker rabbitmq --url amqp://localhost:5672/
  stormguard demo --errors unknown
  stormguard demo --outage 2m --console 127.0.0.1:8790
  stormguard demo --broker kafka --url kafka:9093 --ca ca.pem --sasl scram-sha-512 \
    --user demo --password-file password`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := errors.Join(rs.check(), cfg.Validate()); err != nil {
				return usageError{err}
			}
			return demo.Run(cmd.Context(), cfg, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	choice(&rs, f, &cfg.Broker, "broker", demo.Kinds(), "what to run on")
	f.StringVar(&cfg.URL, "url", "", "`address` of a broker of yours: "+demo.Addresses())
	f.StringVar(&cfg.Creds, "creds", "", "NATS credentials `file` for --url")
	rs.number(f, &cfg.Rate, "rate", 10, 20000, "messages published per second")
	rs.duration(f, &cfg.Outage, "outage", time.Second, 5*time.Minute, "how long the dependency is down")
	rs.duration(f, &cfg.WarmUp, "warmup", 500*time.Millisecond, time.Minute, "healthy time before the outage")
	rs.duration(f, &cfg.After, "after", 500*time.Millisecond, time.Minute, "how long publishing goes on after the outage")
	f.Uint64Var(&cfg.Seed, "seed", cfg.Seed, "seed of the messages' contents, the same for both runs")
	choice(&rs, f, &cfg.Errors, "errors", demo.Failures(), "what the handler returns during the outage")
	accessFlags(&rs, f, &cfg.Access, "speak TLS to Kafka or NATS; --ca and --cert turn it on too (RabbitMQ: amqps:// in --url)", true)
	f.BoolVar(&cfg.Literal, "literal", false, "keep the guard's own storm thresholds")
	f.StringVar(&cfg.Console, "console", "", "loopback `address`, such as 127.0.0.1:8790, that serves the console of the guarded run to \"stormguard status\" and the like")
	f.BoolVar(&cfg.JSON, "json", false, "print one JSON object instead of the table")
	f.BoolVar(&cfg.NoColor, "no-color", false, "no colours (NO_COLOR and TERM=dumb are respected too)")
	return cmd
}
