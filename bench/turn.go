// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// busyFor is how long the handler of the 10us cases is busy.
const busyFor = 10 * time.Microsecond

// work is what a handler does.
func work(busy time.Duration) {
	if busy == 0 {
		return
	}
	for start := time.Now(); time.Since(start) < busy; { //nolint:revive // this is the work
	}
}

// A course is the handler's side of one turn with a real broker: lanes of
// messages, one handler at a time in each. The first message of each lane waits
// until run, and run until there is one, so that joining and subscribing are not
// measured; what the client has fetched by then is a few thousand messages at
// most, on all sides.
type course struct {
	busy    time.Duration
	lanes   []courseLane
	arrived chan struct{}
	open    chan struct{}
	done    chan struct{}
}

type courseLane struct {
	left    int
	started bool
	_       [112]byte // no two lanes in one cache line, or one that is fetched with it
}

// newCourse is for lanes of each messages.
func newCourse(lanes, each int, busy time.Duration) *course {
	c := &course{
		busy: busy, lanes: make([]courseLane, lanes),
		arrived: make(chan struct{}, lanes), open: make(chan struct{}), done: make(chan struct{}, lanes),
	}
	for i := range c.lanes {
		c.lanes[i].left = each
	}
	return c
}

// handle handles a message of a lane.
func (c *course) handle(lane int) {
	l := &c.lanes[lane]
	if !l.started {
		l.started = true
		c.arrived <- struct{}{}
		<-c.open
	}
	work(c.busy)
	if l.left--; l.left == 0 {
		c.done <- struct{}{}
	}
}

// ready waits until a lane has its first message. It does not wait for all:
// sarama fetches no more for one partition while another is not read. failed is a
// consumer that has ended.
func (c *course) ready(ctx context.Context, failed <-chan error) error {
	if got, err := c.await(ctx, c.arrived, 1, failed); err != nil {
		return fmt.Errorf("%d of %d lanes have begun: %w", got, len(c.lanes), err)
	}
	return nil
}

// run handles everything.
func (c *course) run(ctx context.Context, failed <-chan error) error {
	close(c.open)
	if got, err := c.await(ctx, c.done, len(c.lanes), failed); err != nil {
		return fmt.Errorf("%d of %d lanes are done: %w", got, len(c.lanes), err)
	}
	return nil
}

// abandon frees the handlers of a course that was never run.
func (c *course) abandon() { close(c.open) }

var errStuck = errors.New("no progress for a minute")

func (c *course) await(ctx context.Context, from <-chan struct{}, want int, failed <-chan error) (got int, err error) {
	late := time.NewTimer(time.Minute)
	defer late.Stop()
	for ; got < want; got++ {
		select {
		case <-from:
		case err := <-failed:
			return got, fmt.Errorf("the consumer ended: %w", err)
		case <-late.C:
			return got, errStuck
		case <-ctx.Done():
			return got, ctx.Err()
		}
	}
	return got, nil
}

// check says whether each message was handled once. Handlers must have ended.
func (c *course) check() error {
	for i := range c.lanes {
		if left := c.lanes[i].left; left != 0 {
			return fmt.Errorf("lane %d: %d messages too few (below 0: too many)", i, left)
		}
	}
	return nil
}
