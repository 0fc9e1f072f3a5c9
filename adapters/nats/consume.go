// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/guard"
)

// Consume guards a pull consumer with explicit acks: it pulls messages and calls handle when
// the guard says so. If handle returns nil, the message is acked. Any other error means
// retries, and later a dead letter; guard.Permanent, guard.Backoff and guard.Ignore say
// more. handle must not settle the message itself.
//
// Consume blocks until ctx ends, and then stops in this order:
//
//   - It pulls no more.
//   - Running handlers finish within [WithStopTimeout].
//   - Each other message goes back by one nak, except on the message's last delivery.
//   - Acks are flushed.
//
// It then returns nil, or an error that names the unfinished parts: within 5s after the stop
// timeout, whatever the network does.
//
// Consume returns early with [ErrConsumerGone] if the consumer is deleted, with
// [ErrConnectionClosed] if the connection has ended, and with [guard.ErrClosed] if the Guard
// or the source has. It waits out other faults, such as a server that is away at the start or
// restarts later.
//
// Consume extends every message from the server each third of the consumer's AckWait, so a
// hold costs no deliveries. While the source is on hold with a full window, no pull request
// is open.
//
// Besides the goroutines of the guard and of nats.go, Consume starts three, which end before
// it returns, with two exceptions. A handler that ignores its cancelled context keeps its
// goroutine. A write that the network blocks keeps its goroutine for the connection's
// FlusherTimeout.
func Consume(ctx context.Context, g *guard.Guard, consumer jetstream.Consumer, handle func(context.Context, jetstream.Msg) error, opts ...Option) error {
	if handle == nil {
		return errors.New("nats: Consume: the handler must not be nil")
	}
	o, err := sourceOptions(g, opts)
	if err != nil {
		return err
	}
	s, err := await(ctx, consumer, &o)
	if ctx.Err() != nil {
		return nil // it ended before it began
	}
	if err != nil {
		return err
	}
	conn := connOf(consumer)
	warnOfConn(conn, &o, s.config.Name)
	warnOfMaxDeliver(s.limits.MaxDeliver, &o, s.info.Stream, s.info.Name, s.config.Name)
	p := &consumePort{msgPort: newMsgPort(s.info.Name, conn, &o)}
	if policy := cmp.Or(s.config.Policy, new(g.Config().Policy)); policy.Spill {
		handle = allowInProgress(handle)
	}
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
		batch: s.batch(window), expiry: s.expiry(), patience: s.limits.AckWait / 6, lagEvery: o.lagEvery,
		room: true, drain: make(chan struct{}, 1), more: make(chan struct{}, 1), trouble: make(chan error, 1),
	}

	// Three goroutines: the loop, the intake, and one that stops the intake when the Guard
	// or an operator has ended the source. Handlers may finish after ctx ends, so End stops
	// the loop below, and not ctx.
	reading, stopReading := context.WithCancel(ctx)
	defer stopReading()
	ran := make(chan struct{})
	go func() {
		defer close(ran)
		_ = src.RunFeed(context.WithoutCancel(ctx)) // it ends with the source
	}()
	go func() {
		defer stopReading()
		select {
		case <-src.Ended(): // a handler that hangs keeps RunFeed from returning
		case <-ran:
		case <-reading.Done():
		}
	}()
	intake := make(chan error, 1)
	go func() { intake <- p.in.run(reading) }()
	var gone error
	select {
	case gone = <-intake:
	case <-reading.Done():
	}
	asked := ctx.Err() != nil
	st := newStopping(&o)
	if gone == nil {
		if err := st.wait(intake, max(o.stopTimeout/2, intakeGrace)); !errors.Is(err, errHeldUp) {
			gone = err
		}
	}
	lost := errors.Is(gone, ErrConsumerGone) || errors.Is(gone, ErrConnectionClosed)
	why := guard.ReasonShutdown
	if lost {
		why = guard.ReasonLost
	}
	grace, cancel := context.WithDeadline(context.WithoutCancel(ctx), st.began.Add(o.stopTimeout))
	defer cancel()
	report := src.End(grace, why)
	if len(report.Left) == 0 {
		st.until(ran)
	}
	if lost {
		return gone // nobody is left to give messages back to
	}
	errs := []error{gone}
	rest := append(p.rest(), p.in.waiting(nil)...)
	back := make(chan error, 1)
	go func() { back <- p.giveBack(consumer, rest, s.limits.MaxDeliver, st.by) }()
	given := st.wait(back, stopGrace)
	switch {
	case given == nil:
	case len(rest) > 0:
		errs = append(errs, fmt.Errorf("nats: stop %s: whether %d messages are given back is not known; they are delivered again after the AckWait of %s at the latest: %w",
			s.config.Name, len(rest), s.limits.AckWait, given))
	default:
		errs = append(errs, fmt.Errorf("nats: stop %s: whether the last acks have arrived is not known: %w", s.config.Name, given))
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

const (
	// stopGrace is how long a stop may take after its timeout, for the guard's last work and
	// to give messages back.
	stopGrace = 4500 * time.Millisecond
	// intakeGrace is the least time that the intake has to empty the client's buffer.
	intakeGrace = time.Second
)

// errHeldUp means that a call did not return in time.
var errHeldUp = errors.New("the connection does not take it")

// stopping bounds the end of Consume. Any call of the client may block for FlusherTimeout on
// a connection that takes no bytes, so Consume waits for no call after by.
type stopping struct{ began, by time.Time }

func newStopping(o *options) stopping {
	now := time.Now()
	return stopping{began: now, by: now.Add(o.stopTimeout + stopGrace)}
}

// wait waits for an answer for d, but not after by. Without an answer it returns errHeldUp.
func (s stopping) wait(answer <-chan error, d time.Duration) error {
	timer := time.NewTimer(min(d, time.Until(s.by)))
	defer timer.Stop()
	select {
	case err := <-answer:
		return err
	case <-timer.C:
		return errHeldUp
	}
}

func (s stopping) until(done <-chan struct{}) {
	timer := time.NewTimer(time.Until(s.by))
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
	}
}

