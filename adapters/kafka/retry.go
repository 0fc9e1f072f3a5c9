// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package kafka

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/IBM/sarama"
)

// maxLevels is how many delays there may be.
const maxLevels = 8

// RetryConfig describes the retry topics of one consumer group. Sources, Group and
// Delays are needed.
type RetryConfig struct {
	// Sources are the topics whose messages may be parked: all that the group
	// consumes.
	Sources []string

	// Group is the consumer group. Retry topics belong to one group: what another has
	// parked in topics of the same names is passed over, unhandled.
	Group string

	// Delays are how long a message is parked at each level, ascending, from 1 to 8
	// of them, each from 1ms to 720h: such as 1m, 10m, 1h.
	Delays []time.Duration

	// Topic names the retry topics; {topic} stands for the source's, {group} for the
	// consumer group and {level} for 1, 2, …, which has to be in it. Unset means
	// "{topic}.{group}.retry.{level}".
	Topic string

	// MaxParked is how many messages of a partition may be parked at once, all
	// levels together, from 1 to 10,000,000. Each costs its owner some 200 bytes of
	// memory. Beyond it nothing is parked: what should be waits, and what stands
	// behind it. Unset means 100,000.
	MaxParked int

	// NoCreate refuses a topic that does not exist, with the command that creates
	// it, instead of creating it.
	NoCreate bool

	// Replicas of a topic that is created, from 1 to 32767; unset means the
	// broker's default.replication.factor.
	Replicas int16

	// Retention of a topic that is created, beyond its delay: how long an outage,
	// or a stop of the group, may last before parked messages are lost. At least
	// 1h; unset means 168h.
	Retention time.Duration
}

const (
	defaultRetryTopic = "{topic}.{group}.retry.{level}"
	defaultMaxParked  = 100_000
	defaultRetention  = 7 * 24 * time.Hour
	// retryMargin is how much longer than its delay a retry topic must keep what it
	// has.
	retryMargin  = time.Hour
	maxDelay     = 720 * time.Hour
	maxFetchWait = 250 * time.Millisecond
)

// Validate reports everything wrong at once.
func (c RetryConfig) Validate() error {
	var errs []error
	add := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("kafka: RetryConfig."+format, args...))
	}
	topic := cmp.Or(c.Topic, defaultRetryTopic)
	if bare := strings.NewReplacer("{topic}", "t", "{group}", "g", "{level}", "1").Replace(topic); !validTopic(bare) {
		add("Topic: %q is not a topic's name of letters, digits, '.', '_' and '-' with {topic}, {group} and {level}", c.Topic)
	} else if len(c.Delays) > 1 && !strings.Contains(topic, "{level}") {
		add("Topic: %q has no {level}: each needs a topic of its own", c.Topic)
	}
	if len(c.Sources) > 1 && !strings.Contains(topic, "{topic}") {
		add("Topic: %q has no {topic}: each source needs topics of its own", c.Topic)
	}
	if c.Group == "" {
		add("Group: must not be empty")
	}
	if len(c.Sources) == 0 {
		add("Sources: at least one is needed")
	}
	if len(c.Delays) == 0 || len(c.Delays) > maxLevels {
		add("Delays: %d of them: from 1 to %d are needed", len(c.Delays), maxLevels)
	}
	for i, d := range c.Delays {
		if d < time.Millisecond || d > maxDelay {
			add("Delays[%d]: %s is not within 1ms and %s", i, d, maxDelay)
		} else if i > 0 && d <= c.Delays[i-1] {
			add("Delays[%d]: %s does not ascend after %s", i, d, c.Delays[i-1])
		}
	}
	names := map[string]string{}
	for _, s := range c.Sources {
		if !validTopic(s) {
			add("Sources: %q is not a topic's name", s)
			continue
		}
		if _, twice := names[s]; twice {
			add("Sources: %q is named twice, or a retry topic of another", s)
		}
		names[s] = s
		for level := range c.Delays {
			name := c.name(s, level+1)
			if of, taken := names[name]; taken {
				add("Topic: %q, level %d of %q, is taken by %q", name, level+1, s, of)
			} else if !validTopic(name) {
				add("Topic: %q is not a topic's name", name)
			}
			names[name] = s
		}
	}
	if c.MaxParked < 0 || c.MaxParked > 10_000_000 {
		add("MaxParked: %d is not within 1 and 10000000", c.MaxParked)
	}
	if c.Replicas < 0 {
		add("Replicas: %d is not within 1 and 32767", c.Replicas)
	}
	if c.Retention != 0 && c.Retention < retryMargin {
		add("Retention: %s is not at least %s", c.Retention, retryMargin)
	}
	return errors.Join(errs...)
}

// name is the retry topic of a level, from 1.
func (c RetryConfig) name(source string, level int) string {
	return strings.NewReplacer("{topic}", source, "{group}", inTopic(c.Group), "{level}", strconv.Itoa(level)).
		Replace(cmp.Or(c.Topic, defaultRetryTopic))
}

