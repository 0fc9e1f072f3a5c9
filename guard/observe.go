// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/stormguard-mq/stormguard/breaker"
	"github.com/stormguard-mq/stormguard/dlq"
)

const scopeName = "github.com/stormguard-mq/stormguard/guard"

// The metrics; docs/metrics.md lists the same, and a test compares the two.
const (
	MetricConsumed     = "messaging.client.consumed.messages"
	MetricProcess      = "messaging.process.duration"
	MetricMessages     = "stormguard.messages"
	MetricFailures     = "stormguard.failures"
	MetricRetries      = "stormguard.retries"
	MetricDiverted     = "stormguard.diverted"
	MetricDeadLetters  = "stormguard.dead_letters"
	MetricParked       = "stormguard.parked"
	MetricParkedTotal  = "stormguard.parked.total"
	MetricFollowed     = "stormguard.followed"
	MetricDLQRatio     = "stormguard.dlq.ratio"
	MetricRecovery     = "stormguard.recovery.duration"
	MetricAckFailures  = "stormguard.ack.failures"
	MetricHoldAge      = "stormguard.hold.age"
	MetricHold         = "stormguard.hold.active"
	MetricBreaker      = "stormguard.breaker.state"
	MetricTransitions  = "stormguard.breaker.transitions"
	MetricStorm        = "stormguard.storm.active"
	MetricBudget       = "stormguard.budget.balance"
	MetricLag          = "stormguard.lag"
	MetricFleetScope   = "stormguard.fleet.scope"
	MetricFleetHeard   = "stormguard.fleet.heard"
	MetricFleetQuorum  = "stormguard.fleet.quorum"
	MetricFleetStorm   = "stormguard.fleet.storm"
	sampleOneIn        = 64
	durationBoundaries = 14
)

// buckets are the conventions' for durations, in seconds.
var buckets = [durationBoundaries]float64{.005, .01, .025, .05, .075, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10}

// recoveryBuckets reach further: a recovery takes as long as an outage.
var recoveryBuckets = []float64{.01, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600}

// A Lagger is a [Port] that knows how many messages are behind at the broker.
// Lag is called when metrics are read: it must answer from memory; -1 = unknown.
type Lagger interface{ Lag() int64 }

// A Parker is a [Port] whose dead-letter writer parks messages for another try:
// how many are parked now, and how many were sent after them since, to keep their
// order. Parked is called when metrics are read: it must answer from memory.
type Parker interface {
	Parked() (now int, followed uint64)
}

// A Marker is a [Port] of a log, which tells the broker a low watermark and nothing
// else: Ahead is how many messages are settled behind one that is not, so that the broker
// has not heard of it. They count towards Policy.Window like unsettled ones, so no more
// than a window has to be handled again if the source moves. Ahead is asked after each
// Ack but those of the closed path, where nothing is unsettled, by the goroutine that
// called it; without a lock, so calls may overlap where those of Ack may. It must answer
// from memory, and change by nothing but Ack.
type Marker interface{ Ahead() int }

// metrics are the instruments of a Guard. Counters are kept by the sources and
// read when somebody looks; only what is rare or sampled is recorded as it happens.
type metrics struct {
	g           *Guard
	tracer      trace.Tracer
	process     metric.Float64Histogram
	recovery    metric.Float64Histogram
	dead        metric.Int64Counter
	transitions metric.Int64Counter
	observer    metric.Registration
}

