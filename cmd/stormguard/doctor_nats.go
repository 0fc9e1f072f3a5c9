// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/cobra"

	sgnats "github.com/stormguard-mq/stormguard/adapters/nats"
)

func newDoctorNATS() *cobra.Command {
	var e examination
	var url, creds string
	var target sgnats.Target
	cmd := &cobra.Command{
		Use:     "nats",
		Short:   "Look at a JetStream consumer, its stream and its stream of dead letters",
		Example: `  stormguard doctor nats --url nats://localhost:4222 --stream ORDERS --consumer billing --dlq ORDERS_DLQ`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := e.need(cmd, "stream", "consumer"); err != nil {
				return err
			}
			opts := []nats.Option{nats.Name("stormguard doctor")}
			if creds != "" {
				opts = append(opts, nats.UserCredentials(creds))
			}
			nc, err := nats.Connect(url, opts...)
			if err != nil {
				return connectError(url, err)
			}
			defer nc.Close()
			js, err := jetstream.New(nc)
			if err != nil {
				return err
			}
			target.Hold = e.hold
			found, err := sgnats.Inspect(cmd.Context(), js, target)
			if err != nil {
				return err
			}
			return e.report(cmd.OutOrStdout(), found)
		},
	}
	f := cmd.Flags()
	f.StringVar(&url, "url", nats.DefaultURL, "NATS server with JetStream")
	f.StringVar(&creds, "creds", "", "NATS credentials file")
	f.StringVar(&target.Stream, "stream", "", "stream of the guarded consumer")
	f.StringVar(&target.Consumer, "consumer", "", "its consumer")
	f.StringVar(&target.DLQ, "dlq", "", "stream of its dead letters, if it has one")
	target.HandlerTime = 30 * time.Second
	e.duration(f, &target.HandlerTime, "handler-time", time.Millisecond, 24*time.Hour, "the longest that one message may be handled")
	e.flags(cmd)
	return cmd
}
