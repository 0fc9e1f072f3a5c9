// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package kafka

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/IBM/sarama"
)

// topicInfo is a topic as its broker describes it.
type topicInfo struct {
	name       string
	partitions int32
	replicas   int
	settings   map[string]string // its configuration, defaults included; empty if it may not be read
}

// inspector asks a cluster about topics.
type inspector struct {
	admin sarama.ClusterAdmin
	addrs string // for commands
}

func newInspector(client sarama.Client) (*inspector, error) {
	admin, err := sarama.NewClusterAdminFromClient(client)
	if err != nil {
		return nil, fmt.Errorf("kafka: admin: %w", err)
	}
	addrs := make([]string, 0, len(client.Brokers()))
	for _, b := range client.Brokers() {
		addrs = append(addrs, b.Addr())
	}
	slices.Sort(addrs)
	return &inspector{admin, strings.Join(addrs, ",")}, nil
}

// topic describes a topic; nil if there is none of that name.
func (in *inspector) topic(name string) (*topicInfo, error) {
	found, err := in.admin.DescribeTopics([]string{name})
	if err != nil {
		return nil, fmt.Errorf("kafka: topic %s: %w", name, err)
	}
	if len(found) != 1 {
		return nil, fmt.Errorf("kafka: topic %s: %d answers", name, len(found))
	}
	switch t := found[0]; {
	case errors.Is(t.Err, sarama.ErrUnknownTopicOrPartition):
		return nil, nil //nolint:nilnil // there is none
	case !errors.Is(t.Err, sarama.ErrNoError):
		return nil, fmt.Errorf("kafka: topic %s: %w", name, t.Err)
	default:
		info := &topicInfo{name: name, partitions: int32(len(t.Partitions)), settings: map[string]string{}}
		if len(t.Partitions) > 0 {
			info.replicas = len(t.Partitions[0].Replicas)
		}
		if info.settings, err = in.settings(sarama.TopicResource, name); err != nil {
			return nil, fmt.Errorf("kafka: settings of topic %s: %w", name, err)
		}
		return info, nil
	}
}

// source is topic for one that should be there: a broker may learn of a new one late.
func (in *inspector) source(name string) (*topicInfo, error) {
	for begun := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		info, err := in.topic(name)
		if err != nil || info != nil || time.Since(begun) > sourceWait {
			return info, err
		}
	}
}

// settings are those of a topic or broker, defaults included; none if they may
// not be read.
func (in *inspector) settings(kind sarama.ConfigResourceType, name string) (map[string]string, error) {
	found, err := in.admin.DescribeConfigs([]*sarama.ConfigResource{{Type: kind, Name: name}}, sarama.DescribeConfigsOptions{})
	out := make(map[string]string)
	for _, r := range found {
		for _, e := range r.Configs {
			out[e.Name] = e.Value
		}
		if r.ErrorCode != sarama.ErrNoError {
			err = errors.Join(err, r.ErrorCode)
		}
	}
	if errors.Is(err, sarama.ErrTopicAuthorizationFailed) || errors.Is(err, sarama.ErrClusterAuthorizationFailed) {
		err = nil
	}
	return out, err
}

// number is a numeric setting, def if it is not known.
func (t *topicInfo) number(name string, def int64) int64 {
	n, err := strconv.ParseInt(t.settings[name], 10, 64)
	if err != nil {
		return def
	}
	return n
}

// retention is how long a topic keeps a record; 0 means for ever.
func (t *topicInfo) retention() time.Duration {
	if !strings.Contains(t.settings["cleanup.policy"], "delete") {
		return 0
	}
	return time.Duration(max(0, t.number("retention.ms", 0))) * time.Millisecond
}

func (t *topicInfo) compacts() bool { return strings.Contains(t.settings["cleanup.policy"], "compact") }

const (
	// topicWait is how long a new topic may take to be known everywhere.
	topicWait = 10 * time.Second
	// sourceWait is how long a source is looked for. It may just have been created.
	sourceWait = time.Second
)

