// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardnats

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/internal/credit"
)

// MoverConfig describes a [Mover]. Stream, Consumer and DLQ must be set.
type MoverConfig struct {
	// Stream and Consumer name the consumer whose lost messages are moved.
	Stream, Consumer string

	// DLQ is the writer of the dead letters: usually the [*DLQ] of the guarded consumer. So
	// a message that both give up on has one letter.
	DLQ dlq.Writer

	// Advisories is the stream that keeps the server's advisories. Unset means
	// "stormguard-advisories-<Stream>-<Consumer>". If another stream already takes
	// $JS.EVENT.ADVISORY subjects, name that stream, since the subjects of two streams must
	// not overlap.
	Advisories string

	// Parking is the stream that keeps the copies until the budget releases them.
	// Unset means "stormguard-parked-<Stream>-<Consumer>".
	Parking string

	// Budget limits the release of letters; see [dlq.BudgetConfig]. A message that the
	// server gave up on pays as class Exhausted, a message that a consumer terminated as
	// Permanent. Each start begins with full balances.
	Budget dlq.BudgetConfig

	// NoCreate refuses streams that do not exist, instead of creating them.
	NoCreate bool

	// Replicas is the number of replicas of new streams, 1 to 5; unset means 1.
	Replicas int
}

func (c MoverConfig) withDefaults() MoverConfig {
	if c.Advisories == "" {
		c.Advisories = "stormguard-advisories-" + c.Stream + "-" + c.Consumer
	}
	if c.Parking == "" {
		c.Parking = "stormguard-parked-" + c.Stream + "-" + c.Consumer
	}
	if c.Replicas == 0 {
		c.Replicas = 1
	}
	return c
}

// Validate reports all wrong fields in one error.
func (c MoverConfig) Validate() error {
	d := c.withDefaults()
	var errs []error
	for _, f := range []struct{ name, value string }{
		{"Stream", c.Stream}, {"Consumer", c.Consumer}, {"Advisories", d.Advisories}, {"Parking", d.Parking},
	} {
		if (DLQConfig{Stream: f.value}).Validate() != nil {
			errs = append(errs, fmt.Errorf("nats: MoverConfig.%s: %q is not a name", f.name, f.value))
		}
	}
	if c.DLQ == nil {
		errs = append(errs, errors.New("nats: MoverConfig.DLQ: must not be nil"))
	}
	if d.Replicas < 1 || d.Replicas > 5 {
		errs = append(errs, fmt.Errorf("nats: MoverConfig.Replicas: %d is not within 1 and 5", c.Replicas))
	}
	if !c.Budget.Off {
		errs = append(errs, c.Budget.Validate(0))
	}
	return errors.Join(errs...)
}

const (
	moverAckWait = 30 * time.Second
	moverPoll    = time.Second // between two looks at the source's ack floor, or for a credit
	moverCall    = 10 * time.Second
	moverSkew    = 10 * time.Second // largest difference between the clocks of two servers
	moverDurable = "stormguard-mover"
)

// A Mover brings messages that JetStream has given up on to the dead letters: messages whose
// MaxDeliver is used up, and messages that a consumer terminated. JetStream itself keeps the
// first kind in its stream, but delivers them to nobody, and forgets the second kind.
//
// The Mover reads the server's advisories from a stream, so it misses none while it is down.
// It copies the message of each advisory at once to a parking stream. From there it releases
// the letter to the DLQ when its budget ([dlq.BudgetConfig]) has a credit. The growth of the
// source consumer's ack floor earns credits: an outage in front of a consumer with a
// MaxDeliver cannot drain the stream into the DLQ.
//
// The body may be gone by then: the stream reached its limits, or the message was terminated
// in a work queue. The Mover looks for the body once more before the release. If it is still
// missing, the dead letter has no body and says so. The Mover asks the stream's leader, not a
// replica that answers a direct get.
//
// Once a letter with the body is confirmed, the Mover deletes the message from a work-queue
// stream: no other consumer can have it. In other streams the message stays.
//
// A letter has the same [dlq.Record.ID] as one from a guarded consumer. So the DLQ's
// duplicate window keeps one of the two, and one of those that a crash repeats. The server
// sends an advisory once, without confirmation: if it is lost, its message stays where it is.
// Run one Mover for a consumer. More are safe, but each has its own budget.
type Mover struct {
	js   jetstream.JetStream
	cfg  MoverConfig
	log  *slog.Logger
	park *DLQ

	advisories jetstream.Consumer
	parked     [2]jetstream.Consumer // durables of the parking stream, by class

	// mu guards the rest.
	mu             sync.Mutex
	budget         *credit.Budget
	start          time.Time
	base           uint64 // the ack floor at the first look, or at the first of a new consumer of that name
	read           bool   // base is known
	deadDeliveries uint64 // deliveries of the messages that died since base, or since Run first began
	floor          uint64 // the latest ack floor that is safe to count
	counted        MoverCounts
}

