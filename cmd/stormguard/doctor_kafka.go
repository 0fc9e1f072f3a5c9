// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"strings"

	"github.com/IBM/sarama"
	"github.com/spf13/cobra"

	"github.com/stormguard-mq/stormguard/adapters/kafka"
)

func newDoctorKafka() *cobra.Command {
	var e examination
	var url string
	var target kafka.Target
	var retry kafka.RetryConfig
	cmd := &cobra.Command{
		Use:   "kafka",
		Short: "Look at topics, their dead-letter topics and retry topics",
		Long: `Look at the topics of a consumer group, at their dead-letter topics and, with
--retry-delays, at their retry topics, also those of before that nobody reads any
more. What the group's own client has set only its program knows: kafka.Inspect
looks at that too.`,
		Example: `  stormguard doctor kafka --url localhost:9092 --topic orders --topic refunds
  stormguard doctor kafka --topic orders --group billing --retry-delays 1m,10m,1h`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			err := e.need(cmd, "url")
			if len(target.DLQ.Sources) == 0 {
				err = errors.Join(err, usageError{errors.New("--topic: must be given")})
			}
			switch {
			case len(retry.Delays) > 0 && target.DLQ.Group == "":
				err = errors.Join(err, usageError{errors.New("--group: must be given with --retry-delays")})
			case len(retry.Delays) > 0:
				retry.Sources, retry.Group = target.DLQ.Sources, target.DLQ.Group
				target.Retry = &retry
				if bad := retry.Validate(); bad != nil && err == nil {
					err = usageError{bad}
				}
			case retry.Topic != "":
				err = errors.Join(err, usageError{errors.New("--retry-topic: needs --retry-delays")})
			}
			if err != nil {
				return err
			}
			config := sarama.NewConfig()
			config.ClientID = "stormguard-doctor"
			config.Version = sarama.V3_6_0_0
			config.Metadata.AllowAutoTopicCreation = false
			// What a group's client should have, so that only the broker is judged.
			config.Consumer.Offsets.Initial = sarama.OffsetOldest
			config.Consumer.Return.Errors = true
			client, err := sarama.NewClient(strings.Split(url, ","), config)
			if err != nil {
				return connectError(url, err)
			}
			defer func() { _ = client.Close() }()
			target.Hold = e.hold
			found, err := kafka.Inspect(client, target)
			if err != nil && len(found) == 0 {
				return err // not the same as nothing found
			}
			return errors.Join(err, e.report(cmd.OutOrStdout(), found))
		},
	}
	f := cmd.Flags()
	f.StringVar(&url, "url", "localhost:9092", "bootstrap servers, host:port[,host:port...]")
	f.StringArrayVar(&target.DLQ.Sources, "topic", nil, "a topic that the group consumes; may be given more than once")
	f.StringVar(&target.DLQ.Topic, "dlq", "", "topic of the dead letters, {topic} stands for the source's (default {topic}.dlq)")
	f.StringVar(&target.DLQ.Group, "group", "", "consumer group, where --dlq has {group}, and with --retry-delays")
	e.durations(f, &retry.Delays, "retry-delays", "delays of the group's retry topics, ascending, such as 1m,10m,1h")
	f.StringVar(&retry.Topic, "retry-topic", "", "retry topics: {topic} stands for the source's, {group} and {level} (default {topic}.{group}.retry.{level})")
	e.flags(cmd)
	return cmd
}
