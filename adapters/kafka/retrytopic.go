// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package kafka

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/guard"
)

// newTopic is the retry topic of a level of a source.
func (c RetryConfig) newTopic(source *topicInfo, level int) newTopic {
	keeps := c.Delays[level-1] + cmp.Or(c.Retention, defaultRetention)
	settings := map[string]string{
		"cleanup.policy": "delete", "retention.ms": strconv.FormatInt(keeps.Milliseconds(), 10), "retention.bytes": "-1",
		"message.timestamp.type": "LogAppendTime",
	}
	if size := source.number("max.message.bytes", 0); size > 0 {
		settings["max.message.bytes"] = strconv.FormatInt(size+headerRoom, 10)
	}
	return newTopic{c.name(source.name, level), source.partitions, c.Replicas, settings}
}

// ensureTopics creates the retry topics, or checks those that are there.
func (t *RetryTopics) ensureTopics(client sarama.Client) error {
	in, err := newInspector(client)
	if err != nil {
		return err
	}
	errs := []error{t.takesMetadata(client, in)}
	for _, source := range t.cfg.Sources {
		from, err := in.source(source)
		if err == nil && from == nil {
			err = unsuitable("topic %s does not exist: its retry topics need as many partitions as it has", source)
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		for level := range t.cfg.Delays {
			errs = append(errs, t.ensureTopic(client, in, from, level+1))
		}
	}
	return errors.Join(errs...)
}

func (t *RetryTopics) ensureTopic(client sarama.Client, in *inspector, from *topicInfo, level int) error {
	want := t.cfg.newTopic(from, level)
	to, err := in.topic(want.name)
	if err != nil {
		return err
	}
	if to == nil {
		if t.cfg.NoCreate {
			return unsuitable("topic %s does not exist: %s", want.name, in.createCommand(want))
		}
		if to, err = in.create(client, want); err != nil {
			return err
		}
	}
	t.max[want.name] = int(to.number("max.message.bytes", 0))
	var errs []error
	for _, f := range in.retryFaults(from, to, t.cfg.Delays[level-1], retryMargin) {
		errs = append(errs, unsuitable("topic %s: %s: %s", want.name, f.what, f.fix))
	}
	return errors.Join(errs...)
}

// takesMetadata asks the group's coordinator whether it takes what is committed.
func (t *RetryTopics) takesMetadata(client sarama.Client, in *inspector) error {
	coordinator, err := client.Coordinator(t.cfg.Group)
	if err != nil {
		return fmt.Errorf("kafka: coordinator of group %s: %w", t.cfg.Group, err)
	}
	f, err := in.metadataFault(coordinator.ID())
	if err == nil && f != nil {
		err = unsuitable("broker %d: %s: %s", coordinator.ID(), f.what, f.fix)
	}
	return err
}

// metadataFault is what is wrong with a broker that commits offsets; nil if nothing
// is, or its settings may not be read.
func (in *inspector) metadataFault(broker int32) (*fault, error) {
	s, err := in.settings(sarama.BrokerResource, fmt.Sprint(broker))
	if err != nil {
		return nil, fmt.Errorf("kafka: settings of broker %d: %w", broker, err)
	}
	const setting = "offset.metadata.max.bytes"
	n, err := strconv.ParseInt(s[setting], 10, 64)
	if err != nil || n >= maxMetadata {
		return nil, nil //nolint:nilerr,nilnil // unknown, or enough
	}
	return &fault{
		fmt.Sprintf("%s is %d: what is done of a retry topic takes up to %d, could not be committed, and would be handled again", setting, n, maxMetadata),
		fmt.Sprintf("%s=%d or more in server.properties of all brokers (default 4096), and a restart", setting, maxMetadata),
	}, nil
}

// fault is what is wrong with a topic, and what mends it.
type fault struct{ what, fix string }

// retryFaults are what would lose parked messages, or keep them from being parked.
func (in *inspector) retryFaults(from, to *topicInfo, delay, margin time.Duration) (faults []fault) {
	add := func(fix, what string, args ...any) { faults = append(faults, fault{fmt.Sprintf(what, args...), fix}) }
	alter := func(setting string) string { return in.alter(to.name, setting) }
	if to.partitions != from.partitions {
		fix := "a retry topic of another name"
		if to.partitions < from.partitions {
			fix = in.addPartitions(to.name, from.partitions)
		}
		add(fix, "it has %d partitions, %s has %d: a message is parked in its own partition", to.partitions, from.name, from.partitions)
	}
	if to.compacts() {
		add(alter("cleanup.policy=delete"), "cleanup.policy is %s: of each key only the last parked message stays", to.settings["cleanup.policy"])
	}
	if keeps := to.retention(); keeps > 0 && keeps < delay+margin {
		add(alter(fmt.Sprintf("retention.ms=%d", (delay+defaultRetention).Milliseconds())),
			"it keeps messages for %s: less than its delay of %s and %s more", keeps, delay, margin)
	}
	if n := to.number("retention.bytes", -1); n > 0 {
		add(alter("retention.bytes=-1"), "it keeps %d bytes of a partition: what is parked is deleted beyond them", n)
	}
	if have, want := to.number("max.message.bytes", 0), from.number("max.message.bytes", 0)+headerRoom; have > 0 && have < want {
		add(alter(fmt.Sprintf("max.message.bytes=%d", want)), "max.message.bytes is %d, of %s %d: a large message can never be parked, and waits", have, from.name, want-headerRoom)
	}
	return faults
}

// coordinator looks at what commits the offsets of the retry topics.
func (i *inspection) coordinator(group string) error {
	c, err := i.client.Coordinator(group)
	if err != nil {
		return fmt.Errorf("kafka: coordinator of group %s: %w", group, err)
	}
	f, err := i.in.metadataFault(c.ID())
	if f != nil {
		i.add(guard.Danger, fmt.Sprintf("broker %d", c.ID()), f.fix, "%s", f.what)
	}
	return err
}

// retryTopics looks at the retry topics of a source.
func (i *inspection) retryTopics(source string, cfg RetryConfig) error {
	from, err := i.in.topic(source)
	if err != nil || from == nil {
		return err // its absence is found with the DLQ's sources
	}
	for level, delay := range cfg.Delays {
		want := cfg.newTopic(from, level+1)
		to, err := i.in.topic(want.name)
		if err != nil {
			return err
		}
		if to == nil {
			i.add(guard.Warning, "topic "+want.name, i.in.createCommand(want), "it does not exist: nothing of %s can be parked for %s", source, delay)
			continue
		}
		i.durable(to)
		for _, f := range i.in.retryFaults(from, to, delay, max(retryMargin, i.hold)) {
			i.add(guard.Danger, "topic "+want.name, f.fix, "%s", f.what)
		}
	}
	return nil
}