func newMetrics(g *Guard) (*metrics, error) {
	provider := g.meters
	if provider == nil {
		provider = otel.GetMeterProvider()
	}
	meter := provider.Meter(scopeName)
	m := &metrics{g: g}
	if g.traces != nil {
		m.tracer = g.traces.Tracer(scopeName)
	}
	var errs []error
	keep := func(err error) { errs = append(errs, err) }
	var err error
	m.process, err = meter.Float64Histogram(MetricProcess, metric.WithUnit("s"), metric.WithExplicitBucketBoundaries(buckets[:]...),
		metric.WithDescription("Duration of handler calls, of one message in "+strconv.Itoa(sampleOneIn)+"."))
	keep(err)
	m.recovery, err = meter.Float64Histogram(MetricRecovery, metric.WithUnit("s"), metric.WithExplicitBucketBoundaries(recoveryBuckets...),
		metric.WithDescription("From a message's first failure to its settlement."))
	keep(err)
	m.dead, err = meter.Int64Counter(MetricDeadLetters, metric.WithUnit("{message}"), metric.WithDescription("Dead letters confirmed, by reason."))
	keep(err)
	m.transitions, err = meter.Int64Counter(MetricTransitions, metric.WithUnit("{transition}"), metric.WithDescription("Changes of a breaker's state."))
	keep(err)

	counter := func(name, unit, text string) metric.Int64ObservableCounter {
		c, err := meter.Int64ObservableCounter(name, metric.WithUnit(unit), metric.WithDescription(text))
		keep(err)
		return c
	}
	gauge := func(name, unit, text string) metric.Float64ObservableGauge {
		c, err := meter.Float64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(text))
		keep(err)
		return c
	}
	consumed := counter(MetricConsumed, "{message}", "Messages handed over by the broker's client.")
	failures := counter(MetricFailures, "{attempt}", "Handler calls that failed.")
	retries := counter(MetricRetries, "{attempt}", "Handler calls after a message's first.")
	diverted := counter(MetricDiverted, "{message}", "Messages that found the source holding.")
	ackFailures := counter(MetricAckFailures, "{message}", "Acks that the broker's client refused.")
	parkedTotal := counter(MetricParkedTotal, "{message}", "Messages parked for another try.")
	followed := counter(MetricFollowed, "{message}", "Messages sent after a parked one, unhandled, to keep their order.")
	parked := gauge(MetricParked, "{message}", "Messages parked now.")
	messages := gauge(MetricMessages, "{message}", "Unsettled messages, by state.")
	ratio := gauge(MetricDLQRatio, "1", "Dead letters over messages that failed.")
	age := gauge(MetricHoldAge, "s", "Age of the oldest unsettled message in this process.")
	hold := gauge(MetricHold, "", "1 for each reason why the source is not simply running.")
	state := gauge(MetricBreaker, "", "1 for the breaker's state.")
	storm := gauge(MetricStorm, "", "1 while a storm is declared.")
	budget := gauge(MetricBudget, "{credit}", "DLQ credits left.")
	lag := gauge(MetricLag, "{message}", "Messages behind at the broker.")
	fleetStorm := gauge(MetricFleetStorm, "", "1 while the fleet is in storm over the source's topic or queue.")
	fleetScope := gauge(MetricFleetScope, "", "1 for what the fleet makes of a breaker's scope.")
	heard := gauge(MetricFleetHeard, "{process}", "Processes of the roster that are heard, this one included.")
	quorum := gauge(MetricFleetQuorum, "{process}", "Processes that make a quorum.")
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}

	m.observer, err = meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		for _, c := range g.all() {
			st, base := c.State(), c.attributes()
			with := func(kv ...attribute.KeyValue) metric.MeasurementOption {
				return metric.WithAttributes(append(slices.Clip(base), kv...)...)
			}
			a, t := st.Account, st.Tally
			o.ObserveInt64(consumed, int64(a.Received), with())
			o.ObserveInt64(failures, int64(t.Failures), with())
			o.ObserveInt64(retries, int64(t.Retries), with())
			o.ObserveInt64(diverted, int64(t.Diverted), with())
			o.ObserveInt64(ackFailures, int64(t.AckFailures), with())
			for word, n := range map[string]int{
				"waiting": a.Waiting, "processing": a.Processing, "settling": a.Settling, "held": a.Held, "retry_wait": a.RetryWait,
			} {
				o.ObserveFloat64(messages, float64(n), with(attribute.String("state", word)))
			}
			if t.FailedMessages > 0 {
				o.ObserveFloat64(ratio, float64(a.DeadLettered)/float64(t.FailedMessages), with())
			}
			o.ObserveFloat64(age, st.OldestAge.Seconds(), with())
			o.ObserveFloat64(budget, st.Budget, with())
			o.ObserveFloat64(storm, number(st.Storm.Active), with())
			for _, s := range []breaker.State{breaker.Closed, breaker.Open, breaker.HalfOpen} {
				o.ObserveFloat64(state, number(st.Breaker.State == s), with(attribute.String("state", s.String())))
			}
			for _, h := range st.Holds {
				o.ObserveFloat64(hold, 1, with(attribute.String("reason", h.Reason.String())))
			}
			if n := c.lag(); n >= 0 {
				o.ObserveFloat64(lag, float64(n), with())
			}
			if now, after, ok := c.parked(); ok {
				o.ObserveFloat64(parked, float64(now), with())
				o.ObserveInt64(followed, int64(after), with())
				o.ObserveInt64(parkedTotal, int64(t.Parked), with())
			}
			if g.fleet != nil {
				o.ObserveFloat64(fleetStorm, number(st.FleetStorm.Active), with())
			}
		}
		if g.fleet == nil {
			return nil
		}
		for i, f := range g.fleet.Scopes() {
			o.ObserveFloat64(fleetScope, 1, metric.WithAttributes(fleetAttributes(f)...))
			if i == 0 { // all say the same
				o.ObserveFloat64(heard, float64(f.Heard))
				o.ObserveFloat64(quorum, float64(f.Need))
			}
		}
		return nil
	}, consumed, failures, retries, diverted, ackFailures, messages, ratio, age, hold, state, storm, budget, lag, parked, parkedTotal, followed, fleetStorm, fleetScope, heard, quorum)
	return m, err
}

