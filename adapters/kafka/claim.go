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

// consume runs a claim of the function shape.
func (ss *session) consume(c *claim, revoked <-chan struct{}) error {
	ss.leave(c.name)
	src, err := openClaim(ss, c.name, revoked, func() (*guard.Source[*sarama.ConsumerMessage], error) {
		return guard.Open(ss.h.g, ss.sourceConfig(c), limits(ss.set.config), guard.Port[*sarama.ConsumerMessage](c), c.noting(ss.guarded(revoked)))
	})
	if src == nil {
		return err
	}
	ss.add(c)
	defer ss.remove(c)
	ran := make(chan struct{})
	go func() {
		defer close(ran)
		// Handlers may finish after the session's context is over. So that context does not end
		// the loop: End, below, does.
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

// guarded returns a function that calls the user's handler. Before, it waits while another claim
// is being left (makeWay). That wait is no attempt: if it took more than half of the handler's
// timeout, or if its own claim is revoked meanwhile, the function asks the guard to call it again
// for this message. revoked may be nil.
func (ss *session) guarded(revoked <-chan struct{}) func(context.Context, *sarama.ConsumerMessage) error {
	return func(ctx context.Context, m *sarama.ConsumerMessage) error {
		if ss.yieldUntil.Load() != 0 { // checked before ctx.Done(), which would allocate
			begun := time.Now()
			if !ss.yield(ctx.Done(), revoked) || 2*time.Since(begun) > ss.timeout {
				return guard.Backoff(errMakesWay, begun)
			}
		}
		return ss.h.handle(ctx, m)
	}
}

var errMakesWay = errors.New("kafka: another claim is being left")

// await returns when a claim is revoked, or when its loop (over), its session or its source has
// ended. Somebody else may end the source while a handler hangs. Meanwhile await marks settled
// messages. The loop itself marks only before it blocks and after 64 messages: with a backlog and
// slow handlers that takes minutes. The session has the claim until ConsumeClaim returns,
// whatever ends the source, so no mark comes too late.
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

// awaitEnd waits a short time for the end of an eager session that lost a claim: only the
// session's end tells whether the program stops. ConsumerGroup.Close ends claims and session in
// any order. A claim ends without its session when the log does not have its offset.
func (ss *session) awaitEnd() {
	late := time.NewTimer(endsTogether)
	defer late.Stop()
	select {
	case <-ss.native.Context().Done():
	case <-late.C:
	}
}

const endsTogether = 100 * time.Millisecond

// markEvery is how often settled messages are marked, at least.
const markEvery = 100 * time.Millisecond

// endSource ends a claim's source: because the program stops, because the group went on without
// this member and takes no commits of it, or because of a rebalance.
func (ss *session) endSource(topic string, end func(context.Context, guard.Reason) guard.Report) guard.Report {
	why, limit := guard.ReasonRebalance, grace(ss.set.config)
	switch cause := context.Cause(ss.native.Context()); {
	case ss.stopped():
		why, limit = guard.ReasonShutdown, min(limit, ss.h.opts.stopTimeout)
	case errors.Is(cause, sarama.ErrUnknownMemberId), errors.Is(cause, sarama.ErrIllegalGeneration), errors.Is(cause, sarama.ErrFencedInstancedId):
		why = guard.ReasonLost
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	report := end(ctx, why)
	ss.noteEnd(topic, why, report)
	return report
}

// stopped tells whether claims end because the program stops. ConsumerGroup.Close itself ends the
// claims; it ends the session of a cooperative group only later.
func (ss *session) stopped() bool {
	select {
	case <-ss.closed:
		return true
	default:
	}
	ctx := ss.native.Context()
	if given := parentOf(ctx); ss.closed != nil && given != nil {
		// A stop shows in closed or in the given context. A session that ends without either, and
		// without a cause, is that of a cooperative member that failed to join again.
		return given.Err() != nil
	}
	return ctx.Err() != nil && stopping(ctx)
}

func leftError(source string, r guard.Report) error {
	if len(r.Left) == 0 {
		return nil
	}
	return fmt.Errorf("kafka: claim %s: %d messages left, the oldest %s for %s: %s; they are delivered again",
		source, len(r.Left), r.Left[0].State, r.Left[0].Age.Round(time.Millisecond), r.Left[0].Why)
}

// sourceConfig is the configuration of a claim's source.
func (ss *session) sourceConfig(c *claim) guard.SourceConfig {
	o := &ss.h.opts
	return guard.SourceConfig{
		Name: c.name, System: cluster.System, Destination: c.topic, Partition: fmt.Sprint(c.partition),
		DeadLetters: o.letters, Policy: o.policy, Limiter: o.limiter,
	}
}

// nameWait is how long openClaim waits before it tries a taken name again. The name belongs to
// the claim of another member in this process, and this claim has no handle of its source.
// [guard.Source.Ended] would tell when that source begins to end, not when its name is free. The
// case is rare, and ends with either claim.
const nameWait = 20 * time.Millisecond

// openClaim opens the source of a claim. If another member of the group in this process still has
// a source of that name, openClaim waits until that source has ended. It returns nil without an
// error if the claim is over before it began. Any other refusal is final: the guard would refuse
// again.
func openClaim[M any](ss *session, name string, revoked <-chan struct{}, open func() (*guard.Source[M], error)) (*guard.Source[M], error) {
	o := &ss.h.opts
	said := false
	for free := false; ; { // free at the look before: the other may end after the refusal
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
