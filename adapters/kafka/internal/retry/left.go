// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package retry

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/cluster"
	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/offsets"
)

// leftBehind is a partition of a retry topic in which a group has parked messages. With its
// present configuration the group does not read the partition any more.
type leftBehind struct {
	topic     string
	partition int32
	records   int64 // the most that can be there: from the first message to the end
	source    string
	group     string
}

func (l leftBehind) what() string {
	return fmt.Sprintf("up to %d messages of %s that group %s parked are in partition %d", l.records, l.source, l.group, l.partition)
}

func handleLeft(in *cluster.Admin, topic string) string {
	return fmt.Sprintf("run with the Delays, Topic, Group and Sources they were parked with until they are handled; or give them up: kafka-topics.sh --bootstrap-server %s --delete --topic %s", in.Addrs, topic)
}

// left finds messages of cfg's sources in retry topics that cfg does not name. These are topics
// of levels for which cfg has no delay, and topics whose offsets the group has committed as
// [Topics] does.
func left(in *cluster.Admin, client sarama.Client, cfg Config, group string) ([]leftBehind, error) {
	committed, err := in.ListConsumerGroupOffsets(group, nil)
	if errors.Is(err, sarama.ErrGroupIDNotFound) { // some brokers return this error, others no offsets
		committed, err = new(sarama.OffsetFetchResponse), nil
	}
	if err != nil {
		return nil, fmt.Errorf("kafka: offsets of group %s: %w", group, err)
	}
	blocks := committed.Blocks
	unread := make(map[string]bool)
	for topic, parts := range blocks {
		for _, b := range parts {
			unread[topic] = unread[topic] || offsets.Ours(b.Metadata)
		}
	}
	was := cfg
	was.Group = group
	for _, source := range cfg.Sources {
		for level := 1; level <= maxLevels; level++ {
			unread[was.Name(source, level)] = true
		}
	}
	if group == cfg.Group {
		for _, source := range cfg.Sources {
			for level := range cfg.Delays {
				delete(unread, cfg.Name(source, level+1))
			}
		}
	}
	maps.DeleteFunc(unread, func(topic string, is bool) bool { return !is || slices.Contains(cfg.Sources, topic) })
	if len(unread) == 0 {
		return nil, nil // no names would mean all topics
	}
	found, err := in.DescribeTopics(slices.Sorted(maps.Keys(unread)))
	if err != nil {
		return nil, fmt.Errorf("kafka: retry topics of before: %w", err)
	}
	var all []leftBehind
	var errs []error
	for _, t := range found {
		_, committed := blocks[t.Name]
		switch {
		case t.Err == sarama.ErrUnknownTopicOrPartition, t.Err == sarama.ErrTopicAuthorizationFailed && !committed:
			continue // most of these topics never existed
		case t.Err != sarama.ErrNoError:
			errs = append(errs, fmt.Errorf("kafka: topic %s: %w", t.Name, t.Err))
			continue
		}
		for _, p := range t.Partitions {
			at := position{offset: -1}
			if b := blocks[t.Name][p.ID]; b != nil {
				at = position{b.Offset, b.Metadata}
			}
			l, err := leftIn(client, t.Name, p.ID, at)
			errs = append(errs, err)
			if l.group = group; l.records > 0 && slices.Contains(cfg.Sources, l.source) {
				all = append(all, l)
			}
		}
	}
	slices.SortFunc(all, func(a, b leftBehind) int {
		return cmp.Or(strings.Compare(a.topic, b.topic), cmp.Compare(a.partition, b.partition))
	})
	return all, errors.Join(errs...)
}

// leftIn looks at one partition. The source in the first message that is not done counts for all
// of them. A stranger's record names no source.
func leftIn(client sarama.Client, topic string, partition int32, done position) (left leftBehind, err error) {
	left = leftBehind{topic: topic, partition: partition}
	oldest, err := client.GetOffset(topic, partition, sarama.OffsetOldest)
	if err != nil {
		return left, fmt.Errorf("kafka: topic %s: %w", topic, err)
	}
	end, err := client.GetOffset(topic, partition, sarama.OffsetNewest)
	if err != nil {
		return left, fmt.Errorf("kafka: topic %s: %w", topic, err)
	}
	from := max(oldest, done.offset)
	if done.offset > end { // the topic was created again
		from = oldest
		done = position{}
	}
	at, m, err := cluster.FirstMessage(client, topic, partition, from, end, offsets.Decode(done.offset, done.meta))
	if err != nil || m == nil {
		return left, err
	}
	left.records = end - at
	for _, h := range m.Headers {
		if h != nil && string(h.Key) == retryTopicHeader {
			left.source = string(h.Value)
		}
	}
	return left, nil
}

// refuseLeft refuses a configuration with which parked messages would never be read.
func (t *Topics) refuseLeft() error {
	in, err := cluster.NewAdmin(t.reads)
	if err != nil {
		return err
	}
	found, err := left(in, t.reads, t.cfg, t.cfg.Group)
	errs := []error{err}
	for _, l := range found {
		errs = append(errs, cluster.Unsuitable("topic %s: %s, and nobody would read them any more: %s", l.topic, l.what(), handleLeft(in, l.topic)))
	}
	return errors.Join(errs...)
}
