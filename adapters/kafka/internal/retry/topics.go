// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package retry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/cluster"
	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/offsets"
)

// Topics are the retry topics of a group. It has two clients, one to write and one to read,
// and is safe for concurrent use.
type Topics struct {
	cfg    Config
	out    *cluster.Sender
	max    map[string]int // largest record of each retry topic, in bytes
	reads  sarama.Client
	reader sarama.Consumer
	Now    func() time.Time // wall time, by which parked messages are due
}

// New connects and creates or checks the topics, as the adapter's NewRetryTopics says.
func New(addrs []string, config *sarama.Config, cfg Config) (*Topics, error) {
	if config == nil {
		config = sarama.NewConfig()
	}
	w := cluster.ProducerConfig(config)
	if err := errors.Join(cluster.SafeProducer(w), cfg.Validate()); err != nil {
		return nil, err
	}
	client, err := sarama.NewClient(addrs, w)
	if err != nil {
		return nil, fmt.Errorf("kafka: retry topics: %w", err)
	}
	t := &Topics{cfg: cfg, max: make(map[string]int), Now: time.Now}
	if err = t.ensureTopics(client); err == nil {
		t.out, err = cluster.NewSender(client, t.max)
	}
	if err != nil {
		return nil, errors.Join(err, client.Close())
	}
	r := *config
	r.Consumer.Offsets.AutoCommit.Enable = false
	r.Consumer.Return.Errors = true
	r.Consumer.Interceptors = nil
	r.Consumer.IsolationLevel = sarama.ReadUncommitted
	r.Consumer.MaxWaitTime = min(r.Consumer.MaxWaitTime, maxFetchWait) // also how long the end of a claim waits
	r.Metadata.AllowAutoTopicCreation = false
	if t.reads, err = sarama.NewClient(addrs, &r); err == nil {
		if t.reader, err = sarama.NewConsumerFromClient(t.reads); err != nil {
			err = errors.Join(err, t.reads.Close())
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("kafka: retry topics: %w", err), t.out.Close())
	}
	if err := t.refuseLeft(); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return t, nil
}

// Close does what Close of the adapter's RetryTopics says.
func (t *Topics) Close() error {
	return t.out.Close(t.reader, t.reads)
}

func (t *Topics) maxParked() int { return cmp.Or(t.cfg.MaxParked, defaultMaxParked) }

// newTopic is the retry topic of a level of a source.
func (c Config) newTopic(source *cluster.Topic, level int) cluster.NewTopic {
	keeps := c.Delays[level-1] + cmp.Or(c.Retention, defaultRetention)
	settings := map[string]string{
		"cleanup.policy": "delete", "retention.ms": strconv.FormatInt(keeps.Milliseconds(), 10), "retention.bytes": "-1",
		"message.timestamp.type": "LogAppendTime",
	}
	if size := source.Number("max.message.bytes", 0); size > 0 {
		settings["max.message.bytes"] = strconv.FormatInt(size+cluster.HeaderRoom, 10)
	}
	return cluster.NewTopic{Name: c.Name(source.Name, level), Partitions: source.Partitions, Replicas: c.Replicas, Settings: settings}
}

