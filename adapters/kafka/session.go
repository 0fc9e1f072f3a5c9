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

// session is one session of a consumer group. To a wrapped handler it is the
// session itself.
//
// Goroutines: the watch, from Setup to Cleanup; it ends with the request it is
// making. Two for each [left]. One while commitSoon commits, or sayLost asks. Lock order: session.mu, then a claim's.
type session struct {
	h      *handler
	native sarama.ConsumerGroupSession
	set    settings

	closed <-chan struct{}    // by ConsumerGroup.Close; nil if sarama does not show it
	cancel context.CancelFunc // of the watch

	joined      bool // a call of Consume runs it, and says what it ends with
	cooperative bool
	begun       time.Time
	timeout     time.Duration // of a handler
	yieldUntil  atomic.Int64  // nanoseconds since begun; 0: no claim is being let go
	commits     atomic.Int64  // asked for by commitSoon and not made
	late        sync.Once     // said that revokes will be seen late
	seeking     atomic.Bool   // a wrapped handler's Setup runs

	mu     sync.Mutex
	claims map[place]*claim        // open ones, for the watch
	wraps  map[place]*wrappedClaim // passive shape: the latest of each partition, until Cleanup
	opened map[place]bool          // claims that sarama has handed out, until Cleanup
	ends   map[ended]*tally        // claims that have ended, until Cleanup
	left   map[string]*left        // sources of partitions that others have, by name
	over   bool                    // Cleanup was called
	itself bool                    // a claim has ended by itself, and so has the session
}

// ended are the claims of a topic that ended for one reason.
type ended struct {
	topic string
	why   guard.Reason
}

// tally counts claims that have ended, and messages.
type tally struct{ claims, returned, left int }

// noteEnd counts a claim that has ended.
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

// logEnds says which claims have ended, in one line for a topic and a reason.
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
		ss.itself = true
	}
}

// cut tells whether an error is the session's end, and not a failure.
func (ss *session) cut(err error) bool {
	return ss.native.Context().Err() != nil && errors.Is(err, context.Canceled)
}

// unopened is why the session has ended, if it did since sarama could not open a claim: it
// hands that one out to nobody, and group.Consume returns nil. A stop during the join, such as
// by ConsumerGroup.Close, leaves claims unopened, too.
func (ss *session) unopened() error {
	if !errors.Is(context.Cause(ss.native.Context()), sarama.ErrSessionConsumeClaimExited) || ss.stopped() {
		return nil
	}
	var names []string
	ss.mu.Lock()
	for topic, partitions := range ss.native.Claims() {
		for _, p := range partitions {
			if !ss.itself && !ss.opened[place{topic, p}] {
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

const maxUnopened = 5 // that an error names

func (ss *session) open() []*claim {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	all := make([]*claim, 0, len(ss.claims))
	for _, c := range ss.claims {
		all = append(all, c)
	}
	return all
}

// revoked is closed as soon as a claim is taken away or its session ends.
//
// In an eager group the session's context says so. A cooperative revoke leaves
// that alive, and the claim's Messages closed, but behind everything that sarama
// has buffered, and not before the other partitions of the same broker have taken
// what was fetched for them: with slow handlers later than the rebalance timeout,
// or never while the window is full (sarama #1608). The channel by which sarama
// itself closes the claim holds nothing back. There is no method for it, so it is
// read as [look] reads the configuration; where it is not found, Messages alone
// says it, late.
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

// makeWay helps sarama to let go of a claim that was revoked: it waits, for all
// partitions of one broker together, until what was fetched for them is taken, or
// until nobody takes anything for twice MaxProcessingTime. So the other claims
// take nothing for that long.
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

// yield waits while another claim is being let go. Without one it costs an atomic
// load.
func (ss *session) yield(stop <-chan struct{}) {
	until := ss.yieldUntil.Load()
	if until == 0 {
		return
	}
	rest := time.NewTimer(time.Duration(until) - time.Since(ss.begun))
	defer rest.Stop()
	select {
	case <-rest.C:
	case <-stop:
	}
	ss.yieldUntil.CompareAndSwap(until, 0)
}

// watch looks at the log's end, at what is committed and at what is in the spill, if there is
// a client to ask. Setup starts it, Cleanup stops it.
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
		w := watcher{ss: ss, behind: make(map[place]bool), marked: make(map[place]int64), silent: make(map[place]int)}
		every := ss.h.opts.lookEvery
		if a := ss.set.config.Consumer.Offsets.AutoCommit; a.Enable {
			every = max(every, 2*a.Interval) // what is marked at one look is committed at the next
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
	marked map[place]int64 // what was marked at the last look
	behind map[place]bool  // commits of it fail
	silent map[place]int   // looks in a row that its broker has not answered

	learned   bool // the group has told this member's topics
	unlearned int  // looks at which it did not
}

const silentLooks = 2 // before it is said: a partition's leader may move

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
		before, known := w.marked[at]
		_, now := c.marks.Position()
		w.marked[at] = now
		if !known || before < 0 {
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

// ends looks at the end of each log. sarama goes on for ever with a partition that it could open
// and cannot read, and such a one does not answer here either.
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

// committed asks the coordinator what the group has committed.
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
	if err != nil { // a client of the program's own is told by nobody else where it is now
		return nil, errors.Join(err, ss.set.client.RefreshCoordinator(ss.set.group))
	}
	return func(at place) int64 {
		if b := resp.GetBlock(at.topic, at.partition); b != nil && b.Err == sarama.ErrNoError {
			return b.Offset
		}
		return -1
	}, nil
}

// sayLost says what is lost where the log does not have what the group has committed, and sarama
// has begun a claim elsewhere: at the log's beginning, which is then the claim's, also while there
// is no message. It asks before a mark changes what is committed, and a claim that is taken away
// does not wait for the answer.
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

// Commit marks what is settled and commits it.
func (ss *session) Commit() {
	ss.flush()
	ss.native.Commit()
}

// flush marks what is settled in every claim of a wrapped handler.
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

// MarkMessage is the success of a message.
func (ss *session) MarkMessage(m *sarama.ConsumerMessage, metadata string) {
	if w := ss.wrapped(m.Topic, m.Partition); w != nil {
		w.mark(m, metadata)
	}
}

// MarkOffset is the success of every message below offset that was handed out
// and is neither marked nor failed. In Setup it goes to the group as it is: nothing is
// handed out yet, and it seeks forward.
func (ss *session) MarkOffset(topic string, partition int32, offset int64, metadata string) {
	if w := ss.wrapped(topic, partition); w != nil {
		w.markBelow(offset, metadata)
	} else if ss.seeking.Load() {
		ss.native.MarkOffset(topic, partition, offset, metadata)
	}
}

// ResetOffset goes to the group as it is. Nothing is marked after it until the
// handler marks again.
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
