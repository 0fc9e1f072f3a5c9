// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package kafka

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// retryClaim is the part of one epoch of one partition that parks: it reads the
// same partition of the retry topics, and is the port of their source.
//
// Before the claim's first message it reads the retry topics from what is committed
// to their end, and so knows what is parked ([parkedTable]). Then a goroutine for
// each level reads on, one hands over what is due, one commits; all end before
// ConsumeClaim returns. Lock order: retryClaim.mu, then that of a table or tracker;
// none is held during a call of the guard or of sarama.
type retryClaim struct {
	t      *RetryTopics
	ss     *session
	c      *claim
	table  *parkedTable
	byKey  bool
	epoch  string // in what this claim parks: other records after the start are of an earlier owner
	levels []*retryTopic
	replay int64 // the claim hands over again what it had handled up to here; -1 nothing
	write  time.Duration

	breaker func() bool // tells whether it is closed
	wake    chan struct{}
	kick    chan struct{} // a commit is wanted
	broken  chan struct{} // a retry topic is another: the claim has to begin anew

	mu      sync.Mutex
	pending dueMessages

	said sayings
}

// retryTopic is one level of a retryClaim.
type retryTopic struct {
	level int
	name  string
	start int64    // of the reading
	end   int64    // of the topic at the start
	began position // what was committed, or stands for it
	marks *tracker
	room  chan struct{}

	sent   position // that was committed last; the committer's
	sentAt time.Time

	// Under retryClaim.mu:
	settled      map[int64]bool // after start, by what is committed, and not read yet
	read         int64          // the end of what was read
	count, bytes int
	last         map[uint64]*keyDue
}

// keyDue is when the last message of a key that waits is due.
type keyDue struct {
	due int64
	n   int
}

const (
	// readAhead and readAheadBytes are how much of a level may wait in memory.
	readAhead      = 1024
	readAheadBytes = 8 << 20
	// followWait is how long a message waits for the end of its key's last parked
	// one to be committed, before it follows.
	followWait = 500 * time.Millisecond
	// maxBehind is how long after its own time a message waits in its retry topic for
	// another one, which may be due much later than this topic keeps its records.
	maxBehind = retryMargin / 2
	// lookAgain is how soon a message that waits for another one looks again.
	lookAgain = 20 * time.Millisecond
	// parkTimeout bounds one write of a message that follows.
	parkTimeout = 10 * time.Second
	// askAgain is how soon what cannot be read, written or committed is tried again.
	askAgain = 500 * time.Millisecond
	// replayWait bounds the wait for the claim to have passed what it handles again.
	replayWait = 30 * time.Second
)

var (
	errFollows    = errors.New("kafka: follows a parked message of its key")
	errParkedCopy = errors.New("kafka: a copy of a message that is parked or done")
	errParkedFull = errors.New("kafka: RetryConfig.MaxParked messages of the partition are parked")
	errNotClosed  = errors.New("kafka: nothing is parked while the breaker is not closed")
)

// fits reports what keeps a group's claims from being parked.
func (t *RetryTopics) fits(group string, claims map[string][]int32) error {
	var errs []error
	if group != t.cfg.Group {
		errs = append(errs, unsuitable("RetryConfig.Group: %q, and the consumer group is %q: retry topics belong to one group", t.cfg.Group, group))
	}
	for topic, partitions := range claims {
		if !slices.Contains(t.cfg.Sources, topic) {
			errs = append(errs, unsuitable("RetryConfig.Sources: topic %q is consumed and is not among them; a retry topic is never consumed by itself", topic))
			continue
		}
		for level := range t.cfg.Delays {
			name := t.cfg.name(topic, level+1)
			have, err := t.out.client.Partitions(name)
			if err != nil {
				errs = append(errs, fmt.Errorf("kafka: retry topic %s: %w", name, err))
			} else if most := slices.Max(append(partitions, -1)); int(most) >= len(have) {
				errs = append(errs, unsuitable("topic %s: it has %d partitions, and partition %d of %s has none to be parked in: kafka-topics.sh --alter --topic %s --partitions N, and make RetryTopics anew",
					name, len(have), most, topic, name))
			}
		}
	}
	return errors.Join(errs...)
}

