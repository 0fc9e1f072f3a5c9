// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/IBM/sarama"

	"github.com/stormguard-mq/stormguard/guard"
)

const (
	// sessionSlack is how long after [WithStopTimeout] sarama may take to end a session: for its
	// last commit, its running fetches and leaving the group.
	sessionSlack = 2 * time.Second
	// claimSlack is how long the last commit of a claim's retry topics may take.
	claimSlack = settleTime
	// againFirst and againMost bound the wait before a group that has failed begins again.
	againFirst = 100 * time.Millisecond
	againMost  = 10 * time.Second
)

// Consume runs a consumer group until ctx ends, and then closes the group. h is a handler of
// [Wrap] or [WrapHandler], or decorates one. Consume joins again after each rebalance and after
// each error. After errors it waits first, each time longer, up to 10s.
//
// It logs a new error at once, and the same error again after 30s at the earliest, with its
// count. It logs to the handler's logger. Before the first Setup of a decorated handler, that is
// [slog.Default].
//
// Consume returns nil after a stop. It returns an error at once if another try cannot help:
//
//   - the handler refuses to start, for example with [ErrUnsuitable] or [guard.ErrClosed];
//   - the guard refuses one of the handler's claims;
//   - somebody else closed the group or its client ([sarama.ErrClosedConsumerGroup],
//     [sarama.ErrClosedClient]).
//
// It returns within [WithStopTimeout] and 2s after the end of ctx, whatever the network does.
// sarama alone does not: the requests that end a session ignore the context and are repeated. If
// the broker is silent, each takes up to Net.DialTimeout and Net.ReadTimeout (30s each). If they
// have not ended in time, Consume leaves them running and returns an error that says so. The
// process may end then: uncommitted messages are delivered again.
func Consume(ctx context.Context, group sarama.ConsumerGroup, topics []string, h sarama.ConsumerGroupHandler) error {
	c := &consuming{log: slog.Default(), topics: topics}
	switch own, ok := h.(*handler); {
	case len(topics) == 0:
		return errors.Join(errors.New("kafka: Consume: at least one topic is needed"), group.Close())
	case h == nil:
		return errors.Join(errors.New("kafka: Consume: the handler must not be nil"), group.Close())
	case ok && own.err != nil:
		return errors.Join(own.err, group.Close())
	case ok:
		c.join(own)
	}
	ended := make(chan error, 1)
	go func() { // ends with sarama's last request
		err := c.always(context.WithValue(ctx, joinKey{}, c.join), group, topics, h)
		ended <- errors.Join(err, group.Close())
	}()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	limit := c.limit()
	late := time.NewTimer(limit)
	defer late.Stop()
	select {
	case err := <-ended:
		return err
	case <-late.C:
		err := fmt.Errorf("kafka: the consumer group has not ended %s after the stop%s: what is not committed is delivered again", limit, c.left())
		c.logger().Warn("the stop is not complete", "error", err)
		return err
	}
}

// consuming is one call of Consume.
type consuming struct {
	topics []string

	mu    sync.Mutex
	log   *slog.Logger
	own   []*handler // the handlers that this call runs
	said  string     // the error that was logged last
	at    time.Time  // when said was logged
	times int        // how often said has come since at
}

// join adds a handler that this call runs. Setup of that handler calls join in each session.
func (c *consuming) join(h *handler) {
	h.seen(c.topics)
	c.mu.Lock()
	defer c.mu.Unlock()
	if slices.Contains(c.own, h) {
		return
	}
	if len(c.own) == 0 {
		c.log = h.opts.log
	}
	c.own = append(c.own, h)
}

func (c *consuming) handlers() []*handler {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.own)
}

func (c *consuming) logger() *slog.Logger {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.log
}

// limit is how long Consume waits after the end of its context.
func (c *consuming) limit() time.Duration {
	stop := time.Duration(0)
	for _, h := range c.handlers() {
		stop = max(stop, h.opts.stopTimeout)
	}
	return cmp.Or(stop, defaultStopTimeout) + sessionSlack
}

// always runs session after session.
func (c *consuming) always(ctx context.Context, group sarama.ConsumerGroup, topics []string, h sarama.ConsumerGroupHandler) error {
	wait := againFirst
	for ctx.Err() == nil {
		begun := time.Now()
		err := group.Consume(ctx, topics, h)
		if time.Since(begun) > againMost {
			wait = againFirst
		}
		refused, claims := c.ends()
		switch err := cmp.Or(refused, err, claims); {
		case err == nil:
			wait = againFirst
		case final(err):
			return err
		case ctx.Err() == nil:
			c.warn(topics, err, wait)
			again := time.NewTimer(wait)
			select {
			case <-again.C:
			case <-ctx.Done():
				again.Stop()
			}
			wait = min(2*wait, againMost)
		}
	}
	return nil
}

// final tells whether the next try would return the same error.
func final(err error) bool {
	return errors.As(err, new(refusal)) || errors.Is(err, ErrUnsuitable) || errors.Is(err, guard.ErrClosed) ||
		errors.Is(err, sarama.ErrClosedConsumerGroup) || errors.Is(err, sarama.ErrClosedClient)
}

// ends takes the refusals of the guard and the errors that claims have ended with. sarama sends
// both only to the group's Errors, and its Consume returns nil.
func (c *consuming) ends() (refused, claims error) {
	for _, h := range c.handlers() {
		refused = cmp.Or(refused, h.takeRefused())
		h.mu.Lock()
		claims = cmp.Or(claims, h.claimErr)
		h.claimErr = nil
		h.mu.Unlock()
	}
	return refused, claims
}

// warn logs a new error at once, and the same error again after repeatAfter, with its count.
func (c *consuming) warn(topics []string, err error, wait time.Duration) {
	c.mu.Lock()
	log, text, now := c.log, err.Error(), time.Now()
	if text != c.said {
		c.said, c.at, c.times = text, time.Time{}, 0
	}
	c.times++
	times := c.times
	say := now.Sub(c.at) >= repeatAfter
	if say {
		c.at, c.times = now, 0
	}
	c.mu.Unlock()
	if say {
		log.Warn("the consumer group has failed and begins again", "topics", topics, "error", err, "times", times, "in", wait)
	}
}

// left names the claims that have not ended.
func (c *consuming) left() string {
	var names []string
	for _, h := range c.handlers() {
		h.mu.Lock()
		sessions := slices.Collect(maps.Values(h.sessions))
		h.mu.Unlock()
		for _, ss := range sessions {
			for _, claim := range ss.open() {
				names = append(names, claim.name)
			}
		}
	}
	if len(names) == 0 {
		return ", and the broker does not answer"
	}
	slices.Sort(names)
	return ", nor have the claims " + strings.Join(names, ", ")
}
