// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/cobra"

	"github.com/stormguard-mq/stormguard/adapters/nats"
	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/access"
	"github.com/stormguard-mq/stormguard/guard"
)

func newDoctorNATS() *cobra.Command {
	var e examination
	var creds string
	var target guardnats.Target
	cmd := &cobra.Command{
		Use:   "nats",
		Short: "Look at a JetStream consumer, its stream and its stream of dead letters",
		Long: `Look at a JetStream consumer, at its stream and, with --dlq, at the stream of its
dead letters. A stream or consumer that does not exist is a finding.

Exit status: 0 nothing found, 1 findings, 2 usage, 3 could not look. "stormguard
doctor --help" has the details.`,
		Example: `  stormguard doctor nats --url nats://localhost:4222 --stream ORDERS --consumer billing --dlq ORDERS_DLQ`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			err := errors.Join(e.need(cmd, "url", "stream", "consumer"), e.form(access.NATSAddress(e.url), access.NATSForm), e.access.Validate(false))
			if err != nil {
				return usageError{err}
			}
			target.Hold = e.hold
			return e.look(cmd, func(ctx context.Context, a *access.Access) ([]guard.Finding, error) {
				opts := append(a.NATS(), nats.Name("stormguard doctor"))
				if creds != "" {
					opts = append(opts, nats.UserCredentials(creds))
				}
				return inspectNATS(ctx, e.url, opts, target)
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&e.url, "url", nats.DefaultURL, "`address` of a NATS server with JetStream")
	f.StringVar(&creds, "creds", "", "NATS credentials `file`")
	f.StringVar(&target.Stream, "stream", "", "stream of the guarded consumer")
	f.StringVar(&target.Consumer, "consumer", "", "the guarded consumer")
	f.StringVar(&target.DLQ, "dlq", "", "stream of the dead letters, if there is one")
	target.HandlerTime = 30 * time.Second
	e.duration(f, &target.HandlerTime, "handler-time", time.Millisecond, 24*time.Hour, "the longest time that one message may be handled")
	e.flags(cmd)
	accessFlags(&e.ranges, f, &e.access, "speak TLS; --ca, --cert and tls:// in --url turn it on too", false)
	return cmd
}

func inspectNATS(ctx context.Context, url string, opts []nats.Option, target guardnats.Target) ([]guard.Finding, error) {
	nc, err := nats.Connect(url, opts...)
	if err != nil {
		return nil, connectError(url, err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	found, err := guardnats.Inspect(ctx, js, target)
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound):
		return []guard.Finding{{
			Severity: guard.Warning, Where: "stream " + target.Stream, What: "it does not exist: the consumer has nothing to read, and publishers get an error",
			Fix: "check --stream and the account, or: nats stream add " + target.Stream,
		}}, nil
	case errors.Is(err, jetstream.ErrConsumerNotFound):
		return []guard.Finding{{
			Severity: guard.Warning, Where: "consumer " + target.Stream + "/" + target.Consumer, What: "it does not exist: its program has not made it, or the name is wrong",
			Fix: "check --consumer, or: nats consumer add " + target.Stream + " " + target.Consumer,
		}}, nil
	}
	return found, err
}
