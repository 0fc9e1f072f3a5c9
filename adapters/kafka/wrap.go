// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package kafka

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/guard"
)

// Wrap guards a consumer group: handle gets each message of each claim when the
// guard says so, and its return is the outcome. nil marks; any other error
// retries, and later dead-letters; [guard.Permanent], [guard.Backoff] and
// [guard.Ignore] say more.
//
//	h := kafka.Wrap(g, handle)
//	for ctx.Err() == nil {
//		err := group.Consume(ctx, []string{"orders"}, h)
//	}
//
// One handler may serve several sessions, also of several groups. Each claim is
// a source, "topic/partition", of its own; with the default order its handler
// runs in the goroutine that reads the claim. Marks are coalesced, and only ever
// pass messages that are settled; sarama commits them.
//
// What is wrong with the configuration Setup returns, all of it at once, so
// Consume does; see [Check]. Setup also returns [guard.ErrClosed] once the Guard
// is closed. A claim ends with its session, its partition's revoke, its
// Messages, or its source: what is held then is dropped, unmarked, and whoever
// gets the partition next reads it again. A handler that is running then is
// cancelled at once in a rebalance, and has [WithStopTimeout] when the program
// stops. One that outlives even the rebalance timeout is named by the error that
// the claim ends with, which goes to the group's Errors.
func Wrap(g *guard.Guard, handle func(context.Context, *sarama.ConsumerMessage) error, opts ...Option) sarama.ConsumerGroupHandler {
	h := newHandler(g, opts)
	h.handle = handle
	if handle == nil {
		h.err = errors.Join(h.err, errors.New("kafka: Wrap: the handler must not be nil"))
	}
	return h
}

// handler is a consumer group's handler in either shape.
type handler struct {
	g        *guard.Guard
	handle   func(context.Context, *sarama.ConsumerMessage) error // function shape
	existing sarama.ConsumerGroupHandler                          // passive shape
	opts     options
	err      error // what is wrong with the options

	mu       sync.Mutex
	sessions map[sarama.ConsumerGroupSession]*session
	refused  error               // what the guard has refused a claim for, until somebody takes it
	claimErr error               // what a claim has ended with; Consume takes it
	failing  map[string]*failing // by topic; passive shape
}

func newHandler(g *guard.Guard, opts []Option) *handler {
	h := &handler{g: g, sessions: make(map[sarama.ConsumerGroupSession]*session), failing: make(map[string]*failing)}
	h.opts, h.err = newOptions(g, opts)
	if g == nil {
		h.err = errors.Join(h.err, errors.New("kafka: the guard must not be nil"))
	}
	return h
}

// refusal is an error of Setup that will be the same the next time.
type refusal struct{ error }

func (r refusal) Unwrap() error { return r.error }

// refuse keeps what the guard refuses: sarama would begin session after session and tell
// it to the group's Errors alone. [Consume] returns it, or the next Setup does.
func (h *handler) refuse(err error) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.refused = refusal{err}
	return h.refused
}

func (h *handler) takeRefused() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	err := h.refused
	h.refused = nil
	return err
}

func (h *handler) passive() bool { return h.handle == nil }

// Setup refuses what cannot be run safely, and begins to watch the session.
func (h *handler) Setup(s sarama.ConsumerGroupSession) error {
	h.joinConsume(s)
	if h.g == nil {
		return refusal{h.err}
	}
	if err := h.takeRefused(); err != nil {
		return err
	}
	set, err := h.opts.settingsOf(h.g, s)
	if err == nil {
		err = h.opts.refused(h.g, set.config, h.passive())
	}
	if err = errors.Join(h.err, err); err != nil {
		return refusal{err}
	}
	if t := h.opts.retries; t != nil {
		if err := t.fits(set.group, s.Claims()); err != nil {
			return err
		}
	}
	if errors.Is(h.g.Ready(), guard.ErrClosed) {
		return fmt.Errorf("kafka: %w", guard.ErrClosed)
	}
	ss := newSession(h, s, set)
	h.mu.Lock()
	h.sessions[s] = ss
	h.mu.Unlock()
	if h.existing != nil {
		if err := h.existing.Setup(ss); err != nil {
			return err // Cleanup follows all the same
		}
	}
	if h.opts.setup != nil {
		if err := h.opts.setup(s); err != nil {
			return err // Cleanup follows all the same
		}
	}
	ss.watch()
	return nil
}

