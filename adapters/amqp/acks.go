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
	// passiveDelay is the same in the passive shape, whose handlers are not known
	// to be running.
	passiveDelay = 5 * time.Millisecond
	// ackMost is how many acks the passive shape coalesces; the function shape
	// flushes when the guard says so.
	ackMost = 64
)

// acker sends the acks of one channel: one frame for everything up to the oldest
// delivery that is not settled, and one each for what is beyond.
//
// Lock order: wire, then tags.mu. wire is held while acks are sent: an ack of
// many must not overtake, or be overtaken by, one that it covers, since the
// broker closes the channel over a tag it does not know.
type acker struct {
	life atomic.Pointer[life] // nil until there is a channel
	tags tags

	last   atomic.Int64 // when a frame was sent, in Unix nanoseconds
	held   atomic.Bool  // no acks or rejects go out
	wire   sync.Mutex
	frames []ack       // guarded by wire
	late   *time.Timer // sends acks that wait behind a slow handler
	delay  time.Duration
}

// begin makes the timer, for acks that have waited for delay. end stops it.
func (a *acker) begin(delay time.Duration) {
	a.delay = delay
	a.late = time.AfterFunc(time.Hour, func() { _ = a.flush() }) // an error is the channel's end, which is seen elsewhere
	a.late.Stop()
}

func (a *acker) end() { a.late.Stop() }

// wait makes the timer begin, if an ack is the first that is due.
func (a *acker) wait(due int) {
	if due == 1 {
		a.late.Reset(a.delay)
	}
}

// flush sends what is settled.
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

// hold keeps acks and rejects back from when it returns until release, which
// sends them.
func (a *acker) hold() {
	a.wire.Lock()
	defer a.wire.Unlock()
	a.held.Store(true)
}

func (a *acker) release() {
	a.held.Store(false)
	_ = a.flush() // an error is the channel's end, which is seen elsewhere
}
