// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/guard"
)

// session is one session of a consumer group. A wrapped handler uses it as its session.
//
// Goroutines: the watch, from Setup to Cleanup, which ends with its current request; two for each
// [left]; one while commitSoon commits or pauses; one while sayLost asks. Lock order: session.mu,
// then a claim's.
type session struct {
	h      *handler
	native sarama.ConsumerGroupSession
	set    settings

	closed <-chan struct{}    // closed by ConsumerGroup.Close; nil if sarama does not show it
	cancel context.CancelFunc // ends the watch

	joined      bool // a call of Consume runs the session, and reports its errors
	cooperative bool
	begun       time.Time
	timeout     time.Duration // the handler's timeout
	yieldUntil  atomic.Int64  // end of makeWay, in nanoseconds since begun; 0: no claim is being left
	commits     atomic.Int64  // commits asked for by commitSoon and not yet made
	late        sync.Once     // logs once that revokes will be seen late
	seeking     atomic.Bool   // Setup of a wrapped handler is running

	mu          sync.Mutex
	claims      map[place]*claim        // open claims, for the watch
	wraps       map[place]*wrappedClaim // passive shape: the latest claim of each partition, until Cleanup
	opened      map[place]bool          // claims that sarama has handed out, until Cleanup
	ends        map[ended]*tally        // counts of ended claims, until Cleanup
	left        map[string]*left        // sources of spilled partitions without a claim here, by name
	over        bool                    // Cleanup was called
	claimExited bool                    // a claim ended without a revoke, and sarama then ends the session
}

// ended are the claims of one topic that ended for one reason.
type ended struct {
	topic string
	why   guard.Reason
}

// tally counts ended claims, and their messages that were returned or left.
type tally struct{ claims, returned, left int }

// noteEnd counts an ended claim.
func (ss *session) noteEnd(topic string, why guard.Reason, r guard.Report) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	n := ss.ends[ended{topic, why}]
	if n == nil {
		n = &tally{}
		ss.ends[ended{topic, why}] = n
	}
	n.claims++
	n.returned += r.Returned
	n.left += len(r.Left)
}

// logEnds logs the ended claims, one line for each topic and reason.
func (ss *session) logEnds() {
	ss.mu.Lock()
	ends := ss.ends
	ss.ends = make(map[ended]*tally)
	ss.mu.Unlock()
	for e, n := range ends {
		ss.h.opts.log.Info("claims ended", "topic", e.topic, "reason", e.why.String(),
			"claims", n.claims, "returned", n.returned, "left", n.left)
	}
}

// place is a partition.
type place struct {
	topic     string
	partition int32
}

