// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/cluster"
	"github.com/stormguard-mq/stormguard/dlq"
)

// DLQ writes dead letters to Kafka, each confirmed by all in-sync replicas. It is a [dlq.Writer],
// safe for concurrent use.
//
// A dead letter keeps the message's key, body and headers, and its partition if the DLQ has that
// partition. The headers of the dialect say where the message was and why it is dead. An original
// header "x" is renamed to "kept-x" if the dialect uses its name, or if [dlq.Encode] leaves it
// out. A crash between write and mark leaves a second dead letter: both have the same
// [dlq.Record.ID].
//
// The record has the message's time. A topic that this package creates has the time of death
// instead (LogAppendTime), so that retention counts from there. The message's time is then in a
// header.
type DLQ struct {
	cfg    DLQConfig
	client sarama.Client
	out    *cluster.Sender
	max    map[string]int // largest record of each topic, in bytes
}

var _ dlq.Writer = (*DLQ)(nil)

// NewDLQ connects to addrs, and creates or checks the topics. An unsuitable topic is an
// [ErrUnsuitable] that names the command that mends it. Close the DLQ last.
//
// config is for connecting: TLS, SASL, Version, retries and sizes are taken from a copy of it.
// nil means sarama's defaults. NewDLQ sets what makes a producer safe: Producer.Idempotent,
// Producer.RequiredAcks = WaitForAll, Net.MaxOpenRequests = 1. A transactional id is refused. If
// the messages of a source come compressed, set Producer.Compression too: a topic's
// max.message.bytes limits the compressed size.
func NewDLQ(addrs []string, config *sarama.Config, cfg DLQConfig) (*DLQ, error) {
	if config == nil {
		config = sarama.NewConfig()
	}
	c := cluster.ProducerConfig(config)
	if err := errors.Join(cluster.SafeProducer(c), cfg.Validate()); err != nil {
		return nil, err
	}
	client, err := sarama.NewClient(addrs, c)
	if err != nil {
		return nil, fmt.Errorf("kafka: dead letters: %w", err)
	}
	d, err := newDLQ(client, cfg)
	if err != nil {
		return nil, errors.Join(err, client.Close())
	}
	return d, nil
}

func newDLQ(client sarama.Client, cfg DLQConfig) (*DLQ, error) {
	d := &DLQ{cfg: cfg, client: client, max: make(map[string]int)}
	err := d.ensureTopics()
	if err != nil {
		return nil, err
	}
	if d.out, err = cluster.NewSender(client, d.max); err != nil {
		return nil, fmt.Errorf("kafka: dead letters: %w", err)
	}
	return d, nil
}

// Close waits for writes under way, 1s at most, and disconnects. The error tells how many writes
// are left.
func (d *DLQ) Close() error { return d.out.Close() }

// errDLQClosed is the error of a Write after [DLQ.Close], unless sarama's client fails first.
var errDLQClosed = errors.New("kafka: DLQ closed")

// Write writes a dead letter and waits until all in-sync replicas have it, or ctx ends. After ctx
// has ended, the dead letter may still arrive. Until the broker has answered, another Write to
// the same partition is an error.
//
// A record over the topic's or the client's limit is a [*dlq.TooLargeError]. If the configuration
// compresses, only the broker decides whether a record is too large. A topic that does not exist,
// or that the client may not write to, is a [dlq.ErrRefused].
func (d *DLQ) Write(ctx context.Context, r *dlq.Record) error {
	topic := d.cfg.name(r.Origin.Source)
	m := &sarama.ProducerMessage{Topic: topic, Value: sarama.ByteEncoder(r.Body), Timestamp: r.Timestamp}
	if r.Body == nil {
		m.Value = nil // a tombstone stays a tombstone
	}
	if r.Key != nil {
		m.Key = sarama.ByteEncoder(r.Key)
	}
	for _, h := range d.headers(r) {
		m.Headers = append(m.Headers, sarama.RecordHeader{Key: []byte(h.Name), Value: headerBytes(h.Value)})
	}
	if err := d.out.Fits(ctx, m); err != nil {
		return err
	}
	partitions, err := d.client.Partitions(topic)
	if err != nil {
		return d.explain(topic, m, err)
	}
	m.Partition = partitionFor(r, int32(len(partitions)))
	_, err = d.out.Send(ctx, m)
	if errors.Is(err, cluster.ErrClosed) {
		return errDLQClosed
	}
	return d.explain(topic, m, err)
}

