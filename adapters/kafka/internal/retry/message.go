// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package retry

import (
	"encoding/binary"
	"errors"
	"hash/maphash"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/cluster"
)

// Headers of a parked message. They are taken off before it is handled again.
const (
	retryPrefix      = "stormguard-retry-"
	retryTopicHeader = retryPrefix + "topic"
	retryPartition   = retryPrefix + "partition"
	retryOffset      = retryPrefix + "offset"
	retryTimestamp   = retryPrefix + "timestamp" // milliseconds, as all times here
	retryAttempts    = retryPrefix + "attempts"
	retryLevel       = retryPrefix + "level" // last level for its own failures; 0 if it only follows
	retryMoves       = retryPrefix + "moves" // how often it was written
	retryNotBefore   = retryPrefix + "not-before"
	retryFirstFailed = retryPrefix + "first-failed"
	retryEpoch       = retryPrefix + "claim" // which epoch of the partition wrote it
	retryGroup       = retryPrefix + "group" // the group that parked it, as two may share a topic name
)

// A Message is parked or was parked, or it is a message of the claim on its way there (level 0).
// It has the data that its handler sees, and the data of its retry topic.
type Message struct {
	msg       *sarama.ConsumerMessage // with its original topic, partition, offset, time and headers
	origin    origin
	keyed     bool
	level     int   // level of the retry topic that has it; 0: the claim
	at        int64 // its offset in that topic; -1 at level 0
	own       int   // the last level it was parked at for its own failures; 0 for none
	moves     int   // how often it was written to a retry topic
	tries     int   // handler calls so far
	first     int64 // when it first failed, 0 if it never did
	notBefore int64
	claim     string
	group     string // the group that parked it; "" if the record does not say
	due       int64  // when it is handed over: notBefore, or later, after waiting messages of its key
	waitUntil int64  // if not 0: the handler was not called, and the message waits until this time
	size      int
}

// producerMessage is the record of p in a retry topic.
func (p *Message) producerMessage(topic string) *sarama.ProducerMessage {
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
	number(retryOffset, p.origin.offset) // below 0: written by a stranger, see strangeOffset
	number(retryTimestamp, p.origin.stamp)
	number(retryAttempts, int64(p.tries))
	number(retryLevel, int64(p.own))
	number(retryMoves, int64(p.moves))
	number(retryNotBefore, p.notBefore)
	number(retryFirstFailed, p.first)
	add(retryEpoch, p.claim)
	return m
}

// strangeOffset is the origin's offset of a stranger: a record that this package has not written.
// It is made from the record's own offset, is below all offsets of a claim, and differs at each
// level.
func strangeOffset(at int64, level int) int64 { return math.MinInt64 + at*maxLevels + int64(level-1) }

// offsetOf is the offset that a message had, computed from its origin's offset.
func offsetOf(offset int64) int64 {
	if offset < 0 {
		return int64(uint64(offset-math.MinInt64) / maxLevels)
	}
	return offset
}

// readParked makes a Message from a record of a retry topic. A record that this package has not
// written is its own origin, and is due at once.
func readParked(m *sarama.ConsumerMessage, level int) *Message {
	was := *m
	was.Headers = nil
	p := &Message{msg: &was, level: level, at: m.Offset, size: cluster.Size(m)}
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

// lane keeps the messages of a key together. Each message without a key has a lane of its own.
func (p *Message) lane() uint64 {
	if p.keyed {
		return p.origin.key
	}
	var own [16]byte
	binary.LittleEndian.PutUint64(own[:], uint64(p.origin.offset))
	binary.LittleEndian.PutUint64(own[8:], uint64(p.origin.stamp))
	return maphash.Bytes(seed, own[:])
}