// giveBack gives back the rest of Consume's messages. It waits until the server has read the
// naks and all acks before them: a server answers requests in order.
//
// A request for the consumer's info makes the server forget pull requests without a listener.
// Otherwise it would try to serve such a request with the first message given back, and then
// put that message behind the others. So giveBack asks for the info before the naks, too.
func (p *consumePort) giveBack(consumer jetstream.Consumer, rest []jetstream.Msg, maxDeliver int, by time.Time) error {
	if now := time.Now(); by.Sub(now) > stopGrace {
		by = now.Add(stopGrace)
	}
	ctx, cancel := context.WithDeadline(context.Background(), by)
	defer cancel()
	_, err := consumer.Info(ctx)
	if len(rest) == 0 {
		return err
	}
	if back := p.nakAll(rest, maxDeliver); back != nil || err != nil {
		return errors.Join(err, back)
	}
	_, err = consumer.Info(ctx)
	return err
}

// consumePort is the port of the function shape.
type consumePort struct {
	msgPort
	in *intake

	back     sync.Mutex
	returned []jetstream.Msg // messages that End returned
}

// Extend also keeps alive the messages in the stash, in front of the feed.
func (p *consumePort) Extend(ms []jetstream.Msg) { p.msgPort.Extend(p.in.waiting(ms)) }

func (p *consumePort) Demand(n int) { p.in.demand(n) }

// Return keeps the messages until the end of Consume, which gives them back together with
// the stash, in the order of the stream.
func (p *consumePort) Return(ms []jetstream.Msg, _ guard.Reason) error {
	p.back.Lock()
	defer p.back.Unlock()
	p.returned = append(p.returned, ms...)
	return nil
}

func (p *consumePort) rest() []jetstream.Msg {
	p.back.Lock()
	defer p.back.Unlock()
	return p.returned
}

// source has a consumer's configuration and the settings for the guard that follow from it.
type source struct {
	info   *jetstream.ConsumerInfo
	config guard.SourceConfig
	limits guard.Limits
}

const (
	awaitBase = 100 * time.Millisecond
	awaitMax  = 5 * time.Second
)

// await describes the consumer, and waits for a server that is away until ctx ends.
func await(ctx context.Context, consumer jetstream.Consumer, o *options) (source, error) {
	said := ""
	for pause := time.Duration(0); ; pause = min(max(2*pause, awaitBase), awaitMax) {
		wait := time.NewTimer(pause)
		select {
		case <-wait.C:
		case <-ctx.Done():
			wait.Stop()
			return source{}, context.Cause(ctx)
		}
		try, cancel := context.WithTimeout(ctx, infoTimeout)
		s, err := describe(try, consumer, o)
		cancel()
		switch {
		case err == nil && pause > 0:
			o.log.Info("the server is there", "source", s.config.Name)
			return s, nil
		case err == nil || !away(err):
			return s, err
		case err.Error() != said:
			said = err.Error()
			o.log.Warn("the server is away: waiting for it", "source", nameOf(consumer, o), "error", err)
		}
	}
}

// away reports whether an error says that no server answers at the moment.
func away(err error) bool {
	for _, passing := range []error{
		context.DeadlineExceeded, nats.ErrTimeout, nats.ErrNoResponders, jetstream.ErrJetStreamNotEnabled,
		nats.ErrDisconnected, nats.ErrConnectionReconnecting, nats.ErrReconnectBufExceeded,
	} {
		if errors.Is(err, passing) {
			return true
		}
	}
	if _, ok := errors.AsType[net.Error](err); ok { // from the socket
		return true
	}
	// 503: a cluster without a leader, or a server that starts. 500: the consumer's own
	// servers are away, or older.
	api, ok := errors.AsType[*jetstream.APIError](err)
	return ok && api.Code >= 500
}

// nameOf is a source's name before the server has described its consumer.
func nameOf(consumer jetstream.Consumer, o *options) string {
	if info := consumer.CachedInfo(); o.name == "" && info != nil {
		return info.Stream + "/" + info.Name
	}
	return o.name
}

// describe asks the server about the consumer. It refuses a consumer with which the guard
// cannot keep its promises.
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
	for _, d := range c.BackOff { // BackOff replaces AckWait
		if d > 0 && (d < l.AckWait || l.AckWait <= 0) {
			l.AckWait = d
		}
	}
	return l
}

// batch is how many messages a pull may have outstanding. Half the window bounds the
// messages that may have to leave nats.go's buffer quickly.
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