// MoverCounts has the counters of a [Mover] since [NewMover].
type MoverCounts struct {
	Parked   uint64 // advisories whose letter is in the parking stream
	Gone     uint64 // parked letters whose body was not found at the time of parking
	Released uint64 // letters confirmed by the DLQ
	Refused  uint64 // requests for a credit that found none
}

// NewMover creates or checks the advisory stream, the parking stream and their durables. The
// consumer must exist; otherwise the error is an [ErrConsumerGone]. Of opts only
// [WithLogger] applies.
func NewMover(ctx context.Context, js jetstream.JetStream, cfg MoverConfig, opts ...Option) (*Mover, error) {
	if js == nil {
		return nil, errors.New("nats: NewMover: the JetStream must not be nil")
	}
	silent := slog.New(slog.DiscardHandler)
	o, err := newOptions(silent, opts)
	if err = errors.Join(err, cfg.Validate()); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	m := &Mover{js: js, cfg: cfg, log: o.log, start: time.Now()}
	if m.budget, err = credit.New(cfg.Budget, 0); err != nil {
		return nil, fmt.Errorf("nats: mover: %w", err)
	}
	if _, err = js.Consumer(ctx, cfg.Stream, cfg.Consumer); err != nil {
		if errors.Is(err, jetstream.ErrConsumerNotFound) || errors.Is(err, jetstream.ErrStreamNotFound) {
			err = fmt.Errorf("%w: %w", ErrConsumerGone, err)
		}
		return nil, fmt.Errorf("nats: mover of %s/%s: %w", cfg.Stream, cfg.Consumer, err)
	}
	where := cfg.Stream + "." + cfg.Consumer
	subjects := []string{
		"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES." + where,
		"$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED." + where,
	}
	// The server sends advisories without a message id, so the duplicate window has no
	// effect; ensureStream requires one.
	adv, err := ensureStream(ctx, js, jetstream.StreamConfig{
		Name: cfg.Advisories, Subjects: subjects, Retention: jetstream.WorkQueuePolicy, Replicas: cfg.Replicas,
		Duplicates: minDuplicates, Description: "advisories for stormguard's mover",
	}, cfg.NoCreate)
	if err != nil {
		return nil, err
	}
	parking := "stormguard.parked." + where
	park, err := ensureStream(ctx, js, jetstream.StreamConfig{
		Name: cfg.Parking, Subjects: []string{parking + ".*"}, Retention: jetstream.WorkQueuePolicy, Replicas: cfg.Replicas,
		Duplicates: defaultDuplicates, Discard: jetstream.DiscardNew, Description: "messages JetStream gave up on, until stormguard's mover releases them",
	}, cfg.NoCreate)
	if err != nil {
		return nil, err
	}
	m.park = &DLQ{js: js, cfg: DLQConfig{Stream: cfg.Parking, Dialect: dlq.Stormguard}, cuts: new(cuts)}
	if d, ok := cfg.DLQ.(*DLQ); ok && d != nil {
		m.park.cuts = d.cuts // a letter may be cut at both
	}
	if o.log != silent {
		m.park.cuts.inherit(o.log)
	}
	durable := func(s jetstream.Stream, name string, filter ...string) (jetstream.Consumer, error) {
		c, err := s.CreateOrUpdateConsumer(ctx, jetstream.ConsumerConfig{
			Durable: name, FilterSubjects: filter, AckPolicy: jetstream.AckExplicitPolicy, AckWait: moverAckWait, MaxDeliver: -1,
		})
		if err != nil {
			return nil, fmt.Errorf("nats: mover: durable %s of stream %s: %w", name, s.CachedInfo().Config.Name, err)
		}
		return c, nil
	}
	if m.advisories, err = durable(adv, moverDurable+"-"+cfg.Stream+"-"+cfg.Consumer, subjects...); err != nil {
		return nil, err
	}
	for _, class := range []credit.Class{credit.Exhausted, credit.Permanent} {
		// The same stream may also have parked letters of another consumer.
		if m.parked[class], err = durable(park, moverDurable+"-"+cfg.Stream+"-"+cfg.Consumer+"-"+class.String(), parking+"."+class.String()); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// Counts returns the counters since NewMover.
func (m *Mover) Counts() MoverCounts {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.counted
}

// Grant adds n credits: an operator's permission to release n more letters.
func (m *Mover) Grant(n float64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.budget.Grant(n)
}

// Run moves messages until ctx ends, and then returns nil. It returns [ErrConsumerGone] if
// one of its durables is deleted, and [ErrConnectionClosed] if the connection is closed. It
// starts three goroutines, which end before it returns. Only one Run may run at a time.
func (m *Mover) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var loops sync.WaitGroup
	run := func(c jetstream.Consumer, handle func(context.Context, jetstream.Msg)) {
		loops.Go(func() {
			if err := m.each(ctx, c, handle); err != nil {
				cancel(err)
			}
		})
	}
	run(m.advisories, m.parkOne)
	for _, class := range []credit.Class{credit.Exhausted, credit.Permanent} {
		run(m.parked[class], func(ctx context.Context, msg jetstream.Msg) { m.release(ctx, msg, class) })
	}
	m.watchFloor(ctx)
	loops.Wait()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return nil
}

// each handles the messages of a consumer one by one. It pulls one at a time, so that no
// message waits where it cannot be extended.
//
// Each message has an iterator of its own. After a reconnect between two calls of Next, nats.go
// pulls twice: the second message would lie in its buffer until the first one is handled, come
// again after its AckWait, and be handled twice. A reconnect during Next may bring a second
// message, too: Stop drops it, so it is handled once, after its AckWait.
func (m *Mover) each(ctx context.Context, c jetstream.Consumer, handle func(context.Context, jetstream.Msg)) error {
	in := &intake{consumer: c, conn: connOf(c), log: m.log, name: c.CachedInfo().Stream + "/" + c.CachedInfo().Name}
	for ctx.Err() == nil {
		it, err := c.Messages(jetstream.PullMaxMessages(1), jetstream.PullExpiry(pullExpiry), jetstream.PullHeartbeat(pullHeartbeat))
		switch {
		case connectionEnded(err):
			return in.examine(ctx, err)
		case err != nil:
			return fmt.Errorf("nats: mover: %w", err)
		}
		msg, err := it.Next(jetstream.NextContext(ctx))
		it.Stop()
		if err == nil {
			handle(ctx, msg)
			continue
		}
		if ctx.Err() != nil {
			return nil //nolint:nilerr // told to end
		}
		if gone := in.examine(ctx, err); gone != nil {
			return gone
		}
	}
	return nil
}

// advisory has the fields that both kinds of advisories share.
type advisory struct {
	Time       time.Time `json:"timestamp"`
	Stream     string    `json:"stream"`
	Consumer   string    `json:"consumer"`
	StreamSeq  uint64    `json:"stream_seq"`
	Deliveries uint64    `json:"deliveries"`
	Type       string    `json:"type"`
	Reason     string    `json:"reason"`
}

const (
	adviseMaxDeliver = "io.nats.jetstream.advisory.v1.max_deliver"
	adviseTerminated = "io.nats.jetstream.advisory.v1.terminated"
)

// The reasons in the dead letters of these advisories; dlq.Reason lists both.
const (
	reasonMaxDeliver dlq.Reason = "max-deliver"
	reasonTerminated dlq.Reason = "terminated"
)

// parkOne copies the message of an advisory to the parking stream.
func (m *Mover) parkOne(ctx context.Context, msg jetstream.Msg) {
	var a advisory
	err := json.Unmarshal(msg.Data(), &a)
	if err != nil || a.Stream != m.cfg.Stream || a.Consumer != m.cfg.Consumer || a.StreamSeq == 0 ||
		a.Type != adviseMaxDeliver && a.Type != adviseTerminated {
		m.log.Warn("mover: not an advisory of this consumer", "subject", msg.Subject(), "error", err)
		_ = msg.Term() // another try would fail, too
		return
	}
	var gone bool
	err = m.retryUntilDone(ctx, msg, "park", func(ctx context.Context) error {
		var r *dlq.Record
		var err error
		if r, gone, err = m.fetch(ctx, &a); err != nil {
			return err
		}
		park := *m.park
		class := credit.Exhausted
		if r.Permanent {
			class = credit.Permanent
		}
		park.cfg.Subject = "stormguard.parked." + m.cfg.Stream + "." + m.cfg.Consumer + "." + class.String()
		err = park.Write(ctx, r)
		if err != nil && dlq.TrimFor(r, err) {
			err = park.Write(ctx, r)
		}
		return err
	})
	if err != nil {
		return // ctx is over; the advisory is delivered again
	}
	m.mu.Lock()
	m.counted.Parked++
	if gone {
		m.counted.Gone++
	}
	m.deadDeliveries += a.Deliveries
	m.mu.Unlock()
}

// fetch makes the dead letter of an advisory, with the body if it can be read.
func (m *Mover) fetch(ctx context.Context, a *advisory) (r *dlq.Record, gone bool, err error) {
	r = &dlq.Record{
		Origin:     dlq.Origin{System: system, Source: a.Stream, Group: a.Consumer, Sequence: a.StreamSeq},
		Deliveries: int(a.Deliveries), LastFailed: a.Time.UTC(),
		Reason: reasonMaxDeliver,
		Error:  dlq.ErrorInfo{Type: a.Type, Message: fmt.Sprintf("not acked in %d deliveries", a.Deliveries)},
	}
	if a.Type == adviseTerminated {
		r.Reason, r.Permanent, r.Error.Message = reasonTerminated, true, "terminated by its consumer"
		if a.Reason != "" {
			r.Error.Message = a.Reason
		}
	}
	r.Cause = dlq.Fingerprint(errors.New(r.Error.Message), nil)
	if err := m.complete(ctx, r); err != nil {
		return nil, false, err
	}
	return r, !hasBody(r), nil
}

// stream returns the source's stream. Its GetMsg asks only the stream's leader. A replica or
// mirror that lags may answer a direct get, but cannot say that a message is gone.
func (m *Mover) stream(ctx context.Context) (jetstream.Stream, error) {
	s, err := m.js.Stream(ctx, m.cfg.Stream)
	if err == nil {
		s.CachedInfo().Config.AllowDirect = false // GetMsg reads it; no one else has this handle
	}
	return s, err
}

// complete copies a letter's message into the letter, if the message is there.
func (m *Mover) complete(ctx context.Context, r *dlq.Record) error {
	s, err := m.stream(ctx)
	var raw *jetstream.RawStreamMsg
	if err == nil {
		raw, err = s.GetMsg(ctx, r.Origin.Sequence)
	}
	switch {
	case err == nil && !r.LastFailed.IsZero() && raw.Time.After(r.LastFailed.Add(moverSkew)):
		// The stream was deleted and made again, and counts from 1 again.
	case err == nil:
		r.Body, r.Headers, r.Timestamp, r.Origin.Subject = raw.Data, fromHeader(raw.Header), raw.Time, raw.Subject
		r.TraceParent, _ = dlq.LookupText(r.Headers, "traceparent")
		r.TraceState, _ = dlq.LookupText(r.Headers, "tracestate")
	case !errors.Is(err, jetstream.ErrMsgNotFound) && !errors.Is(err, jetstream.ErrStreamNotFound):
		return err
	}
	return nil
}

// hasBody reports whether the message of a letter was read: every message has a subject.
func hasBody(r *dlq.Record) bool { return r.Origin.Subject != "" }

// retryUntilDone calls f until it succeeds, keeps msg alive meanwhile, and then acks msg. The pause
// between tries doubles up to 10s. The only error is ctx's.
func (m *Mover) retryUntilDone(ctx context.Context, msg jetstream.Msg, what string, f func(context.Context) error) error {
	pause := 100 * time.Millisecond
	for failed := false; ; failed = true {
		call, cancel := context.WithTimeout(ctx, moverCall)
		err := f(call)
		if err == nil {
			if err = msg.DoubleAck(call); errors.Is(err, jetstream.ErrMsgAlreadyAckd) {
				err = nil
			}
			if err != nil {
				// msg comes again. Twins are recognised, but an advisory counts twice: some successes
				// earn no credit then, as those before a start with advisories that wait.
				m.log.Warn("mover: ack", "error", err)
			}
			cancel()
			return nil
		}
		cancel()
		if !failed {
			m.log.Warn("mover", "trouble", what, "stream", m.cfg.Stream, "consumer", m.cfg.Consumer, "error", err)
		}
		if err := m.wait(ctx, msg, pause); err != nil {
			return err
		}
		pause = min(2*pause, 10*time.Second)
	}
}

// wait waits for d and keeps msg alive.
func (m *Mover) wait(ctx context.Context, msg jetstream.Msg, d time.Duration) error {
	_ = msg.InProgress()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		_ = msg.Nak() // one nak, so that the next Mover need not wait for the AckWait
		return ctx.Err()
	}
}