// consumeParking is consume with retry topics.
func (ss *session) consumeParking(c *claim, revoked <-chan struct{}) error {
	ctx, cancel := context.WithCancel(ss.native.Context())
	defer cancel()
	go func() {
		select {
		case <-revoked:
			ss.makeWay()
			cancel()
		case <-ctx.Done():
		}
	}()
	rc := newRetryClaim(ss, c)
	if !rc.boot(ctx) {
		return nil // the claim is over before it began
	}
	cfg := ss.sourceConfig(c)
	cfg.DeadLetters, cfg.LettersKeepPlace = dlq.WriterFunc(rc.writeLetter), true
	src, err := openClaim(ss, cfg, guard.Port[*sarama.ConsumerMessage](parkingPort{c, rc}), rc.handleClaimed, revoked)
	if src == nil {
		return err
	}
	cfg.Name += "/retry"
	cfg.Successes = src.Successes
	again, err := openClaim(ss, cfg, guard.Port[*parkedMessage](retryPort{rc}), rc.handleParked, revoked)
	if again == nil {
		ss.endSource(src.End)
		return err
	}
	ss.add(c)
	defer ss.remove(c)
	rc.breaker = func() bool {
		return !slices.ContainsFunc(src.State().Holds, func(h guard.Hold) bool { return h.Reason == guard.ReasonBreaker })
	}

	// Handlers may finish after the session's context is over, so it is not that
	// which ends the loops but End, below.
	running := context.WithoutCancel(ss.native.Context())
	over, ran := make(chan struct{}, 3), make(chan struct{}, 2) // all that is ever sent
	go func() {
		_ = src.Run(running, c.native.Messages())
		over <- struct{}{}
		ran <- struct{}{}
	}()
	go func() {
		_ = again.RunFeed(running)
		over <- struct{}{}
		ran <- struct{}{}
	}()
	var reading, committing sync.WaitGroup
	for _, l := range rc.levels {
		reading.Go(func() { rc.read(ctx, l) })
	}
	reading.Go(func() { rc.dispatch(ctx, again.Feed()) })
	settled := make(chan struct{})
	committing.Go(func() { rc.commitAlways(settled) })

	ended := make(chan struct{})
	go func() {
		select {
		case <-over:
		case <-rc.broken:
		}
		close(ended)
	}()
	ss.await(src, ended, revoked)
	cancel()
	var report, parked guard.Report
	var ending sync.WaitGroup
	ending.Go(func() { parked = ss.endSource(again.End) })
	report = ss.endSource(src.End)
	ending.Wait()
	reading.Wait()
	close(settled)
	committing.Wait()
	if len(report.Left) == 0 && len(parked.Left) == 0 {
		<-ran
		<-ran
	}
	over <- struct{}{} // ended's goroutine, if neither loop returned
	return errors.Join(leftError(c.name, report), leftError(cfg.Name, parked))
}

func newRetryClaim(ss *session, c *claim) *retryClaim {
	t := ss.h.opts.retries
	rc := &retryClaim{
		t: t, ss: ss, c: c, table: newParkedTable(t.maxParked()), epoch: strconv.FormatUint(rand.Uint64(), 16), replay: -1,
		byKey: ss.h.opts.order(ss.h.g) == guard.OrderKey, write: min(parkTimeout, ss.timeout/2),
		wake: make(chan struct{}, 1), kick: make(chan struct{}, 1), broken: make(chan struct{}, 1),
	}
	rc.said.log = ss.h.opts.log
	for i := range t.cfg.Delays {
		rc.levels = append(rc.levels, &retryTopic{
			level: i + 1, name: t.cfg.name(c.topic, i+1), marks: newTracker(), room: make(chan struct{}, 1), last: make(map[uint64]*keyDue),
		})
	}
	return rc
}

