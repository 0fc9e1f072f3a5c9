// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package cluster has the code that the Kafka adapter and its retry topics share. It looks at
// topics and creates them, writes single confirmed records, and reads records.
package cluster

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/guard"
)

// A Topic is a topic as its broker describes it.
type Topic struct {
	Name       string
	Partitions int32
	Replicas   int
	Settings   map[string]string // its configuration, defaults included; empty if it may not be read
	Refused    error             // an [ErrRefused] if Settings may not be read; else nil
}

// ErrRefused means that settings may not be read.
var ErrRefused = errors.New("they may not be read")

// An Admin asks a cluster about topics.
type Admin struct {
	sarama.ClusterAdmin
	Addrs string // the brokers' addresses, for commands
}

// NewAdmin makes an Admin that asks by client. The caller still owns client.
func NewAdmin(client sarama.Client) (*Admin, error) {
	admin, err := sarama.NewClusterAdminFromClient(client)
	if err != nil {
		return nil, fmt.Errorf("kafka: admin: %w", err)
	}
	addrs := make([]string, 0, len(client.Brokers()))
	for _, b := range client.Brokers() {
		addrs = append(addrs, b.Addr())
	}
	slices.Sort(addrs)
	return &Admin{admin, strings.Join(addrs, ",")}, nil
}

// Topic describes a topic; nil if there is none of that name.
func (in *Admin) Topic(name string) (*Topic, error) {
	found, err := in.ClusterAdmin.DescribeTopics([]string{name})
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
		info := &Topic{Name: name, Partitions: int32(len(t.Partitions)), Settings: map[string]string{}}
		if len(t.Partitions) > 0 {
			info.Replicas = len(t.Partitions[0].Replicas)
		}
		if info.Settings, err = in.Settings(sarama.TopicResource, name); err != nil {
			err = fmt.Errorf("kafka: settings of topic %s: %w", name, err)
		}
		if errors.Is(err, ErrRefused) {
			info.Refused, err = err, nil
		}
		if err != nil {
			return nil, err
		}
		return info, nil
	}
}

// Source describes a topic that should exist. It waits for the topic up to sourceWait: a broker
// may learn of a new topic late, and of its settings later still.
func (in *Admin) Source(name string) (*Topic, error) {
	for begun := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		info, err := in.Topic(name)
		unknown := info == nil && err == nil || errors.Is(err, sarama.ErrUnknownTopicOrPartition)
		if !unknown || time.Since(begun) > sourceWait {
			return info, err
		}
	}
}

// Settings are the settings of a topic or broker, defaults included. If they may not be read, the
// error is an [ErrRefused] that names the missing right.
func (in *Admin) Settings(kind sarama.ConfigResourceType, name string) (map[string]string, error) {
	found, err := in.ClusterAdmin.DescribeConfigs([]*sarama.ConfigResource{{Type: kind, Name: name}}, sarama.DescribeConfigsOptions{})
	out := make(map[string]string)
	for _, r := range found {
		for _, e := range r.Configs {
			out[e.Name] = e.Value
		}
		if r.ErrorCode != sarama.ErrNoError {
			err = errors.Join(err, r.ErrorCode)
		}
	}
	switch {
	case errors.Is(err, sarama.ErrTopicAuthorizationFailed):
		err = fmt.Errorf("%w: allow DescribeConfigs on the topic: %w", ErrRefused, err)
	case errors.Is(err, sarama.ErrClusterAuthorizationFailed):
		err = fmt.Errorf("%w: allow DescribeConfigs on the cluster: %w", ErrRefused, err)
	}
	return out, err
}

// Number is a numeric setting, def if it is not known.
func (t *Topic) Number(name string, def int64) int64 {
	n, err := strconv.ParseInt(t.Settings[name], 10, 64)
	if err != nil {
		return def
	}
	return n
}

// Retention is how long a topic keeps a record; 0 means without limit.
func (t *Topic) Retention() time.Duration {
	if !strings.Contains(t.Settings["cleanup.policy"], "delete") {
		return 0
	}
	return time.Duration(max(0, t.Number("retention.ms", 0))) * time.Millisecond
}

// Compacts tells whether only the last record of a key stays.
func (t *Topic) Compacts() bool { return strings.Contains(t.Settings["cleanup.policy"], "compact") }

const (
	// topicWait is how long a new topic may take to be known everywhere.
	topicWait = 10 * time.Second
	// sourceWait is how long Source looks for a topic. The topic may be new, and a busy broker
	// learns of it seconds later.
	sourceWait = 5 * time.Second
)

