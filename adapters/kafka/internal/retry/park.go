// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package retry

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/cluster"
	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/offsets"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

const (
	// followWait is how long a message waits for the commit of its key's last parked message,
	// before it follows.
	followWait = 500 * time.Millisecond
	// maxBehind is how long after its own due time a message waits in its retry topic for the
	// message that it follows. That message may be due much later than this topic keeps its
	// records.
	maxBehind = retryMargin / 2
	// lookAgain and lookAtLast bound the time until a message that waits for another one looks
	// again. It looks when the other one is due, but after lookAtLast at the latest: its topic
	// may have been read on so far that the waiting message blocks it.
	lookAgain  = 20 * time.Millisecond
	lookAtLast = 30 * time.Second
	// largeAgain is the time until a message that is too large to follow looks again.
	largeAgain = 5 * time.Second
	// parkTimeout bounds one write of a message that follows.
	parkTimeout = 10 * time.Second
)

var (
	errFollows    = errors.New("kafka: follows a parked message of its key")
	errNoFollow   = errors.New("kafka: a message cannot follow a parked one of its key")
	errParkedCopy = errors.New("kafka: a copy of a message that is parked or done")
	errParkedFull = fmt.Errorf("%w: kafka: RetryConfig.MaxParked messages of the partition are parked", dlq.ErrPutOff)
)

// Handler makes the handler of the claim: a message behind a parked one of its key follows it.
func (pt *Partition) Handler(handle func(context.Context, *sarama.ConsumerMessage) error) func(context.Context, *sarama.ConsumerMessage) error {
	return func(ctx context.Context, m *sarama.ConsumerMessage) error {
		if pt.table.used.Load() {
			if handles, err := pt.first(ctx, pt.claimed(m)); !handles {
				return err
			}
		}
		return handle(ctx, m)
	}
}

// ParkedHandler makes the handler of parked messages.
func (pt *Partition) ParkedHandler(handle func(context.Context, *sarama.ConsumerMessage) error) func(context.Context, *Message) error {
	return func(ctx context.Context, p *Message) error {
		if handles, err := pt.first(ctx, p); !handles {
			return err
		}
		return handle(ctx, p.msg)
	}
}

// first decides whether a message is handled now. If it must follow its key, or is a copy, it is
// not handled: to the guard that is no success and no failure.
func (pt *Partition) first(ctx context.Context, p *Message) (handle bool, err error) {
	for patient := p.level == 0 || pt.mayWait(p); ; {
		f := pt.table.decide(p, patient)
		switch f.kind {
		case fateHandle:
			return true, nil
		case fateSettle:
			return false, guard.Ignore(errParkedCopy)
		case fateWait:
			if patient = f.due <= p.notBefore+maxBehind.Milliseconds() && pt.t.Now().UnixMilli() <= p.notBefore+maxBehind.Milliseconds(); !patient {
				continue
			}
			now := pt.t.Now()
			p.waitUntil = min(max(f.due, now.Add(lookAgain).UnixMilli()), now.Add(lookAtLast).UnixMilli())
			return false, guard.Ignore(errFollows)
		case fateAwait:
			notify(pt.kick)
			patient = await(ctx, f.freed, followWait)
		case fateFull:
			pt.said.say("a message cannot follow its key: its source waits", pt.c.Source, errParkedFull)
			return false, guard.Backoff(fmt.Errorf("%w: %w", errNoFollow, errParkedFull), time.Now().Add(askAgain))
		default:
			return false, pt.follow(ctx, p, f.level)
		}
	}
}

func (pt *Partition) follow(ctx context.Context, p *Message, level int) error {
	limited, cancel := context.WithTimeout(ctx, pt.write)
	defer cancel()
	to := *p
	to.moves, to.notBefore, to.claim = p.moves+1, pt.t.Now().UnixMilli(), pt.epoch
	at, err := pt.t.write(limited, &to, pt.levels[level-1].name)
	pt.said.say("a message cannot follow its key: its source waits", pt.c.Source, err)
	if errors.Is(err, dlq.ErrTooLarge) { // it is handled when the message that it follows is done
		pt.table.dropped(p)
		return guard.Backoff(fmt.Errorf("%w: %w", errNoFollow, err), time.Now().Add(largeAgain))
	}
	if err != nil {
		return guard.Backoff(fmt.Errorf("%w: %w", errNoFollow, err), time.Now().Add(askAgain))
	}
	pt.table.landed(p, level, at)
	pt.table.followed.Add(1)
	return guard.Ignore(errFollows)
}

