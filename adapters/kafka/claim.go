// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/adapters/kafka/internal/cluster"
	"github.com/stormguard-mq/stormguard/guard"
)

// consume is the function shape.
func (ss *session) consume(c *claim, revoked <-chan struct{}) error {
	ss.leave(c.name)
	src, err := openClaim(ss, c.name, revoked, func() (*guard.Source[*sarama.ConsumerMessage], error) {
		return guard.Open(ss.h.g, ss.sourceConfig(c), limits(ss.set.config), guard.Port[*sarama.ConsumerMessage](c), ss.guarded)
	})
	if src == nil {
		return err
	}
	ss.add(c)
	defer ss.remove(c)
	ran := make(chan struct{})
	go func() {
		defer close(ran)
		// Handlers may finish after the session's context is over, so it is not
		// that which ends the loop but End, below.
		_ = src.Run(context.WithoutCancel(ss.native.Context()), c.native.Messages())
	}()
	ss.await(c, src.Ended(), ran, revoked)
	report := ss.endSource(c.topic, src.End)
	if len(report.Left) == 0 {
		<-ran
	}
	if report.Spilled > 0 && ss.native.Context().Err() == nil { // a cooperative revoke
		ss.drainLeft(c.name, c.topic, c.partition)
	}
	return leftError(c.name, report)
}

// guarded is the user's handler. To make way for a revoke is no attempt: where it
// took much of the handler's timeout, the message has its call after it.
func (ss *session) guarded(ctx context.Context, m *sarama.ConsumerMessage) error {
	if ss.yieldUntil.Load() != 0 { // a look at the context would make it cost
		begun := time.Now()
		ss.yield(ctx.Done())
		if 2*time.Since(begun) > ss.timeout {
			return guard.Backoff(errMakesWay, begun)
		}
	}
	return ss.h.handle(ctx, m)
}

var errMakesWay = errors.New("kafka: another claim is being left")

// await waits for the end of a claim: over, its session's, its revoke, or its
// source's, which somebody else may end while a handler hangs. Meanwhile it marks what
// is settled: the loop itself does so before it blocks and after 64 messages, which
// with a backlog and slow handlers is minutes. The session has the claim until
// ConsumeClaim returns, whoever ends the source, so no mark comes too late.
func (ss *session) await(c *claim, ended, over, revoked <-chan struct{}) {
	marks := time.NewTicker(markEvery)
	defer marks.Stop()
	for {
		select {
		case <-marks.C:
			c.mark()
		case <-ended:
			return
		case <-over:
			return
		case <-revoked:
			ss.makeWay()
			if !ss.cooperative {
				ss.awaitEnd()
			}
			return
		case <-ss.native.Context().Done():
			return
		}
	}
}

// awaitEnd gives an eager session, one of whose claims is taken away, time to end: it says
// whether the program stops. ConsumerGroup.Close ends claims and session in no order. A claim
// alone ends where the log does not have its offset.
func (ss *session) awaitEnd() {
	late := time.NewTimer(endsTogether)
	defer late.Stop()
	select {
	case <-ss.native.Context().Done():
	case <-late.C:
	}
}

const endsTogether = 100 * time.Millisecond

// markEvery is how soon what is settled is marked at the latest.
const markEvery = 100 * time.Millisecond

// endSource ends a claim's source for the reason that the session shows.
func (ss *session) endSource(topic string, end func(context.Context, guard.Reason) guard.Report) guard.Report {
	why, limit := guard.ReasonRebalance, grace(ss.set.config)
	if ss.stopped() {
		why, limit = guard.ReasonShutdown, min(limit, ss.h.opts.stopTimeout)
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	report := end(ctx, why)
	ss.noteEnd(topic, why, report)
	return report
}

// stopped tells whether claims end because the program stops. ConsumerGroup.Close ends them
// itself, and the session of a cooperative group later.
func (ss *session) stopped() bool {
	select {
	case <-ss.closed:
		return true
	default:
	}
	ctx := ss.native.Context()
	return ctx.Err() != nil && stopping(ctx)
}

func leftError(source string, r guard.Report) error {
	if len(r.Left) == 0 {
		return nil
	}
	return fmt.Errorf("kafka: claim %s: %d messages left, the oldest %s for %s: %s; they are delivered again",
		source, len(r.Left), r.Left[0].State, r.Left[0].Age.Round(time.Millisecond), r.Left[0].Why)
}

// sourceConfig is that of a claim's source.
func (ss *session) sourceConfig(c *claim) guard.SourceConfig {
	o := &ss.h.opts
	return guard.SourceConfig{
		Name: c.name, System: cluster.System, Destination: c.topic, Partition: fmt.Sprint(c.partition),
		DeadLetters: o.letters, Policy: o.policy, Limiter: o.limiter,
	}
}

// nameWait is how soon a name that is still taken is tried again. Who has the name is
// another member's claim, whose source this one has no handle of: [guard.Source.Ended]
// says the beginning of its end and not the time when its name is free. It is rare, and
// ends with that claim, or with this one.
const nameWait = 20 * time.Millisecond

// openClaim opens the source of a claim. One of the same name may be on its way
// out: another member of the group in this process that overstays. Without an
// error there is none if the claim is over before it began. What the guard refuses for
// another reason it would refuse again.
func openClaim[M any](ss *session, name string, revoked <-chan struct{}, open func() (*guard.Source[M], error)) (*guard.Source[M], error) {
	o := &ss.h.opts
	said := false
	for free := false; ; { // as the look before saw it: the other may have ended after it was refused
		src, err := open()
		if err == nil {
			return src, nil
		}
		taken := ss.h.g.Source(name) != nil
		if errors.Is(err, guard.ErrClosed) || !taken && free {
			return nil, ss.h.refuse(fmt.Errorf("kafka: claim %s: %w", name, err))
		}
		free = !taken
		ss.leaveOther(name)
		if taken && !said {
			said = true
			o.log.Warn("claim waits for a source of its name to end", "source", name, "error", err)
		}
		pause := time.NewTimer(nameWait)
		select {
		case <-pause.C:
			continue
		case <-revoked: // the session of a cooperative group lives on
		case <-ss.native.Context().Done():
		}
		pause.Stop()
		return nil, nil //nolint:nilnil // see above
	}
}
