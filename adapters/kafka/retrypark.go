// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package kafka

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

const (
	// followWait is how long a message waits for the end of its key's last parked
	// one to be committed, before it follows.
	followWait = 500 * time.Millisecond
	// maxBehind is how long after its own time a message waits in its retry topic for
	// another one, which may be due much later than this topic keeps its records.
	maxBehind = retryMargin / 2
	// lookAgain is how soon a message that waits for another one looks again.
	lookAgain = 20 * time.Millisecond
	// largeAgain is how soon a message that is too large to follow looks again.
	largeAgain = 5 * time.Second
	// parkTimeout bounds one write of a message that follows.
	parkTimeout = 10 * time.Second
)

var (
	errFollows    = errors.New("kafka: follows a parked message of its key")
	errNoFollow   = errors.New("kafka: a message cannot follow a parked one of its key")
	errParkedCopy = errors.New("kafka: a copy of a message that is parked or done")
	errParkedFull = fmt.Errorf("%w: kafka: RetryConfig.MaxParked messages of the partition are parked", dlq.ErrPutOff)
	errHeld       = errors.New("kafka: parked messages wait for the breaker of their topic")
	errNotClosed  = fmt.Errorf("%w: kafka: nothing is parked while the breaker is not closed", dlq.ErrPutOff)
)

// handleClaimed is the handler of the claim's source.
func (rc *retryClaim) handleClaimed(ctx context.Context, m *sarama.ConsumerMessage) error {
	if rc.table.used.Load() {
		if handle, err := rc.first(ctx, rc.claimed(m)); !handle {
			return err
		}
	}
	return rc.ss.guarded(ctx, m)
}

// handleParked is the handler of the retry source.
func (rc *retryClaim) handleParked(ctx context.Context, p *parkedMessage) error {
	if handle, err := rc.first(ctx, p); !handle {
		return err
	}
	if rc.held() {
		return guard.Backoff(errHeld, time.Now().Add(askAgain))
	}
	return rc.ss.guarded(ctx, p.msg)
}

// held tells whether parked messages wait for the claim's breaker. They do while it is
// not closed and the claim has messages of its own to probe with, or while it is open by
// force or by the fleet. Otherwise nothing but them could show that the dependency is back.
func (rc *retryClaim) held() bool {
	st := rc.state()
	a, b := st.Account, st.Breaker
	return !rc.closed(st) && (b.Forced || b.Barred || b.Held || a.Waiting+a.Processing+a.Settling+a.Held+a.RetryWait > 0)
}

// closed tells whether the claim's breaker is closed.
func (*retryClaim) closed(st guard.State) bool {
	return !slices.ContainsFunc(st.Holds, func(h guard.Hold) bool { return h.Reason == guard.ReasonBreaker })
}

// first sees to a message that must not be handled now: it follows its key, or is a
// copy. To the guard neither is a success or a failure.
func (rc *retryClaim) first(ctx context.Context, p *parkedMessage) (handle bool, err error) {
	for patient := p.level == 0 || rc.mayWait(p); ; {
		f := rc.table.up(p, patient)
		switch f.kind {
		case fateHandle:
			return true, nil
		case fateSettle:
			return false, guard.Ignore(errParkedCopy)
		case fateWait:
			if patient = f.due <= p.notBefore+maxBehind.Milliseconds() && rc.t.now().UnixMilli() <= p.notBefore+maxBehind.Milliseconds(); !patient {
				continue
			}
			p.back = max(f.due, rc.t.now().Add(lookAgain).UnixMilli())
			return false, guard.Ignore(errFollows)
		case fateAwait:
			token(rc.kick)
			patient = await(ctx, f.freed, followWait)
		case fateFull:
			rc.said.say("a message cannot follow its key: its source waits", rc.c.name, errParkedFull)
			return false, guard.Backoff(fmt.Errorf("%w: %w", errNoFollow, errParkedFull), time.Now().Add(askAgain))
		default:
			return false, rc.follow(ctx, p, f.level)
		}
	}
}

func (rc *retryClaim) follow(ctx context.Context, p *parkedMessage, level int) error {
	limited, cancel := context.WithTimeout(ctx, rc.write)
	defer cancel()
	to := *p
	to.moves, to.notBefore, to.claim = p.moves+1, rc.t.now().UnixMilli(), rc.epoch
	at, err := rc.t.write(limited, &to, rc.levels[level-1].name)
	rc.said.say("a message cannot follow its key: its source waits", rc.c.name, err)
	if errors.Is(err, dlq.ErrTooLarge) { // its turn comes when what it follows is done
		rc.table.dropped(p)
		return guard.Backoff(fmt.Errorf("%w: %w", errNoFollow, err), time.Now().Add(largeAgain))
	}
	if err != nil {
		return guard.Backoff(fmt.Errorf("%w: %w", errNoFollow, err), time.Now().Add(askAgain))
	}
	rc.table.landed(p, level, at)
	rc.table.followed.Add(1)
	return guard.Ignore(errFollows)
}

// carrier is the property by which a record tells writeLetter its message.
const carrier = "kafka.parked"