// HeaderRoom is how many bytes the headers of a dead letter, or of a parked message, may take
// beside the message.
const HeaderRoom = 64 << 10

// Create creates a topic, unless it is there, and waits until client knows it.
func (in *Admin) Create(client sarama.Client, n NewTopic) (*Topic, error) {
	entries := map[string]*string{}
	for k, v := range n.Settings {
		entries[k] = &v
	}
	replicas := n.Replicas
	if replicas == 0 {
		replicas = -1 // the broker's default
	}
	err := in.ClusterAdmin.CreateTopic(n.Name, &sarama.TopicDetail{NumPartitions: n.Partitions, ReplicationFactor: replicas, ConfigEntries: entries}, false)
	if err != nil && !errors.Is(err, sarama.ErrTopicAlreadyExists) { // another process was faster
		return nil, fmt.Errorf("kafka: create topic %s: %w; by hand: %s", n.Name, err, in.CreateCommand(n))
	}
	for begun := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		info, err := in.Topic(n.Name)
		if err == nil && info != nil && info.Partitions > 0 {
			if err = client.RefreshMetadata(n.Name); err == nil {
				return info, nil
			}
		}
		if time.Since(begun) > topicWait {
			return nil, fmt.Errorf("kafka: topic %s is not there %s after it was created: %w", n.Name, topicWait, err)
		}
	}
}

// A NewTopic is a topic to be created.
type NewTopic struct {
	Name       string
	Partitions int32
	Replicas   int16 // 0: the broker's default
	Settings   map[string]string
}

// CreateCommand is the command that creates a topic.
func (in *Admin) CreateCommand(n NewTopic) string {
	var b strings.Builder
	fmt.Fprintf(&b, "kafka-topics.sh --bootstrap-server %s --create --topic %s --partitions %d", in.Addrs, n.Name, n.Partitions)
	if n.Replicas > 0 {
		fmt.Fprintf(&b, " --replication-factor %d", n.Replicas)
	}
	for _, k := range slices.Sorted(maps.Keys(n.Settings)) {
		fmt.Fprintf(&b, " --config %s=%s", k, n.Settings[k])
	}
	return b.String()
}

// Alter is the command that changes a setting of a topic.
func (in *Admin) Alter(topic, setting string) string {
	return fmt.Sprintf("kafka-configs.sh --bootstrap-server %s --alter --entity-type topics --entity-name %s --add-config %s", in.Addrs, topic, setting)
}

// AddPartitions is the command that gives a topic n partitions.
func (in *Admin) AddPartitions(topic string, n int32) string {
	return fmt.Sprintf("kafka-topics.sh --bootstrap-server %s --alter --topic %s --partitions %d", in.Addrs, topic, n)
}

// ValidTopic tells whether a broker would take the name.
func ValidTopic(s string) bool {
	if s == "" || len(s) > 249 || s == "." || s == ".." {
		return false
	}
	return strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == ""
}

// InTopic is a group's name as a part of a topic's name: characters that a broker would refuse
// become underscores.
func InTopic(group string) string {
	return strings.Map(func(r rune) rune {
		if ValidTopic("t" + string(r)) {
			return r
		}
		return '_'
	}, group)
}

// Durable finds settings by which confirmed messages of a topic may be lost.
func (in *Admin) Durable(t *Topic) (found Findings) {
	where := "topic " + t.Name
	if t.Replicas == 1 {
		found.Add(guard.Warning, where, "more replicas: kafka-reassign-partitions.sh", "it has one replica: the disk of one broker is all there is")
	}
	if t.Replicas > 2 && t.Number("min.insync.replicas", 0) == 1 {
		found.Add(guard.Danger, where, in.Alter(t.Name, "min.insync.replicas=2"), "min.insync.replicas is 1: a write is confirmed although one broker alone has it")
	}
	if t.Settings["unclean.leader.election.enable"] == "true" {
		found.Add(guard.Danger, where, in.Alter(t.Name, "unclean.leader.election.enable=false"), "unclean.leader.election.enable is on: confirmed messages may be gone after a change of leader")
	}
	return found
}

// Findings are what an inspection finds.
type Findings []guard.Finding

// Add adds a finding.
func (f *Findings) Add(s guard.Severity, where, fix, what string, args ...any) {
	*f = append(*f, guard.Finding{Severity: s, Where: where, What: fmt.Sprintf(what, args...), Fix: fix})
}