func fleetAttributes(f breaker.FleetScope) []attribute.KeyValue {
	state := f.State.String()
	if f.Probing {
		state = "probing"
	}
	return []attribute.KeyValue{
		attribute.String("scope", f.Name), attribute.String("state", state),
		attribute.Bool("held", f.Held), attribute.String("reason", string(f.Cause)),
	}
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func (m *metrics) close() {
	if m.observer != nil {
		_ = m.observer.Unregister() // it only forgets a callback
	}
}

func (m *metrics) transition(c breaker.Change) {
	m.transitions.Add(context.Background(), 1, metric.WithAttributes(
		attribute.String("scope", c.Scope), attribute.String("from", c.From.String()),
		attribute.String("to", c.To.String()), attribute.String("cause", string(c.Cause))))
}

// sourceMetrics is the part of one source, with its attributes made ready.
type sourceMetrics struct {
	*metrics
	attrs []attribute.KeyValue
	base  metric.MeasurementOption
	name  string // of the span
}

func (m *metrics) source(cfg SourceConfig) sourceMetrics {
	attrs := []attribute.KeyValue{
		attribute.String("stormguard.source", cfg.Name),
		attribute.String("messaging.system", cfg.System),
		attribute.String("messaging.destination.name", cfg.Destination),
		attribute.String("messaging.consumer.group.name", m.g.cfg.Group),
		attribute.String("messaging.operation.name", "process"),
	}
	return sourceMetrics{m, attrs, metric.WithAttributes(attrs...), "process " + cfg.Destination}
}

func (s *Source[M]) attributes() []attribute.KeyValue { return s.metrics.attrs }

func (s *Source[M]) lag() int64 {
	if l, ok := any(s.port).(Lagger); ok {
		return l.Lag()
	}
	return -1
}

func (s *Source[M]) parked() (now int, followed uint64, ok bool) {
	p, ok := any(s.port).(Parker)
	if ok {
		now, followed = p.Parked()
	}
	return now, followed, ok
}

func (m *sourceMetrics) sampled(n uint64) bool { return n%sampleOneIn == 0 }

func (m *sourceMetrics) retried(d time.Duration, dead bool) {
	m.recovery.Record(context.Background(), d.Seconds(), m.base, metric.WithAttributes(attribute.Bool("stormguard.dead_letter", dead)))
}

func (m *sourceMetrics) deadLettered(why dlq.Reason) {
	m.dead.Add(context.Background(), 1, m.base, metric.WithAttributes(attribute.String("reason", string(why))))
}

// observe is call with a clock around it, and a span if there is a tracer.
func (s *Source[M]) observe(ctx *callContext, m M, n uint64) (stack []byte, err error) {
	if s.metrics.tracer != nil {
		parent, span := s.span(ctx.parent, m)
		ctx.parent = parent
		defer func() {
			if err != nil {
				span.SetStatus(codes.Error, "")
				span.SetAttributes(attribute.String("error.type", dlq.DescribeError(err, nil).Type))
			}
			span.End()
		}()
	}
	if !s.metrics.sampled(n) {
		return s.call(ctx, m)
	}
	start := s.g.now()
	stack, err = s.call(ctx, m)
	ran := s.g.now() - start
	if err == nil {
		s.metrics.process.Record(ctx, ran.Seconds(), s.metrics.base)
	} else {
		s.metrics.process.Record(ctx, ran.Seconds(), s.metrics.base,
			metric.WithAttributes(attribute.String("error.type", dlq.DescribeError(err, nil).Type)))
	}
	return stack, err
}
