// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/spf13/cobra"

	"github.com/stormguard-mq/stormguard/adapters/amqp"
)

func newDoctorRabbitMQ() *cobra.Command {
	var e examination
	target := amqp.Target{Prefetch: 256, ConsumerTimeout: 30 * time.Minute}
	cmd := &cobra.Command{
		Use:   "rabbitmq",
		Short: "Look at a queue and its dead-letter queue",
		Long: `Look at a queue and its dead-letter queue, their arguments and effective policies,
by the API of RabbitMQ's management plugin. The user needs the tag "monitoring".`,
		Example: `  stormguard doctor rabbitmq --api http://guest:guest@localhost:15672 --queue orders --dlq orders.dlq`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := e.need(cmd, "api", "queue"); err != nil {
				return err
			}
			target.Hold = e.hold
			found, err := amqp.Inspect(cmd.Context(), target)
			if err != nil {
				return err
			}
			return e.report(cmd.OutOrStdout(), found)
		},
	}
	f := cmd.Flags()
	f.StringVar(&target.API, "api", "http://guest:guest@localhost:15672", "the management plugin, with user and password")
	f.StringVar(&target.VHost, "vhost", "/", "virtual host")
	f.StringVar(&target.Queue, "queue", "", "the queue that is consumed")
	f.StringVar(&target.DLQ, "dlq", "", "queue of the dead letters, if they do not go by the queue's own exchange")
	f.BoolVar(&target.Native, "native", false, "dead letters go by the queue's own exchange (WithDeadLetterExchange)")
	e.number(f, &target.Prefetch, "prefetch", 1, 65535, "the consumer's prefetch")
	e.duration(f, &target.ConsumerTimeout, "consumer-timeout", time.Second, 8760*time.Hour, "the broker's consumer_timeout")
	e.duration(f, &target.HandlerTime, "handler-time", time.Microsecond, 24*time.Hour, "how long a message usually takes, divided by the workers; unset leaves out what follows from it")
	e.flags(cmd)
	return cmd
}