// ensureTopics creates the retry topics, or checks existing ones.
func (t *Topics) ensureTopics(client sarama.Client) error {
	in, err := cluster.NewAdmin(client)
	if err != nil {
		return err
	}
	errs := []error{t.takesMetadata(client, in)}
	for _, source := range t.cfg.Sources {
		from, err := in.Source(source)
		if err == nil && from == nil {
			err = cluster.Unsuitable("topic %s does not exist: its retry topics need as many partitions as it has", source)
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

func (t *Topics) ensureTopic(client sarama.Client, in *cluster.Admin, from *cluster.Topic, level int) error {
	want := t.cfg.newTopic(from, level)
	to, err := in.Topic(want.Name)
	if err != nil {
		return err
	}
	if to == nil {
		if t.cfg.NoCreate {
			return cluster.Unsuitable("topic %s does not exist: %s", want.Name, in.CreateCommand(want))
		}
		if to, err = in.Create(client, want); err != nil {
			return err
		}
	}
	t.max[want.Name] = int(to.Number("max.message.bytes", 0))
	var errs []error
	for _, f := range topicFaults(in, from, to, t.cfg.Delays[level-1], retryMargin) {
		errs = append(errs, cluster.Unsuitable("topic %s: %s: %s", want.Name, f.what, f.fix))
	}
	return errors.Join(errs...)
}

// takesMetadata asks the group's coordinator whether it accepts as much metadata as is committed.
func (t *Topics) takesMetadata(client sarama.Client, in *cluster.Admin) error {
	coordinator, err := client.Coordinator(t.cfg.Group)
	if err != nil {
		return fmt.Errorf("kafka: coordinator of group %s: %w", t.cfg.Group, err)
	}
	f, err := metadataFault(in, coordinator.ID())
	if errors.Is(err, cluster.ErrRefused) {
		return nil
	}
	if err == nil && f != nil {
		err = cluster.Unsuitable("broker %d: %s: %s", coordinator.ID(), f.what, f.fix)
	}
	return err
}

// metadataFault is the fault of a broker that accepts too little metadata with an offset; nil if
// it accepts enough, or its setting is unknown.
func metadataFault(in *cluster.Admin, broker int32) (*fault, error) {
	s, err := in.Settings(sarama.BrokerResource, fmt.Sprint(broker))
	if err != nil {
		return nil, fmt.Errorf("kafka: settings of broker %d: %w", broker, err)
	}
	const setting = "offset.metadata.max.bytes"
	n, err := strconv.ParseInt(s[setting], 10, 64)
	if err != nil || n >= offsets.MaxMetadata {
		return nil, nil //nolint:nilerr,nilnil // unknown, or enough
	}
	return &fault{
		fmt.Sprintf("%s is %d: what is done of a retry topic takes up to %d, could not be committed, and would be handled again", setting, n, offsets.MaxMetadata),
		fmt.Sprintf("%s=%d or more in server.properties of all brokers (default 4096), and a restart", setting, offsets.MaxMetadata),
	}, nil
}

// fault says what is wrong with a topic or broker, and what mends it.
type fault struct{ what, fix string }

// topicFaults are settings that would lose parked messages, or prevent parking.
func topicFaults(in *cluster.Admin, from, to *cluster.Topic, delay, margin time.Duration) (faults []fault) {
	add := func(fix, what string, args ...any) { faults = append(faults, fault{fmt.Sprintf(what, args...), fix}) }
	alter := func(setting string) string { return in.Alter(to.Name, setting) }
	if to.Partitions != from.Partitions {
		fix := "a retry topic of another name"
		if to.Partitions < from.Partitions {
			fix = in.AddPartitions(to.Name, from.Partitions)
		}
		add(fix, "it has %d partitions, %s has %d: a message is parked in its own partition", to.Partitions, from.Name, from.Partitions)
	}
	if to.Compacts() {
		add(alter("cleanup.policy=delete"), "cleanup.policy is %s: of each key only the last parked message stays", to.Settings["cleanup.policy"])
	}
	if keeps := to.Retention(); keeps > 0 && keeps < delay+margin {
		add(alter(fmt.Sprintf("retention.ms=%d", (delay+defaultRetention).Milliseconds())),
			"it keeps messages for %s: less than its delay of %s and %s more", keeps, delay, margin)
	}
	if n := to.Number("retention.bytes", -1); n > 0 {
		add(alter("retention.bytes=-1"), "it keeps %d bytes of a partition: what is parked is deleted beyond them", n)
	}
	if have, want := to.Number("max.message.bytes", 0), from.Number("max.message.bytes", 0)+cluster.HeaderRoom; have > 0 && have < want {
		add(alter(fmt.Sprintf("max.message.bytes=%d", want)), "max.message.bytes is %d, of %s %d: a large message can never be parked, and waits", have, from.Name, want-cluster.HeaderRoom)
	}
	return faults
}

// write writes p to a retry topic and waits until all in-sync replicas have it. The offset is -1
// if the broker does not tell it. A message that is too large is a [dlq.ErrTooLarge].
func (t *Topics) write(ctx context.Context, p *Message, topic string) (int64, error) {
	m := p.producerMessage(topic)
	m.Headers = append(m.Headers, sarama.RecordHeader{Key: []byte(retryGroup), Value: []byte(t.cfg.Group)})
	err := t.out.Fits(ctx, m)
	at := int64(-1)
	if err == nil {
		at, err = t.out.Send(ctx, m)
	}
	if err != nil {
		if refused := t.out.Refused(m, err); refused != nil && t.out.Compresses { // else the batch may be too large
			err = refused
		}
		return -1, fmt.Errorf("kafka: retry topic %s: %w", topic, err)
	}
	return at, nil
}
