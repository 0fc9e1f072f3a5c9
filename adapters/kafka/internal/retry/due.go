// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package retry

import (
	"container/heap"
	"context"
	"time"

	"github.com/stormguard-mq/stormguard/guard"
)

// replayWait bounds the wait of awaitReplay.
const replayWait = 30 * time.Second

// push lets a message wait until it is due.
func (pt *Partition) push(p *Message, due int64) {
	l := pt.levels[p.level-1]
	p.due = due
	pt.mu.Lock()
	l.count++
	l.bytes += p.size
	if p.keyed { // not before waiting messages of its key
		k := l.last[p.origin.key]
		if k == nil {
			k = &keyDue{}
			l.last[p.origin.key] = k
		}
		k.due = max(k.due, p.due)
		k.n++
		p.due = k.due
	}
	heap.Push(&pt.pending, p)
	pt.mu.Unlock()
	notify(pt.wake)
}

// dispatch hands due messages over, until ctx ends.
func (pt *Partition) dispatch(ctx context.Context, feed *guard.Feed[*Message]) {
	pt.awaitReplay(ctx)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for ctx.Err() == nil {
		due, next := pt.due()
		if len(due) > 0 {
			if _, err := feed.Put(ctx, due...); err != nil {
				return // messages that are not handed over are not settled
			}
			continue
		}
		timer.Reset(next)
		select {
		case <-timer.C:
		case <-pt.wake:
		case <-ctx.Done():
		}
	}
}

// awaitReplay waits until the claim has passed all messages that are also parked (replay). Until
// then the claim delivers messages again that were handled before the parked messages of their
// keys. It polls, once in an epoch and 30s at most: a signal would cost time at each mark.
func (pt *Partition) awaitReplay(ctx context.Context) {
	limit := time.Now().Add(replayWait)
	for ctx.Err() == nil && pt.replay >= 0 && time.Now().Before(limit) {
		if pt.c.Settled() > pt.replay {
			return
		}
		pause(ctx, lookAgain)
	}
}

// due takes due messages, at most 64 at a time. If there are none, next is how long to wait.
func (pt *Partition) due() (due []*Message, next time.Duration) {
	now := pt.t.Now().UnixMilli()
	pt.mu.Lock()
	defer pt.mu.Unlock()
	for len(pt.pending) > 0 && len(due) < 64 && pt.pending[0].due <= now {
		p := heap.Pop(&pt.pending).(*Message) //nolint:forcetypeassert // nothing else is in there
		l := pt.levels[p.level-1]
		l.count--
		l.bytes -= p.size
		if k := l.last[p.origin.key]; p.keyed {
			if k.n--; k.n == 0 {
				delete(l.last, p.origin.key)
			}
		}
		notify(l.room)
		due = append(due, p)
	}
	if len(pt.pending) == 0 {
		return due, time.Hour
	}
	return due, time.Duration(pt.pending[0].due-now) * time.Millisecond
}

// dueMessages is a heap of waiting messages by the time when they are due, then by level and
// offset.
type dueMessages []*Message

func (h *dueMessages) Len() int { return len(*h) }
func (h *dueMessages) Less(i, j int) bool {
	a, b := (*h)[i], (*h)[j]
	switch {
	case a.due != b.due:
		return a.due < b.due
	case a.level != b.level:
		return a.level > b.level // the message at the higher level was first
	}
	return a.at < b.at
}
func (h *dueMessages) Swap(i, j int) { (*h)[i], (*h)[j] = (*h)[j], (*h)[i] }

func (h *dueMessages) Push(x any) { *h = append(*h, x.(*Message)) } //nolint:forcetypeassert // as above

func (h *dueMessages) Pop() any {
	old := *h
	p := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return p
}
