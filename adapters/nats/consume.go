// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package nats

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/guard"
)

// Consume guards a pull consumer with explicit acks: it pulls, and handle gets
// the messages when the guard says so. nil acks; any other error retries, and
// later dead-letters; guard.Permanent, guard.Backoff and guard.Ignore say more.
// handle must not settle the message itself.
//
// It blocks until ctx ends and then stops in order: nothing more is pulled,
// handlers in flight finish within [WithStopTimeout], what is left is given
// back by one nak each (not on a message's last delivery), acks are flushed.
// Then it returns nil, or an error that names what could not be finished. It
// returns [ErrConsumerGone] when the consumer has been deleted,
// [ErrConnectionClosed] when the connection has ended, and [guard.ErrClosed]
// when the Guard or the source has. Everything else, such as a server that
// restarts, it waits out.
//
// Everything it took from the server is extended at a third of the consumer's
// AckWait, so a hold costs no deliveries. While the source is on hold with a
// full window no pull request is open.
//
// Beside the guard's goroutines and nats.go's it starts two, which end before it
// returns; only a handler that ignores its cancelled context for ever keeps its
// own.
func Consume(ctx context.Context, g *guard.Guard, consumer jetstream.Consumer, handle func(context.Context, jetstream.Msg) error, opts ...Option) error {
	if handle == nil {
		return errors.New("nats: Consume: the handler must not be nil")
	}
	o, err := newOptions(opts)
	if err != nil {
		return err
	}
	s, err := describe(ctx, consumer, &o)
	if ctx.Err() != nil {
		return nil // it ended before it began
	}
	if err != nil {
		return err
	}
	conn := connOf(consumer)
	p := &consumePort{msgPort: newMsgPort(s.info.Name, conn, &o)}
	src, err := guard.Open(g, s.config, s.limits, p, handle)
	if err != nil {
		return fmt.Errorf("nats: consume %s: %w", s.config.Name, err)
	}
	if err := override(src, o.window); err != nil {
		src.End(ctx, guard.ReasonShutdown)
		return fmt.Errorf("nats: consume %s: WithWindow: %w", s.config.Name, err)
	}
	window := src.State().Window
	p.copies = newCopies(window)
	p.in = &intake{
		consumer: consumer, feed: src.Feed(), log: o.log, name: s.config.Name, port: &p.msgPort,
		conn: conn, most: s.info.Config.MaxRequestMaxBytes,
		batch: s.batch(window), expiry: s.expiry(), patience: s.limits.AckWait / 6,
		room: true, drain: make(chan struct{}, 1), more: make(chan struct{}, 1), trouble: make(chan error, 1),
	}

	// Two goroutines: the loop, and one that stops the intake when the Guard or
	// an operator has ended the source. Handlers finish after ctx ends, so it is
	// not its context that stops the loop but End, below.
	reading, stopReading := context.WithCancel(ctx)
	defer stopReading()
	ran := make(chan struct{})
	go func() {
		defer close(ran)
		_ = src.RunFeed(context.WithoutCancel(ctx)) // it ends with the source
	}()
	go func() {
		defer stopReading()
		look := time.NewTicker(endedPoll) // a handler that hangs keeps RunFeed from returning
		defer look.Stop()
		for !src.State().Ended {
			select {
			case <-look.C:
			case <-ran:
				return
			case <-reading.Done():
				return
			}
		}
	}()
	gone := p.in.run(reading)
	asked := ctx.Err() != nil

	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), o.stopTimeout)
	defer cancel()
	report := src.End(grace, guard.ReasonShutdown)
	if len(report.Left) == 0 {
		<-ran
	}
	if errors.Is(gone, ErrConsumerGone) || errors.Is(gone, ErrConnectionClosed) {
		return gone // with it, who could be given anything back
	}
	// A look at the consumer makes the server forget pull requests that nobody
	// listens to any more. It would try to serve one with the first message given
	// back, and then put that one behind the others.
	errs := []error{gone}
	if rest := append(p.rest(), p.in.waiting(nil)...); len(rest) > 0 {
		errs = append(errs, flush(consumer), p.nakAll(rest, s.limits.MaxDeliver))
	}
	if err := flush(consumer); err != nil {
		errs = append(errs, fmt.Errorf("nats: stop %s: flush: %w", s.config.Name, err))
	}
	if n := len(report.Left); n > 0 {
		errs = append(errs, fmt.Errorf("nats: stop %s: %d messages left after %s (WithStopTimeout), the oldest %s: %s; they are delivered again",
			s.config.Name, n, o.stopTimeout, report.Left[0].State, report.Left[0].Why))
	}
	if !asked && gone == nil {
		errs = append(errs, guard.ErrClosed)
	}
	err = errors.Join(errs...)
	if errors.Is(err, nats.ErrConnectionClosed) {
		return fmt.Errorf("%w: %w", ErrConnectionClosed, err)
	}
	return err
}