// RetryTopics parks messages whose attempts are used up in retry topics, for long
// delays that neither block their partition nor cost memory for their bodies: see
// [WithRetryTopics]. It is safe for concurrent use, by several handlers of one
// group. One RetryTopics has two clients of its own, one to write and one to read.
type RetryTopics struct {
	cfg    RetryConfig
	out    *sender
	max    map[string]int // the largest record of a retry topic
	reads  sarama.Client
	reader sarama.Consumer
	now    func() time.Time // wall time: what is parked is due by it
}

// NewRetryTopics connects and creates or checks the topics: each retry topic has as
// many partitions as its source, keeps what it has for its delay and 1h at least,
// is not compacted, and takes the source's largest message with 64 KiB of headers.
// What is wrong with one is an [ErrUnsuitable] that names the command that mends
// it; so is a broker that takes too little metadata of an offset, and what the group
// has parked in topics that cfg does not name any more (fewer Delays, another Topic):
// nobody would read it. config is for connecting, as for [NewDLQ]; the offsets of the retry topics
// are committed every Consumer.Offsets.AutoCommit.Interval. nil means sarama's
// defaults. Close it after the consumer group.
func NewRetryTopics(addrs []string, config *sarama.Config, cfg RetryConfig) (*RetryTopics, error) {
	if config == nil {
		config = sarama.NewConfig()
	}
	w := producerConfig(config)
	if err := errors.Join(safeProducer(w), cfg.Validate()); err != nil {
		return nil, err
	}
	client, err := sarama.NewClient(addrs, w)
	if err != nil {
		return nil, fmt.Errorf("kafka: retry topics: %w", err)
	}
	t := &RetryTopics{cfg: cfg, max: make(map[string]int), now: time.Now}
	if err = t.ensureTopics(client); err == nil {
		t.out, err = newSender(client, t.max)
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
		return nil, errors.Join(fmt.Errorf("kafka: retry topics: %w", err), t.out.close())
	}
	if err := t.refuseLeft(); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return t, nil
}

// Close waits for writes under way, 1s at most, and disconnects. It says how many are left.
// A consumer group that is still running can park nothing then: what should be waits.
func (t *RetryTopics) Close() error {
	if !t.out.shut() {
		return nil
	}
	return t.out.closeWithin(func() error { return errors.Join(t.reader.Close(), t.reads.Close(), t.out.finish()) })
}

func (t *RetryTopics) maxParked() int { return cmp.Or(t.cfg.MaxParked, defaultMaxParked) }

// Headers of a parked message. They are taken off before it is handled again.
const (
	retryPrefix      = "stormguard-retry-"
	retryTopicHeader = retryPrefix + "topic"
	retryPartition   = retryPrefix + "partition"
	retryOffset      = retryPrefix + "offset"
	retryTimestamp   = retryPrefix + "timestamp" // milliseconds, as all times here
	retryAttempts    = retryPrefix + "attempts"
	retryLevel       = retryPrefix + "level" // of its own delay; 0 if it only follows
	retryMoves       = retryPrefix + "moves" // how often it was written
	retryNotBefore   = retryPrefix + "not-before"
	retryFirstFailed = retryPrefix + "first-failed"
	retryEpoch       = retryPrefix + "claim" // which epoch of the partition wrote it
	retryGroup       = retryPrefix + "group" // whose: two may have given their topics one name
)

// A parkedMessage is one that is or was parked, as its handler sees it and as its
// retry topic has it; or one of the claim on its way there (level 0).
type parkedMessage struct {
	msg       *sarama.ConsumerMessage // with the topic, partition, offset, time and headers it had
	origin    origin
	keyed     bool
	level     int   // of the retry topic that has it
	at        int64 // its offset there; -1 at level 0
	own       int   // the last level it was parked at for its own failures; 0 none
	moves     int   // how often it was written
	tries     int   // handler calls so far
	first     int64 // when it first failed, 0 if it never did
	notBefore int64
	claim     string
	group     string // that parked it; "" if the record does not say
	due       int64  // notBefore, or later: that of its key's last one before it
	back      int64  // not 0: the handler was not called, and it waits again until then
	size      int
}

