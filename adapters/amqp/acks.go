// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardamqp

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// ackDelay is how long a coalesced ack waits for others while a handler runs.
	ackDelay = 20 * time.Millisecond
	// passiveDelay is the same delay in the passive shape, which does not know whether a handler
	// runs.
	passiveDelay = 5 * time.Millisecond
	// ackMost is how many acks the passive shape coalesces. The function shape flushes when the
	// guard says so.
	ackMost = 64
)

// acker sends the acks of one channel: one frame for all deliveries up to the oldest unsettled one,
// and one frame each for the others.
//
// Lock order: wire, then tags.mu. wire is held while acks are sent. Otherwise an ack of many and an
// ack that it covers could overtake each other. The broker closes the channel over a tag that it
// does not know.
type acker struct {
	life atomic.Pointer[channelEpoch] // nil until there is a channel
	tags tags

	last   atomic.Int64 // when the latest frame was sent, in Unix nanoseconds
	held   atomic.Bool  // acks and rejects are kept back
	wire   sync.Mutex
	frames []ack       // guarded by wire
	late   *time.Timer // sends acks that wait behind a slow handler
	delay  time.Duration
}

// begin makes the timer, which sends acks that have waited for delay. end stops it.
func (a *acker) begin(delay time.Duration) {
	a.delay = delay
	a.late = time.AfterFunc(time.Hour, func() { _ = a.flush() }) // an error is the end of the channel, which others see
	a.late.Stop()
}

func (a *acker) end() { a.late.Stop() }

// wait starts the timer, if an ack is the first that is due.
func (a *acker) wait(due int) {
	if due == 1 {
		a.late.Reset(a.delay)
	}
}

// flush sends the frames of all settled deliveries.
func (a *acker) flush() error {
	a.wire.Lock()
	defer a.wire.Unlock()
	if a.held.Load() {
		return nil
	}
	a.frames = a.tags.take(a.frames[:0])
	l := a.life.Load()
	for _, f := range a.frames {
		if l.ended() {
			return errChannelGone
		}
		a.last.Store(time.Now().UnixNano())
		if f.reject {
			if err := l.ch.Reject(f.tag, false); err != nil {
				return fmt.Errorf("amqp: reject: %w", err)
			}
			continue
		}
		if err := l.ch.Ack(f.tag, f.multiple); err != nil {
			return fmt.Errorf("amqp: ack: %w", err)
		}
	}
	return nil
}

// hold keeps acks and rejects back until release, which sends them. None is sent once hold has
// returned.
func (a *acker) hold() {
	a.wire.Lock()
	defer a.wire.Unlock()
	a.held.Store(true)
}

func (a *acker) release() {
	a.held.Store(false)
	_ = a.flush() // an error is the end of the channel, which others see
}