// Parks is [guard.Parker.Parks] for a message of the claim.
func (pt *Partition) Parks() bool { return len(pt.levels) > 0 }

// Park is [guard.Parker.Park] for a message of the claim.
func (pt *Partition) Park(ctx context.Context, m *sarama.ConsumerMessage, r *dlq.Record) error {
	return pt.park(ctx, pt.claimed(m), r)
}

// Parked is [guard.Parker.Parked].
func (pt *Partition) Parked() (now int, followed uint64) {
	return pt.table.size(), pt.table.followed.Load()
}

// Settled ends an attempt to park a message of the claim. It is called before the message is
// acked.
func (pt *Partition) Settled(m *sarama.ConsumerMessage) {
	if pt.table.used.Load() {
		pt.table.finish(pt.claimed(m))
	}
}

// park writes a message to the topic of its next level.
func (pt *Partition) park(ctx context.Context, p *Message, r *dlq.Record) error {
	due := pt.t.Now().Add(pt.t.cfg.Delays[p.own]).UnixMilli()
	level, gone := pt.table.park(p, p.own+1, due)
	switch {
	case gone:
		return nil
	case level == 0:
		return errParkedFull
	}
	to := *p
	to.tries, to.first = r.Attempts, stampOf(r.FirstFailed)
	to.own, to.moves, to.claim, to.notBefore = p.own+1, p.moves+1, pt.epoch, due
	at, err := pt.t.write(ctx, &to, pt.levels[level-1].name)
	if errors.Is(err, dlq.ErrTooLarge) { // it was not written, and never can be
		pt.said.say("a message is too large to be parked: it is dead-lettered", pt.c.Source, err)
	}
	if err == nil {
		pt.table.landed(p, level, at)
	}
	return err
}

// mayWait tells whether a message may wait in memory for another one of its key, instead of being
// written behind it. It may while half of the room in memory is free.
func (pt *Partition) mayWait(p *Message) bool {
	l := pt.levels[p.level-1]
	at, _ := l.marks.Settled()
	pt.mu.Lock()
	defer pt.mu.Unlock()
	return l.count < readAhead/2 && l.bytes < readAheadBytes/2 && l.read-at < offsets.MaxAhead/2
}

// Port is the port of the source of parked messages.
func (pt *Partition) Port() guard.Port[*Message] { return port{pt} }

type port struct{ *Partition }

var _ guard.Parker[*Message] = port{}

func (r port) Lane(p *Message) uint64 { return p.lane() }
func (r port) Size(p *Message) int    { return p.size }
func (r port) Parks(p *Message) bool  { return p.own < len(r.levels) }

func (r port) Park(ctx context.Context, p *Message, rec *dlq.Record) error {
	return r.park(ctx, p, rec)
}

func (r port) Meta(p *Message) guard.Meta {
	from := cluster.Origin(p.msg, r.t.cfg.Group)
	if p.origin.offset < 0 { // a stranger: its dead letter names the source, where it has no offset
		from.Source, from.Offset, from.HasOffset = r.c.Topic, 0, false
	}
	return guard.Meta{
		Key: p.msg.Key, Body: p.msg.Value, Headers: cluster.Headers(p.msg.Headers), Timestamp: p.msg.Timestamp, Origin: from, Lag: -1,
		Attempts: p.tries, FirstFailed: stampTime(p.first),
	}
}

// Ack settles the record in its retry topic. It also settles the message, unless the message went
// on to another topic. A message that must wait for another one is taken back, and comes again:
// each time it counts as received and as returned.
func (r port) Ack(p *Message) error {
	l := r.levels[p.level-1]
	if due := p.waitUntil; due > 0 {
		p.waitUntil = 0
		r.push(p, due)
		return guard.ErrTakenBack
	}
	l.marks.Settle(p.at, "")
	r.table.finish(p)
	notify(l.room)
	return nil
}

func (port) Extend([]*Message)                     {}
func (port) Return([]*Message, guard.Reason) error { return nil }
func (port) Demand(int)                            {}
func (port) Flush() error                          { return nil }
