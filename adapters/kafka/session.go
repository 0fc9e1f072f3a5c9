// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package kafka

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/IBM/sarama"
)

// session is one session of a consumer group. To a wrapped handler it is the
// session itself.
//
// Goroutines: the watch, from Setup to Cleanup; it ends with the request it is
// making. Lock order: session.mu, then a claim's.
type session struct {
	h      *handler
	native sarama.ConsumerGroupSession
	set    settings

	cancel context.CancelFunc // of the watch

	mu     sync.Mutex
	claims map[place]*claim        // open ones, for the watch
	wraps  map[place]*wrappedClaim // passive shape: the latest of each partition, until Cleanup
}

// place is a partition.
type place struct {
	topic     string
	partition int32
}

func newSession(h *handler, native sarama.ConsumerGroupSession, set settings) *session {
	return &session{
		h: h, native: native, set: set, cancel: func() {},
		claims: make(map[place]*claim), wraps: make(map[place]*wrappedClaim),
	}
}

func (ss *session) add(c *claim) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	ss.claims[place{c.topic, c.partition}] = c
}

func (ss *session) remove(c *claim) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	delete(ss.claims, place{c.topic, c.partition})
}

func (ss *session) open() []*claim {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	all := make([]*claim, 0, len(ss.claims))
	for _, c := range ss.claims {
		all = append(all, c)
	}
	return all
}

// revoked is closed as soon as a claim of a cooperative group is taken away; of
// an eager group it never is, since the session's context says it.
//
// A cooperative revoke leaves that context alive, and Messages is seen to be
// closed only after everything that sarama has buffered is handled: with slow
// handlers later than the rebalance timeout, or never while the window is full.
// The claim's Errors close at the same time and hold nothing back. What comes
// there otherwise is for the group's own reader; what this goroutine takes from
// it instead, stolen gives back as the claim's error.
func (ss *session) revoked(native sarama.ConsumerGroupClaim) (revoked <-chan struct{}, stolen func() error) {
	none := func() error { return nil }
	from, ok := native.(interface {
		Errors() <-chan *sarama.ConsumerError
	})
	if !ok || !cooperative(ss.set.config) {
		return nil, none
	}
	closed := make(chan struct{})
	var mu sync.Mutex
	var errs []error
	go func() { // ends with the claim: sarama closes it once ConsumeClaim has returned
		for err := range from.Errors() {
			ss.h.opts.log.Warn("claim", "topic", err.Topic, "partition", err.Partition, "error", err.Err)
			mu.Lock()
			if len(errs) < maxStolen {
				errs = append(errs, err)
			}
			mu.Unlock()
		}
		close(closed)
	}()
	return closed, func() error {
		mu.Lock()
		defer mu.Unlock()
		return errors.Join(errs...)
	}
}

// maxStolen bounds what is kept of a claim's errors.
const maxStolen = 16

// watch looks at the log's end and at what is committed, if there is a client to
// ask. Setup starts it, Cleanup stops it.
func (ss *session) watch() {
	if ss.set.client == nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	ss.cancel = cancel
	go func() {
		w := watcher{ss: ss, behind: make(map[place]bool), marked: make(map[place]int64)}
		next := time.NewTimer(min(ss.h.opts.lookEvery, time.Second))
		defer next.Stop()
		for {
			select {
			case <-next.C:
			case <-ctx.Done():
				return
			}
			w.look()
			next.Reset(ss.h.opts.lookEvery)
		}
	}()
}

func (ss *session) stop() { ss.cancel() }

// watcher is what the watch remembers from one look to the next.
type watcher struct {
	ss     *session
	marked map[place]int64 // what was marked at the last look
	behind map[place]bool  // commits of it fail
}

func (w *watcher) look() {
	claims := w.ss.open()
	parts := make(map[string][]int32)
	for _, c := range claims {
		end, err := w.ss.set.client.GetOffset(c.topic, c.partition, sarama.OffsetNewest)
		if err != nil {
			end = -1
		}
		c.end.Store(end)
		parts[c.topic] = append(parts[c.topic], c.partition)
	}
	if len(claims) == 0 {
		return
	}
	committed, err := w.ss.committed(parts)
	for _, c := range claims {
		at := place{c.topic, c.partition}
		before, known := w.marked[at]
		_, now := c.marks.position()
		w.marked[at] = now
		if !known || before < 0 {
			continue
		}
		is := err != nil || committed(at) < before
		if is == w.behind[at] {
			continue
		}
		w.behind[at] = is
		if is {
			w.ss.h.opts.log.Warn("commits are behind: what is marked is not committed and would be delivered again",
				"source", c.name, "marked", before, "error", err)
		} else {
			w.ss.h.opts.log.Info("commits have caught up", "source", c.name, "marked", before)
		}
	}
}

// committed asks the coordinator what the group has committed.
func (ss *session) committed(parts map[string][]int32) (func(place) int64, error) {
	coordinator, err := ss.set.client.Coordinator(ss.set.group)
	if err != nil {
		return nil, err
	}
	resp, err := coordinator.FetchOffset(sarama.NewOffsetFetchRequest(ss.set.config.Version, ss.set.group, parts))
	if err != nil {
		return nil, err
	}
	if resp.Err != sarama.ErrNoError {
		return nil, resp.Err
	}
	return func(at place) int64 {
		if b := resp.GetBlock(at.topic, at.partition); b != nil && b.Err == sarama.ErrNoError {
			return b.Offset
		}
		return -1
	}, nil
}

// --- what a wrapped handler sees --------------------------------------------

func (ss *session) Claims() map[string][]int32 { return ss.native.Claims() }
func (ss *session) MemberID() string           { return ss.native.MemberID() }
func (ss *session) GenerationID() int32        { return ss.native.GenerationID() }
func (ss *session) Context() context.Context   { return ss.native.Context() }

// Commit marks what is settled and commits it.
func (ss *session) Commit() {
	ss.mu.Lock()
	wraps := make([]*wrappedClaim, 0, len(ss.wraps))
	for _, w := range ss.wraps {
		wraps = append(wraps, w)
	}
	ss.mu.Unlock()
	for _, w := range wraps {
		_ = w.claim.Flush() // it has no error
	}
	ss.native.Commit()
}

// MarkMessage is the success of a message.
func (ss *session) MarkMessage(m *sarama.ConsumerMessage, metadata string) {
	if w := ss.wrapped(m.Topic, m.Partition); w != nil {
		w.mark(m, metadata)
	}
}

// MarkOffset is the success of every message below offset that was handed out
// and is neither marked nor failed.
func (ss *session) MarkOffset(topic string, partition int32, offset int64, metadata string) {
	if w := ss.wrapped(topic, partition); w != nil {
		w.markBelow(offset, metadata)
	}
}

// ResetOffset goes to the group as it is. Nothing is marked after it until the
// handler marks again.
func (ss *session) ResetOffset(topic string, partition int32, offset int64, metadata string) {
	if w := ss.wrapped(topic, partition); w != nil {
		w.claim.marks.rewound()
	}
	ss.native.ResetOffset(topic, partition, offset, metadata)
}

func (ss *session) wrapped(topic string, partition int32) *wrappedClaim {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	return ss.wraps[place{topic, partition}]
}