// boot learns what is parked; false if ctx ended before. What is committed is asked
// first and the end of the topics after it: what an earlier owner has settled is
// then further on, or done.
func (rc *retryClaim) boot(ctx context.Context) bool {
	for ctx.Err() == nil {
		err := rc.look(ctx)
		rc.said.say("what is parked cannot be read: the claim waits", rc.c.name, err)
		if err == nil {
			return true
		}
		pause(ctx, askAgain)
	}
	return false
}

func (rc *retryClaim) look(ctx context.Context) error {
	names := make([]string, len(rc.levels))
	for i, l := range rc.levels {
		names[i] = l.name
	}
	done, err := rc.t.committed(rc.c.partition, names)
	if err != nil {
		return err
	}
	rc.table = newParkedTable(rc.t.maxParked())
	rc.replay = -1
	for i, l := range rc.levels {
		oldest, err := rc.t.reads.GetOffset(l.name, rc.c.partition, sarama.OffsetOldest)
		if err != nil {
			return err
		}
		if l.end, err = rc.t.reads.GetOffset(l.name, rc.c.partition, sarama.OffsetNewest); err != nil {
			return err
		}
		l.began, l.settled = done[i], decodeAhead(done[i].offset, done[i].meta)
		switch at := l.began.offset; {
		case at > l.end: // the topic was made anew
			l.began, l.settled = position{offset: oldest}, nil
		case at < oldest:
			l.began = position{offset: oldest}
			if at >= 0 { // what is committed is not done: retention was faster
				rc.ss.h.opts.log.Error("parked messages are lost: the retry topic keeps them too short", "topic", l.name, "partition", rc.c.partition, "from", at, "to", oldest)
			}
		}
		maps.DeleteFunc(l.settled, func(n int64, _ bool) bool { return n < l.began.offset })
		l.start = l.began.offset
		if err := rc.load(ctx, l); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// load reads a level up to its end.
func (rc *retryClaim) load(ctx context.Context, l *retryTopic) error {
	if l.start >= l.end {
		return nil
	}
	part, err := rc.open(ctx, l, l.start)
	if err != nil {
		return err
	}
	defer closePartition(part)
	for next := l.start; next < l.end; {
		select {
		case m, ok := <-part.Messages():
			if !ok {
				return fmt.Errorf("kafka: retry topic %s: its reading ended", l.name)
			}
			next = m.Offset + 1
			if m.Offset >= l.end || l.settled[m.Offset] {
				continue
			}
			p := rc.parse(m, l.level)
			if level, at := rc.table.load(p); level > 0 {
				old := rc.levels[level-1]
				if old.settled == nil {
					old.settled = make(map[int64]bool)
				}
				old.settled[at] = true
			}
			if p.origin.offset >= rc.c.initial {
				rc.replay = max(rc.replay, p.origin.offset)
			}
		case err := <-part.Errors():
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func (rc *retryClaim) parse(m *sarama.ConsumerMessage, level int) *parkedMessage {
	p := readParked(m, level)
	rc.identify(p)
	return p
}

func (rc *retryClaim) identify(p *parkedMessage) {
	if rc.byKey {
		p.identify(rc.c)
	}
}

// claimed is a message of the claim.
func (rc *retryClaim) claimed(m *sarama.ConsumerMessage) *parkedMessage {
	p := &parkedMessage{msg: m, origin: origin{offset: m.Offset, stamp: stampOf(m.Timestamp)}, at: -1}
	rc.identify(p)
	return p
}

// open begins to read a level; another claim of this process may be on its way out
// of it.
func (rc *retryClaim) open(ctx context.Context, l *retryTopic, from int64) (sarama.PartitionConsumer, error) {
	for {
		part, err := rc.t.reader.ConsumePartition(l.name, rc.c.partition, from)
		if !errors.As(err, new(sarama.ConfigurationError)) {
			return part, err
		}
		if pause(ctx, nameWait); ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
}

func closePartition(part sarama.PartitionConsumer) {
	part.AsyncClose()
	var errs sync.WaitGroup
	errs.Go(func() {
		for range part.Errors() {
		}
	})
	for range part.Messages() {
	}
	errs.Wait()
}

// read reads a level until ctx ends.
func (rc *retryClaim) read(ctx context.Context, l *retryTopic) {
	next := l.start
	for ctx.Err() == nil {
		part, err := rc.open(ctx, l, next)
		if err == nil {
			next, err = rc.readFrom(ctx, l, part, next)
			closePartition(part)
		}
		if ctx.Err() != nil {
			return
		}
		rc.said.say("a retry topic cannot be read: what is parked waits", l.name, err)
		if errors.Is(err, sarama.ErrOffsetOutOfRange) {
			next = rc.skip(l, next)
		}
		pause(ctx, askAgain)
	}
}

// skip is where the reading goes on that the broker has ended.
func (rc *retryClaim) skip(l *retryTopic, next int64) int64 {
	oldest, err := rc.t.reads.GetOffset(l.name, rc.c.partition, sarama.OffsetOldest)
	if err != nil {
		return next
	}
	if newest, err := rc.t.reads.GetOffset(l.name, rc.c.partition, sarama.OffsetNewest); err == nil && newest < next {
		rc.ss.h.opts.log.Error("a retry topic is shorter than it was: its claim begins anew", "topic", l.name, "partition", rc.c.partition, "end", newest, "was", next)
		token(rc.broken)
		return next
	}
	rc.lost(l, next, oldest)
	return max(next, oldest)
}

func (rc *retryClaim) readFrom(ctx context.Context, l *retryTopic, part sarama.PartitionConsumer, next int64) (int64, error) {
	paused := false
	for {
		messages := part.Messages()
		if full := !rc.hasRoom(l, next); full {
			messages = nil
			if !paused {
				part.Pause()
			}
			paused = true
		} else if paused {
			part.Resume()
			paused = false
		}
		select {
		case m, ok := <-messages:
			if !ok {
				return next, sarama.ErrOffsetOutOfRange // the one reason for which it closes by itself
			}
			rc.said.say("a retry topic cannot be read: what is parked waits", l.name, nil)
			if m.Offset >= next {
				rc.lost(l, next, m.Offset)
				next = m.Offset + 1
				rc.take(l, m)
			}
		case err, ok := <-part.Errors():
			if !ok {
				return next, sarama.ErrOffsetOutOfRange
			}
			rc.said.say("a retry topic cannot be read: what is parked waits", l.name, err)
		case <-l.room:
		case <-ctx.Done():
			return next, ctx.Err()
		}
	}
}

// hasRoom tells whether one more message of a level may come.
func (rc *retryClaim) hasRoom(l *retryTopic, next int64) bool {
	at, _ := l.marks.settled()
	rc.mu.Lock()
	defer rc.mu.Unlock()
	return l.count < readAhead && l.bytes < readAheadBytes && (at < 0 || next-at < maxAhead)
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

// lost says that a retry topic no longer has what was parked there.
func (rc *retryClaim) lost(l *retryTopic, from, to int64) {
	if from >= to {
		return
	}
	if n := rc.table.lost(l.level, from, to); n > 0 {
		rc.ss.h.opts.log.Error("parked messages are lost: the retry topic keeps them too short", "topic", l.name, "partition", rc.c.partition, "messages", n)
	}
}

// take takes in what was read.
func (rc *retryClaim) take(l *retryTopic, m *sarama.ConsumerMessage) {
	p := rc.parse(m, l.level)
	own := p.claim == rc.epoch
	if stranger := p.moves == 0; stranger && m.Offset >= l.end {
		rc.table.load(p)
	}
	rc.mu.Lock()
	before := l.settled[m.Offset]
	rc.mu.Unlock()
	if before || !rc.table.arrive(p, own) {
		l.marks.settle(m.Offset, "")
		rc.mu.Lock()
		delete(l.settled, m.Offset) // marks know it now
		rc.mu.Unlock()
		return
	}
	l.marks.deliver(m.Offset)
	rc.mu.Lock()
	l.read = m.Offset + 1
	rc.mu.Unlock()
	rc.push(p, p.notBefore)
}

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
// over again before that was handled before the parked messages of its key.
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
	return rc.ss.guarded(ctx, p.msg)
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
			return false, guard.Backoff(errParkedFull, time.Now().Add(askAgain))
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
	if err != nil {
		return guard.Backoff(fmt.Errorf("%w: %w", errFollows, err), time.Now().Add(askAgain))
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
	closed := rc.breaker()
	poison := r.Reason == dlq.ReasonAttempts || r.Reason == dlq.ReasonPoisonHead && closed
	if r.Permanent || !poison || p.own >= len(rc.levels) {
		out.Attempts, out.FirstFailed = to.tries, stampTime(to.first)
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
	if err != nil {
		return err
	}
	rc.table.landed(p, level, at)
	return dlq.ErrParked
}

// commitAlways commits what is done, until stop is closed, and then once more.
func (rc *retryClaim) commitAlways(stop <-chan struct{}) {
	every := time.NewTicker(max(10*time.Millisecond, rc.ss.set.config.Consumer.Offsets.AutoCommit.Interval))
	defer every.Stop()
	for last := false; !last; {
		select {
		case <-every.C:
		case <-rc.kick:
		case <-stop:
			last = true
		}
		err := rc.commit()
		rc.said.say("what is done of the retry topics cannot be committed: it would be handled again", rc.c.name, err)
	}
}

func (rc *retryClaim) commit() error {
	keys := rc.table.ended() // before the positions: these then cover their ends
	at := make(map[string]position)
	now := time.Now()
	for _, l := range rc.levels {
		p := rc.position(l)
		if p != l.sent || now.Sub(l.sentAt) >= recommit {
			at[l.name] = p
		}
	}
	if len(at) > 0 {
		if err := rc.t.commit(rc.ss, rc.c.partition, at); err != nil {
			return err
		}
		for _, l := range rc.levels {
			if p, ok := at[l.name]; ok {
				l.sent, l.sentAt = p, now
			}
		}
	}
	rc.table.free(keys)
	return nil
}

// position is what is done of a level.
func (rc *retryClaim) position(l *retryTopic) position {
	rc.mu.Lock()
	ahead := slices.Collect(maps.Keys(l.settled)) // not read again yet
	rc.mu.Unlock()
	at, more := l.marks.settled()
	if at < 0 {
		at = l.began.offset
	}
	ahead = slices.DeleteFunc(append(ahead, more...), func(n int64) bool { return n < at || n >= at+maxAhead })
	slices.Sort(ahead)
	return position{at, encodeAhead(at, ahead)}
}

// parkingPort is the claim's port, with retry topics.
type parkingPort struct {
	*claim
	rc *retryClaim
}

var _ guard.Parker = parkingPort{}

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
// that has to wait for another is none of the guard's until it comes again.
func (r retryPort) Ack(p *parkedMessage) error {
	l := r.rc.levels[p.level-1]
	if due := p.back; due > 0 {
		p.back = 0
		r.rc.push(p, due)
		return nil
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

// token leaves a token in a channel of capacity 1.
func token(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// pause waits, or until ctx ends.
func pause(ctx context.Context, d time.Duration) { await(ctx, nil, d) }

// await waits for a channel to be closed; false if ctx ended or d passed before.
func await(ctx context.Context, c <-chan struct{}, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-c:
		return true
	case <-timer.C:
	case <-ctx.Done():
	}
	return false
}
