// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package kafka

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/IBM/sarama"
)

const (
	// readAhead and readAheadBytes are how much of a level may wait in memory.
	readAhead      = 1024
	readAheadBytes = 8 << 20
)

// boot learns what is parked; false if ctx ended before. What is committed is asked
// first and the end of the topics after it: what an earlier owner has settled is
// then further on, or done.
func (rc *retryClaim) boot(ctx context.Context) bool {
	for ctx.Err() == nil {
		var err error
		looked := make(chan struct{})
		go func() { // a request that a silent broker does not answer outlives ctx
			defer close(looked)
			err = rc.look(ctx)
		}()
		select {
		case <-looked:
		case <-ctx.Done():
			return false
		}
		rc.said.say("what is parked cannot be read: the claim waits", rc.c.name, err)
		if err == nil {
			return true
		}
		pause(ctx, askAgain)
	}
	return false
}

func (rc *retryClaim) look(ctx context.Context) error {
	names := make([]string, len(rc.levels))
	for i, l := range rc.levels {
		names[i] = l.name
	}
	done, err := rc.t.committed(rc.c.partition, names)
	if err != nil {
		return err
	}
	rc.table = newParkedTable(rc.t.maxParked())
	rc.replay = -1
	for i, l := range rc.levels {
		oldest, err := rc.t.reads.GetOffset(l.name, rc.c.partition, sarama.OffsetOldest)
		if err != nil {
			return err
		}
		if l.end, err = rc.t.reads.GetOffset(l.name, rc.c.partition, sarama.OffsetNewest); err != nil {
			return err
		}
		l.began, l.settled = done[i], decodeAhead(done[i].offset, done[i].meta)
		switch at := l.began.offset; {
		case at > l.end: // the topic was made anew
			l.began, l.settled = position{offset: oldest}, nil
		case at < oldest:
			l.began = position{offset: oldest}
			if at >= 0 { // what is committed is not done: retention was faster
				rc.ss.h.opts.log.Error("parked messages are lost: the retry topic keeps them too short", "topic", l.name, "partition", rc.c.partition, "from", at, "to", oldest)
			}
		}
		maps.DeleteFunc(l.settled, func(n int64, _ bool) bool { return n < l.began.offset })
		l.start = l.began.offset
		if err := rc.load(ctx, l); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// load reads a level up to its end.
func (rc *retryClaim) load(ctx context.Context, l *retryTopic) error {
	if l.start >= l.end {
		return nil
	}
	part, err := rc.open(ctx, l, l.start)
	if err != nil {
		return err
	}
	defer closePartition(part)
	silent := time.NewTicker(askAgain)
	defer silent.Stop()
	for next := l.start; next < l.end; {
		select {
		case <-silent.C: // what follows may be none that comes this way
			at, m, err := firstMessage(rc.t.reads, l.name, rc.c.partition, next, l.end, nil)
			if err != nil {
				return err
			}
			if m == nil {
				next = at
			}
		case m, ok := <-part.Messages():
			silent.Reset(askAgain)
			if !ok {
				return fmt.Errorf("kafka: retry topic %s: its reading ended", l.name)
			}
			next = m.Offset + 1
			if m.Offset >= l.end || l.settled[m.Offset] {
				continue
			}
			p := rc.parse(m, l.level)
			if rc.foreign(p) {
				continue // take settles it
			}
			if level, at := rc.table.load(p); level > 0 {
				old := rc.levels[level-1]
				if old.settled == nil {
					old.settled = make(map[int64]bool)
				}
				old.settled[at] = true
			}
			if p.origin.offset >= rc.c.initial {
				rc.replay = max(rc.replay, p.origin.offset)
			}
		case err := <-part.Errors():
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// firstMessage is the first record of a partition from an offset on and before end
// that is a message and not among done, and its offset; nil and end if there is none,
// because all that is there is done, or the control records of a transaction, which a
// PartitionConsumer passes without a word. It reads what may not be committed.
func firstMessage(client sarama.Client, topic string, partition int32, from, end int64, done map[int64]bool) (int64, *sarama.Record, error) {
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

// fetch asks the leader of a partition for what it has from an offset on; at least
// one whole batch, if there is one.
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

func (rc *retryClaim) parse(m *sarama.ConsumerMessage, level int) *parkedMessage {
	p := readParked(m, level)
	rc.identify(p)
	return p
}

// open begins to read a level; another claim of this process may be on its way out
// of it, which sarama tells nobody: it is asked again until that is gone, or ctx ends.
func (rc *retryClaim) open(ctx context.Context, l *retryTopic, from int64) (sarama.PartitionConsumer, error) {
	for {
		part, err := rc.t.reader.ConsumePartition(l.name, rc.c.partition, from)
		if !errors.As(err, new(sarama.ConfigurationError)) {
			return part, err
		}
		if pause(ctx, nameWait); ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
}

func closePartition(part sarama.PartitionConsumer) {
	part.AsyncClose()
	var errs sync.WaitGroup
	errs.Go(func() {
		for range part.Errors() {
		}
	})
	for range part.Messages() {
	}
	errs.Wait()
}

// read reads a level until ctx ends.
func (rc *retryClaim) read(ctx context.Context, l *retryTopic) {
	next := l.start
	for ctx.Err() == nil {
		part, err := rc.open(ctx, l, next)
		if err == nil {
			next, err = rc.readFrom(ctx, l, part, next)
			closePartition(part)
		}
		if ctx.Err() != nil {
			return
		}
		rc.said.say("a retry topic cannot be read: what is parked waits", l.name, err)
		if errors.Is(err, sarama.ErrOffsetOutOfRange) {
			next = rc.skip(l, next)
		}
		pause(ctx, askAgain)
	}
}

// skip is where the reading goes on that the broker has ended.
func (rc *retryClaim) skip(l *retryTopic, next int64) int64 {
	oldest, err := rc.t.reads.GetOffset(l.name, rc.c.partition, sarama.OffsetOldest)
	if err != nil {
		return next
	}
	if newest, err := rc.t.reads.GetOffset(l.name, rc.c.partition, sarama.OffsetNewest); err == nil && newest < next {
		rc.ss.h.opts.log.Error("a retry topic is shorter than it was: its claim begins anew", "topic", l.name, "partition", rc.c.partition, "end", newest, "was", next)
		token(rc.broken)
		return next
	}
	rc.lost(l, next, oldest)
	return max(next, oldest)
}

func (rc *retryClaim) readFrom(ctx context.Context, l *retryTopic, part sarama.PartitionConsumer, next int64) (int64, error) {
	paused := false
	for {
		messages := part.Messages()
		if full := !rc.hasRoom(l, next); full {
			messages = nil
			if !paused {
				part.Pause()
			}
			paused = true
		} else if paused {
			part.Resume()
			paused = false
		}
		select {
		case m, ok := <-messages:
			if !ok {
				return next, sarama.ErrOffsetOutOfRange // the one reason for which it closes by itself
			}
			rc.said.say("a retry topic cannot be read: what is parked waits", l.name, nil)
			if m.Offset >= next {
				rc.lost(l, next, m.Offset)
				next = m.Offset + 1
				rc.take(l, m)
			}
		case err, ok := <-part.Errors():
			if !ok {
				return next, sarama.ErrOffsetOutOfRange
			}
			rc.said.say("a retry topic cannot be read: what is parked waits", l.name, err)
		case <-l.room:
		case <-ctx.Done():
			return next, ctx.Err()
		}
	}
}

// hasRoom tells whether one more message of a level may come.
func (rc *retryClaim) hasRoom(l *retryTopic, next int64) bool {
	at, _ := l.marks.settled()
	rc.mu.Lock()
	defer rc.mu.Unlock()
	return l.count < readAhead && l.bytes < readAheadBytes && (at < 0 || next-at < maxAhead)
}

// lost says that a retry topic no longer has what was parked there.
func (rc *retryClaim) lost(l *retryTopic, from, to int64) {
	if from >= to {
		return
	}
	if n := rc.table.lost(l.level, from, to); n > 0 {
		rc.ss.h.opts.log.Error("parked messages are lost: the retry topic keeps them too short", "topic", l.name, "partition", rc.c.partition, "messages", n)
	}
}

// foreign tells whether another group has parked a message, which handles it itself.
func (rc *retryClaim) foreign(p *parkedMessage) bool {
	if p.group == "" || p.group == rc.t.cfg.Group {
		return false
	}
	if !rc.foreigners.Swap(true) {
		rc.ss.h.opts.log.Error("a retry topic has messages of another group, which are passed over: give each group topics of its own", "source", rc.c.name, "group", p.group)
	}
	return true
}

// take takes in what was read.
func (rc *retryClaim) take(l *retryTopic, m *sarama.ConsumerMessage) {
	p := rc.parse(m, l.level)
	own := p.claim == rc.epoch
	if stranger := p.moves == 0; stranger && m.Offset >= l.end {
		rc.table.load(p)
	}
	rc.mu.Lock()
	before := l.settled[m.Offset]
	rc.mu.Unlock()
	if before || rc.foreign(p) || !rc.table.arrive(p, own) {
		l.marks.settle(m.Offset, "")
		rc.mu.Lock()
		delete(l.settled, m.Offset) // marks know it now
		rc.mu.Unlock()
		return
	}
	l.marks.deliver(m.Offset)
	rc.mu.Lock()
	l.read = m.Offset + 1
	rc.mu.Unlock()
	rc.push(p, p.notBefore)
}
