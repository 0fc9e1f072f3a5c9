// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package retry

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/cluster"
	"github.com/stormguard-mq/stormguard/guard"
)

// Inspect looks for settings that would lose parked messages, prevent parking, or leave messages
// unread. hold is the longest outage that must lose nothing. The error says what could not be
// asked; the other findings come with it.
func Inspect(client sarama.Client, in *cluster.Admin, cfg Config, hold time.Duration) (cluster.Findings, error) {
	i := &inspection{in, client, hold, nil}
	var errs []error
	for _, source := range cfg.Sources {
		errs = append(errs, i.topics(source, cfg))
	}
	errs = append(errs, i.left(cfg), i.coordinator(cfg.Group))
	return i.Findings, errors.Join(errs...)
}

type inspection struct {
	*cluster.Admin
	client sarama.Client
	hold   time.Duration
	cluster.Findings
}

// coordinator looks at the broker that stores the offsets of the retry topics.
func (i *inspection) coordinator(group string) error {
	c, err := i.client.Coordinator(group)
	if err != nil {
		return fmt.Errorf("kafka: coordinator of group %s: %w", group, err)
	}
	f, err := metadataFault(i.Admin, c.ID())
	if f != nil {
		i.Add(guard.Danger, fmt.Sprintf("broker %d", c.ID()), f.fix, "%s", f.what)
	}
	return err
}

// topics looks at the retry topics of a source.
func (i *inspection) topics(source string, cfg Config) error {
	from, err := i.Topic(source)
	if err != nil || from == nil {
		return err // a missing source is found with the DLQ's sources
	}
	var errs []error // without from's own, which are found with the DLQ's sources
	for level, delay := range cfg.Delays {
		want := cfg.newTopic(from, level+1)
		to, err := i.Topic(want.Name)
		if err != nil {
			return errors.Join(append(errs, err)...)
		}
		if to == nil {
			i.Add(guard.Warning, "topic "+want.Name, i.CreateCommand(want), "it does not exist: nothing of %s can be parked for %s", source, delay)
			continue
		}
		errs = append(errs, to.Refused)
		i.Findings = append(i.Findings, i.Durable(to)...)
		for _, f := range topicFaults(i.Admin, from, to, delay, max(retryMargin, i.hold)) {
			i.Add(guard.Danger, "topic "+want.Name, f.fix, "%s", f.what)
		}
	}
	return errors.Join(errs...)
}

// left looks for parked messages that are not read. It also looks at topics with the names that
// cfg would give them for another group, if that group has no members.
func (i *inspection) left(cfg Config) error {
	groups, err := i.otherGroups(cfg)
	errs := []error{err}
	for _, group := range append([]string{cfg.Group}, groups...) {
		found, err := left(i.Admin, i.client, cfg, group)
		errs = append(errs, err)
		for _, l := range found {
			if group == cfg.Group {
				i.Add(guard.Danger, "topic "+l.topic, handleLeft(i.Admin, l.topic), "%s, and nobody reads them any more", l.what())
			} else {
				i.Add(guard.Warning, "topic "+l.topic, handleLeft(i.Admin, l.topic), "%s, and that group has no members: if %s has taken its place, nobody reads them any more", l.what(), cfg.Group)
			}
		}
	}
	return errors.Join(errs...)
}

// otherGroups are the groups without members whose retry topics exist.
func (i *inspection) otherGroups(cfg Config) ([]string, error) {
	if err := i.client.RefreshMetadata(); err != nil {
		return nil, fmt.Errorf("kafka: topics: %w", err)
	}
	topics, err := i.client.Topics()
	if err != nil {
		return nil, fmt.Errorf("kafka: topics: %w", err)
	}
	all, err := i.ListConsumerGroups()
	if err != nil {
		return nil, fmt.Errorf("kafka: groups: %w", err)
	}
	var ask []string
	for group := range all {
		other := cfg
		other.Group = group
		if group != cfg.Group && slices.ContainsFunc(cfg.Sources, func(source string) bool {
			return other.Name(source, 1) != cfg.Name(source, 1) && slices.Contains(topics, other.Name(source, 1))
		}) {
			ask = append(ask, group)
		}
	}
	if len(ask) == 0 {
		return nil, nil
	}
	described, err := i.DescribeConsumerGroups(ask)
	if err != nil {
		return nil, fmt.Errorf("kafka: groups: %w", err)
	}
	var idle []string
	for _, g := range described {
		if len(g.Members) == 0 && g.Err == sarama.ErrNoError {
			idle = append(idle, g.GroupId)
		}
	}
	slices.Sort(idle)
	return idle, nil
}
