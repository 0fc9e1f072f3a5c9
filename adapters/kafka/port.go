// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
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

// pauser is implemented by sarama's claims. Its pause ends with the claim, while a pause of a
// ConsumerGroup outlives the session.
type pauser interface {
	Pause()
	Resume()
}

// claim is one epoch of one partition. It is the port of the function shape, and the passive
// shape shares a part of it. It is safe for concurrent use.
type claim struct {
	topic      string
	partition  int32
	group      string
	name       string // the source's name
	initial    int64  // below 0 if nothing was committed, or the log does not have the committed offset
	start      int64  // where a claim with initial below 0 begins, if known before its first message; else -1
	key        func(*sarama.ConsumerMessage) []byte
	seed       maphash.Seed
	native     sarama.ConsumerGroupClaim
	session    sarama.ConsumerGroupSession
	marks      *offsets.Tracker
	asked      *askedPauses
	end        atomic.Int64 // the log's end at the last look; -1 unknown
	spilledAt  atomic.Int64 // when the latest message was spilled, Unix nanoseconds; 0 never
	unspilled  atomic.Int64 // the offset after the highest that came out of the spill; 0 for none
	noted      atomic.Bool  // see noting
	commitSoon func()       // asks for a commit of the marks soon
	refused    atomic.Bool  // the last look found commits behind, and Flush has not reported it yet

	marking sync.Mutex // held while a mark or a reset goes to the session: one at a time
	marked  bool       // the session got a mark of settled messages or a reset; under marking
	begun   int64      // the beginning that the session was told; -1 for none; under marking
	due     int64      // mark of settled messages at which a commit is asked for; under marking
	seen    int64      // the mark at the watch's last look; -1 for none, or after a reset; under marking
}

var (
	_ guard.Port[*sarama.ConsumerMessage] = (*claim)(nil)
	_ guard.Lagger                        = (*claim)(nil)
	_ guard.Marker                        = (*claim)(nil)
)

// seed is the same in the whole process, so that a key is in the same lane in each epoch.
var seed = maphash.MakeSeed()

func newClaim(s *session, c sarama.ConsumerGroupClaim) *claim {
	p := &claim{
		topic: c.Topic(), partition: c.Partition(), group: s.set.group,
		name: sourceName(s.h.opts.name, c.Topic(), c.Partition()), initial: c.InitialOffset(),
		key: s.h.opts.key, seed: seed, native: c, session: s.native, commitSoon: s.commitSoon, marks: offsets.New(), asked: askedPausesOf(c),
	}
	p.end.Store(-1)
	p.start, p.begun, p.seen, p.due = -1, -1, -1, max(0, p.initial)+mostMarked
	if end := c.HighWaterMarkOffset(); p.initial == sarama.OffsetNewest || p.initial == sarama.OffsetOldest && end == 0 {
		p.start = end
	}
	return p
}

// noting returns handle for the messages of this claim. If the claim does not continue at its
// group's committed offset, the returned function first announces the claim's first message to the
// tracker. Size does not: the guard calls handle on the closed path without it. Until a mark, the
// claim's beginning depends on that message, since start may have been read one fetch later.
//
// Messages of an earlier claim may come out of the spill first. They are acked already, so nobody
// would settle them. If the topic was made anew since, the offsets of the claim may be lower than
// theirs: then the beginning is start.
func (c *claim) noting(handle func(context.Context, *sarama.ConsumerMessage) error) func(context.Context, *sarama.ConsumerMessage) error {
	if c.initial >= 0 {
		return handle
	}
	return func(ctx context.Context, m *sarama.ConsumerMessage) error {
		if !c.noted.Load() && m.Offset >= c.unspilled.Load() {
			c.marks.Deliver(m.Offset)
			c.noted.Store(true)
		}
		return handle(ctx, m)
	}
}

// Lane is the hash of the key. Messages without a key have no order among each other, as in Kafka
// itself: each has a lane of its own.
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

// Size also tells the tracker that the message is not acked at once; see [guard.Port].
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

// Return has nothing to do: the partition's next owner reads unmarked messages again.
func (c *claim) Return([]*sarama.ConsumerMessage, guard.Reason) error { return nil }

// Demand pauses fetching at 0. Messages that were fetched already still arrive. A pause that the
// program asked the group for stays: sarama has one flag for both, so Demand then leaves the flag
// alone. If the program's pauses are not found, nothing is paused, and a full window only stops
// reading.
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

// Flush calls mark. It returns an error if commits were behind at the last look, once for each
// look: the guard counts it.
func (c *claim) Flush() error {
	c.mark()
	if c.refused.CompareAndSwap(true, false) {
		return errNotCommitted
	}
	return nil
}

var errNotCommitted = errors.New("kafka: what is marked is not committed")

// mostMarked is after how many offsets mark asks for a commit.
const mostMarked = 512

// mark marks up to the low watermark. sarama commits the mark, each second by default. mark asks
// for a commit soon after mostMarked offsets, since a process that is killed handles again what is
// not committed, and after messages were spilled, since they would be spilled again.
func (c *claim) mark() {
	c.marking.Lock()
	offset, meta, settled := c.marks.Take()
	fresh := settled
	if !fresh && !c.marked {
		offset, fresh = c.beginningLocked()
	}
	if fresh {
		if c.initial < 0 && !c.marked {
			// A mark can only raise the committed offset. If the topic was made again, that
			// offset may be beyond the log's end. It would stay until the log is as long, and
			// then skip messages.
			c.session.ResetOffset(c.topic, c.partition, offset, meta)
		}
		c.marked = settled
		c.session.MarkOffset(c.topic, c.partition, offset, meta)
	}
	at := c.spilledAt.Load()
	soon := settled && offset >= c.due || fresh && at > 0 && time.Since(time.Unix(0, at)) < spillCommits
	if soon || fresh && !settled {
		c.due = offset + mostMarked
	}
	c.marking.Unlock()
	if soon {
		c.commitSoon()
	}
}

// beginningLocked is where a claim began that does not continue at its group's committed offset,
// if the session was not told yet. Until then the partition's next owner may begin behind
// messages that are held here: at the log's end once more, or at a committed offset that the log
// has reached again.
func (c *claim) beginningLocked() (offset int64, due bool) {
	offset = c.start
	switch first, _ := c.marks.Position(); {
	case c.initial >= 0:
		return 0, false
	case first >= 0 && offset < 0:
		offset = first
	case first >= 0:
		offset = min(offset, first) // start may have been read one fetch later
	case c.native != nil && len(c.native.Messages()) > 0:
		return 0, false // the offset of the first message is known soon
	}
	due = offset != c.begun
	c.begun = offset
	return offset, due
}

// rewind resets the session's offset, as its user asked. A mark under way cannot undo the reset.
func (c *claim) rewind(offset int64, metadata string) {
	c.marking.Lock()
	defer c.marking.Unlock()
	c.marks.Rewound()
	c.marked, c.seen, c.due = true, -1, min(c.due, offset+mostMarked)
	c.session.ResetOffset(c.topic, c.partition, offset, metadata)
}

// look returns the mark at the watch's last look, -1 if there is nothing that must be committed by
// now, and notes the present mark.
func (c *claim) look() (before int64) {
	c.marking.Lock()
	defer c.marking.Unlock()
	before = c.seen
	_, c.seen = c.marks.Position()
	return before
}

// Lag is the log's end at the last look, minus the settled position; -1 if unknown.
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

// Ahead is how many messages above the low watermark are settled.
func (c *claim) Ahead() int { return c.marks.Ahead() }
