// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"fmt"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/dlq"
)

// ErrUnsuitable is the ErrUnsuitable of the adapter.
var ErrUnsuitable = errors.New("kafka: unsuitable configuration")

// Unsuitable is an [ErrUnsuitable] with its reason.
func Unsuitable(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrUnsuitable, fmt.Sprintf(format, args...))
}

// System is the value of messaging.system in the OTel conventions.
const System = "kafka"

// Size is the weight of a message in bytes.
func Size(m *sarama.ConsumerMessage) int {
	n := len(m.Key) + len(m.Value)
	for _, h := range m.Headers {
		n += len(h.Key) + len(h.Value)
	}
	return n
}

// Origin says where a message of a group stands: topic, partition and offset.
func Origin(m *sarama.ConsumerMessage, group string) dlq.Origin {
	return dlq.Origin{
		System: System, Source: m.Topic, Group: group,
		Partition: m.Partition, HasPartition: true, Offset: m.Offset, HasOffset: true,
	}
}

// Headers are a message's headers. They share its bytes.
func Headers(hs []*sarama.RecordHeader) []dlq.Header {
	if len(hs) == 0 {
		return nil
	}
	out := make([]dlq.Header, 0, len(hs))
	for _, h := range hs {
		if h != nil {
			out = append(out, dlq.Header{Name: string(h.Key), Value: h.Value})
		}
	}
	return out
}

// FirstMessage returns the first message of a partition that is not among done, and its offset.
// It looks at offsets of at least from and below end. It returns end and nil if there is no such
// message: all records may be done, or control records of a transaction, which a
// PartitionConsumer passes silently. It also reads messages of transactions that are not
// committed.
func FirstMessage(client sarama.Client, topic string, partition int32, from, end int64, done map[int64]bool) (int64, *sarama.Record, error) {
	for from < end {
		batches, err := fetch(client, topic, partition, from)
		if err != nil {
			return from, nil, fmt.Errorf("kafka: retry topic %s: %w", topic, err)
		}
		before := from
		for _, b := range batches {
			if b.PartialTrailingRecord {
				break
			}
			for _, r := range b.Records {
				at := b.FirstOffset + r.OffsetDelta
				if !b.Control && at >= from && at < end && !done[at] {
					return at, r, nil
				}
			}
			from = max(from, b.LastOffset()+1)
		}
		if from == before {
			return from, nil, fmt.Errorf("kafka: retry topic %s: nothing can be read at offset %d, before its end %d", topic, from, end)
		}
	}
	return end, nil, nil
}

// fetch asks a partition's leader for records from an offset on: at least one whole batch, if
// there is one.
func fetch(client sarama.Client, topic string, partition int32, from int64) ([]*sarama.RecordBatch, error) {
	leader, err := client.Leader(topic, partition)
	if err != nil {
		return nil, err
	}
	c := client.Config()
	req := &sarama.FetchRequest{Version: 5, MaxBytes: c.Consumer.Fetch.MaxBytes, Isolation: sarama.ReadUncommitted}
	if c.Version.IsAtLeast(sarama.V2_1_0_0) { // otherwise there is no zstd
		req.Version, req.SessionEpoch = 10, -1
	}
	req.AddBlock(topic, partition, from, c.Consumer.Fetch.Default, -1)
	resp, err := leader.Fetch(req)
	if err != nil {
		return nil, err
	}
	block := resp.GetBlock(topic, partition)
	switch {
	case block == nil:
		return nil, sarama.ErrIncompleteResponse
	case block.Err != sarama.ErrNoError:
		return nil, errors.Join(block.Err, client.RefreshMetadata(topic))
	}
	var batches []*sarama.RecordBatch
	for _, r := range block.RecordsSet {
		if r.RecordBatch != nil {
			batches = append(batches, r.RecordBatch)
		}
	}
	return batches, nil
}
