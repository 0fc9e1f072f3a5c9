// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package kafka

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
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

	state  func() guard.State // of the claim's own source
	wake   chan struct{}
	kick   chan struct{} // a commit is wanted
	broken chan struct{} // a retry topic is another: the claim has to begin anew
	given  atomic.Bool   // the claim was left: nothing more is committed

	mu      sync.Mutex
	pending dueMessages

	said       sayings
	foreigners atomic.Bool // said that another group parks here, too
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

// askAgain is how soon what cannot be read, written or committed is tried again.
const askAgain = 500 * time.Millisecond

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
	cfg.Policy = ss.h.opts.retryPolicy(ss.h.g)
	again, err := openClaim(ss, cfg, guard.Port[*parkedMessage](retryPort{rc}), rc.handleParked, revoked)
	if again == nil {
		ss.endSource(c.topic, src.End)
		return err
	}
	ss.add(c)
	defer ss.remove(c)
	rc.state = src.State

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
	ss.await(c, src.Ended(), ended, revoked)
	cancel()
	var report, parked guard.Report
	var ending sync.WaitGroup
	ending.Go(func() { parked = ss.endSource(c.topic, again.End) })
	report = ss.endSource(c.topic, src.End)
	ending.Wait()
	inTime, _ := endsWithin(claimSlack, func() error {
		reading.Wait()
		close(settled)
		committing.Wait()
		return nil
	})
	var late error
	if !inTime { // a silent broker; what goes on there ends with sarama's requests
		rc.given.Store(true)
		late = fmt.Errorf("kafka: claim %s: the last commit of its retry topics is not confirmed: what was handled of them may be handled again", c.name)
	}
	if len(report.Left) == 0 && len(parked.Left) == 0 {
		<-ran
		<-ran
	}
	over <- struct{}{} // ended's goroutine, if neither loop returned
	return errors.Join(leftError(c.name, report), leftError(cfg.Name, parked), late)
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
