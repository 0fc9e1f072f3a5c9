// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/cluster"
	"github.com/stormguard-mq/stormguard/dlq"
)

// DLQConfig says where dead letters go. By default only Sources is required, and dead letters of
// "orders" go to "orders.dlq".
type DLQConfig struct {
	// Topic names the topic of dead letters. {topic} stands for the source's topic and {group}
	// for Group. Unset means "{topic}.dlq".
	Topic string

	// Sources are the topics whose messages may become dead letters. They are required if Topic
	// has a {topic} in it. A topic that is created gets as many partitions as the largest of its
	// sources. All sources must exist: a missing one is an [ErrUnsuitable], and then no topic is
	// created.
	Sources []string

	// Group replaces {group} in Topic. It is required if Topic has a {group}.
	Group string

	// Dialect is the format of the headers that tell why a message is dead. Unset means
	// stormguard's own.
	Dialect dlq.Dialect

	// NoCreate refuses a missing topic instead of creating it. The error has the command that
	// creates it.
	NoCreate bool

	// Partitions is the number of partitions of a topic that is created, from 1 to 10,000. Unset
	// means the number of the largest source, or 1.
	Partitions int32

	// Replicas is the number of replicas of a topic that is created, from 1 to 32767. Unset
	// means the broker's default.replication.factor.
	Replicas int16

	// Retention is how long a topic that is created keeps dead letters, at least 1h. Unset means
	// that nothing is deleted.
	Retention time.Duration
}

const defaultTopic = "{topic}.dlq"

// Validate reports everything wrong at once.
func (c DLQConfig) Validate() error {
	var errs []error
	add := func(format string, args ...any) { errs = append(errs, fmt.Errorf("kafka: DLQConfig."+format, args...)) }
	topic := c.topic()
	if bare := strings.NewReplacer("{topic}", "t", "{group}", "g").Replace(topic); !cluster.ValidTopic(bare) {
		add("Topic: %q is not a topic's name of letters, digits, '.', '_' and '-' with {topic} and {group}", c.Topic)
	}
	if strings.Contains(topic, "{topic}") && len(c.Sources) == 0 {
		add("Sources: at least one is needed for %q", topic)
	}
	if strings.Contains(topic, "{group}") && c.Group == "" {
		add("Group: needed for %q", topic)
	}
	for _, s := range c.Sources {
		if !cluster.ValidTopic(s) {
			add("Sources: %q is not a topic's name", s)
		} else if c.name(s) == s {
			add("Topic: dead letters of %q would go to %q itself", s, s)
		}
	}
	if err := c.Dialect.Validate(); err != nil {
		add("Dialect: %w", err)
	}
	if c.Partitions < 0 || c.Partitions > 10_000 {
		add("Partitions: %d is not within 1 and 10000", c.Partitions)
	}
	if c.Replicas < 0 {
		add("Replicas: %d is not within 1 and 32767", c.Replicas)
	}
	if c.Retention != 0 && c.Retention < time.Hour {
		add("Retention: %s is not at least 1h", c.Retention)
	}
	return errors.Join(errs...)
}

func (c DLQConfig) topic() string {
	if c.Topic == "" {
		return defaultTopic
	}
	return c.Topic
}

// name is the topic of the dead letters of source.
func (c DLQConfig) name(source string) string {
	return strings.NewReplacer("{topic}", source, "{group}", cluster.InTopic(c.Group)).Replace(c.topic())
}

// ensureTopics creates the topics of a DLQ, or checks existing ones.
func (d *DLQ) ensureTopics() error {
	in, err := cluster.NewAdmin(d.client)
	if err != nil {
		return err
	}
	need := map[string]demands{}
	var errs []error
	for _, source := range d.cfg.Sources {
		info, err := in.Source(source)
		if err == nil && info == nil {
			err = cluster.Unsuitable("DLQConfig.Sources: topic %s does not exist; if that is its name: kafka-topics.sh --bootstrap-server %s --create --topic %s", source, in.Addrs, source)
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		name := d.cfg.name(source)
		need[name] = need[name].and(info)
	}
	if len(errs) > 0 { // a mistyped name makes no topic
		return errors.Join(errs...)
	}
	if len(d.cfg.Sources) == 0 {
		need[d.cfg.name("")] = demands{}
	}
	for _, name := range slices.Sorted(maps.Keys(need)) {
		if err := d.ensureTopic(in, name, need[name]); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// demands are what the topic of a DLQ must have for its sources.
type demands struct {
	partitions int32
	size       int64 // the largest max.message.bytes of the sources
}

// and adds the demands of one more source.
func (d demands) and(source *cluster.Topic) demands {
	return demands{max(d.partitions, source.Partitions), max(d.size, source.Number("max.message.bytes", 0))}
}

func (d *DLQ) ensureTopic(in *cluster.Admin, name string, want demands) error {
	info, err := in.Topic(name)
	if err != nil {
		return err
	}
	if info == nil {
		if d.cfg.NoCreate {
			return cluster.Unsuitable("topic %s does not exist: %s", name, in.CreateCommand(d.cfg.newTopic(name, want)))
		}
		if info, err = in.Create(d.client, d.cfg.newTopic(name, want)); err != nil {
			return err
		}
	}
	d.max[name] = int(info.Number("max.message.bytes", 0))
	if info.Compacts() {
		return cluster.Unsuitable("topic %s: cleanup.policy %s drops all but the last dead letter of a key: %s",
			name, info.Settings["cleanup.policy"], in.Alter(name, "cleanup.policy=delete"))
	}
	return nil
}

func (c DLQConfig) newTopic(name string, want demands) cluster.NewTopic {
	retention := int64(-1)
	if c.Retention > 0 {
		retention = c.Retention.Milliseconds()
	}
	settings := map[string]string{
		"cleanup.policy": "delete", "retention.ms": strconv.FormatInt(retention, 10), "retention.bytes": "-1",
		"message.timestamp.type": "LogAppendTime",
	}
	if want.size > 0 {
		settings["max.message.bytes"] = strconv.FormatInt(want.size+cluster.HeaderRoom, 10)
	}
	partitions := max(1, want.partitions)
	if c.Partitions > 0 {
		partitions = c.Partitions
	}
	return cluster.NewTopic{Name: name, Partitions: partitions, Replicas: c.Replicas, Settings: settings}
}