// release waits for a credit and then writes a parked letter to the DLQ.
func (m *Mover) release(ctx context.Context, msg jetstream.Msg, class credit.Class) {
	paid, ok := m.spend(class)
	for since, said := time.Now(), false; !ok; paid, ok = m.spend(class) {
		if m.wait(ctx, msg, moverPoll) != nil {
			return
		}
		if !said && time.Since(since) > time.Minute {
			said = true
			m.log.Warn("mover: parked letters wait for a credit", "stream", m.cfg.Stream, "consumer", m.cfg.Consumer,
				"help", "acks of the consumer earn credits, time brings one in 5 min; or Mover.Grant")
		}
	}
	r, err := ReadDeadLetter(msg)
	if err != nil {
		m.log.Warn("mover: parked letter", "error", err) // the letter keeps its readable headers
	}
	if err := m.retryUntilDone(ctx, msg, "release", func(ctx context.Context) error {
		if !hasBody(&r) && r.Origin.Sequence > 0 { // the server also answers "not found" to a fault of its store
			if err := m.complete(ctx, &r); err != nil {
				return err
			}
		}
		letter := r
		if !hasBody(&r) {
			letter.Timestamp = time.Time{} // it has the time of the parked letter, not of the message
			letter.Error.Message += fmt.Sprintf("; the body is gone: message %d is no longer in stream %s", r.Origin.Sequence, m.cfg.Stream)
		}
		err := m.cfg.DLQ.Write(ctx, &letter)
		if err != nil && dlq.TrimFor(&letter, err) {
			err = m.cfg.DLQ.Write(ctx, &letter)
		}
		if err != nil || !hasBody(&r) {
			return err // without a copy in a letter the message is not deleted
		}
		return m.clear(ctx, &r)
	}); err != nil {
		m.mu.Lock()
		m.budget.Refund(paid)
		m.mu.Unlock()
		return
	}
	m.mu.Lock()
	m.counted.Released++
	m.mu.Unlock()
}

