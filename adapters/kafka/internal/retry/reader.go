// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package retry

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/cluster"
	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/offsets"
)

const (
	// readAhead and readAheadBytes bound the messages of a level that wait in memory.
	readAhead      = 1024
	readAheadBytes = 8 << 20
)

// boot learns which messages are parked, and tries until ctx ends or the claim does not fit. It
// asks for the committed offsets first, and then for the end of the topics. So a message that an
// earlier owner has settled is found in a later place, or is done.
func (pt *Partition) boot(ctx context.Context) error {
	for ctx.Err() == nil {
		var err error
		looked := make(chan struct{})
		go func() { // a request that a silent broker does not answer outlives ctx
			defer close(looked)
			err = pt.look(ctx)
		}()
		select {
		case <-looked:
		case <-ctx.Done():
			return ctx.Err()
		}
		if errors.Is(err, cluster.ErrUnsuitable) && !slices.Contains(pt.t.cfg.Sources, pt.c.Topic) {
			return err // waiting cannot mend this; missing partitions may still be added
		}
		pt.said.say("what is parked cannot be read: the claim waits", pt.c.Source, err)
		if err == nil {
			return nil
		}
		pause(ctx, askAgain)
	}
	return ctx.Err()
}

func (pt *Partition) look(ctx context.Context) error {
	// Setup asks, too, but a cooperative group has claims that come after Setup.
	if err := pt.t.Fits(pt.t.cfg.Group, map[string][]int32{pt.c.Topic: {pt.c.Partition}}); err != nil {
		return err
	}
	names := make([]string, len(pt.levels))
	for i, l := range pt.levels {
		names[i] = l.name
	}
	done, err := pt.t.committed(pt.c.Partition, names)
	if err != nil {
		return err
	}
	pt.table = newTable(pt.t.maxParked())
	pt.replay = -1
	for i, l := range pt.levels {
		oldest, err := pt.t.reads.GetOffset(l.name, pt.c.Partition, sarama.OffsetOldest)
		if err != nil {
			return err
		}
		if l.end, err = pt.t.reads.GetOffset(l.name, pt.c.Partition, sarama.OffsetNewest); err != nil {
			return err
		}
		l.began, l.settled = done[i], offsets.Decode(done[i].offset, done[i].meta)
		switch at := l.began.offset; {
		case at > l.end: // the topic was created again
			l.began, l.settled = position{offset: oldest}, nil
		case at < oldest:
			l.began = position{offset: oldest}
			if at >= 0 { // the messages from at on were not done: retention was faster
				pt.c.Log.Error("parked messages are lost: the retry topic keeps them too short", "topic", l.name, "partition", pt.c.Partition, "from", at, "to", oldest)
			}
		}
		maps.DeleteFunc(l.settled, func(n int64, _ bool) bool { return n < l.began.offset })
		l.start = l.began.offset
		if err := pt.load(ctx, l); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// load reads a level up to its end.
func (pt *Partition) load(ctx context.Context, l *levelTopic) error {
	if l.start >= l.end {
		return nil
	}
	part, err := pt.open(ctx, l, l.start)
	if err != nil {
		return err
	}
	defer closePartition(part)
	silent := time.NewTicker(askAgain)
	defer silent.Stop()
	for next := l.start; next < l.end; {
		select {
		case <-silent.C: // the rest may be records that sarama does not deliver
			at, m, err := cluster.FirstMessage(pt.t.reads, l.name, pt.c.Partition, next, l.end, nil)
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
			p := pt.parked(m, l.level)
			if pt.foreign(p) {
				continue // take settles it
			}
			if level, at := pt.table.load(p); level > 0 {
				old := pt.levels[level-1]
				if old.settled == nil {
					old.settled = make(map[int64]bool)
				}
				old.settled[at] = true
			}
			if p.origin.offset >= pt.c.Initial {
				pt.replay = max(pt.replay, p.origin.offset)
			}
		case err := <-part.Errors():
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// open begins to read a level. Another claim of this process may still read it, and sarama does
// not tell when that claim ends: open tries again until it has, or ctx ends.
func (pt *Partition) open(ctx context.Context, l *levelTopic, from int64) (sarama.PartitionConsumer, error) {
	const waits = "its retry topic is still read by a claim that ends: the claim waits"
	for {
		part, err := pt.t.reader.ConsumePartition(l.name, pt.c.Partition, from)
		if !errors.As(err, new(sarama.ConfigurationError)) {
			pt.said.say(waits, l.name, nil)
			return part, err
		}
		pt.said.say(waits, l.name, err)
		if pause(ctx, lookAgain); ctx.Err() != nil {
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
func (pt *Partition) read(ctx context.Context, l *levelTopic) {
	next := l.start
	for ctx.Err() == nil {
		part, err := pt.open(ctx, l, next)
		if err == nil {
			next, err = pt.readFrom(ctx, l, part, next)
			closePartition(part)
		}
		if ctx.Err() != nil {
			return
		}
		pt.said.say("a retry topic cannot be read: what is parked waits", l.name, err)
		if errors.Is(err, sarama.ErrOffsetOutOfRange) {
			next = pt.skip(l, next)
		}
		pause(ctx, askAgain)
	}
}

// skip returns where to read on after the broker has refused offset next.
func (pt *Partition) skip(l *levelTopic, next int64) int64 {
	oldest, err := pt.t.reads.GetOffset(l.name, pt.c.Partition, sarama.OffsetOldest)
	if err != nil {
		return next
	}
	if newest, err := pt.t.reads.GetOffset(l.name, pt.c.Partition, sarama.OffsetNewest); err == nil && newest < next {
		pt.c.Log.Error("a retry topic is shorter than it was: its claim begins anew", "topic", l.name, "partition", pt.c.Partition, "end", newest, "was", next)
		pt.broken()
		return next
	}
	pt.lost(l, next, oldest)
	return max(next, oldest)
}

func (pt *Partition) readFrom(ctx context.Context, l *levelTopic, part sarama.PartitionConsumer, next int64) (int64, error) {
	paused := false
	for {
		messages := part.Messages()
		if full := !pt.hasRoom(l, next); full {
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
				return next, sarama.ErrOffsetOutOfRange // the only reason for which sarama closes it
			}
			pt.said.say("a retry topic cannot be read: what is parked waits", l.name, nil)
			if m.Offset >= next {
				pt.lost(l, next, m.Offset)
				next = m.Offset + 1
				pt.take(l, m)
			}
		case err, ok := <-part.Errors():
			if !ok {
				return next, sarama.ErrOffsetOutOfRange
			}
			pt.said.say("a retry topic cannot be read: what is parked waits", l.name, err)
		case <-l.room:
		case <-ctx.Done():
			return next, ctx.Err()
		}
	}
}

// hasRoom tells whether one more message of a level may come.
func (pt *Partition) hasRoom(l *levelTopic, next int64) bool {
	at, _ := l.marks.Settled()
	pt.mu.Lock()
	defer pt.mu.Unlock()
	return l.count < readAhead && l.bytes < readAheadBytes && (at < 0 || next-at < offsets.MaxAhead)
}

// lost logs that a retry topic no longer has parked messages: those at offsets of at least from
// and below to.
func (pt *Partition) lost(l *levelTopic, from, to int64) {
	if from >= to {
		return
	}
	if n := pt.table.lost(l.level, from, to); n > 0 {
		pt.c.Log.Error("parked messages are lost: the retry topic keeps them too short", "topic", l.name, "partition", pt.c.Partition, "messages", n)
	}
}

// foreign tells whether another group has parked a message. That group handles it.
func (pt *Partition) foreign(p *Message) bool {
	if p.group == "" || p.group == pt.t.cfg.Group {
		return false
	}
	if !pt.foreigners.Swap(true) {
		pt.c.Log.Error("a retry topic has messages of another group, which are passed over: give each group topics of its own", "source", pt.c.Source, "group", p.group)
	}
	return true
}

// take takes in a message that was read from a level.
func (pt *Partition) take(l *levelTopic, m *sarama.ConsumerMessage) {
	p := pt.parked(m, l.level)
	own := p.claim == pt.epoch
	if stranger := p.moves == 0; stranger && m.Offset >= l.end {
		pt.table.load(p)
	}
	pt.mu.Lock()
	before := l.settled[m.Offset]
	pt.mu.Unlock()
	if before || pt.foreign(p) || !pt.table.arrive(p, own) {
		l.marks.Settle(m.Offset, "")
		pt.mu.Lock()
		delete(l.settled, m.Offset) // marks has it now
		pt.mu.Unlock()
		return
	}
	l.marks.Deliver(m.Offset)
	pt.mu.Lock()
	l.read = m.Offset + 1
	pt.mu.Unlock()
	pt.push(p, p.notBefore)
}