// producerMessage is the record of p in a retry topic.
func (p *parkedMessage) producerMessage(topic string) *sarama.ProducerMessage {
	m := &sarama.ProducerMessage{Topic: topic, Partition: p.msg.Partition}
	if p.msg.Key != nil {
		m.Key = sarama.ByteEncoder(p.msg.Key)
	}
	if p.msg.Value != nil {
		m.Value = sarama.ByteEncoder(p.msg.Value)
	}
	add := func(name, value string) {
		m.Headers = append(m.Headers, sarama.RecordHeader{Key: []byte(name), Value: []byte(value)})
	}
	for _, h := range p.msg.Headers {
		if h != nil {
			m.Headers = append(m.Headers, *h)
		}
	}
	number := func(name string, n int64) { add(name, strconv.FormatInt(n, 10)) }
	add(retryTopicHeader, p.msg.Topic)
	number(retryPartition, int64(p.msg.Partition))
	number(retryOffset, p.origin.offset) // below 0: of a stranger, see strangeOffset
	number(retryTimestamp, p.origin.stamp)
	number(retryAttempts, int64(p.tries))
	number(retryLevel, int64(p.own))
	number(retryMoves, int64(p.moves))
	number(retryNotBefore, p.notBefore)
	number(retryFirstFailed, p.first)
	add(retryEpoch, p.claim)
	return m
}

// strangeOffset is the origin's offset of a record that nobody of this package wrote:
// its own, below all that a claim has, and another at each level.
func strangeOffset(at int64, level int) int64 { return math.MinInt64 + at*maxLevels + int64(level-1) }

// offsetOf is the offset that a message had, of its origin's.
func offsetOf(offset int64) int64 {
	if offset < 0 {
		return int64(uint64(offset-math.MinInt64) / maxLevels)
	}
	return offset
}

// readParked is what a record of a retry topic is. One that nobody of this package
// wrote has no origin but itself, and is due at once.
func readParked(m *sarama.ConsumerMessage, level int) *parkedMessage {
	was := *m
	was.Headers = nil
	p := &parkedMessage{msg: &was, level: level, at: m.Offset, size: size(m)}
	values := map[string]string{}
	for _, h := range m.Headers {
		switch {
		case h == nil:
		case strings.HasPrefix(string(h.Key), retryPrefix):
			values[string(h.Key)] = string(h.Value)
		default:
			was.Headers = append(was.Headers, h)
		}
	}
	var bad error
	number := func(name string) int64 {
		n, err := strconv.ParseInt(values[name], 10, 64)
		bad = errors.Join(bad, err)
		return n
	}
	topic, partition, offset, stamp := values[retryTopicHeader], number(retryPartition), number(retryOffset), number(retryTimestamp)
	own, moves := number(retryLevel), number(retryMoves)
	tries, first, notBefore := number(retryAttempts), number(retryFirstFailed), number(retryNotBefore)
	if bad != nil || topic == "" || int32(partition) != m.Partition || moves < 1 {
		p.origin = origin{offset: strangeOffset(m.Offset, level), stamp: stampOf(m.Timestamp)}
		return p
	}
	was.Topic, was.Offset, was.Timestamp = topic, offsetOf(offset), stampTime(stamp)
	was.BlockTimestamp = time.Time{}
	p.origin = origin{offset: offset, stamp: stamp}
	p.own, p.moves = int(min(max(0, own), maxLevels)), int(moves)
	p.tries, p.first, p.notBefore, p.claim, p.group = int(tries), first, notBefore, values[retryEpoch], values[retryGroup]
	return p
}

// stampOf is a message's time in milliseconds, 0 for none.
func stampOf(at time.Time) int64 {
	if at.IsZero() {
		return 0
	}
	return at.UnixMilli()
}

func stampTime(stamp int64) time.Time {
	if stamp == 0 {
		return time.Time{}
	}
	return time.UnixMilli(stamp)
}

// identify gives a message its key.
func (p *parkedMessage) identify(c *claim) {
	key := p.msg.Key
	if c.key != nil {
		key = c.key(p.msg)
	}
	if p.keyed = key != nil; p.keyed {
		p.origin.key = c.hash(key)
	}
}

// lane keeps the messages of a key together, and those without one apart.
func (p *parkedMessage) lane(c *claim) uint64 {
	if p.keyed {
		return p.origin.key
	}
	var own [16]byte
	binary.LittleEndian.PutUint64(own[:], uint64(p.origin.offset))
	binary.LittleEndian.PutUint64(own[8:], uint64(p.origin.stamp))
	return c.hash(own[:])
}

// write writes p to a retry topic and waits until all in-sync replicas have it. The
// offset is -1 where the broker does not say it. One that is too large is a
// [dlq.ErrTooLarge].
func (t *RetryTopics) write(ctx context.Context, p *parkedMessage, topic string) (int64, error) {
	m := p.producerMessage(topic)
	m.Headers = append(m.Headers, sarama.RecordHeader{Key: []byte(retryGroup), Value: []byte(t.cfg.Group)})
	err := t.out.fits(m)
	at := int64(-1)
	if err == nil {
		at, err = t.out.send(ctx, m)
	}
	if err != nil {
		if refused := t.out.refused(m, err); refused != nil && t.out.squeezes { // else it may be the batch that is
			err = refused
		}
		return -1, fmt.Errorf("kafka: retry topic %s: %w", topic, err)
	}
	return at, nil
}
