// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"encoding/binary"
	"errors"
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/cluster"
	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/offsets"
	"github.com/stormguard-mq/stormguard/guard"
)

// pauser is what a claim of sarama's can do besides: its pause dies with it,
// while that of a ConsumerGroup outlives the session.
type pauser interface {
	Pause()
	Resume()
}

// claim is one epoch of one partition: the port of the function shape, and the
// part of it that the passive shape shares. It is safe for concurrent use.
type claim struct {
	topic     string
	partition int32
	group     string
	name      string // the source's
	initial   int64  // below 0 if nothing was committed, or what the log does not have
	start     int64  // where it begins then, if that is known before its first message; -1 otherwise
	key       func(*sarama.ConsumerMessage) []byte
	seed      maphash.Seed
	native    sarama.ConsumerGroupClaim
	session   sarama.ConsumerGroupSession
	marks     *offsets.Tracker
	asked     *askedPauses
	end       atomic.Int64 // of the log, when last looked; -1 unknown
	spilledAt atomic.Int64 // when a message was spilled last, Unix nanoseconds
	soon      func()       // has what is marked committed soon
	refused   atomic.Bool  // the last look has found commits behind, and Flush has not said so yet

	marking sync.Mutex // held while the session is told of a mark or a reset: one after the other
	marked  bool       // it was told of what is settled, or its user has reset it; under marking
	begun   int64      // it was told that this is the beginning; -1 for nothing; under marking
}

var (
	_ guard.Port[*sarama.ConsumerMessage] = (*claim)(nil)
	_ guard.Lagger                        = (*claim)(nil)
	_ guard.Marker                        = (*claim)(nil)
)

// seed is one for the process, so that a key is in the same lane in each epoch.
var seed = maphash.MakeSeed()

func newClaim(s *session, c sarama.ConsumerGroupClaim) *claim {
	p := &claim{
		topic: c.Topic(), partition: c.Partition(), group: s.set.group,
		name: sourceName(s.h.opts.name, c.Topic(), c.Partition()), initial: c.InitialOffset(),
		key: s.h.opts.key, seed: seed, native: c, session: s.native, soon: s.commitSoon, marks: offsets.New(), asked: askedPausesOf(c),
	}
	p.end.Store(-1)
	p.start, p.begun = -1, -1
	if end := c.HighWaterMarkOffset(); p.initial == sarama.OffsetNewest || p.initial == sarama.OffsetOldest && end == 0 {
		p.start = end
	}
	return p
}

// Lane is the hash of the key. Messages without one have no order among each
// other, as in Kafka itself: each is in a lane of its own.
func (c *claim) Lane(m *sarama.ConsumerMessage) uint64 {
	key := m.Key
	if c.key != nil {
		key = c.key(m)
	}
	if key == nil {
		var own [12]byte
		binary.LittleEndian.PutUint64(own[:], uint64(m.Offset))
		return c.hash(own[:])
	}
	return c.hash(key)
}

func (c *claim) hash(b []byte) uint64 { return maphash.Bytes(c.seed, b) }

// Size also says that the message is not acked at once; see [guard.Port].
func (c *claim) Size(m *sarama.ConsumerMessage) int {
	c.marks.Deliver(m.Offset)
	return cluster.Size(m)
}

func (c *claim) describe(m *sarama.ConsumerMessage) guard.Meta {
	return guard.Meta{
		Key: m.Key, Body: m.Value, Headers: cluster.Headers(m.Headers), Timestamp: m.Timestamp,
		Origin: cluster.Origin(m, c.group), Lag: -1,
	}
}

func (c *claim) Meta(m *sarama.ConsumerMessage) guard.Meta {
	meta := c.describe(m)
	if end := max(c.end.Load(), c.native.HighWaterMarkOffset()); end > m.Offset {
		meta.Lag = end - m.Offset - 1
	}
	return meta
}

// Ack moves the low watermark; Flush marks it.
func (c *claim) Ack(m *sarama.ConsumerMessage) error {
	c.marks.Settle(m.Offset, "")
	return nil
}

// Extend has nothing to do: Kafka knows no deadline of a message.
func (c *claim) Extend([]*sarama.ConsumerMessage) {}

// Return has nothing to do: what is not marked is read again by whoever gets the
// partition next.
func (c *claim) Return([]*sarama.ConsumerMessage, guard.Reason) error { return nil }

// Demand pauses fetching at 0. What was fetched already still arrives. A pause that the
// program asked the group for stays: sarama has one flag for both, so the flag is left
// alone then. Where the program's pauses are not found nothing is paused, and a full
// window merely stops reading.
func (c *claim) Demand(n int) {
	p, ok := c.native.(pauser)
	if !ok || c.asked == nil {
		return
	}
	c.asked.lock.Lock()
	defer c.asked.lock.Unlock()
	switch {
	case c.asked.hasLocked(c.topic, c.partition):
	case n == 0:
		p.Pause()
	default:
		p.Resume()
	}
}

// Flush is mark. Its error says that commits were behind at the last look, once for
// each look: the guard counts it.
func (c *claim) Flush() error {
	c.mark()
	if c.refused.CompareAndSwap(true, false) {
		return errNotCommitted
	}
	return nil
}

var errNotCommitted = errors.New("kafka: what is marked is not committed")

// mark marks up to the low watermark. sarama commits it, each second by default; after
// messages were spilled that is asked for at once, for what is read again after a crash
// would be spilled again.
func (c *claim) mark() {
	c.marking.Lock()
	offset, meta, settled := c.marks.Take()
	due := settled
	if !due && !c.marked {
		offset, due = c.beginningLocked()
	}
	if due {
		if c.initial < 0 && !c.marked {
			// A mark only raises what is committed. Beyond the log's end, as after the topic was
			// made anew, that would stay until the log is as long, and then skip messages.
			c.session.ResetOffset(c.topic, c.partition, offset, meta)
		}
		c.marked = settled
		c.session.MarkOffset(c.topic, c.partition, offset, meta)
	}
	c.marking.Unlock()
	if at := c.spilledAt.Load(); due && at > 0 && time.Since(time.Unix(0, at)) < spillCommits {
		c.soon()
	}
}

// beginningLocked is where a claim began that does not go on where its group was, if the session
// was not told. Until it is, whoever gets the partition next may begin behind what is held here:
// at the log's end once more, or at a committed offset that the log has grown to again.
func (c *claim) beginningLocked() (offset int64, due bool) {
	offset = c.start
	switch first, _ := c.marks.Position(); {
	case c.initial >= 0:
		return 0, false
	case first >= 0 && offset < 0:
		offset = first
	case first >= 0:
		offset = min(offset, first) // start may be a fetch later
	case c.native != nil && len(c.native.Messages()) > 0:
		return 0, false // the first of them is soon known
	}
	due = offset != c.begun
	c.begun = offset
	return offset, due
}

// rewind resets the offset of the session, as its user asked; no mark under way undoes
// that.
func (c *claim) rewind(offset int64, metadata string) {
	c.marking.Lock()
	defer c.marking.Unlock()
	c.marks.Rewound()
	c.marked = true
	c.session.ResetOffset(c.topic, c.partition, offset, metadata)
}

// Lag is the log's end, when last looked, less what is settled.
func (c *claim) Lag() int64 {
	end := c.end.Load()
	at, _ := c.marks.Position()
	if at < 0 {
		at = c.initial
	}
	if end < 0 || at < 0 {
		return -1
	}
	return max(0, end-at)
}

// Ahead is how many messages are settled behind the low watermark.
func (c *claim) Ahead() int { return c.marks.Ahead() }
