// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"context"
	"sync"
	"time"
)

// monotonic returns a clock that counts from now.
func monotonic() func() time.Duration {
	start := time.Now()
	return func() time.Duration { return time.Since(start) }
}

// A driver is the goroutine of a set. It starts when the node has a next step, and ends when
// there is none.
type driver struct {
	kick    chan struct{}
	ended   sync.WaitGroup
	running bool          // guarded by Set.mu
	armed   time.Duration // the time to which its timer is set; guarded by Set.mu
}

func (d *driver) init() { d.kick, d.armed = make(chan struct{}, 1), never }

// by makes the driver tick the set at the given time at the latest. The caller holds Set.mu.
func (d *driver) by(at time.Duration, s *Set) {
	switch {
	case !d.running:
		d.running, d.armed = true, at
		d.ended.Go(func() { d.drive(s) })
	case at < d.armed:
		d.armed = at
		d.nudge()
	}
}

func (d *driver) nudge() {
	select {
	case d.kick <- struct{}{}:
	default:
	}
}

// stop ends the goroutine of a set that is closed.
func (d *driver) stop() {
	d.nudge()
	d.ended.Wait()
}

func (d *driver) drive(s *Set) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		wait, ok := d.tick(s)
		if !ok {
			return
		}
		timer.Reset(wait)
		select {
		case <-timer.C:
		case <-d.kick:
		}
	}
}

// tick runs the steps that are due, and returns how long to wait for the next; ok is false
// if the goroutine must end.
func (d *driver) tick(s *Set) (wait time.Duration, ok bool) {
	s.lock()
	defer s.mu.Unlock()
	d.armed = 0 // settle must not nudge its own goroutine
	s.settle()
	d.armed = s.node.Wake()
	if s.closed || d.armed == never {
		d.running, d.armed = false, never
		return 0, false
	}
	return max(d.armed-s.node.now, 0), true
}

// pause waits for d, unless ctx ends or the set closes first.
func pause(ctx context.Context, closed <-chan struct{}, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-closed:
		return ErrClosed
	}
}
