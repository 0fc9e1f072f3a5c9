// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package kafka

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/guard"
)

const (
	// sessionSlack is how long after [WithStopTimeout] sarama may take to end a session:
	// its last commit, its fetches under way, its leaving of the group.
	sessionSlack = 2 * time.Second
	// claimSlack is how long the last commit of a claim's retry topics may take.
	claimSlack = settleTime
	// closeWait is how long Close waits for a writer that nobody waits for any more.
	closeWait = time.Second
	// againFirst and againMost bound the wait before a group that has failed begins again.
	againFirst = 100 * time.Millisecond
	againMost  = 10 * time.Second
)

// Consume runs a consumer group with a handler of [Wrap] or [WrapHandler] until ctx ends,
// and closes the group. It joins again after each rebalance and, with a growing wait of
// 10s at most, after each error, which it logs. It returns nil after a stop,
// [sarama.ErrClosedConsumerGroup] if somebody else closed the group, and what the
// handler's Setup refuses for good, such as [ErrUnsuitable] and [guard.ErrClosed].
//
// It returns within [WithStopTimeout] and 2s after the end of ctx, whatever the network
// does. sarama alone does not: the requests by which it ends a session heed no context,
// take up to Net.DialTimeout and Net.ReadTimeout (30s) each if the broker is silent, and
// are repeated. If they have not ended in time, Consume leaves them and says so by its
// error. The process may end then: what is not committed is delivered again.
func Consume(ctx context.Context, group sarama.ConsumerGroup, topics []string, h sarama.ConsumerGroupHandler) error {
	log, limit, left := slog.New(slog.DiscardHandler), defaultStopTimeout+sessionSlack, func() string { return "" }
	if own, ok := h.(*handler); ok {
		log, limit, left = own.opts.log, own.opts.stopTimeout+sessionSlack, own.left
	}
	ended := make(chan error, 1)
	go func() { // ends with sarama's last request
		err := consumeAlways(ctx, group, topics, h, log)
		ended <- errors.Join(err, group.Close())
	}()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	late := time.NewTimer(limit)
	defer late.Stop()
	select {
	case err := <-ended:
		return err
	case <-late.C:
		err := fmt.Errorf("kafka: the consumer group has not ended %s after the stop%s: what is not committed is delivered again", limit, left())
		log.Warn("the stop is not complete", "error", err)
		return err
	}
}

func consumeAlways(ctx context.Context, group sarama.ConsumerGroup, topics []string, h sarama.ConsumerGroupHandler, log *slog.Logger) error {
	wait := againFirst
	for ctx.Err() == nil {
		err := group.Consume(ctx, topics, h)
		switch {
		case err == nil:
			wait = againFirst
		case errors.As(err, new(refusal)), errors.Is(err, ErrUnsuitable), errors.Is(err, guard.ErrClosed), errors.Is(err, sarama.ErrClosedConsumerGroup):
			return err
		case ctx.Err() == nil:
			log.Warn("the consumer group has failed and begins again", "topics", topics, "error", err, "in", wait)
			pause(ctx, wait)
			wait = min(2*wait, againMost)
		}
	}
	return nil
}

// left names the claims that have not ended.
func (h *handler) left() string {
	h.mu.Lock()
	sessions := make([]*session, 0, len(h.sessions))
	for _, ss := range h.sessions {
		sessions = append(sessions, ss)
	}
	h.mu.Unlock()
	var names []string
	for _, ss := range sessions {
		for _, c := range ss.open() {
			names = append(names, c.name)
		}
	}
	if len(names) == 0 {
		return ", and the broker does not answer"
	}
	slices.Sort(names)
	return ", nor have the claims " + strings.Join(names, ", ")
}

// endsWithin runs f, and waits for it no longer than d. f goes on by itself then.
func endsWithin(d time.Duration, f func() error) (ended bool, err error) {
	done := make(chan error, 1)
	go func() { done <- f() }()
	limit := time.NewTimer(d)
	defer limit.Stop()
	select {
	case err := <-done:
		return true, err
	case <-limit.C:
		return false, nil
	}
}

// closeWithin closes a writer, or says what it still has under way.
func (s *sender) closeWithin(closing func() error) error {
	ended, err := endsWithin(closeWait, closing)
	if ended {
		return err
	}
	return fmt.Errorf("kafka: the broker has not answered for %s: %d writes under way may arrive all the same", closeWait, len(s.slots))
}