// ensureTopics creates the topics of a DLQ, or checks those that are there.
func (d *DLQ) ensureTopics() error {
	in, err := newInspector(d.client)
	if err != nil {
		return err
	}
	need := map[string]demands{}
	var errs []error
	for _, source := range d.cfg.Sources {
		info, err := in.source(source)
		if err == nil && info == nil {
			err = unsuitable("DLQConfig.Sources: topic %s does not exist; if that is its name: kafka-topics.sh --bootstrap-server %s --create --topic %s", source, in.addrs, source)
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		name := d.cfg.name(source)
		n := need[name]
		n.partitions = max(n.partitions, info.partitions)
		n.size = max(n.size, info.number("max.message.bytes", 0))
		need[name] = n
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

// demands are what the sources of a DLQ ask of it.
type demands struct {
	partitions int32
	size       int64 // of the largest message
}

// headerRoom is what a dead letter's headers may take beside its message.
const headerRoom = 64 << 10

func (d *DLQ) ensureTopic(in *inspector, name string, want demands) error {
	info, err := in.topic(name)
	if err != nil {
		return err
	}
	if d.cfg.Partitions > 0 {
		want.partitions = d.cfg.Partitions
	}
	want.partitions = max(1, want.partitions)
	if info == nil {
		if d.cfg.NoCreate {
			return unsuitable("topic %s does not exist: %s", name, in.createCommand(d.cfg.newTopic(name, want)))
		}
		if info, err = in.create(d.client, d.cfg.newTopic(name, want)); err != nil {
			return err
		}
	}
	d.max[name] = int(info.number("max.message.bytes", 0))
	if info.compacts() {
		return unsuitable("topic %s: cleanup.policy %s drops all but the last dead letter of a key: %s --alter --entity-type topics --entity-name %s --add-config cleanup.policy=delete",
			name, info.settings["cleanup.policy"], in.configs(), name)
	}
	return nil
}

// create creates a topic, unless it is there, and waits until client knows it.
func (in *inspector) create(client sarama.Client, n newTopic) (*topicInfo, error) {
	entries := map[string]*string{}
	for k, v := range n.settings {
		entries[k] = &v
	}
	replicas := n.replicas
	if replicas == 0 {
		replicas = -1 // the broker's default
	}
	err := in.admin.CreateTopic(n.name, &sarama.TopicDetail{NumPartitions: n.partitions, ReplicationFactor: replicas, ConfigEntries: entries}, false)
	if err != nil && !errors.Is(err, sarama.ErrTopicAlreadyExists) { // another process was faster
		return nil, fmt.Errorf("kafka: create topic %s: %w; by hand: %s", n.name, err, in.createCommand(n))
	}
	for begun := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		info, err := in.topic(n.name)
		if err == nil && info != nil && info.partitions > 0 {
			if err = client.RefreshMetadata(n.name); err == nil {
				return info, nil
			}
		}
		if time.Since(begun) > topicWait {
			return nil, fmt.Errorf("kafka: topic %s is not there %s after it was created: %w", n.name, topicWait, err)
		}
	}
}

// newTopic is a topic to be created.
type newTopic struct {
	name       string
	partitions int32
	replicas   int16 // 0: the broker's default
	settings   map[string]string
}

func (in *inspector) createCommand(n newTopic) string {
	var b strings.Builder
	fmt.Fprintf(&b, "kafka-topics.sh --bootstrap-server %s --create --topic %s --partitions %d", in.addrs, n.name, n.partitions)
	if n.replicas > 0 {
		fmt.Fprintf(&b, " --replication-factor %d", n.replicas)
	}
	for _, k := range slices.Sorted(maps.Keys(n.settings)) {
		fmt.Fprintf(&b, " --config %s=%s", k, n.settings[k])
	}
	return b.String()
}

func (c DLQConfig) newTopic(name string, want demands) newTopic {
	retention := int64(-1)
	if c.Retention > 0 {
		retention = c.Retention.Milliseconds()
	}
	settings := map[string]string{
		"cleanup.policy": "delete", "retention.ms": strconv.FormatInt(retention, 10), "retention.bytes": "-1",
		"message.timestamp.type": "LogAppendTime",
	}
	if want.size > 0 {
		settings["max.message.bytes"] = strconv.FormatInt(want.size+headerRoom, 10)
	}
	return newTopic{name, want.partitions, c.Replicas, settings}
}

// configs is the beginning of a command that changes settings.
func (in *inspector) configs() string { return "kafka-configs.sh --bootstrap-server " + in.addrs }

// alter is the command that changes a setting of a topic.
func (in *inspector) alter(topic, setting string) string {
	return fmt.Sprintf("%s --alter --entity-type topics --entity-name %s --add-config %s", in.configs(), topic, setting)
}

func (in *inspector) addPartitions(topic string, n int32) string {
	return fmt.Sprintf("kafka-topics.sh --bootstrap-server %s --alter --topic %s --partitions %d", in.addrs, topic, n)
}