// Cleanup marks what is settled. sarama commits it next, unless the program commits by
// itself: what it has marked it may not have written yet.
func (h *handler) Cleanup(s sarama.ConsumerGroupSession) error {
	ss := h.session(s)
	if ss == nil {
		return nil
	}
	var err error
	if h.existing != nil {
		err = h.existing.Cleanup(ss)
	}
	if h.opts.cleanup != nil {
		err = h.opts.cleanup(s)
	}
	ss.flush()
	ss.stop()
	ss.logEnds()
	h.mu.Lock()
	delete(h.sessions, s)
	h.mu.Unlock()
	return err
}

func (h *handler) session(s sarama.ConsumerGroupSession) *session {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.sessions[s]
}

// ConsumeClaim guards one claim until it ends. It starts a goroutine for the
// source's loop, which ends with the claim, unless a handler hangs.
func (h *handler) ConsumeClaim(s sarama.ConsumerGroupSession, native sarama.ConsumerGroupClaim) error {
	ss := h.session(s)
	if ss == nil {
		return errors.New("kafka: ConsumeClaim without Setup")
	}
	c := newClaim(ss, native)
	revoked := ss.revoked(native)
	consume := ss.consume
	if h.passive() {
		consume = ss.consumePassive
	}
	err := consume(c, revoked)
	if err != nil {
		h.mu.Lock()
		h.claimErr = err
		h.mu.Unlock()
	}
	return err
}

// consume is the function shape.
func (ss *session) consume(c *claim, revoked <-chan struct{}) error {
	if ss.h.opts.retries != nil {
		return ss.consumeParking(c, revoked)
	}
	src, err := openClaim(ss, ss.sourceConfig(c), guard.Port[*sarama.ConsumerMessage](c), ss.guarded, revoked)
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
	return leftError(c.name, report)
}

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
			return
		case <-ss.native.Context().Done():
			return
		}
	}
}

// markEvery is how soon what is settled is marked at the latest.
const markEvery = 100 * time.Millisecond

// endSource ends a claim's source for the reason that the session shows.
func (ss *session) endSource(topic string, end func(context.Context, guard.Reason) guard.Report) guard.Report {
	why, limit := guard.ReasonRebalance, grace(ss.set.config)
	if ctx := ss.native.Context(); ctx.Err() != nil && stopping(ctx) {
		why, limit = guard.ReasonShutdown, min(limit, ss.h.opts.stopTimeout)
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	report := end(ctx, why)
	ss.noteEnd(topic, why, report)
	return report
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
		Name: c.name, System: system, Destination: c.topic, Partition: fmt.Sprint(c.partition),
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
func openClaim[M any](ss *session, cfg guard.SourceConfig, port guard.Port[M], handle func(context.Context, M) error, revoked <-chan struct{}) (*guard.Source[M], error) {
	o := &ss.h.opts
	for waited, said := false, false; ; waited = true {
		src, err := guard.Open(ss.h.g, cfg, limits(ss.set.config), port, handle)
		if err == nil {
			return src, nil
		}
		taken := ss.h.g.Source(cfg.Name) != nil
		if errors.Is(err, guard.ErrClosed) || !taken && waited {
			return nil, ss.h.refuse(fmt.Errorf("kafka: claim %s: %w", cfg.Name, err))
		}
		if taken && !said {
			said = true
			o.log.Warn("claim waits for a source of its name to end", "source", cfg.Name, "error", err)
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
