// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/IBM/sarama"
	"github.com/spf13/cobra"

	"github.com/stormguard-mq/stormguard/adapters/kafka"
	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/access"
	"github.com/stormguard-mq/stormguard/guard"
)

func newDoctorKafka() *cobra.Command {
	var e examination
	var target guardkafka.Target
	var retry guardkafka.RetryConfig
	cmd := &cobra.Command{
		Use:   "kafka",
		Short: "Look at topics, their dead-letter topics and retry topics",
		Long: `Look at the topics of a consumer group and at their dead-letter topics. With
--retry-delays, look at the group's retry topics too, also at old ones that
nobody reads any more. A topic that does not exist is a finding.

The doctor cannot see how your program sets its own client. kafka.Inspect, called
in the program, looks at that too.

Exit status: 0 nothing found, 1 findings, 2 usage, 3 could not look. "stormguard
doctor --help" has the details.`,
		Example: `  stormguard doctor kafka --url localhost:9092 --topic orders --topic refunds
  stormguard doctor kafka --topic orders --group billing --retry-delays 1m,10m,1h
  stormguard doctor kafka --url kafka:9093 --ca ca.pem --sasl scram-sha-512 \
    --user billing --password-file password --topic orders --json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			err := errors.Join(e.need(cmd, "url"), e.form(access.KafkaAddress(e.url), access.KafkaForm), e.access.Validate(true))
			if len(target.DLQ.Sources) == 0 {
				err = errors.Join(err, errors.New("--topic: must be given"))
			}
			switch {
			case len(retry.Delays) > 0 && target.DLQ.Group == "":
				err = errors.Join(err, errors.New("--group: must be given with --retry-delays"))
			case len(retry.Delays) > 0:
				retry.Sources, retry.Group = target.DLQ.Sources, target.DLQ.Group
				target.Retry = &retry
			case retry.Topic != "":
				err = errors.Join(err, errors.New("--retry-topic: needs --retry-delays"))
			}
			if err == nil && target.Retry != nil {
				err = target.Retry.Validate()
			}
			if err == nil {
				err = target.DLQ.Validate()
			}
			if err != nil {
				return usageError{err}
			}
			target.Hold = e.hold
			return e.look(cmd, func(_ context.Context, a *access.Access) ([]guard.Finding, error) {
				return inspectKafka(a, e.url, target)
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&e.url, "url", "localhost:9092", "`address` of the brokers: "+access.KafkaForm)
	f.StringArrayVar(&target.DLQ.Sources, "topic", nil, "a topic that the group consumes; may be given more than once")
	f.StringVar(&target.DLQ.Topic, "dlq", "", "topic of the dead letters, {topic} stands for the source's (default {topic}.dlq)")
	f.StringVar(&target.DLQ.Group, "group", "", "consumer group, where --dlq has {group}, and with --retry-delays")
	e.durations(f, &retry.Delays, "retry-delays", "delays of the group's retry topics, ascending, such as 1m,10m,1h")
	f.StringVar(&retry.Topic, "retry-topic", "", "retry topics: {topic} stands for the source's, {group} and {level} (default {topic}.{group}.retry.{level})")
	e.flags(cmd)
	accessFlags(&e.ranges, f, &e.access, "speak TLS; --ca and --cert turn it on too", true)
	return cmd
}

// inspectKafka calls Inspect with the settings that a group's client should have. So it
// judges only the broker.
func inspectKafka(a *access.Access, url string, target guardkafka.Target) ([]guard.Finding, error) {
	config := sarama.NewConfig()
	config.ClientID = "stormguard-doctor"
	config.Version = sarama.V3_6_0_0
	config.Net.DialTimeout = 10 * time.Second
	config.Metadata.AllowAutoTopicCreation = false
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	config.Consumer.Return.Errors = true
	config.Consumer.Group.Rebalance.Timeout = config.Net.ReadTimeout
	a.Kafka(config)
	client, err := sarama.NewClient(strings.Split(url, ","), config)
	if err != nil {
		return nil, connectError(url, access.KafkaError(err))
	}
	defer func() { _ = client.Close() }()
	return guardkafka.Inspect(client, target)
}