func carry(m guard.Meta, p *parkedMessage) guard.Meta {
	m.Properties = append(m.Properties, dlq.Header{Name: carrier, Value: p})
	return m
}

// writeLetter is where the guard writes what is to be dead-lettered: to a retry
// topic, or to the dead letters.
func (rc *retryClaim) writeLetter(ctx context.Context, r *dlq.Record) error {
	out := *r
	out.Properties = nil
	var p *parkedMessage
	for _, h := range r.Properties {
		if v, ok := h.Value.(*parkedMessage); ok && h.Name == carrier {
			p = v
		} else {
			out.Properties = append(out.Properties, h)
		}
	}
	if p == nil {
		return fmt.Errorf("kafka: %w: a record of no message", dlq.ErrRefused)
	}
	to := *p
	to.tries, to.first = p.tries+r.Attempts, stampOf(r.FirstFailed)
	if p.first > 0 {
		to.first = min(p.first, to.first)
	}
	closed := rc.closed(rc.state())
	poison := r.Reason == dlq.ReasonAttempts || (r.Reason == dlq.ReasonPoisonHead || r.Reason == dlq.ReasonGuess) && closed
	out.Attempts, out.FirstFailed = to.tries, stampTime(to.first)
	if r.Permanent || !poison || p.own >= len(rc.levels) {
		return rc.ss.h.opts.letters.Write(ctx, &out)
	}
	if !closed {
		return errNotClosed
	}
	due := rc.t.now().Add(rc.t.cfg.Delays[p.own]).UnixMilli()
	level, gone := rc.table.park(p, p.own+1, due)
	switch {
	case gone:
		return dlq.ErrParked
	case level == 0:
		return errParkedFull
	}
	to.own, to.moves, to.claim = p.own+1, p.moves+1, rc.epoch
	to.notBefore = due
	at, err := rc.t.write(ctx, &to, rc.levels[level-1].name)
	switch {
	case errors.Is(err, dlq.ErrTooLarge): // it was not written, and never can be
		rc.said.say("a message is too large to be parked: it is dead-lettered", rc.c.name, err)
		return rc.ss.h.opts.letters.Write(ctx, &out)
	case err != nil:
		return err
	}
	rc.table.landed(p, level, at)
	return dlq.ErrParked
}

// mayWait tells whether a message may wait in memory for one of its key, instead of
// being written behind it: while half of what may wait there is free.
func (rc *retryClaim) mayWait(p *parkedMessage) bool {
	l := rc.levels[p.level-1]
	at, _ := l.marks.settled()
	rc.mu.Lock()
	defer rc.mu.Unlock()
	return l.count < readAhead/2 && l.bytes < readAheadBytes/2 && l.read-at < maxAhead/2
}

// parkingPort is the claim's port, with retry topics.
type parkingPort struct {
	*claim
	rc *retryClaim
}

var (
	_ guard.Parker = parkingPort{}
	_ guard.Marker = parkingPort{}
)

// Meta also carries the message to writeLetter.
func (p parkingPort) Meta(m *sarama.ConsumerMessage) guard.Meta {
	return carry(p.claim.Meta(m), p.rc.claimed(m))
}

// Ack also ends what was begun to park the message.
func (p parkingPort) Ack(m *sarama.ConsumerMessage) error {
	if p.rc.table.used.Load() {
		p.rc.table.finish(p.rc.claimed(m))
	}
	return p.claim.Ack(m)
}

// Parked is how many messages are parked, and how many followed.
func (p parkingPort) Parked() (now int, followed uint64) {
	return p.rc.table.size(), p.rc.table.followed.Load()
}

// retryPort is the port of what was parked.
type retryPort struct{ rc *retryClaim }

var _ guard.Port[*parkedMessage] = retryPort{}

func (r retryPort) Lane(p *parkedMessage) uint64 { return p.lane(r.rc.c) }
func (r retryPort) Size(p *parkedMessage) int    { return p.size }

func (r retryPort) Meta(p *parkedMessage) guard.Meta {
	from := originOf(p.msg, r.rc.c.group)
	if p.origin.offset < 0 { // its letter is one of the source, in which it has no offset
		from.Source, from.Offset, from.HasOffset = r.rc.c.topic, 0, false
	}
	return carry(guard.Meta{
		Key: p.msg.Key, Body: p.msg.Value, Headers: fromHeaders(p.msg.Headers), Timestamp: p.msg.Timestamp, Origin: from, Lag: -1,
	}, p)
}

// Ack settles the record in its retry topic, and the message unless it went on. One
// that has to wait for another is taken back, and comes again: it is counted as
// received each time, and as returned.
func (r retryPort) Ack(p *parkedMessage) error {
	l := r.rc.levels[p.level-1]
	if due := p.back; due > 0 {
		p.back = 0
		r.rc.push(p, due)
		return guard.ErrTakenBack
	}
	l.marks.settle(p.at, "")
	r.rc.table.finish(p)
	token(l.room)
	return nil
}

func (retryPort) Extend([]*parkedMessage)                     {}
func (retryPort) Return([]*parkedMessage, guard.Reason) error { return nil }
func (retryPort) Demand(int)                                  {}
func (retryPort) Flush() error                                { return nil }