func newSession(h *handler, native sarama.ConsumerGroupSession, set settings) *session {
	return &session{
		h: h, native: native, set: set, closed: closedOf(native), cancel: func() {}, cooperative: cooperative(set.config),
		begun: time.Now(), timeout: h.opts.timeout(h.g),
		claims: make(map[place]*claim), wraps: make(map[place]*wrappedClaim), opened: make(map[place]bool), ends: make(map[ended]*tally), left: make(map[string]*left),
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

// hands notes that sarama hands out a claim.
func (ss *session) hands(native sarama.ConsumerGroupClaim) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	ss.opened[place{native.Topic(), native.Partition()}] = true
}

// returned notes that a claim has ended.
func (ss *session) returned(native sarama.ConsumerGroupClaim, revoked <-chan struct{}) {
	if ss.native.Context().Err() != nil {
		return
	}
	ss.mu.Lock()
	defer ss.mu.Unlock()
	select {
	case <-revoked: // of a cooperative group: it may be assigned again
		delete(ss.opened, place{native.Topic(), native.Partition()})
	default:
		ss.claimExited = true
	}
}

// cut tells whether an error comes from the session's end, and is no failure.
func (ss *session) cut(err error) bool {
	return ss.native.Context().Err() != nil && errors.Is(err, context.Canceled)
}

// unopened is an error if the session has ended because sarama could not open a claim. sarama
// hands such a claim to nobody, and group.Consume returns nil. A stop during the join, such as by
// ConsumerGroup.Close, also leaves claims unopened, but is no error.
func (ss *session) unopened() error {
	if !errors.Is(context.Cause(ss.native.Context()), sarama.ErrSessionConsumeClaimExited) || ss.stopped() {
		return nil
	}
	var names []string
	ss.mu.Lock()
	for topic, partitions := range ss.native.Claims() {
		for _, p := range partitions {
			if !ss.claimExited && !ss.opened[place{topic, p}] {
				names = append(names, fmt.Sprintf("%s/%d", topic, p))
			}
		}
	}
	ss.mu.Unlock()
	if len(names) == 0 {
		return nil
	}
	slices.Sort(names)
	more := ""
	if n := len(names) - maxUnopened; n > 0 {
		names, more = names[:maxUnopened], fmt.Sprintf(" and %d more", n)
	}
	return fmt.Errorf("kafka: a partition cannot be read, so the session has ended; not open were %s%s; sarama says why to the group's Errors alone, see WatchErrors",
		strings.Join(names, ", "), more)
}

const maxUnopened = 5 // claims that an error names

func (ss *session) open() []*claim {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	all := make([]*claim, 0, len(ss.claims))
	for _, c := range ss.claims {
		all = append(all, c)
	}
	return all
}

// revoked returns a channel that closes as soon as a claim is taken away or its session ends.
//
// In an eager group the session's context says so. A cooperative revoke does not end that
// context. It closes the claim's Messages, but only behind all messages that sarama has buffered.
// The other partitions of the same broker must first have taken what was fetched for them. With
// slow handlers that is later than the rebalance timeout. With a full window it never comes
// (sarama #1608). The channel by which sarama itself closes the claim has no such delay. sarama
// has no method for it, so it is read as [look] reads the configuration. If it is not found,
// revoked returns nil, and only Messages tells of the revoke, late.
func (ss *session) revoked(native sarama.ConsumerGroupClaim) <-chan struct{} {
	dying := dyingOf(native)
	if dying == nil && ss.cooperative {
		ss.late.Do(func() {
			ss.h.opts.log.Warn("cooperative revokes will be seen late: not sarama's claims, or not as they were",
				"group", ss.set.group, "type", fmt.Sprintf("%T", native))
		})
	}
	return dying
}

// makeWay helps sarama to let go of a revoked claim. sarama waits for all partitions of one
// broker together, until what was fetched for them is taken, or until nobody takes anything for
// twice MaxProcessingTime. So the other claims take nothing for that long.
func (ss *session) makeWay() {
	rest := 2*ss.set.config.Consumer.MaxProcessingTime + yieldSlack
	if ss.cooperative && ss.native.Context().Err() == nil && rest <= maxYield {
		ss.yieldUntil.Store(int64(time.Since(ss.begun) + rest))
	}
}

const (
	yieldSlack = 50 * time.Millisecond
	maxYield   = time.Second // with a longer MaxProcessingTime nothing is gained
)

// yield waits while another claim is being left, and returns true. It returns false at once if
// revoked is closed: the waiting claim is left itself. If no claim is, it costs one atomic load.
func (ss *session) yield(stop, revoked <-chan struct{}) bool {
	until := ss.yieldUntil.Load()
	if until == 0 {
		return true
	}
	rest := time.NewTimer(time.Duration(until) - time.Since(ss.begun))
	defer rest.Stop()
	select {
	case <-rest.C:
	case <-stop:
	case <-revoked:
		return false
	}
	ss.yieldUntil.CompareAndSwap(until, 0)
	return true
}

// watch starts the goroutine that looks at the log's end, the committed offsets and the spill, if
// there is a client to ask. Setup starts it, Cleanup stops it.
func (ss *session) watch() {
	if ss.set.client == nil {
		if _, more := ss.spilled(); more && !ss.joined && !ss.h.passive() {
			ss.h.opts.log.Warn("what is in the spill of topics without a claim waits: there is no client to ask for this member's topics", "group", ss.set.group, "help", "pass one by WithClient")
		}
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	ss.cancel = cancel
	go func() {
		w := newWatcher(ss)
		every := ss.h.opts.lookEvery
		if a := ss.set.config.Consumer.Offsets.AutoCommit; a.Enable {
			every = max(every, 2*a.Interval) // marks of one look are committed at the next
		}
		next := time.NewTimer(min(every, time.Second))
		defer next.Stop()
		for {
			select {
			case <-next.C:
			case <-ctx.Done():
				return
			}
			w.look()
			next.Reset(every)
		}
	}()
}

func (ss *session) stop() { ss.cancel() }

// watcher is what the watch remembers from one look to the next.
type watcher struct {
	ss     *session
	behind map[place]bool // partitions whose commits are behind their marks
	silent map[place]int  // looks in a row that the broker has not answered

	learned   bool // the group has told this member's topics
	unlearned int  // looks at which the group did not tell them
}

func newWatcher(ss *session) *watcher {
	return &watcher{ss: ss, behind: make(map[place]bool), silent: make(map[place]int)}
}

const silentLooks = 2 // looks before the warning: a partition's leader may move

func (w *watcher) look() {
	w.learn()
	claims := w.ss.open()
	w.ends(claims)
	if len(claims) == 0 || !w.ss.set.config.Consumer.Offsets.AutoCommit.Enable {
		return // the program commits when it likes
	}
	parts := make(map[string][]int32)
	for _, c := range claims {
		parts[c.topic] = append(parts[c.topic], c.partition)
	}
	type change struct {
		topic string
		is    bool // behind
	}
	changes := make(map[change]int)
	uncommitted := make(map[string]int64)
	committed, err := w.ss.committed(parts)
	for _, c := range claims {
		at := place{c.topic, c.partition}
		before := c.look()
		if before < 0 {
			continue
		}
		is := err != nil || committed(at) < before
		if is {
			c.refused.Store(true)
		}
		if is == w.behind[at] {
			continue
		}
		w.behind[at] = is
		changes[change{c.topic, is}]++
		if err == nil {
			uncommitted[c.topic] += before - max(0, committed(at), c.initial)
		}
	}
	for ch, n := range changes {
		if ch.is {
			w.ss.h.opts.log.Warn("commits are behind: what is marked is not committed and would be delivered again",
				"topic", ch.topic, "partitions", n, "messages", uncommitted[ch.topic], "error", err)
		} else {
			w.ss.h.opts.log.Info("commits have caught up", "topic", ch.topic, "partitions", n)
		}
	}
}

// ends looks at the end of each log. sarama goes on without end with a partition that it could
// open and cannot read. Such a partition does not answer here either.
func (w *watcher) ends(claims []*claim) {
	type news struct{ topic, err string }
	found := make(map[news][]int32)
	for _, c := range claims {
		end, err := w.ss.set.client.GetOffset(c.topic, c.partition, sarama.OffsetNewest)
		at, n := place{c.topic, c.partition}, news{topic: c.topic}
		before := w.silent[at]
		w.silent[at] = 0
		if err != nil {
			end, n.err = -1, err.Error()
			w.silent[at] = before + 1
		}
		c.end.Store(end)
		if err == nil && before >= silentLooks || err != nil && before+1 == silentLooks {
			found[n] = append(found[n], c.partition)
		}
	}
	for n, partitions := range found {
		slices.Sort(partitions)
		if n.err == "" {
			w.ss.h.opts.log.Info("partitions answer again", "topic", n.topic, "partitions", partitions)
		} else {
			w.ss.h.opts.log.Warn("partitions do not answer and are probably not read: see WatchErrors for what sarama says",
				"topic", n.topic, "partitions", partitions, "error", n.err)
		}
	}
}

// committed asks the coordinator for the group's committed offsets; -1 for none.
func (ss *session) committed(parts map[string][]int32) (func(place) int64, error) {
	coordinator, err := ss.set.client.Coordinator(ss.set.group)
	if err != nil {
		return nil, err
	}
	resp, err := coordinator.FetchOffset(sarama.NewOffsetFetchRequest(ss.set.config.Version, ss.set.group, parts))
	if err == nil && resp.Err != sarama.ErrNoError {
		err = resp.Err
	}
	if err == nil {
		for topic, partitions := range parts {
			if b := resp.GetBlock(topic, partitions[0]); b != nil && b.Err == sarama.ErrNotCoordinatorForConsumer {
				err = b.Err
			}
		}
	}
	if err != nil { // nobody else tells the program's own client where the coordinator is now
		return nil, errors.Join(err, ss.set.client.RefreshCoordinator(ss.set.group))
	}
	return func(at place) int64 {
		if b := resp.GetBlock(at.topic, at.partition); b != nil && b.Err == sarama.ErrNoError {
			return b.Offset
		}
		return -1
	}, nil
}

// sayLost logs which messages are lost if the log does not have the group's committed offset, so
// that sarama has begun the claim elsewhere. If sarama begins at the log's beginning, sayLost
// also sets the claim's start, which is needed while no message has come. It asks before a mark
// changes the committed offset. It does not wait for the answer once the claim is taken away.
func (ss *session) sayLost(c *claim, revoked <-chan struct{}) {
	if c.initial >= 0 || ss.set.client == nil {
		return
	}
	beginning := make(chan int64, 1) // -1 if it is not known, or nothing is committed
	go func() {
		from := int64(-1)
		defer func() { beginning <- from }()
		committed, err := ss.committed(map[string][]int32{c.topic: {c.partition}})
		if err != nil {
			return
		}
		at := committed(place{c.topic, c.partition})
		if at < 0 {
			return
		}
		begins, err := ss.set.client.GetOffset(c.topic, c.partition, sarama.OffsetOldest)
		ends, err2 := ss.set.client.GetOffset(c.topic, c.partition, sarama.OffsetNewest)
		log := ss.h.opts.log.With("topic", c.topic, "partition", c.partition, "committed", at, "begins", begins, "ends", ends, "from", max(begins, c.start))
		switch {
		case err != nil || err2 != nil:
			return
		case at < begins:
			log.Error("messages are lost: the log begins behind the committed offset")
		case at > ends:
			log.Warn("the log ends before the committed offset: it was made anew, or has lost messages")
		}
		from = begins
	}()
	select {
	case from := <-beginning:
		c.marking.Lock()
		defer c.marking.Unlock()
		if c.initial == sarama.OffsetOldest && c.start < 0 {
			c.start = from
		}
	case <-revoked:
	case <-ss.native.Context().Done():
	}
}

// --- what a wrapped handler sees --------------------------------------------

func (ss *session) Claims() map[string][]int32 { return ss.native.Claims() }
func (ss *session) MemberID() string           { return ss.native.MemberID() }
func (ss *session) GenerationID() int32        { return ss.native.GenerationID() }
func (ss *session) Context() context.Context   { return ss.native.Context() }

// Commit marks the settled messages and commits the marks.
func (ss *session) Commit() {
	ss.flush()
	ss.native.Commit()
}

// flush marks the settled messages of every claim of a wrapped handler.
func (ss *session) flush() {
	ss.mu.Lock()
	wraps := make([]*wrappedClaim, 0, len(ss.wraps))
	for _, w := range ss.wraps {
		wraps = append(wraps, w)
	}
	ss.mu.Unlock()
	for _, w := range wraps {
		w.claim.mark()
	}
}

// MarkMessage reports the success of a message.
func (ss *session) MarkMessage(m *sarama.ConsumerMessage, metadata string) {
	if w := ss.wrapped(m.Topic, m.Partition); w != nil {
		w.mark(m, metadata)
	}
}

// MarkOffset reports the success of every message below offset that was handed out and is not yet
// marked or failed. In Setup nothing is handed out yet: the call goes unchanged to the group, and
// seeks forward.
func (ss *session) MarkOffset(topic string, partition int32, offset int64, metadata string) {
	if w := ss.wrapped(topic, partition); w != nil {
		w.markBelow(offset, metadata)
	} else if ss.seeking.Load() {
		ss.native.MarkOffset(topic, partition, offset, metadata)
	}
}

// ResetOffset goes unchanged to the group. After it nothing is marked until the handler marks
// again.
func (ss *session) ResetOffset(topic string, partition int32, offset int64, metadata string) {
	if w := ss.wrapped(topic, partition); w != nil {
		w.claim.rewind(offset, metadata)
		return
	}
	ss.native.ResetOffset(topic, partition, offset, metadata)
}

func (ss *session) wrapped(topic string, partition int32) *wrappedClaim {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	return ss.wraps[place{topic, partition}]
}