// endedPoll is how soon the intake stops when the source was ended elsewhere.
const endedPoll = 100 * time.Millisecond

// flush makes sure that the server has read what was published before: it
// answers in order.
func flush(consumer jetstream.Consumer) error {
	ctx, cancel := context.WithTimeout(context.Background(), infoTimeout)
	defer cancel()
	_, err := consumer.Info(ctx)
	return err
}

// consumePort is the port of the function shape.
type consumePort struct {
	msgPort
	in *intake

	back sync.Mutex
	rem  []jetstream.Msg // what End gave back
}

// Extend also keeps alive what waits in front of the feed.
func (p *consumePort) Extend(ms []jetstream.Msg) { p.msgPort.Extend(p.in.waiting(ms)) }

func (p *consumePort) Demand(n int) { p.in.demand(n) }

// Return keeps the messages for the end of Consume, which gives them back
// together with the stash, in the order of the stream.
func (p *consumePort) Return(ms []jetstream.Msg, _ guard.Reason) error {
	p.back.Lock()
	defer p.back.Unlock()
	p.rem = append(p.rem, ms...)
	return nil
}

func (p *consumePort) rest() []jetstream.Msg {
	p.back.Lock()
	defer p.back.Unlock()
	return p.rem
}

// source is what a consumer's configuration means to the guard.
type source struct {
	info   *jetstream.ConsumerInfo
	config guard.SourceConfig
	limits guard.Limits
}

// describe asks the server about the consumer and refuses one that the guard
// cannot keep its promises with.
func describe(ctx context.Context, consumer jetstream.Consumer, o *options) (source, error) {
	if consumer == nil {
		return source{}, errors.New("nats: the consumer must not be nil")
	}
	info, err := consumer.Info(ctx)
	if err != nil {
		if errors.Is(err, jetstream.ErrConsumerNotFound) {
			err = fmt.Errorf("%w: %w", ErrConsumerGone, err)
		}
		if errors.Is(err, nats.ErrConnectionClosed) {
			err = fmt.Errorf("%w: %w", ErrConnectionClosed, err)
		}
		if errors.Is(err, jetstream.ErrOrderedConsumerNotCreated) {
			err = unsuitable("an ordered consumer has no acks: use a durable with AckPolicy explicit")
		}
		return source{}, fmt.Errorf("nats: consumer info: %w", err)
	}
	name := info.Stream + "/" + info.Name
	if p := info.Config.AckPolicy; p != jetstream.AckExplicitPolicy {
		return source{}, unsuitable("consumer %s: AckPolicy is %s, want explicit: nats consumer add %s NAME --ack explicit --pull", name, p, info.Stream)
	}
	s := source{info: info, limits: limitsOf(&info.Config)}
	s.config = guard.SourceConfig{
		Name: name, System: system, Destination: name,
		DeadLetters: o.letters, Policy: o.policy, Limiter: o.limiter,
	}
	if o.name != "" {
		s.config.Name, s.config.Destination = o.name, o.name
	}
	return s, nil
}

func limitsOf(c *jetstream.ConsumerConfig) guard.Limits {
	l := guard.Limits{AckWait: c.AckWait, MaxUnacked: max(0, c.MaxAckPending), MaxDeliver: max(0, c.MaxDeliver)}
	for _, d := range c.BackOff { // it replaces AckWait
		if d > 0 && (d < l.AckWait || l.AckWait <= 0) {
			l.AckWait = d
		}
	}
	return l
}

// batch is how many messages a pull may have outstanding: half the window, so
// that what has to leave nats.go's buffer in a hurry is bounded by it.
func (s *source) batch(window int) int {
	n := max(1, min(maxPull, window/2))
	if most := s.info.Config.MaxRequestBatch; most > 0 {
		n = min(n, most)
	}
	return n
}

func (s *source) expiry() time.Duration {
	if most := s.info.Config.MaxRequestExpires; most > 0 {
		return max(time.Second, min(pullExpiry, most))
	}
	return pullExpiry
}
