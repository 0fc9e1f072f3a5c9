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

// Wrap guards a consumer group: handle gets each message of each claim when the
// guard says so, and its return is the outcome. nil marks; any other error
// retries, and later dead-letters; [guard.Permanent], [guard.Backoff] and
// [guard.Ignore] say more.
//
//	h := guardkafka.Wrap(g, handle)
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

// Setup refuses what cannot be run safely, and begins to watch the session.
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
			return err // Cleanup follows all the same
		}
	}
	if h.opts.setup != nil {
		if err := h.opts.setup(s); err != nil {
			return err // Cleanup follows all the same
		}
	}
	ss.drainSpilled()
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
	ss.leaveAll()
	ss.flush()
	ss.stop()
	ss.logEnds()
	unopened := ss.unopened()
	h.mu.Lock()
	delete(h.sessions, s)
	if ss.joined {
		h.claimErr = cmp.Or(h.claimErr, unopened)
	} else if unopened != nil && time.Since(h.saidUnopened) >= sayAgain {
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