// keptPrefix begins the new name of an original header that [dlq.Encode] leaves out of a dead
// letter: x-death and the like, and headers of an earlier death.
const keptPrefix = "kept-"

// headers are the headers of r's dead letter. Kafka itself gives no header a meaning, so a header
// that Encode leaves out belongs to the program. It stays under another name, unless an earlier
// death has kept that name.
func (d *DLQ) headers(r *dlq.Record) []dlq.Header {
	all := dlq.Encode(r, d.cfg.Dialect)
	bare := *r
	bare.Headers = nil
	stay := all[:len(all)-len(dlq.Encode(&bare, d.cfg.Dialect))] // those of r.Headers, in their order
	if len(stay) == len(r.Headers) {
		return all
	}
	before := make(map[string]bool, len(stay)) // so a second death keeps no header again
	for _, h := range stay {
		before[h.Name] = true
	}
	for _, h := range r.Headers {
		if len(stay) > 0 && h.Name == stay[0].Name {
			stay = stay[1:]
			continue
		}
		if h.Name = keptPrefix + h.Name; !before[h.Name] {
			all = append(all, h)
		}
	}
	return all
}

// explain says what an error of the broker means.
func (d *DLQ) explain(topic string, m *sarama.ProducerMessage, err error) error {
	if refused := d.out.Refused(m, err); refused != nil {
		return refused
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, sarama.ErrUnknownTopicOrPartition), errors.Is(err, sarama.ErrInvalidTopic),
		errors.Is(err, sarama.ErrTopicAuthorizationFailed), errors.Is(err, sarama.ErrClusterAuthorizationFailed), errors.Is(err, sarama.ErrInvalidTimestamp):
		return fmt.Errorf("kafka: dead letter to %s: %w: %w", topic, dlq.ErrRefused, err)
	}
	return fmt.Errorf("kafka: dead letter to %s: %w", topic, err)
}

// partitionFor is the source's own partition if the topic has it. Otherwise messages of one key
// go to one partition, and messages without a key follow the partition of their source.
func partitionFor(r *dlq.Record, n int32) int32 {
	if n < 1 {
		return 0
	}
	if r.Origin.HasPartition && r.Origin.Partition < n {
		return r.Origin.Partition
	}
	if r.Key == nil {
		return r.Origin.Partition % n
	}
	h := fnv.New32a()
	_, _ = h.Write(r.Key) // it has no error
	return int32(h.Sum32() % uint32(n))
}

func headerBytes(v any) []byte {
	switch v := v.(type) {
	case nil:
		return nil
	case []byte:
		return v
	case string:
		return []byte(v)
	case time.Time:
		return []byte(v.UTC().Format(time.RFC3339Nano))
	}
	return fmt.Append(nil, v)
}

// ReadDeadLetter decodes a dead letter from a message of a DLQ, whatever its dialect. If no
// dialect is recognised, the record's origin is the message itself. The record shares the
// message's key and body. err joins an error for each header that cannot be read; the rest is
// decoded all the same.
func ReadDeadLetter(m *sarama.ConsumerMessage) (dlq.Record, error) {
	r, dialect, err := dlq.Decode(cluster.Headers(m.Headers))
	r.Key, r.Body = m.Key, m.Value
	if r.Timestamp.IsZero() {
		r.Timestamp = m.Timestamp
	}
	if dialect == "" {
		r.Origin = cluster.Origin(m, "")
	}
	return r, err
}