// clear deletes the message of a letter from a work queue, where it would stay forever. If the
// stream was made again, another message may have its sequence, which clear does not delete.
func (m *Mover) clear(ctx context.Context, r *dlq.Record) error {
	seq := r.Origin.Sequence
	s, err := m.stream(ctx)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if s.CachedInfo().Config.Retention != jetstream.WorkQueuePolicy {
		return nil
	}
	switch is, err := s.GetMsg(ctx, seq); {
	case errors.Is(err, jetstream.ErrMsgNotFound):
		return nil
	case err != nil:
		return err
	case !is.Time.Equal(r.Timestamp):
		return nil
	}
	if err = s.DeleteMsg(ctx, seq); err != nil {
		if _, getErr := s.GetMsg(ctx, seq); errors.Is(getErr, jetstream.ErrMsgNotFound) {
			return nil
		}
	}
	return err
}

// spend pays with a credit, if there is one.
func (m *Mover) spend(class credit.Class) (credit.Paid, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.read && m.floor > m.base+m.deadDeliveries {
		m.budget.Successes(m.floor - m.base - m.deadDeliveries)
	}
	paid, ok := m.budget.Pay(time.Since(m.start), class)
	if !ok {
		m.counted.Refused++
	}
	return paid, ok
}

// watchFloor reads the source's ack floor until ctx ends. The floor also passes every delivery
// of messages that died. Their advisories have the number of these deliveries, so a floor
// counts only after all advisories of its time are parked.
func (m *Mover) watchFloor(ctx context.Context) {
	tick := time.NewTicker(moverPoll)
	defer tick.Stop()
	var before uint64 // the floor at the previous look
	var known bool
	for {
		floor, err := m.ackFloor(ctx)
		if err == nil {
			idle, idleErr := m.idle(ctx)
			m.mu.Lock()
			switch {
			case !m.read:
				m.read, m.base, m.floor = true, floor, floor
			case known && floor < before: // a new consumer of that name, which counts from 0
				m.base, m.floor, m.deadDeliveries = floor, floor, 0
				m.budget = m.budget.Continue()
			case known && idle && idleErr == nil:
				m.floor = max(m.floor, before)
			}
			m.mu.Unlock()
			before, known = floor, true
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func (m *Mover) ackFloor(ctx context.Context) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, infoTimeout)
	defer cancel()
	c, err := m.js.Consumer(ctx, m.cfg.Stream, m.cfg.Consumer)
	if err != nil {
		return 0, err
	}
	return c.CachedInfo().AckFloor.Consumer, nil
}

// idle reports whether every advisory so far is parked.
func (m *Mover) idle(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, infoTimeout)
	defer cancel()
	info, err := m.advisories.Info(ctx)
	if err != nil {
		return false, err
	}
	return info.NumPending == 0 && info.NumAckPending == 0, nil
}
