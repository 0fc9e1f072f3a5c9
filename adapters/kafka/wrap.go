// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/guard"
)

// Wrap makes a consumer group's handler from a function. handle gets each message of each claim
// when the guard allows it. Its return value is the outcome: nil marks the message; any other
// error leads to retries, and later to a dead letter. [guard.Permanent], [guard.Backoff] and
// [guard.Ignore] say more.
//
//	h := guardkafka.Wrap(g, handle)
//	for ctx.Err() == nil {
//		err := group.Consume(ctx, []string{"orders"}, h)
//	}
//
// One handler may serve several sessions, also of several groups. Each claim is a source of its
// own, named "topic/partition". With the default order its handler runs in the goroutine that
// reads the claim. Marks are coalesced, and pass only settled messages; sarama commits them.
//
// Setup refuses an unsuitable configuration, with all its faults at once, and Consume
// returns that error; see [Check]. Setup also returns [guard.ErrClosed] once the Guard is closed.
//
// A claim ends with its session, its partition's revoke, its Messages, or its source. Held
// messages are then dropped, unmarked, and the partition's next owner reads them again. In a
// rebalance a running handler has a second, and is then cancelled. The same holds for a cooperative
// member that fails to join again. If a heartbeat tells that the group has gone on without this
// member, the handler is cancelled at once. When the program stops, the handler has
// [WithStopTimeout] to end. If a handler outlives that, or in a rebalance the rebalance timeout
// (less a margin for the last commit), the claim ends with an error that counts the messages left
// and describes the oldest. The error goes to the group's Errors.
func Wrap(g *guard.Guard, handle func(context.Context, *sarama.ConsumerMessage) error, opts ...Option) sarama.ConsumerGroupHandler {
	h := newHandler(g, opts)
	h.handle = handle
	if handle == nil {
		h.err = errors.Join(h.err, errors.New("kafka: Wrap: the handler must not be nil"))
	}
	return h
}

// Setup refuses an unsafe configuration, and begins to watch the session.
func (h *handler) Setup(s sarama.ConsumerGroupSession) error {
	join, joined := s.Context().Value(joinKey{}).(func(*handler))
	if joined {
		join(h)
	}
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
		if err := t.topics.Fits(set.group, s.Claims()); err != nil {
			return err
		}
	}
	if errors.Is(h.g.Ready(), guard.ErrClosed) {
		return fmt.Errorf("kafka: %w", guard.ErrClosed)
	}
	ss := newSession(h, s, set)
	ss.joined = joined
	h.mu.Lock()
	h.sessions[s] = ss
	h.mu.Unlock()
	if h.existing != nil {
		ss.seeking.Store(true)
		err := h.existing.Setup(ss)
		ss.seeking.Store(false)
		if err != nil {
			return err // Cleanup still follows
		}
	}
	if h.opts.setup != nil {
		if err := h.opts.setup(s); err != nil {
			return err // Cleanup still follows
		}
	}
	ss.drainSpilled()
	ss.watch()
	return nil
}

// Cleanup marks the settled messages. sarama commits the marks next. With AutoCommit off it does
// not: the program may not have written yet what it has marked.
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
	ss.leaveAll()
	ss.flush()
	ss.stop()
	ss.logEnds()
	unopened := ss.unopened()
	h.mu.Lock()
	delete(h.sessions, s)
	if ss.joined {
		h.claimErr = cmp.Or(h.claimErr, unopened)
	} else if unopened != nil && time.Since(h.saidUnopened) >= repeatAfter {
		h.saidUnopened = time.Now()
		h.opts.log.Warn("the consumer group begins again", "error", unopened)
	}
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
	ss.hands(native)
	c := newClaim(ss, native)
	revoked := ss.revoked(native)
	ss.sayLost(c, revoked)
	consume := ss.consume
	switch {
	case h.passive():
		consume = ss.consumePassive
	case h.opts.retries != nil:
		consume = ss.consumeParking
	}
	err := consume(c, revoked)
	ss.returned(native, revoked)
	if err != nil && !ss.cut(err) {
		h.mu.Lock()
		h.claimErr = err
		h.mu.Unlock()
	}
	return err
}
