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

// DLQ writes dead letters to Kafka, each confirmed by all in-sync replicas. It is
// a [dlq.Writer], safe for concurrent use. A dead letter keeps key, body,
// headers and, where the DLQ has as many partitions, its partition; the headers
// of the dialect say where it was and why it is dead. An original header that has a name
// of theirs, or one that [dlq.Encode] leaves out, is kept as "kept-" and its name. The
// letter's [dlq.Record.ID] recognises a twin, which a crash between write and mark
// leaves. The record's time is that of the message; a topic that this package creates
// keeps the time of death instead (LogAppendTime), so that retention counts from there,
// and the message's own is in a header.
type DLQ struct {
	cfg    DLQConfig
	client sarama.Client
	out    *cluster.Sender
	max    map[string]int // a record's largest size for a topic
}

var _ dlq.Writer = (*DLQ)(nil)

// NewDLQ connects and creates or checks the topics. config is for connecting:
// addresses, TLS, SASL, Version, retries and sizes are taken from a copy of it, and
// what makes a producer safe is set there: Producer.Idempotent,
// Producer.RequiredAcks = WaitForAll, Net.MaxOpenRequests = 1. Where messages of a source
// come compressed, set Producer.Compression too: a topic's max.message.bytes is of the
// compressed size. nil means sarama's defaults. A transactional id is refused. What is wrong with a topic is
// an [ErrUnsuitable] that names the command that mends it. Close it last.
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

// Close waits for writes under way, 1s at most, and disconnects. It says how many are left.
func (d *DLQ) Close() error { return d.out.Close() }

// errDLQClosed is a Write after [DLQ.Close], unless sarama's client says so first.
var errDLQClosed = errors.New("kafka: DLQ closed")

// Write writes a dead letter and waits until all in-sync replicas have it, or ctx
// ends; what was sent then may arrive all the same. Until the broker has answered that,
// another dead letter for the same partition is an error. A record over the topic's or
// the client's limit is a [*dlq.TooLargeError], where the configuration compresses only
// when the broker says so; a topic that does not exist, or
// is not ours to write to, is a [dlq.ErrRefused].
func (d *DLQ) Write(ctx context.Context, r *dlq.Record) error {
	topic := d.cfg.name(r.Origin.Source)
	m := &sarama.ProducerMessage{Topic: topic, Value: sarama.ByteEncoder(r.Body), Timestamp: r.Timestamp}
	if r.Body == nil {
		m.Value = nil // a tombstone stays one
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

// keptPrefix begins the name of an original header that [dlq.Encode] leaves out of a dead
// letter: x-death and the like, and those of an earlier death.
const keptPrefix = "kept-"

// headers are those of the dead letter of r. Kafka itself gives no header a meaning, so
// what Encode leaves out is the program's: it stays under another name, unless an earlier
// death has kept that.
func (d *DLQ) headers(r *dlq.Record) []dlq.Header {
	all := dlq.Encode(r, d.cfg.Dialect)
	bare := *r
	bare.Headers = nil
	stay := all[:len(all)-len(dlq.Encode(&bare, d.cfg.Dialect))] // of r.Headers, in their order
	if len(stay) == len(r.Headers) {
		return all
	}
	before := make(map[string]bool, len(stay)) // kept by an earlier death: they do not grow with each
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

// partitionFor is the source's own partition if the topic has it. Otherwise the
// messages of a key stay together, and of those without one each source's
// partition.
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

// ReadDeadLetter reads a dead letter, in whatever dialect it was written, from a
// message of a DLQ. Where no dialect is recognised, the origin is that of the
// message itself. The record shares the message's key and body. err joins a
// an error for each header that cannot be read; the rest is decoded
// all the same.
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
