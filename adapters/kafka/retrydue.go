// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package kafka

import (
	"container/heap"
	"context"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// replayWait bounds the wait for the claim to have passed what it handles again.
const replayWait = 30 * time.Second

// push lets a message wait until it is due.
func (rc *retryClaim) push(p *parkedMessage, due int64) {
	l := rc.levels[p.level-1]
	p.due = due
	rc.mu.Lock()
	l.count++
	l.bytes += p.size
	if p.keyed { // not before those of its key that wait here
		k := l.last[p.origin.key]
		if k == nil {
			k = &keyDue{}
			l.last[p.origin.key] = k
		}
		k.due = max(k.due, p.due)
		k.n++
		p.due = k.due
	}
	heap.Push(&rc.pending, p)
	rc.mu.Unlock()
	token(rc.wake)
}

// dispatch hands over what is due, until ctx ends.
func (rc *retryClaim) dispatch(ctx context.Context, feed *guard.Feed[*parkedMessage]) {
	rc.awaitReplay(ctx)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for ctx.Err() == nil {
		due, next := rc.due()
		if len(due) > 0 {
			if _, err := feed.Put(ctx, due...); err != nil {
				return // what is not handed over is not settled
			}
			continue
		}
		timer.Reset(next)
		select {
		case <-timer.C:
		case <-rc.wake:
		case <-ctx.Done():
		}
	}
}

// awaitReplay waits until the claim has passed what is also parked: what it hands
// over again before that was handled before the parked messages of its key. It is asked
// now and then, once in an epoch and 30s at most: a signal would cost each mark.
func (rc *retryClaim) awaitReplay(ctx context.Context) {
	limit := time.Now().Add(replayWait)
	for ctx.Err() == nil && rc.replay >= 0 && time.Now().Before(limit) {
		if at, _ := rc.c.marks.settled(); at > rc.replay {
			return
		}
		pause(ctx, nameWait)
	}
}

// due takes what is due, at most 64 at a time; if there is nothing, next is how
// long to wait.
func (rc *retryClaim) due() (due []*parkedMessage, next time.Duration) {
	now := rc.t.now().UnixMilli()
	rc.mu.Lock()
	defer rc.mu.Unlock()
	for len(rc.pending) > 0 && len(due) < 64 && rc.pending[0].due <= now {
		p := heap.Pop(&rc.pending).(*parkedMessage) //nolint:forcetypeassert // nothing else is in there
		l := rc.levels[p.level-1]
		l.count--
		l.bytes -= p.size
		if k := l.last[p.origin.key]; p.keyed {
			if k.n--; k.n == 0 {
				delete(l.last, p.origin.key)
			}
		}
		token(l.room)
		due = append(due, p)
	}
	if len(rc.pending) == 0 {
		return due, time.Hour
	}
	return due, time.Duration(rc.pending[0].due-now) * time.Millisecond
}

// dueMessages orders what waits by when it is due, and then by level and offset.
type dueMessages []*parkedMessage

func (h *dueMessages) Len() int { return len(*h) }
func (h *dueMessages) Less(i, j int) bool {
	a, b := (*h)[i], (*h)[j]
	switch {
	case a.due != b.due:
		return a.due < b.due
	case a.level != b.level:
		return a.level > b.level // what is further on was first
	}
	return a.at < b.at
}
func (h *dueMessages) Swap(i, j int) { (*h)[i], (*h)[j] = (*h)[j], (*h)[i] }

func (h *dueMessages) Push(x any) { *h = append(*h, x.(*parkedMessage)) } //nolint:forcetypeassert // as above

func (h *dueMessages) Pop() any {
	old := *h
	p := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return p
}
